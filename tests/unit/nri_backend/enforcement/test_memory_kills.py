# SPDX-License-Identifier: Apache-2.0
"""Containers killed for want of memory, from the kernel's counts to the report for the frontend."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.enforcement.memory_kills import PodKills, kill_count
from nri_backend.nri.model import ContainerState

from tests.rigs.builders import MI, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node
from tests.rigs.kernel_tree import KernelTree

PLAIN = 4096
ONE, TWO = (memory_record(uid, ("a", 1, 48 * MI, PLAIN)) for uid in ("m1", "m2"))


class SlowTree(KernelTree):
    """Shows a count that it has read before only when it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held = ""
        """The cgroup whose count is read once and then held back."""
        self.began, self.gate = threading.Event(), threading.Event()

    def read(self, path: str, name: str) -> str:
        """Waits behind the read."""
        text = super().read(path, name)
        if name == "memory.events" and path == self.held:
            self.held = ""
            self.began.set()
            assert self.gate.wait(5)
        return text


@pytest.fixture
async def node(memory: Path) -> Node:
    """An active instance."""
    node = Node(memory)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    return node


def kills(node: Node) -> dict[str, int]:
    """What the frontend knows, by container."""
    return {name: report.memory_kills for name, report in node.reports.items()}


@pytest.mark.parametrize("seen_by", ["event", "audit"])
async def test_a_container_that_is_killed_at_its_claim_is_reported(node: Node, seen_by: str) -> None:
    """Its cgroup goes with its last process; the pod's count still tells, and of whom it is said, once and no more."""
    env = node.claim(ONE)
    await node.run("side", name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    if seen_by == "audit":
        node.kernel.remove(path)
        await node.enforcer.activate()
        assert kills(node) == {"side": 0, "main": 1}
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 1}
    await node.run("again", *env)
    await node.stop("again")
    assert kills(node) == {"side": 0, "main": 1, "again": 0}


async def test_the_audit_that_finds_the_container_gone_hides_no_kill(node: Node) -> None:
    """It takes the container for stopped between two looks; whose kill it was is told, and not of who ends next."""
    env = node.claim(ONE)
    second = node.claim(TWO)
    await node.run("side", *second, name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    # As at most ticks: few audits count kills.
    await node.enforcer._auditor.audit(full=False)
    assert node.reports["main"].state == "stopped"
    assert kills(node) == {"side": 0, "main": 0}
    await node.stop("main")
    await node.stop("side")
    assert kills(node) == {"side": 0, "main": 1}


async def test_kills_elsewhere_in_the_pod_are_not_the_claims(node: Node) -> None:
    """A container without a memory claim is its own affair; so is what happened before the claim's container came."""
    side = await node.run("side", name="side")
    node.kernel.kill_for_memory(side)
    env = node.claim(ONE)
    await node.run("main", *env)
    node.kernel.kill_for_memory(side)
    await node.stop("side")
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 0}


async def test_without_counts_nothing_is_told(node: Node) -> None:
    """A pod whose memory controller is off starts and stops as ever."""
    env = node.claim(memory_record("m1", ("a", 1, 2 * MI, 2 * MI)))
    path = await node.run("main", *env)
    for group in (path, POD):
        node.kernel.path(group).joinpath("memory.events").unlink()
    await node.stop("main")
    assert kills(node) == {"main": 0}


async def test_counts_go_on_over_a_reconnection(node: Node) -> None:
    """The runtime lists its containers anew; what was told of them before is not forgotten."""
    env = node.claim(ONE)
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    assert kills(node) == {"main": 1}
    listed = replace(container("main", *env), state=ContainerState.RUNNING)
    await node.enforcer.synchronize([pod()], [listed])
    assert [told.memory_kills for told in node.reports.values()] == [1]
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    assert kills(node) == {"main": 2}


async def test_a_hook_and_the_audit_that_look_at_once_count_a_kill_once(memory: Path) -> None:
    """The audit has read the count before the kill and takes it after the hook has taken the later one."""
    node = Node(memory, tree=SlowTree)
    assert isinstance(node.kernel, SlowTree)
    await node.enforcer.activate()
    env = node.claim(ONE)
    second = node.claim(TWO)
    path = await node.run("main", *env)
    node.kernel.held = path
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.enforcer.activate())
        assert await asyncio.to_thread(node.kernel.began.wait, 5)
        node.kernel.kill_for_memory(path)
        hook = tasks.create_task(node.run("other", *second, name="other"))
        await asyncio.wait({hook}, timeout=0.05)
        node.kernel.gate.set()
    await node.enforcer.activate()
    assert kills(node) == {"main": 1, "other": 0}


