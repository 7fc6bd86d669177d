# SPDX-License-Identifier: Apache-2.0
"""A stand-in for containerd: the runtime's side of NRI over a real socket, a container store and a kubelet's calls.

It knows nothing of the plugins it calls, and behaves as containerd does where that matters to them: one event at a time
on the whole node, plugins in the order of their index, a plugin that is late or broken is thrown out and the operation
goes on without it, an answered error fails the operation, updates of other containers are applied one by one and their
failures only logged. The gap between snapshot and first event, which CRI-O has, is not imitated.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_control import main
from tests.fakes.runtime_levels import RuntimeOptions
from tests.fakes.runtime_merge import overwrite
from tests.fakes.runtime_node import FakeNode
from tests.fakes.runtime_plugins import HookCall
from tests.fakes.runtime_store import Container, OperationError, Pod, resources

# Higher than any pid that Linux gives out, so that nobody who believes it can hurt a real process.
_FIRST_PID = 1 << 23


@asynccontextmanager
async def running(options: RuntimeOptions) -> AsyncIterator["FakeRuntime"]:
    """A runtime that listens, until the block is left."""
    runtime = FakeRuntime(options)
    async with asyncio.TaskGroup() as tasks:
        chores = [tasks.create_task(chore) for chore in await runtime.open(tasks)]
        try:
            yield runtime
        finally:
            await runtime.host.shut()
            for chore in chores:
                chore.cancel()


class FakeRuntime(FakeNode):
    """The runtime; running() makes one that works."""

    @property
    def calls(self) -> list[HookCall]:
        """Every call of a plugin so far, with its duration."""
        return self.host.calls

    @property
    def log(self) -> list[str]:
        """What containerd would only log: plugins thrown out, updates that failed."""
        return self.host.log

    @property
    def plugins(self) -> list[str]:
        """The active plugins in the order they are called."""
        return [plugin.name for plugin in self.host.plugins]

    async def restart(self, down_seconds: float = 0.0) -> None:
        """Stops the runtime and starts it again: connections end, the socket is a new one, containers live on."""
        await self.host.shut()
        await asyncio.sleep(down_seconds)
        await self.host.listen()

    async def wait_until(self, condition: Callable[["FakeRuntime"], bool], seconds: float = 5.0) -> None:
        """Waits until plugins came or went so that the condition holds. Raises TimeoutError."""
        async with asyncio.timeout(seconds), self.host.changed:
            await self.host.changed.wait_for(lambda: condition(self))

    async def run_pod_sandbox(
        self, name: str, *, uid: str = "", namespace: str = "default", qos: str = "burstable"
    ) -> Pod:
        """Makes a sandbox. Raises OperationError when a plugin refuses."""
        number = next(self.numbers)
        message = pb.PodSandbox(id=f"{number:064x}", name=name, uid=uid or f"uid-{number}", namespace=namespace)
        message.linux.cgroup_parent = self.cgroups.cgroup_parent(message.uid, qos)
        pod = Pod(message)
        async with self.host.node_lock:
            if self.materialises:
                await asyncio.to_thread(self.cgroups.make_pod, message.linux.cgroup_parent, pod.id)
            try:
                request = pb.RunPodSandboxRequest(pod=message)
                await self.host.relay("RunPodSandbox", request, pb.RunPodSandboxResponse.FromString)
            except OperationError:
                await self.tell("StopPodSandbox", pb.StopPodSandboxRequest(pod=message))
                await self.tell("RemovePodSandbox", pb.RemovePodSandboxRequest(pod=message))
                raise
            self.pods[pod.id] = pod
        return pod

    async def create_container(
        self, pod: Pod, name: str, *, env: Sequence[str] = (), cdi_devices: Sequence[str] = (), **wanted: Any
    ) -> Container:
        """Creates a container with CDI devices injected; further arguments are those of resources().

        Raises OperationError when a device is unresolvable, a plugin refuses or plugins conflict.
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
            request = pb.CreateContainerRequest(pod=pod.message, container=message)
            try:
                updates, devices = await self.host.create(request)
                await self.inject(request.container, devices)
            except OperationError:
                await self.end(container)
                await self.tell(
                    "RemoveContainer", pb.RemoveContainerRequest(pod=container.pod.message, container=container.message)
                )
                raise
            message.CopyFrom(request.container)
            await self.host.apply(updates, self.apply)
            if self.options.drops_hugepage_limits:
                del message.linux.resources.hugepage_limits[:]
            message.state = pb.CONTAINER_CREATED
            self.containers[container.id] = container
        async with self.host.node_lock:
            await self.tell(
                "PostCreateContainer",
                pb.PostCreateContainerRequest(pod=container.pod.message, container=container.message),
            )
        return container

    async def start_container(self, container: Container) -> None:
        """Makes the container's group, asks the plugins, starts the process. Raises OperationError."""
        message = container.message
        async with self.host.node_lock:
            try:
                await self.make_group(container, _FIRST_PID + next(self.numbers))
                request = pb.StartContainerRequest(pod=container.pod.message, container=message)
                await self.host.relay("StartContainer", request, pb.StartContainerResponse.FromString)
                if await self.was_killed(container):
                    raise OperationError(f"container {container.name} was killed before its first instruction")
            except OperationError:
                await self.end(container)
                raise
            message.state = pb.CONTAINER_RUNNING
        async with self.host.node_lock:
            await self.tell(
                "PostStartContainer",
                pb.PostStartContainerRequest(pod=container.pod.message, container=container.message),
            )

    async def update_container(self, container: Container, **wanted: Any) -> None:
        """The kubelet wants other resources; arguments are those of resources(). Raises OperationError."""
        async with self.host.node_lock:
            request = pb.UpdateContainerRequest(pod=container.pod.message, container=container.message)
            request.linux_resources.CopyFrom(resources(**wanted))
            answers = await self.host.relay("UpdateContainer", request, pb.UpdateContainerResponse.FromString)
            others = []
            for update in (update for _, answer in answers for update in answer.update):
                if update.container_id == container.id:
                    overwrite(request.linux_resources, update.linux.resources, appends_hugepages=False)
                else:
                    others.append(update)
            await self.host.apply(others, self.apply)
            own = pb.ContainerUpdate(container_id=container.id)
            own.linux.resources.CopyFrom(request.linux_resources)
            await self.apply(own)
        async with self.host.node_lock:
            await self.tell(
                "PostUpdateContainer",
                pb.PostUpdateContainerRequest(pod=container.pod.message, container=container.message),
            )

    async def stop_container(self, container: Container) -> None:
        """Stops the process, or notices that it ended."""
        async with self.host.node_lock:
            await self.end(container)

    async def remove_container(self, container: Container) -> None:
        """Forgets the container, stopping it first when it runs."""
        async with self.host.node_lock:
            if container.running:
                await self.end(container)
            self.containers.pop(container.id, None)
            await self.tell(
                "RemoveContainer", pb.RemoveContainerRequest(pod=container.pod.message, container=container.message)
            )

    async def stop_pod(self, pod: Pod) -> None:
        """Stops the containers of the pod and its sandbox."""
        for container in [one for one in self.containers.values() if one.pod is pod and one.running]:
            await self.stop_container(container)
        async with self.host.node_lock:
            pod.ready = False
            await self.tell("StopPodSandbox", pb.StopPodSandboxRequest(pod=pod.message))

    async def remove_pod(self, pod: Pod) -> None:
        """Removes the containers of the pod and its sandbox."""
        await self.stop_pod(pod)
        for container in [one for one in self.containers.values() if one.pod is pod]:
            await self.remove_container(container)
        async with self.host.node_lock:
            self.pods.pop(pod.id, None)
            await self.tell("RemovePodSandbox", pb.RemovePodSandboxRequest(pod=pod.message))
        if self.materialises:
            await asyncio.to_thread(self.cgroups.remove_pod, pod.message.linux.cgroup_parent)


if __name__ == "__main__":
    main(running)
