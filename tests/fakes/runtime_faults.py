# SPDX-License-Identifier: Apache-2.0
"""What a runtime in trouble, or another program in its place, may send to its plugins: bytes, events, snapshots."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import ParseDict

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_wire import TrunkClosedError

if TYPE_CHECKING:
    from tests.fakes.runtime import FakeRuntime

_ANSWERS: Mapping[str, Any] = {
    "CreateContainer": pb.CreateContainerResponse,
    "StartContainer": pb.StartContainerResponse,
    "UpdateContainer": pb.UpdateContainerResponse,
    "StopContainer": pb.StopContainerResponse,
}


class RuntimeFaults:
    """Orders over the control socket. None of them changes what the stand-in itself believes."""

    def __init__(self, runtime: "FakeRuntime") -> None:
        self._runtime = runtime

    async def send_bytes(self, data: str) -> int:
        """Writes bytes, as hexadecimal digits, to every plugin; returns to how many."""
        plugins = list(self._runtime.host.plugins)
        for plugin in plugins:
            with suppress(TrunkClosedError):
                await plugin.trunk.write_bytes(bytes.fromhex(data))
        return len(plugins)

    async def send_event(self, method: str, container: Mapping[str, Any], pod: Mapping[str, Any] | None = None) -> None:
        """Sends any event. Container and pod are JSON forms of the messages, or the ids of those that there are.

        Raises OperationError when a plugin refuses.
        """
        request = getattr(pb, f"{method}Request")(pod=self._pod(pod or {}), container=self._container(container))
        answer = _ANSWERS.get(method, pb.Empty)
        async with self._runtime.host.node_lock:
            await self._runtime.host.relay(method, request, answer.FromString)

    async def list_also(self, containers: Sequence[Mapping[str, Any]]) -> None:
        """What the snapshots from now on list beside the containers that there are."""
        self._runtime.strangers = [self._container(container) for container in containers]

    def _container(self, given: Mapping[str, Any]) -> pb.Container:
        known = self._runtime.containers.get(given.get("id", ""))
        message = pb.Container()
        if known is not None:
            message.CopyFrom(known.message)
        return ParseDict(dict(given), message)

    def _pod(self, given: Mapping[str, Any]) -> pb.PodSandbox:
        known = self._runtime.pods.get(given.get("id", ""))
        message = pb.PodSandbox()
        if known is not None:
            message.CopyFrom(known.message)
        return ParseDict(dict(given), message)
