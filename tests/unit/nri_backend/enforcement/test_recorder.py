# SPDX-License-Identifier: Apache-2.0
"""After a restart, the backend learns from its enforcement records which claims it had enforced. No pod can forge a
record.
"""

import asyncio
import contextlib
import errno
import shutil
import threading
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nri_backend.containers.container import tracked_as
from nri_backend.containers.lifecycle import Event
from nri_backend.containers.plan import misplaced
from nri_backend.enforcement.recorder import EnforcementRecord, EnforcementRecords, parse_enforcement_record
from nri_backend.node.cgroups import CgroupTree
from nri_backend.nri.model import Container, ContainerState, RejectedError, Resources
from numa_contract.backend_codes import BackendCode

from tests.fakes.waiting import patience
from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.descriptors import descriptors_left
from tests.rigs.enforcement import Node, auditing, enforcing

ONE = cpu_record("c1", "cpus=2-3")
HUGE = memory_record("m1", ("m", 0, 32 * MI, 2 * MI))


@asynccontextmanager
async def restarted_with(
    memory_dir: Path, env: tuple[str, ...], mebibytes: int, records: type[EnforcementRecords] = EnforcementRecords
) -> AsyncIterator[tuple[Node, Container, str]]:
    """Starts an instance whose runtime reports a running container with the given limit on 2 MiB pages.

    Yields the node, the container and its cgroup.
    """
    node = Node(memory_dir, records=records)
    listed = replace(container("claim", *env, huge={"2MB": mebibytes * MI}), state=ContainerState.RUNNING)
    path = node.make_cgroups(pod(), listed)
    async with auditing(node):
        await node.enforcer.activate()  # before the runtime lists its containers
        await node.enforcer.synchronize([pod()], [listed])
        yield node, listed, path


async def pool_after_restart(memory_dir: Path, *containers: tuple[str, tuple[str, ...], str]) -> str:
    """Starts an instance that finds the given containers (ID, environment, pod) running. Returns its shared pool."""
    node = Node(memory_dir)
    async with auditing(node):
        await node.enforcer.activate()
        listed = [replace(container(i, *env, of=of), state=ContainerState.RUNNING) for i, env, of in containers]
        await node.enforcer.synchronize([pod(of) for _, _, of in containers], listed)
        await node.until(lambda: not misplaced(node.enforcer.state))
        return ",".join(map(str, sorted(node.enforcer.state.pool.shared)))


async def test_a_forged_variable_that_names_the_pool_gains_nothing_across_restarts(memory_dir: Path) -> None:
    """The container started while no instance was connected. Since it runs in the pool, its effective CPUs are exactly
    those in the forged variable.
    """
    forged = ("DRA_CPUSET_madeup=1-7",)
    async with enforcing(Node(memory_dir)) as node:
        node.make_cgroups(pod("p9"), container("evil", of="p9"))
        node.make_cgroups(pod("p2"), container("web", of="p2"))
    for _ in range(3):
        assert await pool_after_restart(memory_dir, ("evil", forged, "p9"), ("web", (), "p2")) == "1,2,3,4,5,6,7"


async def test_a_claim_restored_after_a_restart_shares_its_record_with_the_claim_file(memory_dir: Path) -> None:
    """Otherwise, a second copy of each claim would be computed after every runtime restart and kept in memory."""
    async with enforcing(Node(memory_dir)) as node:
        env = node.claim(ONE)
        await node.run("claim", *env)
    async with restarted_with(memory_dir, env, 0) as (node, _, _):
        tracked = node.enforcer.state.containers.get("claim")
        assert tracked is not None
        (held,) = tracked.enforced_claims
        assert held.record is node.enforcer.state.files[held.key].record
        assert held is node.enforcer.state.claims.known[held.key]


async def test_an_enforcement_record_is_valid_for_only_one_cgroup(memory_dir: Path) -> None:
    """After a reboot, a container with the same ID has a different cgroup."""
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("claim", *node.claim(ONE))
        node.unprepare(ONE)
    assert await pool_after_restart(memory_dir, ("claim", env_of(ONE), "p1")) == "1,4,5,6,7"
    directory = node.kernel.path(path)
    directory.rename(directory.with_name("moved"))
    shutil.copytree(directory.with_name("moved"), directory)
    assert await pool_after_restart(memory_dir, ("claim", env_of(ONE), "p1")) == "1,2,3,4,5,6,7"


async def test_a_container_keeps_cpus_and_nodes_across_a_restart_without_its_memory_record(memory_dir: Path) -> None:
    both = memory_record("m1", ("m", 1, MI, 4096))
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("claim", *node.claim(ONE), *node.claim(both))
        node.unprepare(both)
    assert await pool_after_restart(memory_dir, ("claim", (*env_of(ONE), *env_of(both)), "p1")) == "1,4,5,6,7"
    assert (node.cpus(path), node.kernel.get(path, "cpuset.mems.effective")) == ("2-3", "1")


