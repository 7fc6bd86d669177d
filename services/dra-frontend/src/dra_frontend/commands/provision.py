# SPDX-License-Identifier: Apache-2.0
"""Brings the hugepage pools of a machine to what is planned, and tells what the kernel really gave. Core.

The kernel gives what it finds at that moment and calls that success: each write is followed by a look.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from numa_contract.pagesize import kubernetes_page_size

from dra_frontend.commands.provision_plan import Target
from dra_frontend.commands.render import columns
from dra_frontend.machine.file_tree import HostTreeError

# Between compactions of a node that gives nothing any more: what is in the way is mostly written back or freed soon.
WAITS: Final = (0.2, 0.5, 1.0, 2.0)
# The kernel does not look at the clock while it allocates, so that it is asked for so much at a time.
STEP_BYTES: Final = 8 << 30


class Pools(Protocol):
    """The hugepage pools of a machine. All raise HostTreeError, ``compact`` nothing."""

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the pages of a pool, those excluded that vanish with their user (surplus)."""

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Asks the kernel for a pool of so many pages."""

    def compact(self, node: int) -> None:
        """Lets the kernel bring free memory of the node together, if it can be asked."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a target."""

    target: Target
    before: int
    got: int | None
    """None when nothing was tried."""
    problem: str = ""
    """Why the kernel could not be asked."""

    @property
    def short(self) -> int | None:
        """Returns the pages that are missing; None when nothing was tried."""
        return None if self.got is None else max(0, self.target.wanted - self.got)

    @property
    def failed(self) -> bool:
        """Tells whether the target was missed, by however little."""
        return bool(self.short or self.problem)


@dataclass(slots=True)
class Effort:
    """How long may be tried."""

    seconds: float
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _end: float = field(init=False)

    def __post_init__(self) -> None:
        """The time runs from now on."""
        self._end = self.now() + self.seconds

    def left(self) -> bool:
        """Tells whether there is time for another try."""
        return self.now() < self._end

    def wait(self, seconds: float) -> bool:
        """Waits; returns False at once when the time would be over by then."""
        if self.now() + seconds > self._end:
            return False
        self.sleep(seconds)
        return True


def preview(targets: Sequence[Target], pools: Pools) -> list[Outcome]:
    """Returns what there is and what is wanted; touches nothing."""
    return [Outcome(target, pools.pages(target.node, target.page_bytes), None) for target in targets]


def provision(targets: Sequence[Target], pools: Pools, effort: Effort) -> list[Outcome]:
    """Brings every pool to its target as far as the kernel can; pools that have it are not touched.

    A pool that cannot be written does not keep the others from theirs.
    """
    before = {target: pools.pages(target.node, target.page_bytes) for target in targets}
    problems: dict[Target, str] = {}
    # What shrinks makes room for the rest, and large pages need the memory that is in one piece.
    for target in sorted(targets, key=lambda each: (before[each] < each.wanted, -each.page_bytes)):
        try:
            if before[target] > target.wanted:
                pools.resize(target.node, target.page_bytes, target.wanted)
            elif before[target] < target.wanted:
                _grow(target, pools, effort)
        except HostTreeError as error:
            problems[target] = str(error)
    return [
        Outcome(target, before[target], pools.pages(target.node, target.page_bytes), problems.get(target, ""))
        for target in targets
    ]


def _grow(target: Target, pools: Pools, effort: Effort) -> None:
    step = max(1, STEP_BYTES // target.page_bytes)
    waits = iter(WAITS)
    has = pools.pages(target.node, target.page_bytes)
    while has < target.wanted and effort.left():
        pools.resize(target.node, target.page_bytes, min(target.wanted, has + step))
        had, has = has, pools.pages(target.node, target.page_bytes)
        if has > had:
            continue
        wait = next(waits, None)
        if wait is None:
            return
        pools.compact(target.node)
        if not effort.wait(wait):
            return


def report(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Returns the outcomes as plain values."""
    missing = [outcome.short for outcome in outcomes if outcome.short is not None]
    return {
        "pages": [
            {
                "pageSize": kubernetes_page_size(outcome.target.page_bytes),
                "node": outcome.target.node,
                "asked": outcome.target.wanted,
                "before": outcome.before,
                "got": outcome.got,
                "short": outcome.short,
                **({"problem": outcome.problem} if outcome.problem else {}),
            }
            for outcome in outcomes
        ],
        "short": sum(missing) if len(missing) == len(outcomes) else None,
    }


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes for a person, one row for each page size and node."""
    rows = [["SIZE", "NODE", "ASKED", "BEFORE", "GOT", ""]]
    for outcome in outcomes:
        size, got = kubernetes_page_size(outcome.target.page_bytes), outcome.got
        rows.append(
            [
                *map(str, (size, outcome.target.node, outcome.target.wanted, outcome.before)),
                "-" if got is None else str(got),
                _remark(outcome),
            ]
        )
    return "\n".join(columns(rows))


def _remark(outcome: Outcome) -> str:
    short = f"short by {outcome.short}" if outcome.short else ""
    return ": ".join(filter(None, (short, outcome.problem)))
