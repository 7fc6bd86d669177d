# SPDX-License-Identifier: Apache-2.0
"""Moves interrupts or host daemons off claimed CPUs while there are claims, and restores their affinities later.

Interrupts (with workqueues and irqbalance) form one class of *movables* (plan.py), the slices with host daemons
another. Each class has an `Evictor`, an asyncio task that runs passes of `evict()` in a thread. A pass

1. reads the current affinities,
2. plans the new ones (plan.py),
3. stores, in a file (originals.py), the originals of all movables that it is about to change, unless the file already
   contains them,
4. writes the new affinities,
5. removes the restored originals from the file again, and reverts the entries of movables whose write failed.

Since step 3 precedes step 4, an instance that is killed at any point leaves a file from which the next active instance
can restore every original. If step 3 fails, nothing is moved.

An instance that is frozen during a pass is replaced after a few seconds (node/active_lock.py), and may later continue
the pass with values that are out of date. It would then overwrite its successor's originals, or move interrupts behind
its successor's back. So each write of a pass is preceded by a check that the instance still holds the active lock. A
write that is already in progress when the lock is lost cannot be prevented.

A pass runs when the CPUs to vacate or the online CPUs change. While any affinity differs from its original, a pass also
runs periodically, because other programs write to the same files: irqbalance to those of interrupts, and
``systemctl daemon-reload`` to those of slices. A movable whose write the kernel rejected is considered unmovable, and
is not written again until the CPUs to vacate or the online CPUs change.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn, Protocol

from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import cut_answer

from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.host_isolation.plan import Cpus, Originals, plan_eviction, revert_failed
from nri_backend.problems import NO_PROBLEM, Problem, code_of

DEBOUNCE_SECONDS: Final = 0.2
"""Delay before each pass, so that hooks run first and a burst of new pods causes only one pass."""
CONTESTED_PASSES: Final = 3
"""Number of consecutive passes in which another program must have moved interrupts or slices back before a problem is
reported.
"""
_log = logging.getLogger(__name__)


class Movables(Protocol):
    """Reads and writes the affinities of one class (plan.py): interrupts or slices, each identified by its name. The
    methods block.
    """

    def affinities(self, cpus_to_vacate: Cpus, moved: Collection[str]) -> Mapping[str, Cpus | None]:
        """Returns the affinities of the interrupts or slices named in ``moved``, and of all others that use a CPU to be
        vacated. The result may also contain further interrupts or slices.

        The value is None if an interrupt or slice exists but its affinity cannot currently be read.
        """

    def set_affinity(self, name: str, cpus: Cpus) -> bool:
        """Writes an affinity. Returns False if the kernel rejects it for this interrupt or slice.

        Raises OSError for a failure that does not depend on the interrupt or slice.
        """

    def count_using(self, names: Collection[str], cpus: Cpus) -> int:
        """Returns how many of the named interrupts or slices currently use the CPUs."""


@dataclass(frozen=True, slots=True)
class DesiredIsolation:
    """The desired state for either interrupts or slices."""

    cpus_to_vacate: Cpus
    """CPUs that all of these interrupts or slices must leave. If the set is empty, the original affinities are
    restored.
    """
    online: Cpus


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """The state after one pass."""

    moved: frozenset[str] = frozenset()
    """Names of the interrupts or slices whose affinity differs from the original."""
    unmovable: frozenset[str] = frozenset()
    """Names of the interrupts or slices whose new affinity the kernel rejected."""
    remaining: int = 0
    """Number of interrupts or slices that still use CPUs that must be vacated."""
    contested: int = 0
    """Number of interrupts or slices that another program has moved back since the previous pass."""


@dataclass(frozen=True, slots=True)
class AffinityClass:
    """One class of movables, interrupts or slices, with the rules for moving and reporting them."""

    movables: Movables
    originals: OriginalsFile
    noun: str
    """Plural noun that names the class in log lines and problems."""
    interval_seconds: float
    """Interval in seconds between passes while any affinity differs from its original."""
    may_relocate: bool
    """True if an interrupt or slice whose CPUs must all be vacated is moved to all other online CPUs. If False, it
    keeps its affinity.
    """
    not_moved: BackendCode
    """Code of the problem to report if moving fails with an error that has no code of its own."""
    delayed: frozenset[str] = frozenset()
    """Names of the movables for which a read may return an earlier affinity for some time after a write."""
    contested: Problem = NO_PROBLEM
    """Problem to report, including the remedy, if another program keeps moving interrupts or slices back."""
    remaining: Problem = NO_PROBLEM
    """Problem to report, including its reason and remedy, if some interrupts or slices stay on claimed CPUs."""
    may_write: Callable[[], bool] = lambda: True
    """Returns False once another instance may be active. It is called in the pass's thread, before each write."""

    def save(self, originals: Originals) -> None:
        """Stores the originals. Raises OSError if that fails, or if this instance must not write."""
        self._check()
        self.originals.save(originals)

    def set_affinity(self, name: str, cpus: Cpus) -> bool:
        """Writes an affinity, like Movables.set_affinity(). Also raises OSError if this instance must not write."""
        self._check()
        return self.movables.set_affinity(name, cpus)

    def _check(self) -> None:
        if not self.may_write():
            raise OSError("another instance is active, or may become active")


