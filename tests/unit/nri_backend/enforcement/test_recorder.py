# SPDX-License-Identifier: Apache-2.0
"""What survives a restart of ours: what was made true, and nothing that a pod says."""

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from nri_backend.containers.overlap import misplaced
from nri_backend.node.enforcement_records import EnforcementRecord, EnforcementRecords
from nri_backend.nri.model import Container, ContainerState, Resources

from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, auditing, enforcing

ONE = cpu_record("c1", "cpus=2-3")
HUGE = memory_record("m1", ("m", 0, 32 * MI, 2 * MI))


@asynccontextmanager
async def finding(
    memory: Path, env: tuple[str, ...], mebibytes: int, proofs: type[EnforcementRecords] = EnforcementRecords
) -> AsyncIterator[tuple[Node, Container, str]]:
    """A new instance, to which the runtime lists a running container with this limit of 2 MiB pages, and its cgroup."""
    node = Node(memory, records=proofs)
    listed = replace(container("claim", *env, huge={"2MB": mebibytes * MI}), state=ContainerState.RUNNING)
    path = node.make_cgroups(pod(), listed)
    async with auditing(node):
        await node.enforcer.activate()  # before the runtime tells its state
        await node.enforcer.synchronize([pod()], [listed])
        yield node, listed, path


async def restarted(memory: Path, *containers: tuple[str, tuple[str, ...], str]) -> str:
    """A new instance finds these (id, environment, pod) running; returns the pool that it shares out."""
    node = Node(memory)
    async with auditing(node):
        await node.enforcer.activate()
        listed = [replace(container(i, *env, of=of), state=ContainerState.RUNNING) for i, env, of in containers]
        await node.enforcer.synchronize([pod(of) for _, _, of in containers], listed)
        await node.until(lambda: not misplaced(node.enforcer.state))
        return ",".join(map(str, sorted(node.enforcer.state.pool.shared)))


@pytest.mark.fault("backend A3", "security S2")
async def test_a_pod_that_names_the_pool_gets_nothing_over_any_restarts(memory: Path) -> None:
    """It starts in a gap, is put into the pool, and then shows just the CPUs that it names."""
    forged = ("DRA_CPUSET_madeup=1-7",)
    async with enforcing(Node(memory)) as node:
        node.make_cgroups(pod("p9"), container("evil", of="p9"))
        node.make_cgroups(pod("p2"), container("web", of="p2"))
    for _ in range(3):
        assert await restarted(memory, ("evil", forged, "p9"), ("web", (), "p2")) == "1,2,3,4,5,6,7"


async def test_a_proof_shares_the_record_with_the_claim_file(memory: Path) -> None:
    """A second copy of each would stay in memory from every restart of the runtime on."""
    async with enforcing(Node(memory)) as node:
        env = node.claim(ONE)
        await node.run("claim", *env)
    async with finding(memory, env, 0) as (node, _, _):
        tracked = node.enforcer.state.get("claim")
        assert tracked is not None
        (held,) = tracked.enforced
        assert held.record is node.enforcer.state.files[held.key].record


@pytest.mark.fault("backend A3", "security S2")
async def test_a_proof_is_good_for_one_cgroup(memory: Path) -> None:
    """A container of the same id after a reboot, or whatever a forger makes of one, is another."""
    async with enforcing(Node(memory)) as node:
        path = await node.run("claim", *node.claim(ONE))
        node.unprepare(ONE)
    assert await restarted(memory, ("claim", env_of(ONE), "p1")) == "1,4,5,6,7"
    directory = node.kernel.path(path)
    directory.rename(directory.with_name("moved"))
    shutil.copytree(directory.with_name("moved"), directory)
    assert await restarted(memory, ("claim", env_of(ONE), "p1")) == "1,2,3,4,5,6,7"


@pytest.mark.fault("backend A4")
async def test_a_lost_memory_record_takes_nothing_from_a_claim_container(memory: Path) -> None:
    """Neither its CPUs nor its nodes, over a restart."""
    both = memory_record("m1", ("m", 1, MI, 4096))
    async with enforcing(Node(memory)) as node:
        path = await node.run("claim", *node.claim(ONE), *node.claim(both))
        node.unprepare(both)
    assert await restarted(memory, ("claim", (*env_of(ONE), *env_of(both)), "p1")) == "1,4,5,6,7"
    assert (node.cpus(path), node.kernel.get(path, "cpuset.mems.effective")) == ("2-3", "1")


