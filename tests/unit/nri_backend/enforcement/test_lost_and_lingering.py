# SPDX-License-Identifier: Apache-2.0
"""Whatever is lost, and in whatever order: nobody gets the CPUs of a container while it lives."""

import asyncio
import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.nri.model import MAX_VARIABLES, Container, ContainerState
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing

ONE = cpu_record("c1", "cpus=2-3")
HELD = parse_cpu_list("1,4-7")
"""The shared pool while somebody has the claim's CPUs."""


def listed(id_: str, *env: str) -> Container:
    """A running container as the runtime lists it."""
    return replace(container(id_, *env), state=ContainerState.RUNNING)


async def lose(node: Node) -> None:
    """The record is gone, and that is seen."""
    node.unprepare(ONE)
    await node.enforcer.inputs.refresh(thorough=True)


async def test_what_could_not_be_kept_outlives_a_reconnection(memory: Path) -> None:
    """The disk is full, the record is lost, and the runtime restarts."""
    async with enforcing(Node(memory)) as node:
        (memory / "proofs").write_text("in the way")
        path = await node.run("claim", *node.claim(ONE))
        await lose(node)
        await node.enforcer.synchronize([pod()], [listed("claim", *env_of(ONE))])
        assert node.enforcer.state.pool.shared == HELD
        assert node.cpus(path) == "2-3"


async def test_who_is_not_listed_and_lives_keeps_its_cpus(memory: Path) -> None:
    """Its end came while nobody was connected, and a process of it is left; over a restart of ours, too."""
    async with enforcing(Node(memory)) as node:
        path = await node.run("claim", *node.claim(ONE))
        node.enforcer.disconnected()
        await node.enforcer.synchronize([pod()], [])
        await lose(node)
        assert node.enforcer.state.pool.shared == HELD
    async with enforcing(Node(memory)) as node:
        assert node.enforcer.state.pool.shared == HELD
        assert node.reports["claim"].state == "running"
        node.kernel.remove(path)
        await node.until(lambda: node.enforcer.state.pool.shared == parse_cpu_list("1-7"))
        assert "claim" not in node.reports


async def test_a_container_gets_its_claim_when_the_last_process_of_the_owner_has_ended(memory: Path) -> None:
    """It started while no instance was connected, and a process of the init container was left."""
    async with enforcing(Node(memory)) as node:
        init = await node.run("init", *node.claim(ONE), name="init")
    node, main = Node(memory), replace(listed("main", *env_of(ONE)), name="main")
    path = node.make_cgroups(pod(), main)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([pod()], [main])
        await node.until(lambda: node.cpus(path) == "1,4-7")
        node.kernel.remove(init)
        await node.until(lambda: node.cpus(path) == "2-3")
        assert [use.uid for use in node.reports["main"].claims] == ["c1"]
        assert node.reports["main"].refused == ""


async def test_a_process_left_of_a_container_without_claims_leaves_claimed_cpus(memory: Path) -> None:
    """The runtime has removed the container; the process is moved until it has ended, and then forgotten."""
    async with enforcing(Node(memory)) as node:
        left = container("left", of="p2")
        path = await node.run("left", of="p2")
        await node.enforcer.stop_container(pod("p2"), left)
        claim = await node.run("claim", *node.claim(ONE))
        assert (node.cpus(claim), node.cpus(path)) == ("2-3", "1,4-7")
        await node.enforcer.remove_container(pod("p2"), left)
        node.claim(cpu_record("c2", "cpus=4-5", pods=["p3"]))
        await node.until(lambda: node.cpus(path) == "1,6-7")
        node.kernel.remove(path)
        await node.until(lambda: node.enforcer.state.get("left") is None)


async def test_a_start_does_not_wait_for_a_tick_once_the_last_process_has_ended(memory: Path) -> None:
    """The runtime has stopped the container; its process ends and its cgroup is removed between two ticks."""
    async with enforcing(Node(memory)) as node:
        path = await node.run("left", of="p2")
        await asyncio.sleep(0.05)  # the audit has ended
        node.enforcer._auditor._next.tick += 1000
        await node.enforcer.stop_container(pod("p2"), container("left", of="p2"))
        node.kernel.remove(path)
        claim = await node.run("claim", *node.claim(ONE))
        assert node.cpus(claim) == "2-3"


async def test_a_standby_that_was_asked_first_knows_the_answer_at_the_start(memory: Path) -> None:
    """The kubelet states 64 MiB, the claim has 32: after the hand-over the limit is still 96."""
    standby = Node(memory)
    async with enforcing(Node(memory)) as active:
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


async def test_proofs_that_somebody_removes_are_written_again(memory: Path) -> None:
    """An instance that was replaced and does not know it, or a host that tidies up."""
    async with enforcing(Node(memory)) as node:
        await node.run("claim", *node.claim(ONE))
        for file in (memory / "proofs").iterdir():
            file.unlink()
        for _ in range(2):
            await node.enforcer._auditor.audit(full=True)
        assert os.listdir(memory / "proofs") == ["claim.json"]  # noqa: PTH208


