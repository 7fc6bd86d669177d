# SPDX-License-Identifier: Apache-2.0
"""No other container gets a running container's CPUs, whatever state is lost and in whatever order."""

import asyncio
import errno
import math
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.nri.model import MAX_VARIABLES, Container, ContainerState, RejectedError
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import eventually, patience
from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.partition_tree import PARTITION, PartitionTree

ONE = cpu_record("c1", "cpus=2-3")
POOL = parse_cpu_list("1,4-7")
"""The shared pool when the claim's CPUs are not part of it."""


def listed(id_: str, *env: str) -> Container:
    """Returns a running container as the runtime lists it."""
    return replace(container(id_, *env), state=ContainerState.RUNNING)


async def lose_record(node: Node) -> None:
    """Removes the claim file and has the instance read the directory."""
    node.unprepare(ONE)
    await node.enforcer.claim_files.refresh(thorough=True)


async def test_a_claim_without_any_record_survives_a_runtime_reconnection(memory_dir: Path) -> None:
    """The enforcement record cannot be written, and then the claim file is lost."""
    async with enforcing(Node(memory_dir)) as node:
        (memory_dir / "enforcement-records").write_text("in the way")
        path = await node.run("claim", *node.claim(ONE))
        await lose_record(node)
        await node.enforcer.synchronize([pod()], [listed("claim", *env_of(ONE))])
        assert node.enforcer.state.pool.shared == POOL
        assert node.cpus(path) == "2-3"


async def test_the_problem_of_a_running_container_without_a_record_has_its_own_remedy(memory_dir: Path) -> None:
    """The pod may have been deleted while its container could not be stopped. A container that is being created is
    rejected with the advice to name the claim in the pod.
    """
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        await lose_record(node)
        (problem,) = node.enforcer.state.problems
        assert "so the claim's resources stay held. If its pod has been deleted, stop the container" in problem
        assert "spec.resourceClaims" not in problem
        with pytest.raises(RejectedError, match=r"spec\.resourceClaims instead of setting the variable"):
            await node.enforcer.create_container(pod("p2"), container("other", *env_of(ONE), of="p2"))


async def test_a_container_that_is_not_listed_keeps_its_cpus_while_one_of_its_processes_runs(memory_dir: Path) -> None:
    """The runtime reported the container's exit while no instance was connected. The CPUs stay out of the pool, even
    across a backend restart.
    """
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("claim", *node.claim(ONE))
        node.enforcer.disconnected()
        await node.enforcer.synchronize([pod()], [])
        await lose_record(node)
        assert node.enforcer.state.pool.shared == POOL
    async with enforcing(Node(memory_dir)) as node:
        assert node.enforcer.state.pool.shared == POOL
        assert node.reports["claim"].state == "running"
        node.kernel.remove(path)
        await node.until(lambda: node.enforcer.state.pool.shared == parse_cpu_list("1-7"))
        assert "claim" not in node.reports


async def test_a_container_gets_its_claim_when_the_owners_last_process_has_ended(memory_dir: Path) -> None:
    """The container started while no instance was connected. At that time, a process of the init container that owns
    the claim was still running.
    """
    async with enforcing(Node(memory_dir)) as node:
        init = await node.run("init", *node.claim(ONE), name="init")
    node, main = Node(memory_dir), replace(listed("main", *env_of(ONE)), name="main")
    path = node.make_cgroups(pod(), main)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([pod()], [main])
        await node.until(lambda: node.cpus(path) == "1,4-7")
        node.kernel.remove(init)
        await node.until(lambda: node.cpus(path) == "2-3")
        assert [use.uid for use in node.reports["main"].claims] == ["c1"]
        assert node.reports["main"].refused == ""