@pytest.mark.fault("backend A12")
@pytest.mark.parametrize(("created", "started"), [(True, True), (True, False), (False, False)])
async def test_a_limit_is_added_once(memory: Path, created: bool, started: bool) -> None:
    """The spec states 64 MiB and the claim has 32: what an instance of ours has answered before it ended is known."""
    async with enforcing(Node(memory)) as node:
        env = node.claim(HUGE)
        path = node.make_cgroups(pod(), container("claim"))
        if created:
            await node.enforcer.create_container(pod(), container("claim", *env, huge={"2MB": 64 * MI}))
        if started:
            await node.enforcer.start_container(pod(), container("claim", *env, huge={"2MB": 96 * MI}))
    for _ in range(2):
        async with finding(memory, env, 96 if created else 64) as (node, listed, _):
            for _ in range(2):
                node.kernel.set(path, "hugetlb.2MB.max", "0")
                await node.enforcer.synchronize([pod()], [listed])
                await node.until(partial(is_limited, node, path, 96 * MI))
                await node.until(partial(is_proven, memory))


async def test_a_resize_of_hugepages_is_answered_once(memory: Path) -> None:
    """Our answer to it holds the claimed pages, too, for a container that was created in a gap."""
    env = Node(memory).claim(HUGE)
    async with finding(memory, env, 64) as (node, listed, path):
        (update,) = await node.enforcer.update_container(pod(), listed, Resources(hugepage_limits={"2MB": 128 * MI}))
        assert update.resources.hugepage_limits == {"2MB": 160 * MI}
        await node.until(partial(is_limited, node, path, 160 * MI))
        await node.enforcer.synchronize([pod()], [replace(listed, resources=update.resources)])
        node.kernel.set(path, "hugetlb.2MB.max", "0")
        await node.until(partial(is_limited, node, path, 160 * MI))


def is_proven(memory: Path) -> bool:
    """Whether the audit has kept what it made true."""
    return any(b'"inode":0' not in file.read_bytes() for file in (memory / "proofs").glob("*.json"))


def is_limited(node: Node, path: str, limit: int) -> bool:
    """Whether a limit of 2 MiB pages is as said."""
    return node.kernel.get(path, "hugetlb.2MB.max") == str(limit)


@pytest.mark.fault("issue 10, law 6")
async def test_a_full_disk_stops_no_container_and_heals(memory: Path) -> None:
    """What cannot be kept is held in memory, told as a problem, and kept when there is room."""
    async with enforcing(Node(memory)) as node:
        proofs = memory / "proofs"
        proofs.write_text("in the way")
        assert node.cpus(await node.run("claim", *node.claim(ONE))) == "2-3"
        assert any("cannot be kept" in problem for problem in node.enforcer.problems)
        node.unprepare(ONE)
        await node.enforcer.inputs.refresh(thorough=True)
        assert node.enforcer.state.pool.held == {2, 3}
        proofs.unlink()
        node.enforcer._auditor.request_audit()
        await node.until(lambda: proofs.is_dir() and [file.name for file in proofs.iterdir()] == ["claim.json"])
        await node.until(lambda: not any("cannot be kept" in problem for problem in node.enforcer.problems))
        await node.stop("claim")
        await node.enforcer.remove_container(pod(), container("claim"))
        node.enforcer._auditor.request_audit()
        await node.until(lambda: list(proofs.iterdir()) == [])


async def test_the_proof_of_one_container_does_not_end_the_problem_of_another(memory: Path) -> None:
    """A start writes one proof, and that of another container may still be missing."""
    async with enforcing(Node(memory)) as node:
        (memory / "proofs/claim.json").mkdir(parents=True)
        await node.run("claim", *node.claim(ONE))
        assert any("cannot be kept" in problem for problem in node.enforcer.problems)
        await node.run("other", *node.claim(cpu_record("c2", "cpus=4", pods=["p2"])), of="p2")
        assert any("cannot be kept" in problem for problem in node.enforcer.problems)
        (memory / "proofs/claim.json").rmdir()
        node.enforcer._auditor.request_audit()
        await node.until(lambda: not any("cannot be kept" in problem for problem in node.enforcer.problems))