async def test_a_record_that_goes_while_the_container_is_removed_changes_nothing(memory: Path) -> None:
    """What was known before the kernel was asked is not written over what is known after."""
    async with enforcing(Node(memory)) as node:
        await node.run("claim", *node.claim(ONE))
        inside, go = threading.Event(), threading.Event()
        populated = node.kernel.populated

        def slow(path: str) -> bool:
            inside.set()
            assert go.wait(5)
            return populated(path)

        node.kernel.populated = slow  # type: ignore[method-assign]
        removal = asyncio.create_task(node.enforcer.remove_container(pod(), container("claim")))
        assert await asyncio.to_thread(inside.wait, 5)
        await lose(node)
        go.set()
        await removal
        assert node.enforcer.state.pool.shared == HELD


@pytest.mark.fault("backend A10")
async def test_a_container_that_stops_while_the_cgroup_tree_is_hidden_may_still_live(memory: Path) -> None:
    """A mount over the tree does not end a process: its CPUs stay held until the tree shows that it has ended."""
    async with enforcing(Node(memory)) as node:
        await node.run("claim", *node.claim(ONE))
        await lose(node)
        (memory / "cgroup").rename(memory / "hidden")
        (memory / "cgroup").mkdir()
        await node.enforcer.stop_container(pod(), container("claim"))
        audits = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] > audits + 5)
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", HELD)
        (memory / "cgroup").rmdir()
        (memory / "hidden").rename(memory / "cgroup")
        node.kernel.remove(POD)
        await node.until(lambda: node.reports["claim"].state == "stopped")


@pytest.mark.parametrize("listed_again", [True, False])
async def test_a_container_first_seen_while_the_cgroup_tree_is_hidden_keeps_its_cpus(
    memory: Path, listed_again: bool
) -> None:
    """Its record is lost, and the mount hides whether the proof is of its cgroup: it may be."""
    async with enforcing(Node(memory)) as node:
        await node.run("claim", *node.claim(ONE))
        node.unprepare(ONE)
    node = Node(memory)
    async with auditing(node):
        await node.enforcer.activate()
        (memory / "cgroup").rename(memory / "hidden")
        (memory / "cgroup").mkdir()
        await node.enforcer.synchronize([pod()], [listed("claim", *env_of(ONE))] if listed_again else [])
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", HELD)
        (memory / "cgroup").rmdir()
        (memory / "hidden").rename(memory / "cgroup")
        audits = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] > audits + 5)
        assert (node.reports["claim"].state, node.enforcer.state.pool.shared) == ("running", HELD)


async def test_who_comes_back_is_judged_anew(memory: Path) -> None:
    """Its cgroup was hidden for a moment, and its claim released meanwhile."""
    async with enforcing(Node(memory)) as node:
        path = await node.run("claim", *node.claim(ONE))
        directory = node.kernel.path(path)
        directory.rename(memory / "hidden")
        await node.until(lambda: node.reports["claim"].state == "stopped")
        await lose(node)
        (memory / "hidden").rename(directory)
        node.kernel.set(path, "cpuset.cpus", "0-7")
        await node.until(lambda: node.reports["claim"].state == "running")
        tracked = node.enforcer.state.get("claim")
        assert tracked is not None
        assert tracked.phase is Phase.RUNNING
        await node.until(lambda: node.cpus(path) == "2-3")
        assert node.enforcer.state.pool.shared == HELD


async def test_a_group_of_a_container_that_cannot_be_read_hides_nothing(memory: Path) -> None:
    """Its author has taken the mode of the files away: it still has no more than its parent."""
    async with enforcing(Node(memory)) as node:
        path = await node.run("dind", of="p9")
        node.kernel.make(f"{path}/container")
        for file in ("cgroup.procs", "container/cpuset.cpus.effective"):
            node.kernel.unreadable[f"{path}/{file}".rpartition("/")[0], file.rpartition("/")[2]] = errno.EACCES
            node.enforcer._auditor.request_audit()
            await node.until(lambda: any("dind" in problem for problem in node.enforcer.problems))
            assert node.enforcer.state.get("dind").observed.cpus == parse_cpu_list("1-7")  # type: ignore[union-attr]
        assert node.cpus(await node.run("claim", *node.claim(ONE))) == "2-3"


async def test_what_we_add_ourselves_breaks_no_limit(memory: Path) -> None:
    """As many variables as are allowed, and after a restart those that the answer has added."""
    records = [cpu_record(f"c{i}", *(f"r{j}=2-3" for j in range(32))) for i in range(MAX_VARIABLES // 32)]
    async with enforcing(Node(memory)) as node:
        stored, _ = await node.create("claim", *(entry for record in records for entry in node.claim(record)))
        path = node.make_cgroups(pod(), stored)
        await node.enforcer.start_container(pod(), stored)
    node = Node(memory)
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([pod()], [replace(stored, state=ContainerState.RUNNING)])
        assert node.enforcer.state.pool.shared == HELD
        assert node.cpus(path) == "2-3"
