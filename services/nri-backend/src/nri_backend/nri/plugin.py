# SPDX-License-Identifier: Apache-2.0
"""The NRI plugin service: decodes a call from the runtime, runs the hook, and encodes its result as the response.

What happens on the node depends on the kind of failure (NRI pkg/adaptation/plugin.go). A response with an error fails
the pod's operation, and the kubelet retries it. If there is no response within the runtime's request timeout, the
runtime disconnects the plugin and continues the operation without it: the container starts without enforcement.
Therefore every call gets a response in time. A hook that has not finished after three quarters of the timeout is
cancelled, and once it has ended, the call is answered with DEADLINE_EXCEEDED; budgets.py shows what the last quarter is
for.
The timeout is the one in the call, else the one that the runtime reported in Configure (since NRI 0.6), else the
default of 2 s.

The functions below the service class convert between NRI messages and the values of model.py. Protobuf is not used
outside this package.
"""

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Final

from google.protobuf.message import DecodeError, Message
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_ENV_PREFIX, MEMORY_ENV_PREFIX

from nri_backend._pb import nri_pb2 as pb
from nri_backend.budgets import DEADLINE_SHARE, REQUEST_SECONDS
from nri_backend.nri.model import (
    MAX_VARIABLE_BYTES,
    MAX_VARIABLES,
    Adjustment,
    Container,
    ContainerHooks,
    ContainerState,
    MemoryPolicy,
    Pod,
    RejectedError,
    Resources,
    Update,
)
from nri_backend.nri.wire import MAX_DATA, Call, Code, StatusError

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"

MAX_CONTAINERS = 16384
"""Maximum number of containers, and of pods, in a snapshot. A node runs hundreds; the limit bounds the memory that a
snapshot can use.
"""
_log = logging.getLogger(__name__)
# Events that NRI 0.6 and all later releases support. A runtime disconnects a plugin that subscribes to an unknown
# event, and an empty mask subscribes to all events, including validation.
_EVENTS = (
    pb.RUN_POD_SANDBOX,
    pb.STOP_POD_SANDBOX,
    pb.REMOVE_POD_SANDBOX,
    pb.CREATE_CONTAINER,
    pb.START_CONTAINER,
    pb.UPDATE_CONTAINER,
    pb.STOP_CONTAINER,
    pb.REMOVE_CONTAINER,
)
_STATE_CHANGES = {
    pb.RUN_POD_SANDBOX: "RunPodSandbox",
    pb.POST_UPDATE_POD_SANDBOX: "PostUpdatePodSandbox",
    pb.STOP_POD_SANDBOX: "StopPodSandbox",
    pb.REMOVE_POD_SANDBOX: "RemovePodSandbox",
    pb.POST_CREATE_CONTAINER: "PostCreateContainer",
    pb.START_CONTAINER: "StartContainer",
    pb.POST_START_CONTAINER: "PostStartContainer",
    pb.POST_UPDATE_CONTAINER: "PostUpdateContainer",
    pb.REMOVE_CONTAINER: "RemoveContainer",
}
_OUR_PREFIXES: Final = (CPU_ENV_PREFIX, MEMORY_ENV_PREFIX)
# Space in a response frame for everything except the updates: the enclosing ttrpc response and its field tags.
_ENVELOPE_BYTES: Final = 64
_STATES = {
    pb.CONTAINER_CREATED: ContainerState.CREATED,
    pb.CONTAINER_PAUSED: ContainerState.PAUSED,
    pb.CONTAINER_RUNNING: ContainerState.RUNNING,
    pb.CONTAINER_STOPPED: ContainerState.STOPPED,
}
CallDone = Callable[[str, float, str], None]
"""Callback for each handled call, with its method, its duration in seconds, and its outcome: ``ok``, ``refused``,
``timeout``, ``error`` or ``unimplemented``.
"""
_Method = tuple[Callable[[bytes], Message], Callable[..., Coroutine[Any, Any, Message]]]


