# SPDX-License-Identifier: Apache-2.0
"""Everything that is kept off claimed CPUs: which CPUs these are, by kind, and what is told of it."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from nri_backend.containers.state import NodeState
from nri_backend.node.cgroups import CgroupTree
from nri_backend.quiet.interrupts import Interrupts
from nri_backend.quiet.irqbalance import Irqbalance
from nri_backend.quiet.keeper import Keeper, Kind, Wanted
from nri_backend.quiet.moves import Cpus
from nri_backend.quiet.slices import HostSlices
from nri_backend.quiet.things import StoreFile
from nri_backend.settings import Settings

INTERRUPT_SECONDS: Final = 30.0
SLICE_SECONDS: Final = 5.0
"""Between two looks: a daemon-reload gives host daemons every CPU again."""
_BALANCED: Final = "if it is irqbalance, set IRQBALANCE_BANNED_CPULIST in its environment file, or stop it"
_CONFINED: Final = "of the CPUs that their slice may use (AllowedCPUs=) claims have all; allow others, or reserve CPUs"
_IMMOVABLE: Final = "interrupts are not moved off claimed CPUs: {} cannot be written"
_WORKING: Final = "work of the kernel stays on claimed CPUs: {} cannot be written"
_log = logging.getLogger(__name__)


def vacated(state: NodeState) -> Cpus:
    """Returns the CPUs that interrupts leave: those of claims' containers that run, but for requests that keep them."""
    running = [one.entitlement for one in state if one.occupies and one.own_cpus]
    claimed = frozenset[int]().union(*(held.cpus for held in running))
    return (claimed - frozenset().union(*(held.interrupted for held in running))) & state.host.online


def off_host(state: NodeState) -> Cpus:
    """Returns the CPUs that host daemons leave: all that no other container may use, reserved ones excepted."""
    return state.pool.held & state.host.online


class Quiet:
    """The tasks of this package, for an instance that enforces once the runtime has told its containers."""

    def __init__(self, state: NodeState, active: Callable[[], bool], tree: CgroupTree, settings: Settings) -> None:
        self._state = state
        self._active = active
        interrupts = Interrupts(settings.kernel_root, Irqbalance(settings.kernel_root, settings.host_root))
        self._movable = bool(settings.kernel_root) and interrupts.writable
        store = StoreFile(f"{settings.own_dir}/interrupts.json")
        kind = Kind(interrupts, store, "interrupts", INTERRUPT_SECONDS, elsewhere=True, fought=_BALANCED)
        self._interrupts = Keeper(kind, self._interrupts_wanted)
        store = StoreFile(f"{settings.own_dir}/host-slices.json")
        kind = Kind(
            HostSlices(tree, settings.host_root), store, "host daemons", SLICE_SECONDS, elsewhere=False, stuck=_CONFINED
        )
        self._slices = Keeper(kind, self._slices_wanted)
        self._immovable: tuple[str, ...] = ()
        if settings.kernel_root and not self._movable:
            self._immovable += (_IMMOVABLE.format(f"{settings.kernel_root.rstrip('/')}/proc/irq"),)
        if settings.kernel_root and (path := interrupts.unwritable_workqueues):
            self._immovable += (_WORKING.format(path),)
        for text in self._immovable:
            _log.warning(text)
        if settings.kernel_root and not interrupts.balancer_visible:
            where = {"below": settings.kernel_root}
            _log.warning("irqbalance may move interrupts back: run/irqbalance is not mounted", extra=where)

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words."""
        immovable = self._immovable if self._state.config.irqs == "move" else ()
        return immovable + self._interrupts.problems + self._slices.problems

    def gauges(self) -> dict[str, float]:
        """Returns the metrics as of now."""
        outcome = self._interrupts.outcome
        return {"interrupts_moved": sum(map(str.isdecimal, outcome.moved)), "interrupts_staying": outcome.staying}

    def wake(self) -> None:
        """The state has changed, or this instance has become the active one."""
        self._interrupts.wake()
        self._slices.wake()

    async def run_forever(self) -> None:
        """Moves and gives back; never returns."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._interrupts.run_forever(), name="interrupts")
            tasks.create_task(self._slices.run_forever(), name="host slices")

    def _interrupts_wanted(self) -> Wanted | None:
        moved = self._state.config.irqs == "move"
        return self._wanted(vacated, moved=moved) if self._movable else None

    def _slices_wanted(self) -> Wanted | None:
        return self._wanted(off_host, moved=self._state.config.host_slices)

    def _wanted(self, taken: Callable[[NodeState], Cpus], *, moved: bool) -> Wanted | None:
        if not (self._active() and self._state.told):
            return None
        return Wanted(taken(self._state) if moved else frozenset(), self._state.host.online)
