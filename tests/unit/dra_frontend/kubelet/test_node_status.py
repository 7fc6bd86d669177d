# SPDX-License-Identifier: Apache-2.0
"""Values that the frontend reads from its Node object."""

import asyncio
from typing import Any

import pytest
from dra_frontend.api_server.errors import ForbiddenError, NotFoundError, UnavailableError
from dra_frontend.kubelet.node_status import NodeStatus

from tests.fakes.waiting import eventually, patience

GI = 1 << 30


def node(reserved: int = 2 * GI, *features: str, **more: str) -> dict[str, Any]:
    """Returns a Node object with 64 GiB of memory, of which 8 GiB are hugepages and N bytes are not allocatable."""
    capacity = {"cpu": "16", "memory": "64Gi", "hugepages-1Gi": "6Gi", "hugepages-2Mi": "2Gi", "pods": "110", **more}
    allocatable = {**capacity, "memory": str(56 * GI - reserved)}
    return {"status": {"capacity": capacity, "allocatable": allocatable, "declaredFeatures": [*features]}}


class Server:
    """A fake API server that returns a Node object or fails."""

    def __init__(self) -> None:
        self.answer: dict[str, Any] | Exception = node()
        self.asked = 0
        self.refusals = 0
        """Number of requests that the server denies before it responds."""

    async def get_node(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked <= self.refusals:
            raise ForbiddenError("get nodes", "no")
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_the_reserve_changes_in_whole_steps_and_is_retained() -> None:
    """The reserve stays the same if there are a few more or fewer pages, if the Node object lacks the values, or if the
    server is unavailable.
    """
    server = Server()
    status = NodeStatus(server.get_node)
    server.answer = UnavailableError("get nodes", "timeout")
    with pytest.raises(UnavailableError):
        await status.read()
    assert (status.reserved_memory, status.first_read_done.is_set()) == (None, False)
    for answer, reserved in ((node(), 2 * GI), (node(2 * GI + 4096), 2 * GI), ({}, 2 * GI), (node(3 * GI), 3 * GI)):
        server.answer = answer
        await status.read()
        assert status.reserved_memory == reserved
    assert status.first_read_done.is_set()


async def test_the_node_object_is_read_on_demand_and_cached_for_ten_seconds() -> None:
    """The object declares whether the kubelet counts claims. While the server is unavailable, the last known value is
    retained. If no value is known, none is assumed.
    """
    server, now = Server(), [0.0]
    status = NodeStatus(server.get_node, lambda: now[0])
    server.answer = ForbiddenError("get nodes", "no")
    with pytest.raises(ForbiddenError):
        await status.counts_claims()
    server.answer = node(GI, "DRANodeAllocatableResources")
    assert [await status.counts_claims() for _ in range(3)] == [True] * 3
    assert server.asked == 2
    now[0], server.answer = 11.0, UnavailableError("get nodes", "timeout")
    assert await status.counts_claims()
    now[0], server.answer = 22.0, node(GI)
    assert not await status.counts_claims()


@pytest.mark.parametrize("answer", [ForbiddenError("get nodes", "no"), NotFoundError("get nodes", "none")])
async def test_a_permanent_error_delays_no_caller(answer: Exception) -> None:
    """Retrying soon would not help, so a caller that needs the value continues without it and can report the reason."""
    server = Server()
    server.answer = answer
    status = NodeStatus(server.get_node, waits=(0.01, 0.01))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(status.run())
        async with asyncio.timeout(5 * patience()):
            await status.first_read_done.wait()
        running.cancel()
    assert (status.reserved_memory, status.problem) == (None, str(answer))
    (warning,) = status.warnings
    assert "set reservedMemory" in warning


async def test_an_error_right_after_startup_is_retried() -> None:
    """An API server that has just started may deny requests because it has not loaded roles and tokens yet. If the
    frontend fell back to the default reserve immediately, it would publish a capacity and soon have to change it.
    """
    server = Server()
    server.refusals = 2
    status = NodeStatus(server.get_node, waits=(0.01, 0.01))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(status.run())
        async with asyncio.timeout(5 * patience()):
            await status.first_read_done.wait()
        running.cancel()
    assert status.reserved_memory == 2 * GI


async def test_the_node_is_read_again_after_the_delay_that_the_server_requests() -> None:
    """Every node of the cluster reads its Node, and many of them may do so when an overloaded server restarts."""
    server = Server()
    server.answer = UnavailableError("get nodes", "too many requests", 0.5)
    status = NodeStatus(server.get_node, waits=(0.01, 0.01))
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(status.run())
        await asyncio.sleep(0.2)
        assert server.asked == 1
        await eventually(lambda: server.asked == 2)
        running.cancel()


async def test_a_configured_reserve_needs_no_request() -> None:
    """No request is sent, no caller waits, and no warning is reported."""
    server = Server()
    status = NodeStatus(server.get_node, needed=False)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(status.run())
        await status.first_read_done.wait()
        await asyncio.sleep(0)
        running.cancel()
    assert (server.asked, status.warnings) == (0, [])