async def test_a_proof_that_could_not_be_written_is_no_problem_after_its_container(memory: Path) -> None:
    """With the end of the container nothing is left to write, although the directory is still not writable."""
    async with enforcing(Node(memory)) as node:
        (memory / "proofs").write_text("in the way")
        await node.run("claim", *node.claim(ONE))
        assert any("cannot be kept" in problem for problem in node.enforcer.problems)
        await node.stop("claim")
        await node.enforcer.remove_container(pod(), container("claim"))
        await node.until(lambda: not any("cannot be kept" in problem for problem in node.enforcer.problems))


@pytest.mark.fault("backend A6")
async def test_who_takes_over_knows_what_was_made_true(memory: Path) -> None:
    """The standby saw the container start; its record went before the hand-over."""
    standby = Node(memory)
    standby.stored = Resources(cpus="2-3")
    async with enforcing(Node(memory)) as former:
        env = former.claim(ONE)
        await former.run("claim", *env)
        await standby.run("claim", *env)
        former.unprepare(ONE)
    async with auditing(standby):
        await standby.enforcer.activate()
        assert standby.enforcer.state.pool.held == {2, 3}


class SlowProofs(EnforcementRecords):
    """A disk that is busy: tidying up, and the first full proof, wait until somebody lets them go on."""

    def __init__(self, *arguments: str) -> None:
        super().__init__(*arguments)
        self.reached, self.free = threading.Event(), threading.Event()

    def retain(self, container_ids: Collection[str]) -> set[str]:
        self._wait()
        return super().retain(container_ids)

    def write(self, proof: EnforcementRecord) -> None:
        if proof.inode:
            self._wait()
        super().write(proof)

    def _wait(self) -> None:
        self.reached.set()
        self.free.wait(5)


@asynccontextmanager
async def meanwhile(node: Node) -> AsyncIterator[None]:
    """What is done in it begins while the disk is busy, and ends when it is free again."""
    proofs = node.enforcer._recorder._proofs
    assert isinstance(proofs, SlowProofs)
    assert await asyncio.to_thread(proofs.reached.wait, 5)
    asyncio.get_running_loop().call_later(0.02, proofs.free.set)
    yield


async def limit_after_a_restart(memory: Path, env: tuple[str, ...], mebibytes: int) -> str:
    """Returns what a new instance makes of a container that the runtime states this limit of."""
    async with finding(memory, env, mebibytes) as (node, _, path):
        await node.until(lambda: node.enforcer.state.pool.shared)
        await node.enforcer._auditor.audit(full=True)
        return node.kernel.get(path, "hugetlb.2MB.max")


async def test_a_creation_while_others_are_forgotten_stays_answered(memory: Path) -> None:
    """Who tidies up knows the containers of a moment ago: after a restart the claim is not added again."""
    async with enforcing(Node(memory, records=SlowProofs)) as node:
        env = node.claim(HUGE)
        node.make_cgroups(pod(), container("claim"))
        tidying = asyncio.create_task(node.enforcer._recorder.forget_others())
        async with meanwhile(node):
            await node.enforcer.create_container(pod(), container("claim", *env, huge={"2MB": 64 * MI}))
        await tidying
        await node.enforcer.start_container(pod(), container("claim", *env, huge={"2MB": 96 * MI}))
    assert await limit_after_a_restart(memory, env, 96) == str(96 * MI)


async def test_a_resize_while_the_first_proof_is_written_takes_nothing(memory: Path) -> None:
    """It waits for no disk, the proof keeps the claim's CPUs, and says in the end that the resize was answered."""
    env = (*Node(memory).claim(ONE), *Node(memory).claim(HUGE))
    async with finding(memory, env, 64, proofs=SlowProofs) as (node, listed, _):
        async with meanwhile(node):
            await node.enforcer.update_container(pod(), listed, Resources(hugepage_limits={"2MB": 128 * MI}))
        proof = memory / "proofs" / "claim.json"
        await node.until(lambda: proof.exists() and b'"answered":true' in proof.read_bytes())
    node.unprepare(ONE)
    assert await restarted(memory, ("claim", env, "p1")) == "1,4,5,6,7"
    assert await limit_after_a_restart(memory, env, 160) == str(160 * MI)