async def test_a_leftover_process_of_a_container_without_claims_leaves_claimed_cpus(memory_dir: Path) -> None:
    """The runtime has removed the container.

    The leftover process is kept off claimed CPUs until it exits. Then the container is forgotten.
    """
    async with enforcing(Node(memory_dir)) as node:
        left = container("left", of="p2")
        path = await node.run("left", of="p2")
        await node.enforcer.stop_container(pod("p2"), left)
        claim = await node.run("claim", *node.claim(ONE))
        assert (node.cpus(claim), node.cpus(path)) == ("2-3", "1,4-7")
        await node.enforcer.remove_container(pod("p2"), left)
        node.claim(cpu_record("c2", "cpus=4-5", pods=["p3"]))
        await node.until(lambda: node.cpus(path) == "1,6-7")
        node.kernel.remove(path)
        await node.until(lambda: node.enforcer.state.containers.get("left") is None)


@pytest.mark.parametrize("claims", [True, False])
async def test_a_leftover_process_is_moved_back_if_another_process_changed_its_cpuset(
    memory_dir: Path, claims: bool
) -> None:
    """The container is stopped before an audit has detected the change."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        env = node.claim(cpu_record("c2", "cpus=4-5", pods=["p2"])) if claims else ()
        left = await node.run("left", *env, of="p2")
        before = node.cpus(left)
        await node.until(lambda: node.reports["left"].cpus == parse_cpu_list(before))
        node.kernel.set(left, "cpuset.cpus", "0-7")
        await node.enforcer.stop_container(pod("p2"), container("left", of="p2"))
        await node.until(lambda: node.cpus(left) == before)


async def test_a_stopped_containers_partition_is_not_repaired(memory_dir: Path) -> None:
    """The container's cgroup may be removed at any moment (docs/adr/0029). Remaining processes stay on the container's
    CPUs, in a cgroup that is a member instead of a partition.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        db = await node.run("db", *node.claim(ONE))
        await node.enforcer.stop_container(pod("p1"), container("db"))
        node.kernel.written.clear()
        node.kernel.set(db, PARTITION, "member")
        node.kernel.set(db, "cpuset.cpus", "0-7")
        end = node.ahead + 70
        await node.until(lambda: node.ahead >= end)
        assert not [text for path, name, text in node.kernel.written if path == db and name == PARTITION]
        assert (node.partition(db), node.cpus(db)) == ("member", "2-3")


async def test_a_sibling_leaves_an_ended_partitions_cpus_on_the_kernels_event(memory_dir: Path) -> None:
    """The sibling is moved without waiting for the next audit."""
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar, db = await node.run("sidecar", name="sidecar"), await node.run("db", *node.claim(ONE))
        await overlap(node, db, sidecar)
        node.enforcer._auditor._next.tick += 1000
        node.enforcer._auditor.partitions._add_changed({db})
        await eventually(lambda: node.cpus(sidecar) == "1,4-7")


async def overlap(node: Node, db: str, sibling: str) -> None:
    """Writes a sibling's cpuset, as another process would, so that it overlaps an exited container's partition."""
    await node.enforcer.stop_container(pod("p1"), container("db"))
    node.kernel.set(sibling, "cpuset.cpus", "0-7")
    assert "invalid" in node.partition(db)


@pytest.mark.parametrize("end", ["the last process ends", "the cgroup is removed"])
async def test_the_pool_excludes_a_stopped_containers_cpus_if_its_partition_is_invalid(
    memory_dir: Path, end: str
) -> None:
    """One of the container's processes is still running. The kernel returns the CPUs to all other cgroups, but in this
    test no event reports the change.

    The backend turns the container's cgroup into a member, because an invalid partition must not outlive its cgroup.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar, plain = await node.run("sidecar", name="sidecar"), await node.run("plain", of="p2")
        db = await node.run("db", *node.claim(ONE))
        await overlap(node, db, sidecar)
        await node.until(lambda: node.cpus(plain) == node.cpus(sidecar) == "1,4-7")
        assert node.enforcer.state.pool.held == {2, 3}
        assert (node.partition(db), node.cpus(db)) == ("member", "2-3")
        late = await node.run("late", of="p3")
        assert node.cpus(late) == "1,4-7"
        if end == "the cgroup is removed":
            node.kernel.remove(db)
        else:
            node.kernel.set(db, "cgroup.events", "populated 0\nfrozen 0")
        await node.until(lambda: node.cpus(plain) == node.cpus(late) == "1-7")
        assert not node.enforcer.state.pool.held


async def test_the_pool_excludes_an_ended_partitions_cpus_when_they_are_online_again(memory_dir: Path) -> None:
    """All of the partition's CPUs were offline, which invalidated the partition. One of the container's processes is
    still running.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        plain, db = await node.run("plain", of="p2"), await node.run("db", *node.claim(ONE))
        await node.enforcer.stop_container(pod("p1"), container("db"))
        set_online(node, "0-1,4-7")
        await node.until(lambda: node.cpus(db) == "1,4-7")
        set_online(node, "0-7")
        await node.until(lambda: (node.cpus(db), node.cpus(plain)) == ("2-3", "1,4-7"))
        assert node.partition(db) == "member"


