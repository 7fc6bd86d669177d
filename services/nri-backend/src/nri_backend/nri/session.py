# SPDX-License-Identifier: Apache-2.0
"""Maintains the plugin's connection to the runtime: connect, register, synchronize, serve, and reconnect when it ends.

Time limits for a connection attempt: the runtime accepts one plugin at a time and waits up to 5 s for each, and a busy
runtime has been observed to take 8 s to respond (containerd/nri PR 292). The registration may therefore take 30 s;
giving up earlier would only put this plugin at the end of the queue again. After a failed synchronization some releases
keep the connection open and send nothing (containerd issue 13901), so a connection without a snapshot is closed after
30 s.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import NoReturn

from numa_node.backoff import Backoff

from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.link import Link
from nri_backend.nri.model import ContainerHooks, LinkStatus
from nri_backend.nri.plugin import RUNTIME_SERVICE, CallDone, PluginService
from nri_backend.nri.wire import TtrpcError

_log = logging.getLogger(__name__)
_NRI_VERSION = "v0.12.2"
# Delays between connection attempts. A runtime restarts within two seconds, so the maximum is one second.
_MIN_DELAY_SECONDS = 0.05
_MAX_DELAY_SECONDS = 1.0
_REGISTER_SECONDS = 30.0
_SYNCHRONIZE_SECONDS = 30.0


class RuntimeSession:
    """Keeps one connection to the runtime open, and reconnects whenever it ends."""

    def __init__(
        self,
        hooks: ContainerHooks,
        changed: Callable[[LinkStatus], None],
        call_done: CallDone,
        *,
        name: str = "dra-driver-numa",
        index: str = "00",
        backoff: Backoff | None = None,
    ) -> None:
        """``changed`` is called after every change to ``status``. Neither ``changed`` nor ``call_done`` may block or
        raise.
        """
        self.status = LinkStatus()
        self._hooks = hooks
        self._changed = changed
        self._call_done = call_done
        self._registration = pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index, NRI_version=_NRI_VERSION)
        self._backoff = backoff or Backoff(_MIN_DELAY_SECONDS, _MAX_DELAY_SECONDS)
        self._link: Link | None = None

    async def run_forever(self, dial: Callable[[], Awaitable[Link]]) -> NoReturn:
        """Connects with ``dial``, and reconnects forever. ``dial`` raises OSError on failure."""
        while True:
            try:
                link = await dial()
            except OSError as error:
                self._set_disconnected(f"cannot connect: {str(error) or type(error).__name__}")
            else:
                self._set_disconnected(await self._serve_connection(link))
                self._hooks.disconnected()
            await asyncio.sleep(self._backoff.next())

    async def drain(self, seconds: float) -> None:
        """Waits until every call from the runtime has been answered, but no longer than ``seconds``."""
        if self._link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._link.drain()

    async def _serve_connection(self, link: Link) -> str:
        """Serves a connection until it ends, and returns the reason why it ended."""
        service = PluginService(self._hooks, self._call_done)
        self._link = link
        self._set_status(LinkStatus(connected=True, last_end=self.status.last_end))
        try:
            async with asyncio.TaskGroup() as tasks:
                # Calls are served during the registration: Configure may arrive before the response to RegisterPlugin.
                registering = tasks.create_task(self._register(link, service), name="nri registration")
                end = await link.run(service.serve)
                registering.cancel()
        finally:
            self._link = None
        return end

    async def _register(self, link: Link, service: PluginService) -> None:
        """Registers the plugin once and waits for the snapshot. Closes the connection if either fails."""
        try:
            payload = self._registration.SerializeToString()
            await link.call(RUNTIME_SERVICE, "RegisterPlugin", payload, _REGISTER_SECONDS)
            async with asyncio.timeout(_SYNCHRONIZE_SECONDS):
                await service.synchronized.wait()
            failure = service.sync_failure
        except TtrpcError as error:
            failure = f"the registration failed: {error}"
        except TimeoutError:
            failure = f"the runtime sent no snapshot within {_SYNCHRONIZE_SECONDS:g} s"
        if failure:
            link.close(failure)
            return
        runtime = service.runtime
        status = replace(self.status, synchronized=True, nri_version=runtime.NRI_version)
        status = replace(status, runtime_name=runtime.runtime_name, runtime_version=runtime.runtime_version)
        limits = runtime.request_timeout, runtime.registration_timeout
        request, registration = (milliseconds / 1e3 or None for milliseconds in limits)
        self._set_status(replace(status, request_timeout=request, registration_timeout=registration))
        _log.info("synchronized with %s %s", runtime.runtime_name, runtime.runtime_version)
        # Only a connection that survives the snapshot resets the delay. Otherwise a runtime that disconnects the plugin
        # right after each snapshot would cause a tight loop.
        await asyncio.sleep(_MAX_DELAY_SECONDS)
        self._backoff.reset()

    def _set_disconnected(self, reason: str) -> None:
        if self.status.connected or reason != self.status.last_end:
            _log.warning("no connection to the runtime: %s", reason)
        self._set_status(replace(self.status, connected=False, synchronized=False, last_end=reason))

    def _set_status(self, status: LinkStatus) -> None:
        self.status = status
        self._changed(status)
