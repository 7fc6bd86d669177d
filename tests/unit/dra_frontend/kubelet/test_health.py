# SPDX-License-Identifier: Apache-2.0
"""Health streams send the complete device list when they are opened, on each change, and periodically."""

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import cast

from dra_frontend.kubelet.health import (
    RESEND_SECONDS,
    STALE_SECONDS,
    DeviceHealth,
    Health,
    HealthBoard,
    health_response,
)

from tests.fakes._pb import dra_health_v1alpha1_pb2 as pb
from tests.fakes.waiting import patience

GOOD = DeviceHealth("node", "cpudevnuma000", Health.HEALTHY)
BAD = DeviceHealth("node", "cpudevnuma000", Health.UNHEALTHY, "CPU 3 is offline")
OTHER = DeviceHealth("node", "cpudevnuma001", Health.HEALTHY)


def subscribe(board: HealthBoard) -> AsyncGenerator[tuple[DeviceHealth, ...], None]:
    return cast("AsyncGenerator[tuple[DeviceHealth, ...], None]", board.watch())


async def test_the_complete_list_is_sent_immediately_and_on_every_change() -> None:
    """A change that occurs between two responses is included in the next one. As long as the list is unchanged, nothing
    is sent.
    """
    board = HealthBoard([GOOD])
    stream = subscribe(board)
    async with asyncio.timeout(5 * patience()):
        assert await anext(stream) == (GOOD,)
        board.update([BAD])
        board.update([BAD, OTHER])
        assert await anext(stream) == (BAD, OTHER)
        waiting = asyncio.ensure_future(anext(stream))
        for _ in range(5):
            board.update([BAD, OTHER])
            await asyncio.sleep(0)
        assert not waiting.done()
        board.update([GOOD, OTHER])
        assert await waiting == (GOOD, OTHER)
    await stream.aclose()


async def test_the_list_is_repeated_before_it_becomes_stale() -> None:
    """The kubelet forgets a device that has not been reported again within the timeout, even if nothing has changed."""
    assert RESEND_SECONDS * 2 < STALE_SECONDS <= 30
    stream = subscribe(HealthBoard([GOOD], resend=0.01))
    async with asyncio.timeout(5 * patience()):
        for _ in range(3):
            assert await anext(stream) == (GOOD,)
    await stream.aclose()


async def test_close_ends_waiting_streams_immediately() -> None:
    """Shutdown must not wait for the next repetition. A stream that is opened afterwards also ends."""
    board = HealthBoard([GOOD])
    stream = subscribe(board)
    async with asyncio.timeout(5 * patience()):
        assert await anext(stream) == (GOOD,)
        reading = asyncio.ensure_future(anext(stream, None))
        await asyncio.sleep(0)
        board.close()
        board.close()
        assert await reading is None
        assert await anext(subscribe(board), None) is None


def test_the_report_uses_the_kubelets_fields() -> None:
    """Every field has the field number that the kubelet expects."""
    (device,) = pb.NodeWatchResourcesResponse.FromString(health_response((BAD,)).SerializeToString()).devices
    assert (device.device.pool_name, device.device.device_name) == ("node", "cpudevnuma000")
    assert device.health == pb.UNHEALTHY
    assert device.message == "CPU 3 is offline"
    assert 0 <= time.time() - device.last_updated_time < 60
    assert device.health_check_timeout_seconds == 30