@pytest.mark.parametrize(("created", "started"), [(True, True), (True, False), (False, False)])
async def test_claimed_hugepages_are_added_once_across_restarts(memory_dir: Path, created: bool, started: bool) -> None:
    """The kubelet's limit is 64 MiB, and the claim is for 32 MiB.

    The enforcement record shows whether an instance has already answered CreateContainer.
    """
    async with enforcing(Node(memory_dir)) as node:
        env = node.claim(HUGE)
        path = node.make_cgroups(pod(), container("claim"))
        if created:
            await node.enforcer.create_container(pod(), container("claim", *env, huge={"2MB": 64 * MI}))
        if started:
            await node.enforcer.start_container(pod(), container("claim", *env, huge={"2MB": 96 * MI}))
    for _ in range(2):
        async with restarted_with(memory_dir, env, 96 if created else 64) as (node, listed, _):
            for _ in range(2):
                node.kernel.set(path, "hugetlb.2MB.max", "0")
                await node.enforcer.synchronize([pod()], [listed])
                await node.until(partial(is_limited, node, path, 96 * MI))
                await node.until(partial(is_recorded, memory_dir))


async def test_claimed_hugepages_are_added_once_on_a_resize(memory_dir: Path) -> None:
    """The limit in the answer to the update includes the claim, even if no instance was connected when the container
    was created.
    """
    env = Node(memory_dir).claim(HUGE)
    async with restarted_with(memory_dir, env, 64) as (node, listed, path):
        (update,) = await node.enforcer.update_container(pod(), listed, Resources(hugepage_limits={"2MB": 128 * MI}))
        assert update.resources.hugepage_limits == {"2MB": 160 * MI}
        await node.until(partial(is_limited, node, path, 160 * MI))
        await node.enforcer.synchronize([pod()], [replace(listed, resources=update.resources)])
        node.kernel.set(path, "hugetlb.2MB.max", "0")
        await node.until(partial(is_limited, node, path, 160 * MI))


def is_recorded(memory_dir: Path) -> bool:
    """Returns True if the audit has written a complete enforcement record."""
    return any(b'"inode":0' not in file.read_bytes() for file in (memory_dir / "enforcement-records").glob("*.json"))


def is_limited(node: Node, path: str, limit: int) -> bool:
    """Returns True if the limit on 2 MiB pages has the given value."""
    return node.kernel.get(path, "hugetlb.2MB.max") == str(limit)


async def test_a_container_starts_even_if_its_enforcement_record_cannot_be_written(memory_dir: Path) -> None:
    """The record is kept in memory and the failure is reported as a problem. The record is written as soon as
    possible.
    """
    async with enforcing(Node(memory_dir)) as node:
        records = memory_dir / "enforcement-records"
        records.write_text("in the way")
        assert node.cpus(await node.run("claim", *node.claim(ONE))) == "2-3"
        (problem,) = node.enforcer.problems
        assert ("cannot be written" in problem, problem.code) == (True, BackendCode.ENFORCEMENT_NOT_RECORDED)
        node.unprepare(ONE)
        await node.enforcer.claim_files.refresh(thorough=True)
        assert node.enforcer.state.pool.held == {2, 3}
        records.unlink()
        node.enforcer._auditor.request_audit()
        await node.until(lambda: records.is_dir() and [file.name for file in records.iterdir()] == ["claim.json"])
        await node.until(lambda: not any("cannot be written" in problem for problem in node.enforcer.problems))
        await node.stop("claim")
        await node.enforcer.remove_container(pod(), container("claim"))
        node.enforcer._auditor.request_audit()
        await node.until(lambda: list(records.iterdir()) == [])


async def test_writing_an_enforcement_record_does_not_clear_another_records_problem(memory_dir: Path) -> None:
    """Starting a container writes only the container's own record."""
    async with enforcing(Node(memory_dir)) as node:
        (memory_dir / "enforcement-records/claim.json").mkdir(parents=True)
        await node.run("claim", *node.claim(ONE))
        assert any("cannot be written" in problem for problem in node.enforcer.problems)
        await node.run("other", *node.claim(cpu_record("c2", "cpus=4", pods=["p2"])), of="p2")
        assert any("cannot be written" in problem for problem in node.enforcer.problems)
        (memory_dir / "enforcement-records/claim.json").rmdir()
        node.enforcer._auditor.request_audit()
        await node.until(lambda: not any("cannot be written" in problem for problem in node.enforcer.problems))


