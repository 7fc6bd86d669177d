# SPDX-License-Identifier: Apache-2.0
"""What a check is, and what it finds. Pure."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar


class Level(StrEnum):
    """How much a finding matters."""

    PROBLEM = "problem"
    """Something does not work, or will not keep a promise."""
    NOTE = "note"
    """Worth knowing; the node works as it is configured."""
    UNKNOWN = "unknown"
    """The check could not be made."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a node, with one remedy. Each text has no line break."""

    level: Level
    what: str
    """The cause, one sentence or two."""
    why: str
    """Consequence of the fault. For UNKNOWN, the reason why the check could not be made."""
    remedy: str
    evidence: tuple[str, ...] = ()
    """Facts that show the cause, where ``what`` does not contain them: one for each part of the node."""


def problem(what: str, why: str, remedy: str, evidence: Iterable[str] = ()) -> Finding:
    """Returns a finding that needs a person."""
    return Finding(Level.PROBLEM, what, why, remedy, tuple(evidence))


def note(what: str, why: str, remedy: str, evidence: Iterable[str] = ()) -> Finding:
    """Returns a finding that is good to know."""
    return Finding(Level.NOTE, what, why, remedy, tuple(evidence))


@dataclass(frozen=True, slots=True)
class Unread:
    """Stands for what a source could not read."""

    why: str
    remedy: str
    on_purpose: bool = False
    """True if the source was not read on purpose, so that this is not a problem."""


def unknown(source: Unread) -> Finding:
    """Returns the finding of a check whose source could not be read."""
    return Finding(Level.UNKNOWN, "", source.why, source.remedy)


_Read = TypeVar("_Read")


def known(source: _Read | Unread) -> _Read | None:
    """Returns what a source has read, None where it could not."""
    return None if isinstance(source, Unread) else source


@dataclass(frozen=True, slots=True)
class Check:
    """One rule."""

    id: str
    """Group and name, ``kernel.cgroup-v2``."""
    rule: str
    """What holds on a good node, as a sentence."""
    reads: tuple[str, ...]
    """Fields of Facts that must have been read; they are the first arguments of ``judge``."""
    judge: Callable[..., Iterable[Finding]]
    also: tuple[str, ...] = ()
    """Fields of Facts that add evidence; they are the last arguments of ``judge``, and each may be an Unread."""
    always: bool = False
    """Whether ``judge`` is also given an Unread: what could not be read is what it judges."""

    @property
    def group(self) -> str:
        """Returns the first part of the id."""
        return self.id.partition(".")[0]

    def run(self, facts: Any) -> list[Finding]:
        """Returns the findings; none on a good node. Raises nothing."""
        sources = [getattr(facts, name) for name in self.reads]
        for source in sources:
            if isinstance(source, Unread) and not self.always:
                return [unknown(source)]
        more = [getattr(facts, name) for name in self.also]
        try:
            return list(self.judge(*sources, *more))
        except Exception as error:  # noqa: BLE001 - a fault in one check must not hide what the others find
            return [Finding(Level.UNKNOWN, "", f"the check itself failed: {error!r}", "report this bug")]
