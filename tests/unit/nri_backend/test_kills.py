# SPDX-License-Identifier: Apache-2.0
"""Containers killed for want of memory, from the kernel's counts to the report for the frontend."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.claims import MI, memory_record
from tests.fakes.enforcement import Node, memory_directory

POD = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podp1.slice"
PLAIN = 4096


@pytest.fixture
def memory() -> Iterator[Path]:
    with memory_directory() as path:
        yield path


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
    env = node.claim(memory_record("m1", ("a", 1, 48 * MI, PLAIN)))
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
    env = node.claim(memory_record("m1", ("a", 1, 48 * MI, PLAIN)))
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    await node.enforcer.activate()
    assert kills(node) == {"main": 1}


async def test_kills_elsewhere_in_the_pod_are_not_the_claims(node: Node) -> None:
    """A container without a memory claim is its own affair; so is what happened before the claim's container came."""
    side = await node.run("side", name="side")
    node.kernel.kill_for_memory(side)
    env = node.claim(memory_record("m1", ("a", 1, 48 * MI, PLAIN)))
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
