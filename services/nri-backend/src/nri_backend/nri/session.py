# SPDX-License-Identifier: Apache-2.0
"""The life of the plugin's connection to the runtime: dial, register, be synchronised, serve, lose it, begin again."""

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
from nri_backend.ttrpc import TtrpcError

_log = logging.getLogger(__name__)
_OUR_NRI = "v0.12.2"
# Seconds. A runtime that restarts is back within two, so the longest wait is one.
_FIRST_WAIT = 0.05
_LAST_WAIT = 1.0
# The runtime accepts one plugin at a time and waits up to 5 s for each; a busy one has been seen to need 8 s to answer
# (containerd/nri PR 292). Giving up early would only queue us again at the end.
_REGISTER_SECONDS = 30.0
# After a failed synchronisation some releases keep the connection open and send nothing (containerd issue 13901), so a
# connection without a snapshot is no use.
_SYNCHRONIZE_SECONDS = 30.0


class RuntimeSession:
    """Keeps one connection to the runtime, for ever."""

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
        """``changed`` hears of every change of ``status``. Neither callback may wait or raise."""
        self.status = LinkStatus()
        self._hooks = hooks
        self._changed = changed
        self._call_done = call_done
        self._registration = pb.RegisterPluginRequest(plugin_name=name, plugin_idx=index, NRI_version=_OUR_NRI)
        self._backoff = backoff or Backoff(_FIRST_WAIT, _LAST_WAIT)
        self._link: Link | None = None

    async def run_forever(self, dial: Callable[[], Awaitable[Link]]) -> NoReturn:
        """Connects again whenever the connection is gone; dial raises OSError when nobody listens."""
        while True:
            try:
                link = await dial()
            except OSError as error:
                self._lost(f"cannot connect: {str(error) or type(error).__name__}")
            else:
                self._lost(await self._one_connection(link))
                self._hooks.disconnected()
            await asyncio.sleep(self._backoff.next())

    async def answered(self, seconds: float) -> None:
        """Waits until no call of the runtime is left without its answer, but no longer than this."""
        if self._link is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._link.answered()

    async def _one_connection(self, link: Link) -> str:
        """Returns why it ended."""
        service = PluginService(self._hooks, self._call_done)
        self._link = link
        self._change(LinkStatus(connected=True, last_end=self.status.last_end))
        try:
            async with asyncio.TaskGroup() as tasks:
                # Serving begins with the registration: Configure may come before its answer.
                introduction = tasks.create_task(self._introduce(link, service), name="nri registration")
                end = await link.run(service.serve)
                introduction.cancel()
        finally:
            self._link = None
        return end

    async def _introduce(self, link: Link, service: PluginService) -> None:
        """Registers, exactly once, and waits for the snapshot; whatever goes wrong ends the connection."""
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
        self._change(replace(status, request_timeout=request, registration_timeout=registration))
        _log.info("synchronised with %s %s", runtime.runtime_name, runtime.runtime_version)
        # A runtime that throws us out right after the snapshot is not a success: no tight loop of snapshots then.
        await asyncio.sleep(_LAST_WAIT)
        self._backoff.reset()

    def _lost(self, reason: str) -> None:
        if self.status.connected or reason != self.status.last_end:
            _log.warning("no connection to the runtime: %s", reason)
        self._change(replace(self.status, connected=False, synchronized=False, last_end=reason))

    def _change(self, status: LinkStatus) -> None:
        self.status = status
        self._changed(status)
