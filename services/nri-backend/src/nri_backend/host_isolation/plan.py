# SPDX-License-Identifier: Apache-2.0
"""Computes the affinities to write while some CPUs must be vacated, and the originals to restore later. This module
does no I/O.

A *movable* is anything whose set of CPUs (its affinity) the backend may overwrite: an interrupt, the unbound
workqueues, or a systemd slice. The affinity that it had before is its *original*. Originals are stored in a file before
they are overwritten, so that a later instance can restore them. Two rules make this safe against crashes and against
other programs:

* The file contains each original together with the last two affinities that the backend expects to read back: the one
  before its latest write and the one that it wrote. If the process dies between two writes, either affinity may be in
  effect, and the stored original is still valid.
* If the current affinity is neither of these two, another program has written it, and it becomes the new original. The
  movable is moved again only if the new original contains CPUs that must be vacated; it is counted as contested if an
  earlier pass had moved it.

A write to irqbalance is *delayed*: irqbalance returns an earlier affinity until its next round, and several writes may
precede that round. So the file contains more than two affinities for it. The desired affinity is written even if
irqbalance returns it already, unless it was also the last one written. The entry is dropped only by a pass that reads
the original and has nothing to write. Since nothing restores the original once the entry has been dropped, the file
must show that the original was in fact written, and not only about to be: after the write it contains the original
twice at the end.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from numa_contract.records import CpuSet, Document
from pydantic import Field

_MAX_EXPECTED: Final = 64
"""Maximum number of affinities that are stored for one movable whose writes are delayed. Passes are at least 0.2 s
apart, and irqbalance's rounds are ten seconds apart.
"""
Cpus = frozenset[int]
Affinities = Mapping[str, Cpus]
"""Affinities, keyed by the name of the interrupt or slice."""


class OriginalAffinity(Document):
    """Original affinity of an interrupt or slice that the backend has moved, as stored on disk."""

    original: CpuSet = Field(alias="former")
    """Affinity to restore once no CPUs have to be vacated any more."""
    expected: Annotated[tuple[CpuSet, ...], Field(alias="known", min_length=1)]
    """The affinities before and after the backend's last write, in this order, preceded by those of earlier writes if
    the writes are delayed. The current one is among them unless another program has written it.
    """


Originals = Mapping[str, OriginalAffinity]
"""Stored originals, keyed by the name of the interrupt or slice."""


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """The writes of one pass, and the originals to store before and after these writes."""

    writes: Affinities
    before_writes: Originals
    """Originals to store before the first write. They are sufficient to restore all affinities after any number of
    these writes.
    """
    after_writes: Originals
    """Originals to store after the last write: those of interrupts or slices that are still moved."""
    contested: tuple[str, ...]
    """Names of the interrupts or slices that were moved earlier, and that another program has moved back to CPUs that
    must be vacated.
    """


def reduced_affinity(original: Cpus, cpus_to_vacate: Cpus, online: Cpus, *, may_relocate: bool) -> Cpus:
    """Returns the original affinity without the CPUs that must be vacated. An empty original means all CPUs.

    If no online CPU remains, the result is all online CPUs that need not be vacated if ``may_relocate`` is set and
    there are any, otherwise the unchanged original.
    """
    if not cpus_to_vacate or (original and original.isdisjoint(cpus_to_vacate)):
        return original
    remaining = (original or online) - cpus_to_vacate
    if remaining & online:
        return remaining
    return (online - cpus_to_vacate if may_relocate else frozenset()) or original


def plan_eviction(
    current: Affinities,
    originals: Originals,
    cpus_to_vacate: Cpus,
    online: Cpus,
    *,
    may_relocate: bool = True,
    delayed: Collection[str] = (),
) -> EvictionPlan:
    """Plans the writes that move interrupts or slices off the CPUs that must be vacated, and that restore those that
    need not be moved any longer.

    ``current`` contains their current affinities. Originals whose name is not in ``current`` are dropped, since the
    interrupt or slice no longer exists. ``delayed`` contains the names of those whose writes are delayed.
    """
    writes, before_restoring, after_writes, contested = {}, {}, {}, []
    new = OriginalAffinity.model_construct  # without validation
    for name, now in current.items():
        stored = originals.get(name)
        unchanged = stored is not None and now in stored.expected
        original = stored.original if stored is not None and unchanged else now
        target = reduced_affinity(original, cpus_to_vacate, online, may_relocate=may_relocate)
        restores = name in delayed and target == original
        last = (target, target) if restores else (target,)
        pending = stored is not None and unchanged and name in delayed and stored.expected[-len(last) :] != last
        if target != now or pending:
            writes[name] = target
            if stored is not None and target != now != stored.expected[-1]:
                contested.append(name)
        if target != original or (name in writes and name in delayed):
            # Reuse an equal entry: building thousands of them would take 0.1 s in each pass.
            same = stored is not None and unchanged and stored.expected[-1] == now == target
            expected: tuple[Cpus, ...] = (now, target)
            if stored is not None and unchanged and name in delayed:
                newest_first = dict.fromkeys((target, now, *reversed(stored.expected)))
                expected = tuple(newest_first)[:_MAX_EXPECTED][::-1]
            if restores:
                before_restoring[name] = new(original=original, expected=expected)
                after_writes[name] = new(original=original, expected=(*expected, target))
            else:
                after_writes[name] = stored if stored and same else new(original=original, expected=expected)
    overwritten = {name: stored for name, stored in originals.items() if name in writes}
    before_writes = {**overwritten, **after_writes, **before_restoring}
    return EvictionPlan(writes, before_writes, after_writes, tuple(contested))


def revert_failed(after: Originals, before: Originals, failed: Collection[str]) -> Originals:
    """Returns ``after``, but with the entries from ``before`` for the names whose write failed."""
    return {**{n: m for n, m in after.items() if n not in failed}, **{n: before[n] for n in failed if n in before}}