async def test_an_unwritten_records_problem_ends_with_its_container(memory_dir: Path) -> None:
    """Nothing is left to write, even though the directory is still not writable."""
    async with enforcing(Node(memory_dir)) as node:
        (memory_dir / "enforcement-records").write_text("in the way")
        await node.run("claim", *node.claim(ONE))
        assert any("cannot be written" in problem for problem in node.enforcer.problems)
        await node.stop("claim")
        await node.enforcer.remove_container(pod(), container("claim"))
        await node.until(lambda: not any("cannot be written" in problem for problem in node.enforcer.problems))


async def test_a_lingering_containers_record_is_read_once_descriptors_are_free(memory_dir: Path) -> None:
    """Only its record shows that the container has a process. The record is not removed in the meantime."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        node.unprepare(ONE)
    node = Node(memory_dir)
    async with auditing(node):
        await node.enforcer.activate()
        with descriptors_left(), contextlib.suppress(OSError):
            await node.enforcer.synchronize([], [])
        await node.enforcer._auditor.audit(full=True, all_containers=True)
        await node.enforcer.synchronize([], [])
        assert node.enforcer.state.pool.held == {2, 3}


async def test_an_instance_becomes_active_once_its_records_can_be_read(memory_dir: Path) -> None:
    """The standby did not see the container start, and the claim's file was removed."""
    async with enforcing(Node(memory_dir)) as node:
        env = node.claim(ONE)
        await node.run("claim", *env)
        node.unprepare(ONE)
    standby = Node(memory_dir)
    standby.enforcer.state.put(tracked_as(pod(), container("claim", *env)).after(Event.LIST_RUNNING))
    with descriptors_left():
        active = asyncio.create_task(standby.enforcer.activate())
        await asyncio.sleep(0.5)
        assert not standby.enforcer.active
    async with auditing(standby):
        await active
        assert standby.enforcer.state.pool.held == {2, 3}


async def test_enforced_claims_are_known_after_a_takeover(memory_dir: Path) -> None:
    """The standby was called when the container started. The claim file was removed before the hand-over."""
    standby = Node(memory_dir)
    standby.stored = Resources(cpus="2-3")
    async with enforcing(Node(memory_dir)) as former:
        env = former.claim(ONE)
        await former.run("claim", *env)
        await standby.run("claim", *env)
        former.unprepare(ONE)
    async with auditing(standby):
        await standby.enforcer.activate()
        assert standby.enforcer.state.pool.held == {2, 3}


class SlowWrites(EnforcementRecords):
    """A slow disk, on which writes of complete records wait until ``free`` is set."""

    def __init__(self, own_directory: str, tree: CgroupTree) -> None:
        super().__init__(own_directory, tree)
        self.reached, self.free = threading.Event(), threading.Event()

    def write(self, records: Sequence[EnforcementRecord]) -> dict[str, OSError | None]:
        if any(record.cgroup for record in records):
            self._wait()
        return super().write(records)

    def _wait(self) -> None:
        self.reached.set()
        self.free.wait(5 * patience())


class SlowRecords(SlowWrites):
    """A slow disk on which ``retain`` waits for ``free`` too. The audit may call it before any record is written."""

    def retain(self, container_ids: Collection[str], starting: Collection[str] = ()) -> set[str]:
        self._wait()
        return super().retain(container_ids, starting)


async def slow_write(node: Node) -> SlowWrites:
    """Waits until the disk is busy."""
    records = node.enforcer.reconciler.recorder._records
    assert isinstance(records, SlowWrites)
    assert await asyncio.to_thread(records.reached.wait, 5 * patience())
    return records


@asynccontextmanager
async def during_slow_write(node: Node) -> AsyncIterator[None]:
    """Waits until the disk is busy. The disk becomes free shortly after the ``with`` block has been entered."""
    records = await slow_write(node)
    asyncio.get_running_loop().call_later(0.02, records.free.set)
    yield


async def test_a_start_that_is_cancelled_during_the_write_leaves_a_complete_record(memory_dir: Path) -> None:
    """The thread cannot be cancelled. It replaces the whole file after the hook has ended."""
    async with enforcing(Node(memory_dir, records=SlowWrites)) as node:
        env = node.claim(ONE)
        start = asyncio.create_task(node.run("claim", *env))
        # The disk may be busy with the first audit's cleanup before the start's job has begun.
        await node.until(lambda: node.enforcer.reconciler.recorder._starting)
        records = await slow_write(node)
        start.cancel()
        await asyncio.wait({start})
        assert not is_recorded(memory_dir)
        records.free.set()
        await node.until(lambda: is_recorded(memory_dir))
        (file,) = (memory_dir / "enforcement-records").iterdir()
        (held,) = parse_enforcement_record(file.name, file.read_bytes()).claims
        assert held.key == (ONE.driver, ONE.claim.uid)