async def test_a_neighbour_that_is_killed_unseen_is_not_the_claims(node: Node) -> None:
    """The runtime tells nothing of its end, being away; an idle look has seen the neighbour before."""
    await node.run("main", *node.claim(ONE))
    side = await node.run("side", name="side")
    await node.enforcer._auditor.audit(full=True)
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    await node.enforcer._auditor.audit(full=True)
    await node.stop("main")
    assert kills(node)["main"] == 0


async def test_a_pod_that_counts_for_itself_alone_hides_no_kill(node: Node) -> None:
    """So it does where cgroup2 is mounted with memory_localevents."""
    path = await node.run("main", *node.claim(ONE))
    await node.enforcer._auditor.audit(full=True)
    node.kernel.set(path, "memory.events", "oom 1\noom_kill 1")
    await node.enforcer._auditor.audit(full=True)
    assert kills(node) == {"main": 1}


def test_the_count_is_read_from_the_kernels_text() -> None:
    """oom_kill counts killed processes; oom and max, which stand beside it, count something else."""
    assert kill_count("low 0\nhigh 4\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n") == 2
    assert kill_count("low 0\nhigh 0\n") == kill_count("") == 0


_Look = tuple[int, dict[str, int | None], str, dict[str, int]]
"""The pod's count, those of its containers, who has just ended, and what is told."""


@pytest.mark.parametrize(
    "looks",
    [
        pytest.param([(0, {"a": 0, "b": 0}, "", {}), (1, {"b": 0}, "a", {"a": 1}), (1, {"b": 0}, "b", {})], id="ended"),
        pytest.param([(1, {"b": 1}, "a", {"b": 1}), (3, {"b": 2}, "c", {"b": 1, "c": 1})], id="a neighbour's"),
        pytest.param(
            [
                (0, {"a": 0, "b": 0, "c": 0, "new": None}, "", {}),
                (1, {"a": None, "b": 0, "c": 0, "new": None}, "", {"a": 1}),
                (1, {"a": None, "b": 0, "c": 0}, "a", {}),
                (2, {"b": None, "c": None}, "", {}),
                (2, {"b": None, "c": None}, "c", {"c": 1}),
            ],
            id="gone before the runtime says so; of two the runtime says which",
        ),
        pytest.param(
            [
                (1, {"a": 1, "b": 0}, "a", {"a": 1}),
                (1, {"a": 1, "b": 0}, "a", {}),
                (1, {"a": 1, "b": 0}, "", {}),
                (2, {"a": None, "b": 0}, "a", {"a": 1}),
            ],
            id="a cgroup that outlives its container",
        ),
        pytest.param([(0, {"a": 0, "b": 0}, "", {}), (1, {"b": None}, "", {"b": 1})], id="one removed without a word"),
    ],
)
def test_kills_are_told_of_whom_they_are(looks: list[_Look]) -> None:
    """By the container's own count, else of who has just ended, else of the only one that is gone."""
    pod = PodKills(total=0)
    for total, own, ended, told in looks:
        assert pod.take(total, own, ended) == told


def test_what_was_there_before_is_nobodys() -> None:
    """Kills of a pod before the first look are not told of a container that ends later."""
    assert PodKills(total=3).take(3, {"a": 0}, ended="a") == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
def test_every_kill_is_told_exactly_once(steps: list[tuple[str, bool, bool]]) -> None:
    """Whatever the order of kills, looks and ends, in the end each container was told as many kills as it had."""
    pod, total = PodKills(total=0), 0
    own = dict.fromkeys("abc", 0)
    happened, told = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for name, killed, ends in steps:
        if killed:
            total, own[name], happened[name] = total + 1, own[name] + 1, happened[name] + 1
        others = {other: count for other, count in own.items() if not ends or other != name}
        for who, count in pod.take(total, others, ended=name if ends else "").items():
            told[who] += count
        if ends:
            own[name] = 0
    for who, count in pod.take(total, own).items():
        told[who] += count
    assert told == happened
