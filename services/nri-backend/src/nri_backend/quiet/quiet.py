# SPDX-License-Identifier: Apache-2.0
"""Everything that is kept off claimed CPUs: which CPUs these are, by kind, and what is told of it."""

import logging
from collections.abc import Callable
from typing import Final, NoReturn

from nri_backend.containers.container import Phase
from nri_backend.containers.state import NodeState
from nri_backend.quiet.interrupts import Interrupts
from nri_backend.quiet.keeper import Keeper, Kind, Wanted
from nri_backend.quiet.moves import Cpus
from nri_backend.quiet.things import StoreFile

LOOK_SECONDS: Final = 30.0
_REMEDY: Final = (
    "if it is irqbalance, set IRQBALANCE_BANNED_CPULIST in its environment file, or stop it; "
    "docs/exclusive.md, Interrupts"
)
_log = logging.getLogger(__name__)


def vacated(state: NodeState) -> Cpus:
    """Returns the CPUs that interrupts leave: those of claims' containers that run, but for requests that keep them."""
    running = [one.entitlement for one in state if one.phase in (Phase.STARTED, Phase.ENDING) and one.own_cpus]
    claimed = frozenset[int]().union(*(held.cpus for held in running))
    return (claimed - frozenset().union(*(held.interrupted for held in running))) & state.host.online


class Quiet:
    """The tasks of this package, for an instance that enforces once the runtime has told its containers."""

    def __init__(self, state: NodeState, active: Callable[[], bool], kernel_root: str, own_dir: str) -> None:
        self._state = state
        self._active = active
        interrupts = Interrupts(kernel_root)
        self._movable = bool(kernel_root) and interrupts.writable
        store = StoreFile(f"{own_dir}/interrupts.json")
        kind = Kind(interrupts, store, "interrupts", LOOK_SECONDS, elsewhere=True, remedy=_REMEDY)
        self._interrupts = Keeper(kind, self._wanted)
        if kernel_root and not self._movable:
            _log.warning("interrupts stay where they are: proc/irq cannot be written", extra={"below": kernel_root})

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words."""
        return self._interrupts.problems

    def gauges(self) -> dict[str, float]:
        """Returns the metrics as of now."""
        outcome = self._interrupts.outcome
        return {"interrupts_moved": sum(map(str.isdecimal, outcome.moved)), "interrupts_staying": outcome.staying}

    def wake(self) -> None:
        """The state has changed, or this instance has become the active one."""
        self._interrupts.wake()

    async def run_forever(self) -> NoReturn:
        """Moves and gives back."""
        await self._interrupts.run_forever()

    def _wanted(self) -> Wanted | None:
        if not (self._movable and self._active() and self._state.told):
            return None
        moves = self._state.config.irqs == "move"
        return Wanted(vacated(self._state) if moves else frozenset(), self._state.host.online)
