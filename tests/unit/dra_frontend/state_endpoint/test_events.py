# SPDX-License-Identifier: Apache-2.0
"""Server-sent events."""

import asyncio
import json
from dataclasses import dataclass, field

from dra_frontend.state_endpoint.events import EventFeed


@dataclass
class Listener:
    """Somebody who reads a stream to its end."""

    seen: list[bytes] = field(default_factory=list)
    greeted: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self, feed: EventFeed) -> None:
        """Reads until the stream ends."""
        async for message in feed.listen():
            self.seen += [message]
            self.greeted.set()


async def test_an_event_reaches_every_listener_at_once() -> None:
    """The backend acts on a record as soon as it exists."""
    feed = EventFeed()
    listeners = [Listener(), Listener()]
    async with asyncio.TaskGroup() as tasks:
        for listener in listeners:
            tasks.create_task(listener.read(feed))
            await listener.greeted.wait()
        feed.publish("record", {"uid": "u"})
        feed.close()
    for listener in listeners:
        lines = listener.seen[1].decode().splitlines()
        assert lines[1] == "event: record"
        assert json.loads(lines[2].removeprefix("data: ")) == {"uid": "u"}


async def test_a_slow_listener_is_cut_off_and_nobody_waits_for_it() -> None:
    """Publishing never blocks; who cannot keep up connects again and reads the whole state."""
    feed = EventFeed()
    listener = Listener()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(listener.read(feed))
        await listener.greeted.wait()
        for number in range(1000):
            feed.publish("record", {"n": number})
    assert len(listener.seen) < 1000
