# SPDX-License-Identifier: Apache-2.0
"""A fake containerd: the runtime's side of NRI over a real socket, a container store, and the kubelet's CRI calls.

It is independent of the plugins that it calls, and behaves like containerd in every respect that matters to plugins. It
handles one event at a time on the whole node and calls plugins in index order. It disconnects a plugin that violates
the protocol or does not respond in time, and continues the operation without that plugin. An error response, however,
makes the operation fail. Updates of other containers are applied one by one, and failures are only logged. Unlike
CRI-O, the fake has no gap between the snapshot and the first event.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_control import main
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.runtime_merge import drop_hugepage_limits, overwrite
from tests.fakes.runtime_node import FakeNode, request
from tests.fakes.runtime_plugins import HookCall
from tests.fakes.runtime_store import Container, OperationError, Pod, resources
from tests.fakes.waiting import PATIENCE

# Higher than any pid that Linux assigns, so no caller can affect a real process.
_FIRST_PID = 1 << 23


@asynccontextmanager
async def running(options: RuntimeOptions) -> AsyncIterator["FakeRuntime"]:
    """Yields a listening runtime for the duration of the block."""
    runtime = FakeRuntime(options)
    async with asyncio.TaskGroup() as tasks:
        chores = [tasks.create_task(chore) for chore in await runtime.open(tasks)]
        try:
            yield runtime
        finally:
            await runtime.host.close()
            for chore in chores:
                chore.cancel()


class FakeRuntime(FakeNode):
    """The runtime; running() starts one."""

    @property
    def calls(self) -> list[HookCall]:
        """Every call to a plugin so far, with its duration."""
        return self.host.calls

    @property
    def log(self) -> list[str]:
        """Messages that containerd would only log: disconnected plugins and failed updates."""
        return self.host.log

    @property
    def plugins(self) -> list[str]:
        """The active plugins, in call order."""
        return [plugin.name for plugin in self.host.plugins]

    async def restart(self, down_seconds: float = 0.0) -> None:
        """Restarts the runtime: connections are closed, the socket is recreated, and containers keep running."""
        await self.host.close()
        await asyncio.sleep(down_seconds)
        await self.host.listen()

    async def wait_until(self, condition: Callable[["FakeRuntime"], bool], seconds: float = 5.0) -> None:
        """Waits until the condition holds; checks it whenever a plugin connects or disconnects. Raises TimeoutError."""
        async with asyncio.timeout(seconds * PATIENCE), self.host.changed:
            await self.host.changed.wait_for(lambda: condition(self))

    async def run_pod_sandbox(
        self, name: str, *, uid: str = "", namespace: str = "default", qos: str = "burstable"
    ) -> Pod:
        """Creates a sandbox. Raises OperationError if a plugin rejects it."""
        number = next(self.numbers)
        message = pb.PodSandbox(id=f"{number:064x}", name=name, uid=uid or f"uid-{number}", namespace=namespace)
        message.linux.cgroup_parent = self.cgroups.cgroup_parent(message.uid, qos)
        pod = Pod(message)
        async with self.host.node_lock:
            if self.materialises:
                await asyncio.to_thread(self.cgroups.make_pod, message.linux.cgroup_parent, pod.id)
            try:
                await self.host.relay("RunPodSandbox", request("RunPodSandbox", pod))
            except OperationError:
                await self.notify_plugins("StopPodSandbox", pod)
                await self.notify_plugins("RemovePodSandbox", pod)
                raise
            self.pods[pod.id] = pod
        return pod

    async def create_container(
        self, pod: Pod, name: str, *, env: Sequence[str] = (), cdi_devices: Sequence[str] = (), **wanted: Any
    ) -> Container:
        """Creates a container with CDI devices injected; other arguments are those of resources().

        Raises OperationError if a device cannot be resolved, a plugin rejects the container or plugins conflict.
        """
        message = pb.Container(
            id=f"{next(self.numbers):064x}", pod_sandbox_id=pod.id, name=name, env=env, args=["/pause"]
        )
        message.labels["io.kubernetes.container.name"] = name
        message.linux.cgroups_path = self.cgroups.cgroups_path(pod.message.linux.cgroup_parent, message.id)
        message.linux.resources.CopyFrom(resources(**wanted))
        await self.inject(message, cdi_devices)
        container = Container(message, pod)
        async with self.host.node_lock:
            asked = request("CreateContainer", container)
            try:
                updates, devices = await self.host.create(asked)
                await self.inject(asked.container, devices)
            except OperationError:
                await self.end(container)
                await self.notify_plugins("RemoveContainer", container)
                raise
            message.CopyFrom(asked.container)
            await self.host.apply(updates, self.apply)
            drop_hugepage_limits(message.linux.resources)
            message.state = pb.CONTAINER_CREATED
            self.containers[container.id] = container
        async with self.host.node_lock:
            await self.notify_plugins("PostCreateContainer", container)
        return container

    async def start_container(self, container: Container) -> None:
        """Creates the container's cgroup, calls the plugins, and starts the process. Raises OperationError."""
        async with self.host.node_lock:
            try:
                await self.make_group(container, _FIRST_PID + next(self.numbers))
                await self.host.relay("StartContainer", request("StartContainer", container))
                if await self.was_killed(container):
                    raise OperationError(f"container {container.name} was killed before its first instruction")
            except OperationError:
                await self.end(container)
                raise
            container.message.state = pb.CONTAINER_RUNNING
        async with self.host.node_lock:
            await self.notify_plugins("PostStartContainer", container)

    async def update_container(self, container: Container, **wanted: Any) -> None:
        """Updates the resources as the kubelet does; arguments are those of resources(). Raises OperationError."""
        async with self.host.node_lock:
            asked = request("UpdateContainer", container)
            asked.linux_resources.CopyFrom(resources(**wanted))
            others = []
            for update in (one for answer in await self.host.relay("UpdateContainer", asked) for one in answer.update):
                if update.container_id == container.id:
                    overwrite(asked.linux_resources, update.linux.resources)
                else:
                    others.append(update)
            await self.host.apply(others, self.apply)
            own = pb.ContainerUpdate(container_id=container.id)
            own.linux.resources.CopyFrom(asked.linux_resources)
            await self.apply(own)
        async with self.host.node_lock:
            await self.notify_plugins("PostUpdateContainer", container)

    async def stop_container(self, container: Container) -> None:
        """Stops the container's process, or handles its exit if it has already exited."""
        async with self.host.node_lock:
            await self.end(container)

    async def remove_container(self, container: Container) -> None:
        """Removes the container, after stopping it if it is running."""
        async with self.host.node_lock:
            if container.running:
                await self.end(container)
            self.containers.pop(container.id, None)
            await self.notify_plugins("RemoveContainer", container)

    async def remove_pod(self, pod: Pod) -> None:
        """Stops the pod's containers, then its sandbox, and removes them in the same order."""
        mine = [one for one in self.containers.values() if one.pod is pod]
        for container in mine:
            if container.running:
                await self.stop_container(container)
        async with self.host.node_lock:
            await self.notify_plugins("StopPodSandbox", pod)
        for container in mine:
            await self.remove_container(container)
        async with self.host.node_lock:
            self.pods.pop(pod.id, None)
            await self.notify_plugins("RemovePodSandbox", pod)
        if self.materialises:
            await asyncio.to_thread(self.cgroups.remove_pod, pod.message.linux.cgroup_parent)


if __name__ == "__main__":
    main(running)