async def test_a_container_whose_settings_are_refused_has_no_record(memory_dir: Path) -> None:
    """A record is written only after the container's settings have been verified."""
    async with enforcing(Node(memory_dir)) as node:
        path = node.make_cgroups(pod(), container("claim"))
        node.kernel.refused[path, "hugetlb.2MB.max"] = errno.EACCES
        with pytest.raises(RejectedError):
            await node.run("claim", *node.claim(ONE), *node.claim(HUGE))
        assert not is_recorded(memory_dir)


async def limit_after_a_restart(memory_dir: Path, env: tuple[str, ...], mebibytes: int) -> str:
    """Returns the hugepage limit that a new instance applies if the runtime reports the given limit in MiB."""
    async with restarted_with(memory_dir, env, mebibytes) as (node, _, path):
        await node.until(lambda: node.enforcer.state.pool.shared)
        await node.enforcer._auditor.audit(full=True)
        return node.kernel.get(path, "hugetlb.2MB.max")


async def test_a_creation_during_a_record_cleanup_is_recorded_as_answered(memory_dir: Path) -> None:
    """The cleanup uses an older container list. After a restart, the claim is not added a second time."""
    async with enforcing(Node(memory_dir, records=SlowRecords)) as node:
        env = node.claim(HUGE)
        node.make_cgroups(pod(), container("claim"))
        cleanup = asyncio.create_task(node.enforcer.reconciler.recorder.remove_untracked())
        async with during_slow_write(node):
            await node.enforcer.create_container(pod(), container("claim", *env, huge={"2MB": 64 * MI}))
        await cleanup
        await node.enforcer.start_container(pod(), container("claim", *env, huge={"2MB": 96 * MI}))
    assert await limit_after_a_restart(memory_dir, env, 96) == str(96 * MI)


async def test_a_container_started_during_a_record_cleanup_is_recorded(memory_dir: Path) -> None:
    """The cleanup uses an older container list, and the start's job does not wait for the cleanup."""
    async with enforcing(Node(memory_dir, records=SlowRecords)) as node:
        records = node.enforcer.reconciler.recorder._records
        assert isinstance(records, SlowRecords)
        cleanup = asyncio.create_task(node.enforcer.reconciler.recorder.remove_untracked())
        assert await asyncio.to_thread(records.reached.wait, 5)
        start = asyncio.create_task(node.run("claim", *node.claim(ONE)))
        asyncio.get_running_loop().call_later(0.1, records.free.set)
        await start
        await cleanup
        assert is_recorded(memory_dir)


async def test_a_start_writes_its_record_only_once(node: Node, memory_dir: Path) -> None:
    """The job writes the record. Neither the hook nor the next audit writes it again."""
    await node.run("claim", *node.claim(ONE))
    file = memory_dir / "enforcement-records" / "claim.json"
    before = file.stat().st_ino
    await node.enforcer._auditor.audit(full=True)
    assert file.stat().st_ino == before
    assert node.enforcer.reconciler.recorder._starting == {}


def test_a_cleanup_spares_the_temporary_file_for_a_record_that_is_being_written(tmp_path: Path) -> None:
    """If the file were removed, the record could not be renamed into place. Other temporary files are left over from a
    crash.
    """
    directory = tmp_path / "enforcement-records"
    directory.mkdir()
    for name in (".new.json.12ab.tmp", ".old.json.12ab.tmp", "gone.json"):
        (directory / name).touch()
    EnforcementRecords(str(tmp_path), CgroupTree(str(tmp_path))).retain(["old"], {"new": None})
    assert {path.name for path in directory.iterdir()} == {".new.json.12ab.tmp"}


async def test_a_resize_during_a_records_first_write_is_recorded_as_answered(memory_dir: Path) -> None:
    """The resize does not wait for the disk.

    The record keeps the claimed CPUs, and in the end shows that the resize was answered.
    """
    env = (*Node(memory_dir).claim(ONE), *Node(memory_dir).claim(HUGE))
    async with restarted_with(memory_dir, env, 64, records=SlowRecords) as (node, listed, _):
        async with during_slow_write(node):
            await node.enforcer.update_container(pod(), listed, Resources(hugepage_limits={"2MB": 128 * MI}))
        record = memory_dir / "enforcement-records" / "claim.json"
        await node.until(lambda: record.exists() and b'"answered":true' in record.read_bytes())
    node.unprepare(ONE)
    assert await pool_after_restart(memory_dir, ("claim", env, "p1")) == "1,4,5,6,7"
    assert await limit_after_a_restart(memory_dir, env, 160) == str(160 * MI)
