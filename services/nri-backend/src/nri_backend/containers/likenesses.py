# SPDX-License-Identifier: Apache-2.0
"""Running containers in groups of those that are alike: a node has hundreds of containers, and few of these groups."""

from collections.abc import Iterable
from typing import NamedTuple

from nri_backend.containers.container import Tracked


class Likeness(NamedTuple):
    """What the containers of a group have in common."""

    cpus: frozenset[int] | None
    """On which they were last seen."""
    own: frozenset[int]
    """That they alone may use."""
    own_pod: bool
    apart: frozenset[int]
    """That they leave out."""
    near: frozenset[int]
    """Of the pool, beside their own; empty: none of it."""


class Likenesses:
    """The groups of containers that occupy CPUs."""

    def __init__(self) -> None:
        self._groups: dict[Likeness, set[str]] = {}

    def groups(self) -> Iterable[tuple[Likeness, set[str]]]:
        """Returns each likeness with the ids of its containers."""
        return self._groups.items()

    def change(self, before: Tracked | None, after: Tracked | None) -> None:
        """Takes a container that is new, changed or gone."""
        if before is not None and (ids := self._groups.get(_likeness(before))) is not None:
            ids.discard(before.id)
            if not ids:
                del self._groups[_likeness(before)]
        if after is not None and after.occupies:
            self._groups.setdefault(_likeness(after), set()).add(after.id)


def _likeness(tracked: Tracked) -> Likeness:
    return Likeness(
        tracked.observed.cpus, tracked.kept_cpus, tracked.identity.own_pod, tracked.excluded, tracked.entitlement.near
    )
