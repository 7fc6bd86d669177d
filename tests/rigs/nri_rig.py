# SPDX-License-Identifier: Apache-2.0
"""The backend's NRI session with recording hooks, connected to the fake runtime."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from nri_backend.nri.link import dial
from nri_backend.nri.model import Adjustment, Resources
from nri_backend.nri.session import RuntimeSession
from numa_node.backoff import Backoff

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime import FakeRuntime, running
from tests.fakes.runtime_levels import RuntimeOptions
from tests.rigs.nri_hooks import RecordingHooks, RecordingObserver

PLUGIN_NAME = "00-dra-driver-numa"


@dataclass
class NriRig:
    """A runtime, an NRI session connected to it, and the session's hooks."""

    runtime: FakeRuntime
    hooks: RecordingHooks
    observer: RecordingObserver
    session: RuntimeSession
    tasks: asyncio.TaskGroup

    async def synchronized(self, connection: int = 1) -> None:
        """Waits until both ends consider the plugin active, on this connection or a later one."""
        await self.observer.wait_for(lambda status: status.synchronized and self.observer.connections >= connection)
        await self.runtime.wait_until(lambda runtime: PLUGIN_NAME in runtime.plugins)

    def answer(self, **resources: Any) -> None:
        """Makes CreateContainer return these resources from now on."""
        self.hooks.adjustment = Adjustment(Resources(**resources))


@asynccontextmanager
async def nri_rig(
    folder: Path, level: str = "0.12", *, wait: bool = True, filled: int = 0, annotation: int = 0, **options: Any
) -> AsyncIterator[NriRig]:
    """Yields an NRI session that is connected to a runtime with ``filled`` running containers. Each container's pod has
    an annotation of ``annotation`` bytes.
    """
    socket = folder / "nri.sock"
    hooks, observer = RecordingHooks(), RecordingObserver()
    session = RuntimeSession(hooks, observer.link_changed, observer.call_done, backoff=Backoff(0.01, 0.1, Random(1)))
    async with running(RuntimeOptions(socket, level=level, **options)) as runtime, asyncio.TaskGroup() as tasks:
        await _fill(runtime, filled, annotation)
        forever = tasks.create_task(session.run_forever(partial(dial, socket)))
        try:
            rig = NriRig(runtime, hooks, observer, session, tasks)
            if wait:
                await rig.synchronized()
            yield rig
        finally:
            forever.cancel()


async def _fill(runtime: FakeRuntime, count: int, annotation: int) -> None:
    """Adds pods to the runtime, each with one running container and an annotation of ``annotation`` bytes."""
    for number in range(count):
        pod = await runtime.run_pod_sandbox(f"pod-{number}")
        pod.message.annotations["big"] = "x" * annotation
        container = await runtime.create_container(pod, "app", env=[f"DRA_CPUSET_{number}=0"], memory_limit=1 << 30)
        container.message.state = pb.CONTAINER_RUNNING
