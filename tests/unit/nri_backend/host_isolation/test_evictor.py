# SPDX-License-Identifier: Apache-2.0
"""Interrupts are moved off claimed CPUs, and their original affinities are restored by the same instance or by the next
one. The tests use a tree of real files.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

import pytest
from nri_backend.host_isolation.evictor import (
    CONTESTED_PASSES,
    AffinityClass,
    DesiredIsolation,
    EvictionResult,
    Evictor,
    evict,
)
from nri_backend.host_isolation.interrupts import DEFAULT_AFFINITY, WORKQUEUES
from nri_backend.host_isolation.originals import OriginalsFile
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode

from tests.fakes.waiting import eventually
from tests.rigs.descriptors import descriptors_left
from tests.rigs.irq_tree import IrqTree

ONLINE = frozenset(range(8))
NO_CLAIMS = DesiredIsolation(frozenset(), ONLINE)


def vacate(*cpus: int) -> DesiredIsolation:
    return DesiredIsolation(frozenset(cpus), ONLINE)


@pytest.fixture
def tree(tmp_path: Path) -> IrqTree:
    """Returns a tree with a network card, a disk with managed interrupts, and an interrupt without a handler."""
    tree = IrqTree(tmp_path)
    tree.add(24, "0-7", "eth0-rx")
    tree.add(25, "2", "eth0-tx")
    tree.add(26, "3", "nvme0q3", managed=True)
    tree.add(27, "0", "nvme0q0", managed=True)
    tree.add(28, "0-7", handler="")
    return tree


CONTESTED = Problem("another process keeps moving interrupts back", BackendCode.INTERRUPTS_MOVED_BACK)


def interrupts(tree: IrqTree, interval_seconds: float = 60.0, originals: str = "interrupts.json") -> AffinityClass:
    file = OriginalsFile(f"{tree.root}/{originals}")
    return AffinityClass(
        *(tree, file, "interrupts", interval_seconds),
        may_relocate=True,
        not_moved=BackendCode.INTERRUPTS_NOT_MOVED,
        contested=CONTESTED,
    )


def test_interrupts_leave_claimed_cpus_and_get_their_original_affinities_back(tree: IrqTree) -> None:
    """The same applies to the default affinity and to unbound workqueues. A managed interrupt's affinity is written
    only once, and that of an unused interrupt is never written.
    """
    before = tree.all_affinities()
    result = evict(interrupts(tree), vacate(2, 3), frozenset())
    assert result == EvictionResult(
        frozenset({"24", "25", DEFAULT_AFFINITY, WORKQUEUES}), frozenset({"26"}), remaining=1
    )
    others = "0-1,4-7"
    assert tree.all_affinities() == before | dict.fromkeys(("24", "25", DEFAULT_AFFINITY, WORKQUEUES), others)
    tree.written.clear()
    assert evict(interrupts(tree), vacate(2, 3), result.unmovable) == result
    assert not tree.written
    assert evict(interrupts(tree), vacate(3), result.unmovable).moved == {"24", DEFAULT_AFFINITY, WORKQUEUES}
    assert tree.all_affinities()["25"] == "2"
    assert evict(interrupts(tree), NO_CLAIMS, frozenset()) == EvictionResult()
    assert tree.all_affinities() == before
    assert not (tree.root / "interrupts.json").exists()


def test_a_temporarily_unmovable_interrupt_gets_its_original_affinity_back(tree: IrqTree) -> None:
    """The kernel temporarily rejects writes for two interrupts: for 25 while its only CPU is offline, and for 24 while
    there is no free vector.
    """
    before = tree.all_affinities()
    unmovable = evict(interrupts(tree), vacate(2, 3), frozenset()).unmovable
    tree.online = ONLINE - {2}
    unmovable = evict(interrupts(tree), DesiredIsolation(frozenset({3}), tree.online), unmovable).unmovable
    assert "25" in unmovable
    tree.online = ONLINE
    unmovable = evict(interrupts(tree), vacate(2, 3), unmovable).unmovable
    tree.managed.add("24")
    unmovable = evict(interrupts(tree), vacate(0, 2, 3), unmovable).unmovable
    tree.managed.remove("24")
    assert evict(interrupts(tree), NO_CLAIMS, unmovable) == EvictionResult()
    assert tree.all_affinities() == before
    assert not (tree.root / "interrupts.json").exists()


def test_an_interrupt_that_cannot_be_read_keeps_its_stored_affinity(tree: IrqTree) -> None:
    """Reading /proc/self/mem at offset 0 fails with EIO. The next pass can read the interrupt's affinity again."""
    before = tree.all_affinities()
    evict(interrupts(tree), vacate(2, 3), frozenset())
    file = tree.root / "proc/irq/24/smp_affinity_list"
    file.rename(file.with_name("kept"))
    file.symlink_to("/proc/self/mem")
    assert "24" in evict(interrupts(tree), vacate(2, 3), frozenset({"26"})).moved
    file.with_name("kept").rename(file)
    assert evict(interrupts(tree), NO_CLAIMS, frozenset()) == EvictionResult()
    assert tree.all_affinities() == before


