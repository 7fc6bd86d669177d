# SPDX-License-Identifier: Apache-2.0
"""The NRI plugin service: a call of the runtime becomes a hook in domain terms, its result the answer.

How a failure is answered decides what happens on the node (NRI pkg/adaptation/plugin.go): an answered error fails the
pod's operation and the kubelet tries again; no answer within the runtime's patience (2 s) gets the plugin thrown out,
and the operation goes on without it. So everything is answered, and a hook that runs out of time is an error.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError, Message

from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.messages import read_container, read_pod, read_resources, write_adjustment, write_updates
from nri_backend.nri.model import Container, ContainerHooks, Pod, RefusedError
from nri_backend.ttrpc import Call, Code, StatusError

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"

MAX_CONTAINERS = 16384
"""In a snapshot, and of pods as many. A node runs some hundreds; a peer that never ends would fill the memory."""
_log = logging.getLogger(__name__)
_DEFAULT_PATIENCE = 2.0
# The share of the runtime's patience after which a hook is answered with an error. The rest is for the way back and for
# pauses of this process.
_OURS = 0.75
# Every release knows these events. One unknown bit closes the plugin, and no bit at all subscribes to everything,
# validation included.
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
_OUTCOMES: dict[int, str] = {Code.UNIMPLEMENTED: "unimplemented", Code.DEADLINE_EXCEEDED: "timeout"}
CallDone = Callable[[str, float, str], None]
"""Hears of each answered call: method, seconds, and ok, refused, timeout, error or unimplemented."""
_Method = tuple[Callable[[bytes], Message], Callable[..., Awaitable[Message]]]


class PluginService:
    """Answers the runtime's calls on one connection."""

    def __init__(self, hooks: ContainerHooks, call_done: CallDone) -> None:
        self.runtime = pb.ConfigureRequest()
        """What the runtime said of itself; empty before Configure."""
        self.synchronized = asyncio.Event()
        """Set when the snapshot was answered, also when that was an error: see sync_failure."""
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
        # All lifecycle methods exist, those without a use too: one that is missing makes a runtime of 0.12 send every
        # lifecycle event as StateChange from then on. Any message can be read as Empty, and answers without fields are
        # all the same on the wire.
        self._methods |= {
            name: (pb.Empty.FromString, self._nothing)
            for name in ("Shutdown", *_STATE_CHANGES.values())
            if name not in self._methods
        }

    async def serve(self, call: Call) -> bytes:
        """Carries out one call; the answer's payload. Raises StatusError, and nothing else."""
        started = time.monotonic()
        outcome = "error"
        name = call.method
        try:
            read, method = self._find(call)
            request = read(call.payload)
            if isinstance(request, pb.StateChangeEvent):
                name = _STATE_CHANGES.get(request.event, name)
            answer = await self._within(call, name, method(request))
            outcome = "ok"
            return answer.SerializeToString()
        except RefusedError as error:
            outcome = "refused"
            raise StatusError(Code.FAILED_PRECONDITION, str(error)) from error
        except DecodeError as error:
            raise StatusError(Code.INVALID_ARGUMENT, f"{name}: the request cannot be read: {error}") from error
        except StatusError as error:
            outcome = _OUTCOMES.get(error.code, outcome)
            raise
        except Exception as error:
            _log.exception("%s failed", name)
            raise StatusError(
                Code.INTERNAL, f"{name}: internal error; the log of nri-backend has the details"
            ) from error
        finally:
            self._call_done(name, time.monotonic() - started, outcome)

    def _find(self, call: Call) -> _Method:
        if call.service != PLUGIN_SERVICE or call.method not in self._methods:
            raise StatusError(Code.UNIMPLEMENTED, f"there is no method {call.service}/{call.method}")
        return self._methods[call.method]

    async def _within(self, call: Call, name: str, result: Awaitable[Message]) -> Message:
        seconds = _OURS * (call.timeout_ns / 1e9 or self.runtime.request_timeout / 1e3 or _DEFAULT_PATIENCE)
        try:
            async with asyncio.timeout(seconds) as limit:
                return await result
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise StatusError(
                Code.DEADLINE_EXCEEDED, f"{name} was not done within {seconds:g} s; it is tried again"
            ) from error

    async def _configure(self, request: pb.ConfigureRequest) -> pb.ConfigureResponse:
        self.runtime = request
        return pb.ConfigureResponse(events=sum(1 << (event - 1) for event in _EVENTS))

    async def _synchronize(self, request: pb.SynchronizeRequest) -> pb.SynchronizeResponse:
        # A container may come in an earlier chunk than its pod: nothing is looked at before the last one.
        numbers = {
            "containers": len(self._containers) + len(request.containers),
            "pods": len(self._pods) + len(request.pods),
        }
        for what, number in numbers.items():
            if number > MAX_CONTAINERS:
                self.sync_failure = f"the snapshot of the runtime has more than {MAX_CONTAINERS} {what}"
                self.synchronized.set()
                raise StatusError(Code.RESOURCE_EXHAUSTED, self.sync_failure)
        self._pods += map(read_pod, request.pods)
        self._containers += map(read_container, request.containers)
        if request.more:
            return pb.SynchronizeResponse(more=True)
        pods, containers = self._pods, self._containers
        self._pods, self._containers = [], []
        self.sync_failure = "the snapshot of the runtime was not taken over"
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

    async def _nothing(self, _request: pb.Empty) -> Message:
        return pb.Empty()
