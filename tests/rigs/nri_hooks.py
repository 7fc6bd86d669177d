# SPDX-License-Identifier: Apache-2.0
"""Hooks that record their calls and respond as the test requires."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from nri_backend.nri.model import Adjustment, Container, LinkStatus, Pod, Resources, Update

from tests.fakes.waiting import PATIENCE


class RecordingHooks:
    """Implements ContainerHooks."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []
        """(hook, pod name or container name or counts), in order."""
        self.adjustment = Adjustment()
        self.updates: list[Update] = []
        """Response of synchronize, update_container and stop_container."""
        self.before: Callable[[str], Awaitable[None]] | None = None
        """Awaited with the hook's name before the hook responds; may raise or delay the response."""
        self.pods: Sequence[Pod] = ()
        self.containers: Sequence[Container] = ()
        self.wanted: Resources | None = None

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        self.pods, self.containers = tuple(pods), tuple(containers)
        await self._note("synchronize", (len(pods), len(containers)))
        return self.updates

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        await self._note("create_container", container.name)
        return self.adjustment

    async def start_container(self, pod: Pod, container: Container) -> None:
        await self._note("start_container", container.name)

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        self.wanted = wanted
        await self._note("update_container", container.name)
        return self.updates

    async def stop_container(self, pod: Pod, container: Container) -> list[Update]:
        await self._note("stop_container", container.name)
        return self.updates

    async def remove_container(self, pod: Pod, container: Container) -> None:
        await self._note("remove_container", container.name)

    async def remove_pod(self, pod: Pod) -> None:
        await self._note("remove_pod", pod.name)

    def disconnected(self) -> None:
        self.seen.append(("disconnected", None))

    @property
    def names(self) -> list[str]:
        """Returns the hooks in call order."""
        return [name for name, _ in self.seen]

    async def _note(self, hook: str, what: Any) -> None:
        self.seen.append((hook, what))
        if self.before is not None:
            await self.before(hook)


class RecordingObserver:
    """Records connection events and calls."""

    def __init__(self) -> None:
        self.changes: list[LinkStatus] = []
        self.calls: list[tuple[str, str]] = []
        """(method, outcome), in order."""
        self.seconds: list[float] = []
        self._changed = asyncio.Event()

    @property
    def connections(self) -> int:
        """Number of connections so far."""
        return sum(status.connected and not status.synchronized for status in self.changes)

    async def wait_for(self, condition: Callable[[LinkStatus], bool], seconds: float = 5.0) -> None:
        """Waits until the link's last known status meets the condition. Raises TimeoutError."""
        async with asyncio.timeout(seconds * PATIENCE):
            while not (self.changes and condition(self.changes[-1])):
                self._changed.clear()
                await self._changed.wait()

    def link_changed(self, status: LinkStatus) -> None:
        self.changes.append(status)
        self._changed.set()

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        self.calls.append((method, outcome))
        self.seconds.append(seconds)
