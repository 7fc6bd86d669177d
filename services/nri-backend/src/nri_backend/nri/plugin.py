# SPDX-License-Identifier: Apache-2.0
"""The NRI plugin service: decodes a call of the runtime, runs the hook, and encodes its result as the response.

The kind of failure decides what happens on the node (NRI pkg/adaptation/plugin.go). A response with an error fails the
pod's operation, and the kubelet retries it. If there is no response within the runtime's request timeout, the runtime
disconnects the plugin and continues the operation without it: the container starts without enforcement. Therefore every
call gets a response in time. A hook that has not finished after three quarters of the timeout is cancelled and answered
with DEADLINE_EXCEEDED; the last quarter is for the transport and for pauses of this process. The timeout is that of the
call, else the one that the runtime reported in Configure (since NRI 0.6), else the default of 2 s.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from google.protobuf.message import DecodeError, Message

from nri_backend._pb import nri_pb2 as pb
from nri_backend.budgets import DEADLINE_SHARE, REQUEST_SECONDS
from nri_backend.nri.messages import read_container, read_pod, read_resources, write_adjustment, write_updates
from nri_backend.nri.model import Container, ContainerHooks, Pod, RejectedError
from nri_backend.ttrpc import Call, Code, StatusError

PLUGIN_SERVICE = "nri.pkg.api.v1alpha1.Plugin"
RUNTIME_SERVICE = "nri.pkg.api.v1alpha1.Runtime"

MAX_CONTAINERS = 16384
"""Maximum number of containers, and of pods, in a snapshot. A node runs hundreds; the limit bounds memory."""
_log = logging.getLogger(__name__)
# Events that every NRI release knows. A runtime disconnects a plugin that subscribes to an unknown event, and an empty
# mask subscribes to all events, including validation.
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
CallDone = Callable[[str, float, str], None]
"""Observer of handled calls: method, seconds, and ``ok``, ``refused``, ``timeout``, ``error`` or ``unimplemented``."""
_Method = tuple[Callable[[bytes], Message], Callable[..., Awaitable[Message]]]


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
        # Lifecycle methods without a use are implemented, too. If one is missing, a runtime of NRI 0.12 sends every
        # further lifecycle event as StateChange. Any message can be parsed as Empty, and all responses without fields
        # have the same encoding.
        self._methods |= {
            name: (pb.Empty.FromString, self._acknowledge)
            for name in ("Shutdown", *_STATE_CHANGES.values())
            if name not in self._methods
        }

    async def serve(self, call: Call) -> bytes:
        """Handles one call and returns the payload of the response. Raises StatusError and no other exception."""
        started = time.monotonic()
        outcome, name = "error", call.method
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
            async with deadline:
                answer = await method(request)
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
            raise StatusError(Code.INTERNAL, f"{name}: internal error; see the log of nri-backend") from error
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
                self.sync_failure = f"the snapshot of the runtime has more than {MAX_CONTAINERS} {objects}"
                self.synchronized.set()
                raise StatusError(Code.RESOURCE_EXHAUSTED, self.sync_failure)
        self._pods += map(read_pod, request.pods)
        self._containers += map(read_container, request.containers)
        if request.more:
            return pb.SynchronizeResponse(more=True)
        pods, containers = self._pods, self._containers
        self._pods, self._containers = [], []
        self.sync_failure = "the snapshot of the runtime could not be processed"
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
