# SPDX-License-Identifier: Apache-2.0
"""Containers killed for want of memory, from the kernel's counts to the report for the frontend."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.nri.model import ContainerState

from tests.rigs.claims import MI, POD, container, memory_record, pod
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
    return {name: report.memory_kills for name, report in node.sink.latest.items()}


async def test_a_container_that_is_killed_at_its_claim_is_reported(node: Node) -> None:
    """Its cgroup goes with its last process; the pod's count still tells, and of whom it is said."""
    env = node.claim(ONE)
    await node.run("side", name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 1}
    await node.run("again", *env)
    await node.stop("again")
    assert kills(node) == {"side": 0, "main": 1, "again": 0}


async def test_a_killed_child_is_reported_while_its_container_lives(node: Node) -> None:
    """The audit sees the count of the container's own cgroup."""
    env = node.claim(ONE)
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    await node.enforcer.activate()
    assert kills(node) == {"main": 1}


async def test_a_kill_is_reported_before_the_runtime_tells_of_the_end(node: Node) -> None:
    """The cgroup is gone and no event has come: the audit finds who it was, and the late event adds nothing."""
    env = node.claim(ONE)
    await node.run("side", name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    await node.enforcer.activate()
    assert kills(node) == {"side": 0, "main": 1}
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 1}


async def test_the_audit_that_finds_the_container_gone_hides_no_kill(node: Node) -> None:
    """It takes the container for stopped between two looks; whose kill it was is told, and not of who ends next."""
    env = node.claim(ONE)
    second = node.claim(TWO)
    await node.run("side", *second, name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    # As in most seconds: only every fifth audit is a full one, which counts kills.
    await node.enforcer._auditor.audit(full=False)
    assert node.sink.latest["main"].state == "stopped"
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
    assert [told.memory_kills for told in node.sink.latest.values()] == [1]
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
        await asyncio.wait({hook}, timeout=0.3)
        node.kernel.gate.set()
    await node.enforcer.activate()
    assert kills(node) == {"main": 1, "other": 0}
