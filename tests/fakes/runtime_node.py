# SPDX-License-Identifier: Apache-2.0
"""The node underneath the fake runtime: stored objects, the contents of the fake cgroups, and the resulting events."""

import asyncio
import itertools
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_cdi import UnresolvableError, inject
from tests.fakes.runtime_cgroups import CgroupRefusedError, FakeCgroups
from tests.fakes.runtime_host import PluginHost
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.runtime_merge import drop_hugepage_limits, overwrite
from tests.fakes.runtime_store import Container, OperationError, Pod

_WATCH_SECONDS = 0.05


def request(method: str, subject: Pod | Container) -> Any:
    """Returns the message for an event about a pod or a container."""
    message = getattr(pb, f"{method}Request")
    if isinstance(subject, Pod):
        return message(pod=subject.message)
    return message(pod=subject.pod.message, container=subject.message)


class FakeNode:
    """Pods, containers and cgroups, and the plugins that receive events about them."""

    def __init__(self, options: RuntimeOptions) -> None:
        self.options = options
        self.pods: dict[str, Pod] = {}
        self.containers: dict[str, Container] = {}
        self.phantom_containers: list[pb.Container] = []
        """Containers that a snapshot lists in addition to the existing ones."""
        self.host = PluginHost(options)
        self.materialises = options.cgroup_root is not None
        self.cgroups = FakeCgroups(
            options.cgroup_root or Path("/nonexistent"),
            options.cgroup_driver,
            options.machine_cpus,
            options.machine_mems,
            options.hugepage_sizes,
            partitions=options.partitions,
        )
        self.numbers = itertools.count(1)

    async def open(self, tasks: asyncio.TaskGroup) -> list[Coroutine[None, None, None]]:
        """Opens the socket and returns the background tasks to run while it is open."""
        if self.materialises:
            await asyncio.to_thread(self.cgroups.prepare)
        await self.host.listen()
        return [self.host.admit_forever(tasks, self._snapshot, self.apply), self._watch()]

    async def inject(self, message: pb.Container, devices: Sequence[str]) -> None:
        """Applies CDI devices to a container that is being created. Raises OperationError."""
        try:
            await asyncio.to_thread(inject, message, devices, self.options.cdi_dirs)
        except UnresolvableError as error:
            raise OperationError(str(error)) from error

    async def make_group(self, container: Container, pid: int) -> None:
        """Imitates ``runc create``, as far as a plugin can see it. Raises OperationError."""
        message = container.message
        message.pid = pid
        for mount in message.mounts:
            if "bind" in mount.options and not await asyncio.to_thread(Path(mount.source).exists):
                raise OperationError(f"runc create failed: error mounting {mount.source!r}: no such file or directory")
        if not self.materialises:
            return
        parent = container.pod.message.linux.cgroup_parent
        try:
            container.directory = await asyncio.to_thread(
                self.cgroups.start, parent, container.id, pid, message.linux.resources
            )
        except CgroupRefusedError as error:
            raise OperationError(f"runc create failed: {error}") from error

    async def was_killed(self, container: Container) -> bool:
        """Returns True if the container's ``cgroup.kill`` was written."""
        directory = container.directory
        return directory is not None and await asyncio.to_thread(self.cgroups.killed, directory)

    async def apply(self, update: pb.ContainerUpdate) -> None:
        """Changes a container's stored spec, and its cgroup if it is running. Unknown containers are skipped
        silently.
        """
        container = self.containers.get(update.container_id)
        if container is None:
            return
        stored = container.message.linux.resources
        overwrite(stored, update.linux.resources)
        drop_hugepage_limits(stored)
        if container.running and container.directory is not None:
            try:
                await asyncio.to_thread(self.cgroups.write, container.directory, stored)
            except CgroupRefusedError as error:
                raise OperationError(str(error)) from error

    async def end(self, container: Container) -> None:
        """Handles the exit of the container's process: removes the container's cgroup and notifies the plugins. The
        node's lock must be held.
        """
        if container.directory is not None:
            await asyncio.to_thread(self.cgroups.stop, container.directory)
            container.directory = None
        container.message.state = pb.CONTAINER_STOPPED
        container.message.pid = 0
        try:
            answers = await self.host.relay("StopContainer", request("StopContainer", container))
        except OperationError as error:
            self.host.log.append(str(error))
            return
        for answer in answers:
            await self.host.apply(answer.update, self.apply)

    async def notify_plugins(self, method: str, subject: Pod | Container) -> None:
        """Sends an event whose failure is only logged. The node's lock must be held."""
        try:
            await self.host.relay(method, request(method, subject))
        except OperationError as error:
            self.host.log.append(str(error))

    def _snapshot(self) -> tuple[list[pb.PodSandbox], list[pb.Container]]:
        living = (pb.CONTAINER_CREATED, pb.CONTAINER_RUNNING)
        return (
            [pod.message for pod in self.pods.values()],
            [one.message for one in self.containers.values() if one.message.state in living] + self.phantom_containers,
        )

    async def _watch(self) -> None:
        """Imitates the kernel: updates the effective cpusets and handles the exit of killed containers."""
        pause = _WATCH_SECONDS
        while self.materialises:
            await asyncio.sleep(pause)
            began = time.monotonic()
            killed = await asyncio.to_thread(self.cgroups.refresh)
            # Tests measure performance on a node full of containers, so this loop must not use much CPU time there.
            pause = max(_WATCH_SECONDS, 10 * (time.monotonic() - began))
            for container in [one for one in self.containers.values() if one.directory in killed] if killed else ():
                if container.running and await self.was_killed(container):
                    async with self.host.node_lock:
                        await self.end(container)
