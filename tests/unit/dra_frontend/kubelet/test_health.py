# SPDX-License-Identifier: Apache-2.0
"""Health streams: complete lists, at subscribe, on change and repeated."""

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from dra_frontend.kubelet.health import RESEND_SECONDS, STALE_SECONDS, HealthBoard, HealthStreams
from dra_frontend.kubelet.messages import write_health
from dra_frontend.kubelet.values import DeviceHealth, Health, HealthReport

from tests.fakes._pb import dra_health_v1alpha1_pb2 as pb

GOOD = DeviceHealth("node", "cpudevnuma000", Health.HEALTHY)
BAD = DeviceHealth("node", "cpudevnuma000", Health.UNHEALTHY, "CPU 3 is offline")
OTHER = DeviceHealth("node", "cpudevnuma001", Health.HEALTHY)


def subscribe(streams: HealthStreams) -> AsyncGenerator[HealthReport, None]:
    return cast("AsyncGenerator[HealthReport, None]", streams.watch(b"", None))


async def test_the_complete_list_comes_at_once_and_on_every_change() -> None:
    """A subscriber knows all devices from the first answer on, also those that did not change."""
    board = HealthBoard([GOOD, OTHER])
    stream = subscribe(HealthStreams(board))
    assert (await anext(stream)).devices == (GOOD, OTHER)
    board.show([BAD, OTHER])
    async with asyncio.timeout(5):
        assert (await anext(stream)).devices == (BAD, OTHER)
    await stream.aclose()


async def test_a_change_between_two_reads_is_not_missed() -> None:
    """What changes while an answer is on its way to a slow subscriber is the next answer."""
    board = HealthBoard([GOOD])
    stream = subscribe(HealthStreams(board))
    await anext(stream)
    board.show([BAD])
    board.show([BAD, OTHER])
    async with asyncio.timeout(5):
        assert (await anext(stream)).devices == (BAD, OTHER)
    await stream.aclose()


@pytest.mark.fault("protocol trap 4.13")
async def test_the_list_is_repeated_before_it_gets_stale() -> None:
    """The kubelet forgets a device that is not repeated within the timeout, even if nothing changes."""
    assert RESEND_SECONDS * 2 < STALE_SECONDS <= 30
    stream = subscribe(HealthStreams(HealthBoard([GOOD]), resend=0.01))
    async with asyncio.timeout(5):
        for _ in range(3):
            assert (await anext(stream)).devices == (GOOD,)
    await stream.aclose()


async def test_close_ends_waiting_streams_at_once() -> None:
    """Shutdown must not wait for the next repetition; a stream that begins afterwards ends too."""
    streams = HealthStreams(HealthBoard([GOOD]))

    async def read() -> int:
        return len([report async for report in streams.watch(b"", None)])

    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        reading = group.create_task(read())
        while not streams.subscribers:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        streams.close()
        streams.close()
        assert await reading == 1
    assert streams.subscribers == 0
    assert await read() == 0


@pytest.mark.fault("cpu peer 9.3.5")
def test_showing_the_same_list_again_is_no_change() -> None:
    """Subscribers are not woken for nothing."""
    board = HealthBoard([GOOD])
    board.show([GOOD])
    assert board.report().serial == 0
    board.show([BAD])
    assert board.report() == HealthReport(1, (BAD,))


def test_report_on_the_wire() -> None:
    """Every field arrives where the kubelet looks for it."""
    data = write_health(HealthReport(0, (BAD,)), now=1_700_000_000, timeout=30)
    (device,) = pb.NodeWatchResourcesResponse.FromString(data).devices
    assert (device.device.pool_name, device.device.device_name) == ("node", "cpudevnuma000")
    assert device.health == pb.UNHEALTHY
    assert device.message == "CPU 3 is offline"
    assert (device.last_updated_time, device.health_check_timeout_seconds) == (1_700_000_000, 30)
