# SPDX-License-Identifier: Apache-2.0
"""Stores the kubelet's original limits of a cgroup as an extended attribute of that cgroup."""

import json
import os
from collections.abc import Mapping
from typing import Final

from nri_backend.limits.claimed import Note

_ATTRIBUTE: Final = "user.dra-driver-numa"


class OriginalLimits:
    """The original limits of cgroups, and the values that the backend has written over them (limits.claimed.Note).

    They are stored as an attribute of the cgroup, so that the kernel removes them together with it. The cgroups are
    those of pods and above, which are not visible in the cgroup namespace of any container. cgroup2 supports user
    attributes since Linux 5.7, and preflight.py requires 5.14. If an attribute cannot be set all the same (a security
    module, the tree of a test), the notes are stored in memory. A restart of the backend then loses them, and adds a
    raise to a limit that contains it already.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._memory: dict[str, Mapping[str, Note]] = {}

    def load(self, path: str) -> Mapping[str, Note]:
        """Returns the notes by file, or an empty mapping if there are none or they cannot be parsed."""
        if path in self._memory:
            return self._memory[path]
        try:
            # The kernel limits an attribute to 64 KiB, and no container can write one of these cgroups.
            document = json.loads(os.getxattr(f"{self._root}/{path}", _ATTRIBUTE))
            notes: dict[str, Note] = {file: (own, *ours) for file, (own, *ours) in document.items()}
            if all(limit is None or type(limit) is int for note in notes.values() for limit in note):
                return notes
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def store(self, path: str, notes: Mapping[str, Note]) -> None:
        """Stores the notes as ``{file: [original limit, written value, ...]}``."""
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
        """Removes the notes that are stored in memory for a cgroup that does not exist any more."""
        self._memory.pop(path, None)