def evict(affinity_class: AffinityClass, desired: DesiredIsolation, unmovable: frozenset[str]) -> EvictionResult:
    """Runs one pass. Blocks.

    Raises OSError or ValueError if a step fails, or once this instance must not write. If the originals cannot be
    stored, nothing is moved.
    """
    originals = affinity_class.originals.load()
    cpus_to_vacate = desired.cpus_to_vacate
    if not cpus_to_vacate and not originals:
        return EvictionResult()
    unmovable = unmovable if cpus_to_vacate else frozenset()
    current = affinity_class.movables.affinities(cpus_to_vacate, originals.keys())
    movable = {name: cpus for name, cpus in current.items() if cpus is not None and name not in unmovable}
    # Interrupts or slices that this pass skips keep their stored original, so that a later pass can restore it.
    skipped = {name: stored for name, stored in originals.items() if name in current and name not in movable}
    plan = plan_eviction(
        movable,
        originals,
        cpus_to_vacate,
        desired.online,
        may_relocate=affinity_class.may_relocate,
        delayed=affinity_class.delayed,
    )
    before_writes = {**skipped, **plan.before_writes} if plan.writes else originals
    if before_writes != originals:
        affinity_class.save(before_writes)
    failed = {name for name, cpus in plan.writes.items() if not affinity_class.set_affinity(name, cpus)}
    after_writes = {**skipped, **revert_failed(plan.after_writes, originals, failed)}
    if after_writes != before_writes:
        affinity_class.save(after_writes)
    unmovable = (unmovable | failed) & current.keys() if cpus_to_vacate else frozenset()
    planned = {**movable, **plan.writes}
    overlapping = unmovable | {name for name, cpus in planned.items() if not cpus.isdisjoint(cpus_to_vacate)}
    remaining = affinity_class.movables.count_using(overlapping, cpus_to_vacate)
    return EvictionResult(frozenset(after_writes), unmovable, remaining, len(plan.contested))


class Evictor:
    """Task that keeps interrupts or slices off claimed CPUs. While there are neither claims nor stored originals, it
    does no I/O.
    """

    def __init__(self, affinity_class: AffinityClass, desired: Callable[[], DesiredIsolation | None]) -> None:
        """Creates an evictor that has not run yet.

        ``desired`` returns the desired state, or None while this instance must not act. It is called on the event loop.
        """
        self.result = EvictionResult()
        self.affinity_class = affinity_class
        self._desired = desired
        self._changed = asyncio.Event()
        self._applied: DesiredIsolation | None = None
        """Desired state at the last pass, whether or not the pass succeeded."""
        self._next_pass: float | None = None
        """Time of the next periodic pass on the event loop's clock, or None if none is needed."""
        self._contested_passes = 0
        self._error = NO_PROBLEM

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Problems to report to the operator, one sentence each."""
        contested = self.affinity_class.contested if self._contested_passes >= CONTESTED_PASSES else NO_PROBLEM
        remaining = self.affinity_class.remaining if self.result.remaining else NO_PROBLEM
        return tuple(filter(None, (self._error, contested, remaining)))

    def wake(self) -> None:
        """Requests a check of the desired state."""
        self._changed.set()

    async def run_forever(self) -> NoReturn:
        """Runs a pass when the desired state changes, and periodically while any affinity differs from its original
        value.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_pass):
                    await self._changed.wait()
            await asyncio.sleep(DEBOUNCE_SECONDS)
            self._changed.clear()
            desired = self._desired()
            due = self._next_pass is not None and asyncio.get_running_loop().time() >= self._next_pass
            if desired is not None and (due or desired != self._applied):
                await self._run_pass(desired)

    async def _run_pass(self, desired: DesiredIsolation) -> None:
        loop = asyncio.get_running_loop()
        # If the desired state has changed, writes that the kernel rejected are tried again: it may have rejected the
        # previous CPUs only because none of them was online or had a free vector.
        unmovable = self.result.unmovable if desired == self._applied else frozenset[str]()
        job = loop.run_in_executor(None, partial(evict, self.affinity_class, desired, unmovable))
        try:
            self._store_result(desired, await asyncio.shield(job))
        except asyncio.CancelledError:
            # The pass must end before this instance releases the lock, since the next instance starts from the stored
            # originals.
            await asyncio.wait([job])
            raise
        except Exception as error:  # noqa: BLE001 - reported; an unexpected error must not end claim enforcement
            unexpected = None if isinstance(error, OSError | ValueError) else error
            if not self._error:
                _log.warning(
                    "%s are not moved", self.affinity_class.noun, extra={"error": str(error)}, exc_info=unexpected
                )
            text = f"{self.affinity_class.noun} are not moved off claimed CPUs: {cut_answer(str(error) or repr(error))}"
            self._error = Problem(text, code_of(error, self.affinity_class.not_moved))
        repeat = bool(desired.cpus_to_vacate or self.result.moved or self._error)
        self._next_pass = loop.time() + self.affinity_class.interval_seconds if repeat else None
        self._applied = desired

    def _store_result(self, desired: DesiredIsolation, result: EvictionResult) -> None:
        if (result.moved, result.remaining) != (self.result.moved, self.result.remaining):
            numbers = {"moved": len(result.moved), "remaining": result.remaining}
            cpus = format_cpu_list(desired.cpus_to_vacate)
            _log.info("%s moved off claimed CPUs", self.affinity_class.noun, extra={"cpus": cpus, **numbers})
        contested = bool(result.contested) and desired == self._applied
        self._contested_passes = self._contested_passes + 1 if contested else 0
        self.result = result
        self._error = NO_PROBLEM