async def test_a_running_partition_is_recreated_when_its_cpus_are_online_again(memory_dir: Path) -> None:
    """All of the partition's CPUs were offline, which invalidated the partition. No other container has to be moved."""
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        plain, db = await node.run("plain", of="p2"), await node.run("db", *node.claim(ONE))
        # Until the simulated kernel's files have changed too, no tick may occur, and no job with an older plan may run.
        node.enforcer._auditor._next.tick += 1000
        node.host = replace(node.host, online=parse_cpu_list("0-1,4-7"))
        await node.enforcer._auditor.host.refresh()
        await eventually(lambda: node.enforcer.reconciler._worker.free)
        set_online(node, "0-1,4-7")
        node.enforcer._auditor._next.tick -= 1000
        await node.until(lambda: node.cpus(db) == "1,4-7")
        assert node.partition(db) == "root invalid (No cpu available due to hotplug)"
        node.kernel.written.clear()
        set_online(node, "0-7")
        await node.until(lambda: (node.cpus(db), node.cpus(plain)) == ("2-3", "1,4-7"))
        assert node.partition(db) == "root"
        assert not [path for path, name, _ in node.kernel.written if (path, name) == (plain, "cpuset.cpus")]


async def test_a_partition_refused_because_its_cpus_went_offline_is_recreated_when_they_return(
    memory_dir: Path,
) -> None:
    """The kernel reports the change before the backend has read that the CPUs are offline.

    The audit that retries every refused partition would not run for another minute.
    """
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        db, auditor = await node.run("db", *node.claim(ONE)), node.enforcer._auditor
        await node.until(lambda: auditor._next.all_containers)
        auditor._next.tick, auditor._next.all_containers = math.inf, math.inf
        await eventually(lambda: node.enforcer.reconciler._worker.free)
        node.kernel.online = "0-1,4-7"
        node.kernel.settle(POD)
        auditor.partitions._add_changed({db})
        await eventually(lambda: "due to hotplug" in node.reports["db"].fallback_reason)
        set_online(node, "0-1,4-7")
        auditor._next.tick = 0
        await node.until(lambda: node.cpus(db) == "1,4-7")
        set_online(node, "0-7")
        await node.until(lambda: (node.partition(db), node.reports["db"].fallback_reason) == ("root", ""))


def set_online(node: Node, cpus: str) -> None:
    """Brings these CPUs online and takes all others offline."""
    node.kernel.online = cpus
    node.kernel.settle(POD)
    node.host = replace(node.host, online=parse_cpu_list(cpus))


async def test_a_restarted_container_waits_for_its_predecessor_whose_partition_was_invalidated(
    memory_dir: Path,
) -> None:
    """Without the wait, both cgroups would have the same CPUs, and the kernel would reject the new partition."""
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar, db = await node.run("sidecar", name="sidecar"), await node.run("db", *node.claim(ONE))
        node.enforcer.starter.clear_seconds = 0.0
        await overlap(node, db, sidecar)
        await node.until(lambda: node.partition(db) == "member")
        with pytest.raises(RejectedError, match="still runs on the claim's CPUs"):
            await node.create("again", *env_of(ONE))
        node.kernel.remove(db)
        await node.until(lambda: node.reports["db"].state == "stopped")
        assert node.partition(await node.run("again", *env_of(ONE))) == "root"