def test_without_claims_and_originals_no_affinity_is_read(tree: IrqTree) -> None:
    """A node without claims therefore reports no problem if its interrupts cannot be read."""
    (tree.root / "proc/irq/default_smp_affinity").unlink()
    assert evict(interrupts(tree), NO_CLAIMS, frozenset()) == EvictionResult()


def test_nothing_is_moved_if_originals_cannot_be_stored(tree: IrqTree) -> None:
    """The directory for the file is missing, or the existing file is damaged."""
    before = tree.all_affinities()
    with pytest.raises(FileNotFoundError):
        evict(interrupts(tree, originals="no/such/place"), vacate(2, 3), frozenset())
    (tree.root / "interrupts.json").write_text("{]")
    with pytest.raises(ValueError, match=r"interrupts\.json is damaged"):
        evict(interrupts(tree), vacate(2, 3), frozenset())
    assert tree.all_affinities() == before
    assert not tree.written


def test_nothing_is_moved_while_claims_hold_every_cpu(tree: IrqTree) -> None:
    before = tree.all_affinities()
    assert evict(interrupts(tree), DesiredIsolation(ONLINE, ONLINE), frozenset()).moved == frozenset()
    assert tree.all_affinities() == before


@contextlib.asynccontextmanager
async def running(
    affinity_class: AffinityClass, desired: Callable[[], DesiredIsolation | None]
) -> AsyncIterator[Evictor]:
    evictor = Evictor(affinity_class, desired)
    task = asyncio.create_task(evictor.run_forever())
    try:
        yield evictor
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_the_next_active_instance_restores_the_originals(tree: IrqTree) -> None:
    """The first instance dies after vacating CPU 2. The second instance writes nothing until it becomes active."""
    before, desired = tree.all_affinities(), vacate(2)
    async with running(interrupts(tree), lambda: desired) as evictor:
        evictor.wake()
        await eventually(lambda: evictor.result.moved == {"24", "25", DEFAULT_AFFINITY, WORKQUEUES})
    after = tree.all_affinities()
    active: list[DesiredIsolation] = []
    async with running(interrupts(tree), lambda: active[0] if active else None) as evictor:
        evictor.wake()
        await asyncio.sleep(0.1)
        assert tree.all_affinities() == after
        active.append(NO_CLAIMS)
        evictor.wake()
        await eventually(lambda: not (tree.root / "interrupts.json").exists())
        assert tree.all_affinities() == before


