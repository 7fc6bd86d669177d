# SPDX-License-Identifier: Apache-2.0
"""What was written over the kubelet's limits, as an attribute of the cgroup."""

import json
import os
from collections.abc import Mapping
from typing import Final

from nri_backend.limits.claimed import Note
from nri_backend.limits.difference import Limit

_ATTRIBUTE: Final = "user.dra-driver-numa"


class OriginalLimits:
    """What was written over the kubelet's limits: kept on each cgroup, so that it dies with it.

    These are the cgroups of pods and those above: no container has them in its cgroup namespace.
    cgroup2 has user attributes since Linux 5.7, and preflight.py wants 5.14. Where setting one fails all the same (a
    security module, a fake's tree) memory has to do: then what is raised at a restart of ours is raised twice.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._memory: dict[str, Mapping[str, Note]] = {}

    def load(self, path: str) -> Mapping[str, Note]:
        """Returns the notes by file; none where there are none or they make no sense."""
        if path in self._memory:
            return self._memory[path]
        try:
            # The kernel limits an attribute to 64 KiB, and no container can write one of these cgroups.
            document = json.loads(os.getxattr(f"{self._root}/{path}", _ATTRIBUTE))
            return {file: (_limit(own), *map(_limit, ours)) for file, (own, *ours) in document.items()}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def store(self, path: str, notes: Mapping[str, Note]) -> None:
        """Keeps the notes as ``{file: [own, written, ...]}``."""
        try:
            if notes:
                os.setxattr(f"{self._root}/{path}", _ATTRIBUTE, json.dumps(dict(notes)).encode())
            else:
                os.removexattr(f"{self._root}/{path}", _ATTRIBUTE)
            self._memory.pop(path, None)
        except OSError:
            if notes:
                self._memory[path] = notes
            else:
                self.forget(path)

    def forget(self, path: str) -> None:
        """The cgroup is gone."""
        self._memory.pop(path, None)


def _limit(value: object) -> Limit:
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise TypeError("a noted limit is no number")