async def test_a_lingering_containers_invalid_partition_becomes_a_member_on_restart(memory_dir: Path) -> None:
    """The kernel invalidated the partition while no backend was running."""
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar, db = await node.run("sidecar", name="sidecar"), await node.run("db", *node.claim(ONE))
    node.kernel.set(sidecar, "cpuset.cpus", "0-7")
    restarted = Node(memory_dir, tree=lambda _: node.kernel)
    async with enforcing(restarted):
        assert restarted.enforcer.state.pool.held == {2, 3}
        await restarted.until(lambda: restarted.partition(db) == "member")
        assert restarted.cpus(db) == "2-3"


async def test_a_standby_does_not_touch_a_stopped_containers_invalid_partition(memory_dir: Path) -> None:
    async with enforcing(Node(memory_dir, tree=PartitionTree)) as node:
        sidecar, db = await node.run("sidecar", name="sidecar"), await node.run("db", *node.claim(ONE))
    standby = Node(memory_dir, tree=lambda _: node.kernel)
    async with auditing(standby):
        await standby.enforcer.synchronize([pod()], [listed("db", *env_of(ONE))])
        await overlap(standby, db, sidecar)
        end = standby.ahead + 70
        await standby.until(lambda: standby.ahead >= end)
        assert "invalid" in standby.partition(db)


async def test_a_start_does_not_wait_for_the_next_tick_once_the_last_process_has_ended(memory_dir: Path) -> None:
    """The runtime has stopped the other container. Its process exits and its cgroup is removed between two ticks."""
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("left", of="p2")
        await asyncio.sleep(0.05)  # until the audit has ended
        node.enforcer._auditor._next.tick += 1000
        await node.enforcer.stop_container(pod("p2"), container("left", of="p2"))
        node.kernel.remove(path)
        claim = await node.run("claim", *node.claim(ONE))
        assert node.cpus(claim) == "2-3"


async def test_a_standby_called_before_the_active_instance_gets_the_answer_on_start(memory_dir: Path) -> None:
    """The kubelet's limit is 64 MiB, and the claim is for 32 MiB. The limit is still 96 MiB after the hand-over."""
    standby = Node(memory_dir)
    async with enforcing(Node(memory_dir)) as active:
        await standby.enforcer.synchronize([], [])
        asked = container("claim", *active.claim(memory_record("m1", ("m", 0, 32 * MI, 2 * MI))), huge={"2MB": 64 * MI})
        await standby.enforcer.create_container(pod(), asked)
        answer = await active.enforcer.create_container(pod(), asked)
        stored = replace(asked, resources=answer.resources)
        path = active.make_cgroups(pod(), stored)
        for one in (active, standby):
            await one.enforcer.start_container(pod(), stored)
    await standby.enforcer.activate()
    assert standby.kernel.get(path, "hugetlb.2MB.max") == str(96 * MI)


async def test_removed_enforcement_records_are_rewritten(memory_dir: Path) -> None:
    """Another instance, or a cleanup on the host, has removed the files."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        for file in (memory_dir / "enforcement-records").iterdir():
            file.unlink()
        for _ in range(2):
            await node.enforcer._auditor.audit(full=True)
        assert os.listdir(memory_dir / "enforcement-records") == ["claim.json"]  # noqa: PTH208


async def test_a_record_that_disappears_while_its_container_is_removed_frees_no_cpus(memory_dir: Path) -> None:
    """The removal is still waiting for the kernel, and must not restore the earlier state when it continues."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        inside, go = threading.Event(), threading.Event()
        populated = node.kernel.populated

        def slow_populated(path: str) -> bool:
            inside.set()
            assert go.wait(5 * patience())
            return populated(path)

        node.kernel.populated = slow_populated  # type: ignore[method-assign]
        removal = asyncio.create_task(node.enforcer.remove_container(pod(), container("claim")))
        assert await asyncio.to_thread(inside.wait, 5 * patience())
        await lose_record(node)
        go.set()
        await removal
        assert node.enforcer.state.pool.shared == POOL