class PluginService:
    """Handles the runtime's calls on one connection."""

    def __init__(self, hooks: ContainerHooks, call_done: CallDone) -> None:
        self.runtime = pb.ConfigureRequest()
        """The runtime's name, versions and timeouts; empty before Configure."""
        self.synchronized = asyncio.Event()
        """Set when the snapshot has been handled, successfully or not (see sync_failure)."""
        self.sync_failure = ""
        self._hooks = hooks
        self._call_done = call_done
        self._pods: list[Pod] = []
        self._containers: list[Container] = []
        self._methods: dict[str, _Method] = {
            "Configure": (pb.ConfigureRequest.FromString, self._configure),
            "Synchronize": (pb.SynchronizeRequest.FromString, self._synchronize),
            "StateChange": (pb.StateChangeEvent.FromString, self._state_change),
            "CreateContainer": (pb.CreateContainerRequest.FromString, self._create),
            "StartContainer": (pb.StartContainerRequest.FromString, self._start),
            "UpdateContainer": (pb.UpdateContainerRequest.FromString, self._update),
            "StopContainer": (pb.StopContainerRequest.FromString, self._stop),
            "RemoveContainer": (pb.RemoveContainerRequest.FromString, self._remove),
            "RemovePodSandbox": (pb.RemovePodSandboxRequest.FromString, self._remove_pod),
        }
        # Lifecycle methods that the backend does not need are implemented as well. If one were missing, a runtime with
        # NRI 0.12 would send every other lifecycle event as StateChange. Any message can be parsed as Empty, and all
        # responses without fields have the same encoding.
        self._methods |= {
            name: (pb.Empty.FromString, self._acknowledge)
            for name in ("Shutdown", *_STATE_CHANGES.values())
            if name not in self._methods
        }

    async def serve(self, call: Call) -> bytes:
        """Handles one call and returns the payload of the response. Raises StatusError and no other exception."""
        started = time.monotonic()
        outcome, name = "error", call.method
        answer: Message
        seconds = DEADLINE_SHARE * (call.timeout_ns / 1e9 or self.runtime.request_timeout / 1e3 or REQUEST_SECONDS)
        deadline = asyncio.timeout(seconds)
        try:
            if call.service != PLUGIN_SERVICE or call.method not in self._methods:
                outcome = "unimplemented"
                raise StatusError(Code.UNIMPLEMENTED, f"there is no method {call.service}/{call.method}")
            read, method = self._methods[call.method]
            request = read(call.payload)
            if isinstance(request, pb.StateChangeEvent):
                name = _STATE_CHANGES.get(request.event, name)
            hook = method(request)
            try:
                pending = hook.send(None)
            except StopIteration as end:
                # The hook had nothing to wait for, so no deadline was set up; setting one up would take longer than
                # many hooks do.
                answer = end.value
            else:
                async with deadline:
                    answer = await _resume(hook, pending)
            outcome = "ok"
            return answer.SerializeToString()
        except RejectedError as error:
            outcome = "refused"
            raise StatusError(Code.FAILED_PRECONDITION, str(error)) from error
        except DecodeError as error:
            raise StatusError(Code.INVALID_ARGUMENT, f"{name}: the request cannot be decoded: {error}") from error
        except StatusError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                outcome = "timeout"
                text = f"{name} did not finish within {seconds:g} s; it will be retried"
                raise StatusError(Code.DEADLINE_EXCEEDED, text) from error
            _log.exception("%s failed", name)
            raise StatusError(Code.INTERNAL, f"{name}: internal error; see nri-backend's log") from error
        finally:
            self._call_done(name, time.monotonic() - started, outcome)

    async def _configure(self, request: pb.ConfigureRequest) -> pb.ConfigureResponse:
        self.runtime = request
        return pb.ConfigureResponse(events=sum(1 << (event - 1) for event in _EVENTS))

    async def _synchronize(self, request: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        # Chunks are processed together after the last one, since a container may precede its pod.
        numbers = {
            "containers": len(self._containers) + len(request.containers),
            "pods": len(self._pods) + len(request.pods),
        }
        for objects, number in numbers.items():
            if number > MAX_CONTAINERS:
                self.sync_failure = f"the runtime's snapshot has more than {MAX_CONTAINERS} {objects}"
                self.synchronized.set()
                raise StatusError(Code.RESOURCE_EXHAUSTED, self.sync_failure)
        self._pods += map(read_pod, request.pods)
        self._containers += map(read_container, request.containers)
        if request.more:
            return pb.SynchronizeResponse(more=True)
        pods, containers = self._pods, self._containers
        self._pods, self._containers = [], []
        self.sync_failure = "the runtime's snapshot could not be processed"
        try:
            updates = await self._hooks.synchronize(pods, containers)
            self.sync_failure = ""
        finally:
            self.synchronized.set()
        return pb.SynchronizeResponse(update=write_updates(updates))

    async def _state_change(self, request: pb.StateChangeEvent) -> Message:
        name = _STATE_CHANGES.get(request.event)
        return pb.Empty() if name is None else await self._methods[name][1](request)

    async def _create(self, request: pb.CreateContainerRequest) -> Message:
        adjustment = await self._hooks.create_container(read_pod(request.pod), read_container(request.container))
        return pb.CreateContainerResponse(adjust=write_adjustment(adjustment))

    async def _start(self, request: pb.StartContainerRequest | pb.StateChangeEvent) -> Message:
        await self._hooks.start_container(read_pod(request.pod), read_container(request.container))
        return pb.StartContainerResponse()

    async def _update(self, request: pb.UpdateContainerRequest) -> Message:
        wanted = read_resources(request.linux_resources)
        pod, container = read_pod(request.pod), read_container(request.container)
        updates = await self._hooks.update_container(pod, container, wanted)
        return pb.UpdateContainerResponse(update=write_updates(updates))

    async def _stop(self, request: pb.StopContainerRequest) -> Message:
        updates = await self._hooks.stop_container(read_pod(request.pod), read_container(request.container))
        return pb.StopContainerResponse(update=write_updates(updates))

    async def _remove(self, request: pb.RemoveContainerRequest | pb.StateChangeEvent) -> Message:
        await self._hooks.remove_container(read_pod(request.pod), read_container(request.container))
        return pb.RemoveContainerResponse()

    async def _remove_pod(self, request: pb.RemovePodSandboxRequest | pb.StateChangeEvent) -> Message:
        await self._hooks.remove_pod(read_pod(request.pod))
        return pb.RemovePodSandboxResponse()

    async def _acknowledge(self, _request: pb.Empty) -> Message:
        return pb.Empty()


@types.coroutine
def _resume(hook: Coroutine[Any, Any, Message], pending: Any) -> Generator[Any, Any, Message]:
    """Runs the rest of a hook that is waiting for the future ``pending``. Returns its result, or raises its error."""
    try:
        while True:
            try:
                value = yield pending
            except BaseException as error:  # noqa: BLE001  the hook handles it, mostly a cancellation
                pending = hook.throw(error)
            else:
                pending = hook.send(value)
    except StopIteration as end:
        answer: Message = end.value
        return answer


def read_pod(message: pb.PodSandbox) -> Pod:
    """Converts a pod sandbox."""
    return Pod(
        id=message.id,
        uid=message.uid,
        namespace=message.namespace,
        name=message.name,
        cgroup_parent=message.linux.cgroup_parent,
        runtime_handler=message.runtime_handler,
    )


def read_container(message: pb.Container) -> Container:
    """Converts a container. Of its environment variables, only the driver's own are kept."""
    # A pod's author can set 1.5 MB of variables, and the runtime sends all of them with every event.
    env: list[str] = []
    left = MAX_VARIABLE_BYTES
    for entry in message.env:
        if entry.startswith(_OUR_PREFIXES):
            env.append(entry[: max(left, 0) + 1])
            left -= len(entry)
            if left < 0 or len(env) > MAX_VARIABLES:
                break
    return Container(
        id=message.id,
        pod_id=message.pod_sandbox_id,
        name=message.name,
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        env=tuple(env),
        cgroups_path=message.linux.cgroups_path,
        resources=read_resources(message.linux.resources),
    )


def read_resources(message: pb.LinuxResources) -> Resources:
    """Converts resources. A wrapper message with the value 0 means that the kubelet did not set the field."""
    cpu, memory = message.cpu, message.memory
    return Resources(
        cpus=cpu.cpus,
        mems=cpu.mems,
        cpu_quota=cpu.quota.value or None,
        cpu_period=cpu.period.value or None,
        memory_limit=memory.limit.value or None,
        # Runtimes append the entries of an update to their list instead of replacing existing ones; the last entry for
        # a page size applies.
        hugepage_limits={limit.page_size: limit.limit for limit in message.hugepage_limits},
    )


def write_adjustment(adjustment: Adjustment) -> pb.ContainerAdjustment:
    """Converts the adjustment for a container that is being created. Unset fields are not sent."""
    message = pb.ContainerAdjustment(env=[pb.KeyValue(key=k, value=v) for k, v in adjustment.env.items()])
    if adjustment.resources != Resources():
        message.linux.resources.CopyFrom(_write_resources(adjustment.resources))
    if adjustment.memory_policy is not None:
        message.linux.memory_policy.CopyFrom(_write_policy(adjustment.memory_policy))
    return message


def _write_policy(policy: MemoryPolicy) -> pb.LinuxMemoryPolicy:
    # MPOL_PREFERRED accepts a single node; MPOL_PREFERRED_MANY accepts several and has existed since Linux 5.15.
    preferred = pb.MPOL_PREFERRED if len(policy.nodes) == 1 else pb.MPOL_PREFERRED_MANY
    mode = pb.MPOL_INTERLEAVE if policy.mode == "interleave" else preferred
    return pb.LinuxMemoryPolicy(mode=mode, nodes=format_cpu_list(policy.nodes))


def write_updates(updates: Sequence[Update], limit: int = MAX_DATA - _ENVELOPE_BYTES) -> list[pb.ContainerUpdate]:
    """Converts the updates in order, and stops with a warning at the first one that would exceed ``limit`` bytes."""
    # Field tag and length prefix of each update in the enclosing message; a length needs at most five bytes.
    overhead = 6
    messages: list[pb.ContainerUpdate] = []
    for update in updates:
        message = pb.ContainerUpdate(
            container_id=update.container_id,
            linux=pb.LinuxContainerUpdate(resources=_write_resources(update.resources)),
            ignore_failure=True,
        )
        limit -= message.ByteSize() + overhead
        if limit < 0:
            text = "a response contains only %d of %d updates; the audit applies the others to the cgroups"
            _log.warning(text, len(messages), len(updates))
            break
        messages.append(message)
    return messages


def _write_resources(resources: Resources) -> pb.LinuxResources:
    limits = [pb.HugepageLimit(page_size=size, limit=limit) for size, limit in resources.hugepage_limits.items()]
    message = pb.LinuxResources(hugepage_limits=limits)
    if resources.cpus:
        message.cpu.cpus = resources.cpus
    if resources.mems:
        message.cpu.mems = resources.mems
    if resources.cpu_quota is not None:
        message.cpu.quota.value = resources.cpu_quota
    if resources.memory_limit is not None:
        message.memory.limit.value = resources.memory_limit
    return message
