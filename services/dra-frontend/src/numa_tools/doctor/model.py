# SPDX-License-Identifier: Apache-2.0
"""Definitions of checks and their findings. This module does no I/O."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar


class Level(StrEnum):
    """Severity of a finding."""

    PROBLEM = "problem"
    """Something does not work, or a guarantee is not met."""
    NOTE = "note"
    """Informational: the node works as configured."""
    UNKNOWN = "unknown"
    """The check could not be run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault on a node, with its remedy. None of the strings in a finding contains a line break."""

    level: Level
    what: str
    """Cause, in one or two sentences."""
    why: str
    """Consequence of the fault or, for UNKNOWN, the reason why the check could not be run."""
    remedy: str
    evidence: tuple[str, ...] = ()
    """Facts that prove the cause but are not part of ``what``, such as one fact for each affected NUMA node."""


def problem(what: str, why: str, remedy: str, evidence: Iterable[str] = ()) -> Finding:
    """Returns a finding that needs action."""
    return Finding(Level.PROBLEM, what, why, remedy, tuple(evidence))


def note(what: str, why: str, remedy: str, evidence: Iterable[str] = ()) -> Finding:
    """Returns an informational finding."""
    return Finding(Level.NOTE, what, why, remedy, tuple(evidence))


@dataclass(frozen=True, slots=True)
class Unread:
    """Placeholder for the facts from a source that could not be read."""

    why: str
    remedy: str
    intentional: bool = False
    """True if the source was skipped deliberately, so its absence is not a problem."""


def unknown(source: Unread) -> Finding:
    """Returns the finding for a check whose source could not be read."""
    return Finding(Level.UNKNOWN, "", source.why, source.remedy)


_Read = TypeVar("_Read")


def facts_or_none(source: _Read | Unread) -> _Read | None:
    """Returns the facts from a source, or None if the source could not be read."""
    return None if isinstance(source, Unread) else source


@dataclass(frozen=True, slots=True)
class Check:
    """A rule for a healthy node and the function that checks the rule."""

    id: str
    """Group and name, such as ``kernel.cgroup-v2``."""
    rule: str
    """Condition that a healthy node meets, as a sentence."""
    reads: tuple[str, ...]
    """Required fields of Facts, which are the first arguments to ``judge``."""
    judge: Callable[..., Iterable[Finding]]
    optional_reads: tuple[str, ...] = ()
    """Optional fields of Facts, which are the last arguments to ``judge``. Each of them may be an Unread."""
    accepts_unread: bool = False
    """True if ``judge`` also accepts an Unread, because it checks whether the source is readable."""

    @property
    def group(self) -> str:
        """First part of ``id``."""
        return self.id.partition(".")[0]

    def run(self, facts: Any) -> list[Finding]:
        """Returns the findings; a healthy node has none. Never raises."""
        sources = [getattr(facts, name) for name in self.reads]
        for source in sources:
            if isinstance(source, Unread) and not self.accepts_unread:
                return [unknown(source)]
        more = [getattr(facts, name) for name in self.optional_reads]
        try:
            return list(self.judge(*sources, *more))
        except Exception as error:  # noqa: BLE001 - a fault in one check must not hide what the others find
            return [Finding(Level.UNKNOWN, "", f"the check itself failed: {error!r}", "report this bug")]