async def test_a_container_that_stops_while_the_cgroup_tree_is_hidden_keeps_its_cpus(memory_dir: Path) -> None:
    """Mounting something over the tree does not end a process. The CPUs stay allocated until the tree shows that the
    process has exited.
    """
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        await lose_record(node)
        (memory_dir / "cgroup").rename(memory_dir / "hidden")
        (memory_dir / "cgroup").mkdir()
        await node.enforcer.stop_container(pod(), container("claim"))
        audits = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] > audits + 5)
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", POOL)
        (memory_dir / "cgroup").rmdir()
        (memory_dir / "hidden").rename(memory_dir / "cgroup")
        node.kernel.remove(POD)
        await node.until(lambda: node.reports["claim"].state == "stopped")


@pytest.mark.parametrize("listed_again", [True, False])
async def test_a_container_first_seen_while_the_cgroup_tree_is_hidden_keeps_its_cpus(
    memory_dir: Path, listed_again: bool
) -> None:
    """The container's claim file is lost, and the mount over the tree hides whether the enforcement record belongs to
    the container's cgroup.
    """
    async with enforcing(Node(memory_dir)) as node:
        await node.run("claim", *node.claim(ONE))
        node.unprepare(ONE)
    node = Node(memory_dir)
    async with auditing(node):
        await node.enforcer.activate()
        (memory_dir / "cgroup").rename(memory_dir / "hidden")
        (memory_dir / "cgroup").mkdir()
        await node.enforcer.synchronize([pod()], [listed("claim", *env_of(ONE))] if listed_again else [])
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", POOL)
        (memory_dir / "cgroup").rmdir()
        (memory_dir / "hidden").rename(memory_dir / "cgroup")
        audits = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] > audits + 5)
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", POOL)


async def test_a_claim_is_enforced_again_after_its_containers_cgroup_reappears(memory_dir: Path) -> None:
    """The container's cgroup was hidden for a moment, and its claim file was removed during that time."""
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("claim", *node.claim(ONE))
        directory = node.kernel.path(path)
        directory.rename(memory_dir / "hidden")
        await node.until(lambda: node.reports["claim"].state == "stopped")
        await lose_record(node)
        (memory_dir / "hidden").rename(directory)
        node.kernel.set(path, "cpuset.cpus", "0-7")
        await node.until(lambda: node.reports["claim"].state == "running")
        tracked = node.enforcer.state.containers.get("claim")
        assert tracked is not None
        assert tracked.phase is Phase.RUNNING
        await node.until(lambda: node.cpus(path) == "2-3")
        assert node.enforcer.state.pool.shared == POOL


async def test_an_unreadable_sub_cgroup_does_not_hide_the_containers_cpus(memory_dir: Path) -> None:
    """The container has changed the files' modes, so the backend cannot read them. It uses the parent's CPUs instead,
    which include the sub-cgroup's.
    """
    async with enforcing(Node(memory_dir)) as node:
        path = await node.run("dind", of="p9")
        node.kernel.make(f"{path}/container")
        for file in ("cgroup.procs", "container/cpuset.cpus.effective"):
            node.kernel.unreadable[f"{path}/{file}".rpartition("/")[0], file.rpartition("/")[2]] = errno.EACCES
            node.enforcer._auditor.request_audit()
            await node.until(lambda: any("dind" in problem for problem in node.enforcer.problems))
            assert node.enforcer.state.containers.get("dind").observed.cpus == parse_cpu_list("1-7")  # type: ignore[union-attr]
        assert node.cpus(await node.run("claim", *node.claim(ONE))) == "2-3"


async def test_a_container_keeps_its_claims_if_the_answers_variables_exceed_the_limit(memory_dir: Path) -> None:
    """The container has the maximum number of variables and, after a restart, also the variables that the answer has
    added.
    """
    records = [cpu_record(f"c{i}", *(f"r{j}=2-3" for j in range(32))) for i in range(MAX_VARIABLES // 32)]
    async with enforcing(Node(memory_dir)) as node:
        stored, _ = await node.create("claim", *(entry for record in records for entry in node.claim(record)))
        path = node.make_cgroups(pod(), stored)
        await node.enforcer.start_container(pod(), stored)
    node = Node(memory_dir)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([pod()], [replace(stored, state=ContainerState.RUNNING)])
        assert node.enforcer.state.pool.shared == POOL
        assert node.cpus(path) == "2-3"
