# SPDX-License-Identifier: Apache-2.0
"""Which CPUs each thing gets while others are taken, and which it gets back.

What a thing had is kept before it is changed. Whoever changes it afterwards is respected: what it says then is taken
for what it had.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated

from numa_contract.records import CpuSet, Document
from pydantic import Field

Cpus = frozenset[int]
Sets = Mapping[str, Cpus]
"""What things say, by name."""


class Moved(Document):
    """A thing that was moved off some CPUs."""

    former: CpuSet
    """What it said before."""
    known: Annotated[tuple[CpuSet, ...], Field(min_length=1)]
    """What it says now unless somebody else has written: before our latest write, and after it."""


Store = Mapping[str, Moved]
"""Everything that was moved, by name."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done."""

    writes: Sets
    before: Store
    """To be kept before anything is written: whatever of it is written then, nothing is lost."""
    after: Store
    """To be kept when all is written."""
    returned: tuple[str, ...]
    """Those that we had moved and that somebody else has put on taken CPUs again."""


def reduced(former: Cpus, taken: Cpus, online: Cpus, *, elsewhere: bool) -> Cpus:
    """Returns what a thing gets: what it had (empty: every CPU) without the CPUs that are taken.

    Where none of them is left that is online: with ``elsewhere`` all that nobody has taken, else it stays.
    """
    if not taken or (former and former.isdisjoint(taken)):
        return former
    left = (former or online) - taken
    if left & online:
        return left
    return (online - taken if elsewhere else frozenset()) or former


def plan(present: Sets, store: Store, taken: Cpus, online: Cpus, *, elsewhere: bool = True) -> Plan:
    """Returns what is to be written, now that things say ``present``; what is not among them any more is forgotten."""
    writes, after, returned = {}, {}, []
    for name, now in present.items():
        moved = store.get(name)
        ours = moved is not None and now in moved.known
        former = moved.former if moved is not None and ours else now
        if (wanted := reduced(former, taken, online, elsewhere=elsewhere)) != now:
            writes[name] = wanted
            if moved is not None and now != moved.known[-1]:
                returned.append(name)
        if wanted != former:
            # What is known already is not made again: of thousands of interrupts that would take 0.1 s at each look.
            same = moved is not None and ours and moved.known[-1] == now == wanted
            after[name] = moved if moved and same else Moved.model_construct(former=former, known=(now, wanted))
    kept = {name: moved for name, moved in store.items() if name in writes}
    return Plan(writes, {**kept, **after}, after, tuple(returned))


def without(after: Store, before: Store, failed: Collection[str]) -> Store:
    """Returns what is to be kept where some writes have failed: of these, what was kept of them ``before``."""
    return {**{n: m for n, m in after.items() if n not in failed}, **{n: before[n] for n in failed if n in before}}
