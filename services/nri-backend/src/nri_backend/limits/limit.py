# SPDX-License-Identifier: Apache-2.0
"""Limits of cgroups as values: what a file shall say, and what is written over values that the kubelet has set.

Rules of this file. A value that we have not written ourselves is the kubelet's own. It is noted before anything is
written over it, and comes back when nothing asks for another one; so nothing adds up over restarts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

Limit = int | None
"""Bytes, or microseconds of CPU time in a period; None is no limit, the kernel's ``max``."""
CPU_MAX: Final = "cpu.max"
_HUGE: Final = "hugetlb."


class Rule(Enum):
    """How a limit is compared with the one that is wanted."""

    EXACTLY = auto()
    AT_MOST = auto()
    """A lower one holds as well: somebody else's limit."""
    AT_LEAST = auto()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one file must say."""

    limit: Limit
    rule: Rule = Rule.EXACTLY
    needed: bool = False
    """The file must exist; others are set where the kernel has them."""

    def met_by(self, seen: Limit) -> bool:
        """Tells whether the file is right as it is."""
        if self.rule is Rule.EXACTLY:
            return seen == self.limit
        low, high = (seen, self.limit) if self.rule is Rule.AT_MOST else (self.limit, seen)
        return high is None or (low is not None and low <= high)


@dataclass(frozen=True, slots=True)
class Raise:
    """What the claims below a cgroup need of a limit that the kubelet sets there."""

    plus: int = 0
    """To be added to the kubelet's own."""
    lifted: bool = False
    """No limit at all."""
    needed: bool = False

    def over(self, own: Limit) -> Limit:
        """Returns the limit that is then wanted; no limit stays no limit."""
        return None if self.lifted or own is None else own + self.plus


@dataclass(frozen=True, slots=True)
class Note:
    """What we remember of one limit: the kubelet's value, and the values that we have written over it."""

    own: Limit
    ours: tuple[Limit, ...]
    """Two while a write is under way: a crash in between must not make our own value look like the kubelet's."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do to the limits of one cgroup, by file."""

    wanted: Mapping[str, Wanted]
    ahead: Mapping[str, Note]
    """What must be noted before the files are written."""
    after: Mapping[str, Note]
    """What must be noted when they are written."""


def limit_text(limit: Limit) -> str:
    """Returns a limit as the kernel writes it."""
    return "max" if limit is None else str(limit)


def with_reservation(file: str) -> tuple[str, ...]:
    """Returns the files that get the same limit: of hugepages, reservations too, so that mmap fails and not use."""
    return (file, f"{file.removesuffix('max')}rsvd.max") if file.startswith(_HUGE) else (file,)


def own_limit(current: Limit, note: Note | None) -> Limit:
    """Returns the kubelet's value: a value that we have not written was written by the kubelet."""
    return note.own if note is not None and current in note.ours else current


def plan(present: Mapping[str, Limit], noted: Mapping[str, Note], raises: Mapping[str, Raise]) -> Plan:
    """Returns what to write and to note; a file that is noted and needs no raise gets the kubelet's value back.

    ``present``: what the files say that are raised or noted; those that are not there do not exist.
    """
    wanted: dict[str, Wanted] = {}
    ahead: dict[str, Note] = {}
    after: dict[str, Note] = {}
    for file in dict.fromkeys((*raises, *noted)):
        raised = raises.get(file, Raise())
        if file not in present:
            if raised.needed:
                # Wanted all the same, so that the look finds it absent and names it.
                wanted |= {name: Wanted(raised.plus, needed=True) for name in with_reservation(file)}
            continue
        current, note = present[file], noted.get(file)
        own = own_limit(current, note)
        value = raised.over(own)
        wanted |= {name: Wanted(value, needed=raised.needed) for name in with_reservation(file)}
        if value != own:
            after[file] = Note(own, (value,))
        if value != own or current != own:
            ours = (value, current) if note is not None and current in note.ours else (value,)
            ahead[file] = Note(own, tuple(dict.fromkeys(ours)))
    return Plan(wanted, ahead, after)