async def test_an_unmovable_interrupt_is_retried_only_when_the_claimed_cpus_change(tree: IrqTree) -> None:
    """Periodic passes do not write the interrupt's affinity again."""
    desired, before = [vacate(2)], tree.all_affinities()
    tree.managed.add("25")
    async with running(interrupts(tree, 0.01), lambda: desired[0]) as evictor:
        evictor.wake()
        await eventually(lambda: evictor.result.unmovable == {"25"})
        tree.managed.remove("25")
        await asyncio.sleep(0.5)
        assert (tree.written.count("25"), tree.all_affinities()["25"]) == (1, before["25"])
        desired[0] = vacate(2, 4)
        evictor.wake()
        await eventually(lambda: not evictor.result.unmovable)
        assert tree.all_affinities()["25"] == "0-1,3,5-7"


async def test_interrupts_are_moved_once_descriptors_are_free_again(tmp_path: Path) -> None:
    """A file that could not be opened says nothing about the interrupt, so the interrupt is not unmovable."""

    class Short(IrqTree):
        """A tree whose files cannot be opened for writing until ``short`` is cleared."""

        short = True

        def set_affinity(self, name: str, cpus: frozenset[int]) -> bool:
            """Writes the affinity, which fails for lack of a descriptor until ``short`` is cleared."""
            with descriptors_left() if self.short else contextlib.nullcontext():
                return super().set_affinity(name, cpus)

    tree = Short(tmp_path)
    tree.add(25, "2")
    async with running(interrupts(tree, 0.01), lambda: vacate(2)) as evictor:
        evictor.wake()
        await eventually(lambda: bool(evictor.problems))
        assert "Too many open files" in evictor.problems[0]
        tree.short = False
        await eventually(lambda: not evictor.problems)
        assert tree.all_affinities()["25"] == "0-1,3-7"
        assert not evictor.result.unmovable


async def test_a_program_that_keeps_moving_interrupts_back_is_a_problem(tree: IrqTree) -> None:
    """The interrupts are moved again in each pass. After a few passes, the conflict is reported as a problem, which is
    cleared when the conflict ends.
    """
    async with running(interrupts(tree, 0.01), lambda: vacate(2)) as evictor:
        evictor.wake()
        rounds = 0
        while not evictor.problems:
            tree.set("25", "2")
            await asyncio.sleep(0.1)
            rounds += 1
        assert evictor.problems == (CONTESTED,)
        assert rounds > CONTESTED_PASSES
        await eventually(lambda: evictor.problems == ())
        assert tree.all_affinities()["25"] == "0-1,3-7"


async def test_a_failed_pass_is_a_problem_and_is_retried(tree: IrqTree) -> None:
    """Once the directory for the originals appears, the problem is cleared and the interrupts are moved."""
    async with running(interrupts(tree, 0.01, "later/file"), lambda: vacate(2)) as evictor:
        evictor.wake()
        await eventually(lambda: bool(evictor.problems))
        assert "interrupts are not moved off claimed CPUs: " in evictor.problems[0]
        assert evictor.problems[0].code is BackendCode.INTERRUPTS_NOT_MOVED
        (tree.root / "later").mkdir()
        await eventually(lambda: not evictor.problems)
        assert tree.all_affinities()["25"] == "0-1,3-7"


async def test_an_unexpected_exception_is_a_problem_and_does_not_end_the_task(tmp_path: Path) -> None:
    """If the task that moves interrupts ended, the backend would exit, and claims would no longer be enforced."""

    class Broken(IrqTree):
        """A tree that raises an exception of a type that reading the kernel's files never raises."""

        broken = True

        def affinities(
            self, cpus_to_vacate: frozenset[int], moved: Collection[str]
        ) -> dict[str, frozenset[int] | None]:
            """Fails until ``broken`` is cleared."""
            if self.broken:
                raise KeyError("odd")
            return super().affinities(cpus_to_vacate, moved)

    tree = Broken(tmp_path)
    tree.add(25, "2")
    async with running(interrupts(tree, 0.01), lambda: vacate(2)) as evictor:
        evictor.wake()
        await eventually(lambda: bool(evictor.problems))
        assert evictor.problems == ("interrupts are not moved off claimed CPUs: 'odd'",)
        tree.broken = False
        await eventually(lambda: not evictor.problems)
        assert tree.all_affinities()["25"] == "0-1,3-7"
