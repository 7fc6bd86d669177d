# SPDX-License-Identifier: Apache-2.0
"""Follows the API server's release, as far as it decides how slices are written."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from dra_frontend.api_server.errors import KubeError
from dra_frontend.devices.allocatable import MappingForm, mapping_form
from dra_frontend.publishing.status import Notice, Timing

_LOG = logging.getLogger(__name__)

# A control plane is upgraded under running drivers; nothing tells of it but the version.
_LOOK_SECONDS: Final = 300.0


class VersionSource(Protocol):
    """Who knows the release."""

    async def get_version(self) -> tuple[int, int]:
        """Returns (major, minor); raises KubeError."""


class ServerRelease:
    """Knows the form of KEP-5517 to publish in, if any; not enabled, it asks nobody and the answer is none."""

    def __init__(
        self,
        source: VersionSource,
        notify: Callable[[Notice], Awaitable[None]],
        *,
        enabled: bool,
        timing: Timing | None = None,
        look_seconds: float = _LOOK_SECONDS,
    ) -> None:
        self._source = source
        self._notify = notify
        self._enabled = enabled
        self._timing = timing or Timing()
        self._look_seconds = look_seconds
        self._told = False
        self.mapping: MappingForm | None = None

    async def learn(self) -> None:
        """Asks until there is an answer: slices that change their form a moment later would be written twice."""
        failures = 0
        while self._enabled and not await self._ask():
            failures += 1
            await asyncio.sleep(self._timing.retry(failures))

    async def follow(self, changed: Callable[[], None]) -> None:
        """Asks now and then, and calls ``changed`` when slices are to be written in another form. Runs for ever."""
        while True:
            await asyncio.sleep(self._look_seconds)
            before = self.mapping
            if self._enabled and await self._ask() and self.mapping != before:
                changed()

    async def _ask(self) -> bool:
        try:
            major, minor = await self._source.get_version()
        except KubeError as error:
            _LOG.warning("release of the API server not known error=%s", error)
            if not error.retriable:
                await self._tell(str(error))
            return not error.retriable
        self.mapping = mapping_form((major, minor))
        if self.mapping is None:
            await self._tell(
                f"this API server is Kubernetes {major}.{minor}, and 1.36 is the first that can count claims"
            )
        return True

    async def _tell(self, reason: str) -> None:
        if self._told:
            return
        self._told = True
        note = f"publishNodeAllocatableResourceMapping has no effect, devices are published without it: {reason}"
        try:
            await self._notify(Notice("NodeAllocatableMappingUnsupported", note))
        except KubeError as error:
            _LOG.warning("event not recorded note=%s error=%s", note, error)
