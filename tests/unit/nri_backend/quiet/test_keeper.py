# SPDX-License-Identifier: Apache-2.0
"""Interrupts on a tree of real files: moved, given back, also by the next instance."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest
from nri_backend.quiet.interrupts import DEFAULT, WORKQUEUES
from nri_backend.quiet.keeper import FIGHT_LOOKS, Keeper, Kind, Outcome, Wanted, vacate
from nri_backend.quiet.things import StoreFile

from tests.fakes.waiting import eventually
from tests.rigs.irq_tree import IrqTree

ONLINE = frozenset(range(8))
NOTHING = Wanted(frozenset(), ONLINE)


def taken(*cpus: int) -> Wanted:
    return Wanted(frozenset(cpus), ONLINE)


@pytest.fixture
def tree(tmp_path: Path) -> IrqTree:
    """A network card, a disk whose interrupts are managed, and a line that nobody uses."""
    tree = IrqTree(tmp_path)
    tree.add(24, "0-7", "eth0-rx")
    tree.add(25, "2", "eth0-tx")
    tree.add(26, "3", "nvme0q3", managed=True)
    tree.add(27, "0", "nvme0q0", managed=True)
    tree.add(28, "0-7", handler="")
    return tree


def kind(tree: IrqTree, look_seconds: float = 60.0) -> Kind:
    store = StoreFile(f"{tree.root}/interrupts.json")
    return Kind(tree, store, "interrupts", look_seconds, elsewhere=True, fought="stop it")


def test_interrupts_leave_and_come_back(tree: IrqTree) -> None:
    """Also the default of new ones, and unbound workqueues. What is managed is asked once; what nobody uses, never."""
    before = tree.says()
    outcome = vacate(kind(tree), taken(2, 3), frozenset())
    assert outcome == Outcome(frozenset({"24", "25", DEFAULT, WORKQUEUES}), frozenset({"26"}), staying=1)
    others = "0-1,4-7"
    assert tree.says() == before | dict.fromkeys(("24", "25", DEFAULT, WORKQUEUES), others)
    tree.written.clear()
    assert vacate(kind(tree), taken(2, 3), outcome.refused) == outcome
    assert not tree.written
    assert vacate(kind(tree), taken(3), outcome.refused).moved == {"24", DEFAULT, WORKQUEUES}
    assert tree.says()["25"] == "2"
    assert vacate(kind(tree), NOTHING, frozenset()) == Outcome()
    assert tree.says() == before
    assert not (tree.root / "interrupts.json").exists()


def test_what_was_refused_once_gets_back_what_it_had(tree: IrqTree) -> None:
    """The kernel may refuse for a while: here since the only CPU of it is offline, there for want of a vector."""
    before = tree.says()
    refused = vacate(kind(tree), taken(2, 3), frozenset()).refused
    tree.online = ONLINE - {2}
    refused = vacate(kind(tree), Wanted(frozenset({3}), tree.online), refused).refused
    assert "25" in refused
    tree.online = ONLINE
    refused = vacate(kind(tree), taken(2, 3), refused).refused
    tree.managed.add("24")
    refused = vacate(kind(tree), taken(0, 2, 3), refused).refused
    tree.managed.remove("24")
    assert vacate(kind(tree), NOTHING, refused) == Outcome()
    assert tree.says() == before
    assert not (tree.root / "interrupts.json").exists()


def test_without_claims_no_interrupt_is_looked_at(tree: IrqTree) -> None:
    """A node without claims pays nothing, and one on which interrupts cannot be read is none of our business."""
    (tree.root / "proc/irq/default_smp_affinity").unlink()
    assert vacate(kind(tree), NOTHING, frozenset()) == Outcome()


def test_what_cannot_be_kept_is_not_moved(tree: IrqTree) -> None:
    """Without a record of what they had, nobody could give it back."""
    before = tree.says()
    lost = Kind(tree, StoreFile(f"{tree.root}/no/such/place"), "interrupts", 60.0, elsewhere=True)
    with pytest.raises(FileNotFoundError):
        vacate(lost, taken(2, 3), frozenset())
    for damaged in ("{]", '{"25": {"former": "2", "known": []}}'):
        (tree.root / "interrupts.json").write_text(damaged)
        with pytest.raises(ValueError, match=r"interrupts\.json is damaged; remove it"):
            vacate(kind(tree), taken(2, 3), frozenset())
    assert tree.says() == before
    assert not tree.written


def test_where_claims_have_every_cpu_all_stay(tree: IrqTree) -> None:
    """Somebody has to take them; how many there are is told."""
    before = tree.says()
    assert vacate(kind(tree), Wanted(ONLINE, ONLINE), frozenset()).moved == frozenset()
    assert tree.says() == before


@contextlib.asynccontextmanager
async def keeping(kind: Kind, wanted: Callable[[], Wanted | None]) -> AsyncIterator[Keeper]:
    keeper = Keeper(kind, wanted)
    task = asyncio.create_task(keeper.run_forever())
    try:
        yield keeper
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_the_next_instance_gives_back(tree: IrqTree) -> None:
    """One that dies leaves what it has kept; a standby touches nothing; the next one goes on from there."""
    before, now = tree.says(), taken(2)
    async with keeping(kind(tree), lambda: now) as keeper:
        keeper.wake()
        await eventually(lambda: keeper.outcome.moved == {"24", "25", DEFAULT, WORKQUEUES})
    after = tree.says()
    acts: list[Wanted] = []
    async with keeping(kind(tree), lambda: acts[0] if acts else None) as keeper:
        keeper.wake()
        await asyncio.sleep(0.1)
        assert tree.says() == after
        acts.append(NOTHING)
        keeper.wake()
        await eventually(lambda: not (tree.root / "interrupts.json").exists())
        assert tree.says() == before


async def test_an_interrupt_that_was_refused_is_tried_again_when_the_claimed_cpus_change(tree: IrqTree) -> None:
    """The kernel had no vector for it at the first attempt; a managed one is not tried at each look."""
    now, before = [taken(2)], tree.says()
    tree.managed.add("25")
    async with keeping(kind(tree, 0.01), lambda: now[0]) as keeper:
        keeper.wake()
        await eventually(lambda: keeper.outcome.refused == {"25"})
        tree.managed.remove("25")
        await asyncio.sleep(0.5)
        assert (tree.written.count("25"), tree.says()["25"]) == (1, before["25"])
        now[0] = taken(2, 4)
        keeper.wake()
        await eventually(lambda: not keeper.outcome.refused)
        assert tree.says()["25"] == "0-1,3,5-7"


async def test_somebody_who_moves_them_back_is_told_of(tree: IrqTree) -> None:
    """They are moved again at each look; after some of these a person has to do something."""
    async with keeping(kind(tree, 0.01), lambda: taken(2)) as keeper:
        keeper.wake()
        rounds = 0
        while not keeper.problems:
            tree.set("25", "2")
            await asyncio.sleep(0.1)
            rounds += 1
        assert keeper.problems == ("somebody moves interrupts back to claimed CPUs: stop it",)
        assert rounds > FIGHT_LOOKS
        await eventually(lambda: keeper.problems == ())
        assert tree.says()["25"] == "0-1,3-7"


async def test_what_keeps_them_from_being_moved_is_told(tree: IrqTree) -> None:
    """Until it is mended: then they are moved."""
    lost = Kind(tree, StoreFile(f"{tree.root}/later/file"), "interrupts", 0.01, elsewhere=True)
    async with keeping(lost, lambda: taken(2)) as keeper:
        keeper.wake()
        await eventually(lambda: bool(keeper.problems))
        assert "interrupts are not moved off claimed CPUs: " in keeper.problems[0]
        (tree.root / "later").mkdir()
        await eventually(lambda: not keeper.problems)
        assert tree.says()["25"] == "0-1,3-7"


async def test_an_unforeseen_error_is_reported_and_ends_nothing(tmp_path: Path) -> None:
    """Interrupts are a comfort; a fault in moving them must not end the enforcement of claims."""

    class Odd(IrqTree):
        """Raises an exception that no reader of the kernel's files raises."""

        broken = True

        def present(self, taken: frozenset[int], moved: Collection[str]) -> dict[str, frozenset[int] | None]:
            """Fails until it is mended."""
            if self.broken:
                raise KeyError("odd")
            return super().present(taken, moved)

    odd = Odd(tmp_path)
    odd.add(25, "2")
    async with keeping(kind(odd, 0.01), lambda: taken(2)) as keeper:
        keeper.wake()
        await eventually(lambda: bool(keeper.problems))
        assert keeper.problems == ("interrupts are not moved off claimed CPUs: 'odd'",)
        odd.broken = False
        await eventually(lambda: not keeper.problems)
        assert odd.says()["25"] == "0-1,3-7"
