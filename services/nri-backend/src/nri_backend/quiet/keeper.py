# SPDX-License-Identifier: Apache-2.0
"""Keeps things of one kind off claimed CPUs while there are claims, and gives them back what they had."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NoReturn

from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import cut_answer

from nri_backend.quiet.moves import Cpus, plan, without
from nri_backend.quiet.things import StoreFile, Things

PAUSE_SECONDS: Final = 0.2
"""Before each look: hooks come first, and pods that come in a burst keep nobody busy."""
FIGHT_LOOKS: Final = 3
"""After so many looks in a row that found things back on claimed CPUs, somebody else wants them there."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be true."""

    taken: Cpus
    """CPUs that things have to leave; empty: they get back what they had."""
    online: Cpus


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one look has left."""

    moved: frozenset[str] = frozenset()
    refused: frozenset[str] = frozenset()
    """Those that the kernel does not let us move; they are tried again when other CPUs are claimed or online."""
    staying: int = 0
    returned: int = 0
    """How many somebody else had put back."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Things of one kind, and what is said of them."""

    things: Things
    store: StoreFile
    noun: str
    look_seconds: float
    """Between two looks while something is moved: others may have moved it back."""
    elsewhere: bool
    """Whether one that is left without a CPU may go to any that nobody has claimed."""
    fought: str = ""
    """What to do where somebody moves them back all the time; empty: nothing, they are moved again."""
    stuck: str = ""
    """Why some stay, and what to do; empty: it cannot be helped."""


def vacate(kind: Kind, wanted: Wanted, refused: frozenset[str]) -> Outcome:
    """Makes it true once. OSError or ValueError where that cannot be kept, and so is not begun. Blocks."""
    store = kind.store.load()
    if not wanted.taken and not store:
        return Outcome()
    refused = refused if wanted.taken else frozenset()
    present = kind.things.present(wanted.taken, store.keys())
    movable = {name: cpus for name, cpus in present.items() if cpus is not None and name not in refused}
    # What is not moved, or does not tell, just now still gets back one day what it had.
    aside = {name: moved for name, moved in store.items() if name in present and name not in movable}
    planned = plan(movable, store, wanted.taken, wanted.online, elsewhere=kind.elsewhere)
    before = {**aside, **planned.before} if planned.writes else store
    if planned.writes:
        kind.store.save(before)
    failed = {name for name, cpus in planned.writes.items() if not kind.things.write(name, cpus)}
    after = {**aside, **without(planned.after, store, failed)}
    if after != before:
        kind.store.save(after)
    refused = (refused | failed) & present.keys() if wanted.taken else frozenset()
    now = {**movable, **planned.writes}
    left = refused | {name for name, cpus in now.items() if not cpus.isdisjoint(wanted.taken)}
    staying = kind.things.staying(left, wanted.taken)
    return Outcome(frozenset(after), refused, staying, len(planned.returned))


class Keeper:
    """The task for one kind. It costs nothing as long as there are no claims."""

    def __init__(self, kind: Kind, wanted: Callable[[], Wanted | None]) -> None:
        """``wanted`` is asked on the event loop; None while this instance must not act."""
        self.outcome = Outcome()
        self._kind = kind
        self._wanted = wanted
        self._news = asyncio.Event()
        self._done: Wanted | None = None
        self._next_look: float | None = None
        self._fights = 0
        self._error = ""

    @property
    def problems(self) -> tuple[str, ...]:
        """What somebody should look at, in words."""
        kind = self._kind
        found = {
            f"{kind.noun} are not moved off claimed CPUs: {self._error}": self._error,
            f"somebody moves {kind.noun} back to claimed CPUs: {kind.fought}": self._fights >= FIGHT_LOOKS
            and kind.fought,
            f"{kind.noun} stay on claimed CPUs: {kind.stuck}": self.outcome.staying and kind.stuck,
        }
        return tuple(text for text, there in found.items() if there)

    def wake(self) -> None:
        """Something has changed that may change what is wanted."""
        self._news.set()

    async def run_forever(self) -> NoReturn:
        """Works when what is wanted changes, and now and then while something is moved."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._next_look):
                    await self._news.wait()
            await asyncio.sleep(PAUSE_SECONDS)
            self._news.clear()
            wanted = self._wanted()
            due = self._next_look is not None and asyncio.get_running_loop().time() >= self._next_look
            if wanted is not None and (due or wanted != self._done):
                await self._look(wanted)

    async def _look(self, wanted: Wanted) -> None:
        loop = asyncio.get_running_loop()
        # The kernel's reason may have been the former CPUs: no vector left on them, or none of them online.
        refused = self.outcome.refused if wanted == self._done else frozenset[str]()
        job = loop.run_in_executor(None, partial(vacate, self._kind, wanted, refused))
        try:
            self._take(wanted, await asyncio.shield(job))
        except asyncio.CancelledError:
            # Whoever gets the lock next begins with what this one has kept.
            await asyncio.wait([job])
            raise
        except Exception as error:  # noqa: BLE001 - reported; what is not foreseen must not end the enforcement of claims
            unforeseen = None if isinstance(error, OSError | ValueError) else error
            if not self._error:
                _log.warning("%s are not moved", self._kind.noun, extra={"error": str(error)}, exc_info=unforeseen)
            self._error = cut_answer(str(error) or repr(error))
        again = bool(wanted.taken or self.outcome.moved or self._error)
        self._next_look = loop.time() + self._kind.look_seconds if again else None
        self._done = wanted

    def _take(self, wanted: Wanted, outcome: Outcome) -> None:
        if (outcome.moved, outcome.staying) != (self.outcome.moved, self.outcome.staying):
            numbers = {"moved": len(outcome.moved), "staying": outcome.staying}
            _log.info("%s", self._kind.noun, extra={"off": format_cpu_list(wanted.taken), **numbers})
        fought = bool(outcome.returned) and wanted == self._done
        self._fights = self._fights + 1 if fought else 0
        self.outcome = outcome
        self._error = ""
