# SPDX-License-Identifier: Apache-2.0
"""Prints the functions called for one CreateContainer and its StartContainer: ``python -m hack.trace_container``.

Recording begins with the bytes that the multiplexer receives and ends with the bytes of the response. The container is
the first one in its pod and has one claim for CPUs and one for hugepages; other pods have run before. The socket and
the audit that runs alongside the hooks are not included.
"""

import asyncio
import sys
import tempfile
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType
from typing import Any

from google.protobuf.message import Message
from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.model import Container, Pod, Resources
from nri_backend.nri.plugin import PLUGIN_SERVICE, PluginService
from nri_backend.nri.wire import (
    PLUGIN_CONNECTION,
    REQUEST,
    Call,
    Demultiplexer,
    ServerConnection,
    encode_call,
    encode_frame,
    frame_message,
)

from hack.trace import CallTrace
from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, enforcing

_WARM_UP_REQUESTS = 3
_SANDBOX_SECONDS = 0.05


class Runtime:
    """The runtime's side of a connection, without a socket."""

    def __init__(self, node: Node) -> None:
        self._server, self._demultiplexer, self._ids = ServerConnection(), Demultiplexer(), count(1, 2)
        self._service = PluginService(node.enforcer, lambda *_: None)

    async def call(self, method: str, request: Message, trace: CallTrace) -> None:
        """Sends a call to the plugin and records the functions called between the request's bytes and the
        response's.
        """
        call = encode_call(Call(PLUGIN_SERVICE, method, request.SerializeToString()))
        sent = frame_message(PLUGIN_CONNECTION, encode_frame(next(self._ids), REQUEST, call))
        trace.running = True
        for _, piece in self._demultiplexer.receive_data(sent):
            for event in self._server.receive_data(piece):
                if isinstance(event, Call):
                    response = await self._service.serve(event)
                    frame_message(PLUGIN_CONNECTION, self._server.respond(event.stream_id, response))
        trace.running = False


def _messages(nri_pod: Pod, nri_container: Container) -> tuple[pb.PodSandbox, pb.Container]:
    sandbox = pb.PodSandbox(id=nri_pod.id, uid=nri_pod.uid, namespace=nri_pod.namespace, name=nri_pod.name)
    sandbox.linux.cgroup_parent = nri_pod.cgroup_parent
    message = pb.Container(
        id=nri_container.id, pod_sandbox_id=nri_container.pod_id, name=nri_container.name, env=nri_container.env
    )
    message.linux.cgroups_path = nri_container.cgroups_path
    return sandbox, message


async def _containers(create: CallTrace, start: CallTrace, path: Path) -> None:
    async with enforcing(Node(path)) as node:
        runtime = Runtime(node)
        for number in range(_WARM_UP_REQUESTS + 1):
            nri_pod = pod(f"p{number}")
            cpus = cpu_record(f"c{number}", "cpus=2-3", pods=[nri_pod.uid])
            memory = memory_record(f"m{number}", ("m", 1, 64 * MI, 2 * MI), pods=[nri_pod.uid])
            nri_container = container(f"life-{number}", *node.claim(cpus), *node.claim(memory), of=nri_pod.uid)
            node.make_pod(nri_pod)
            # The kubelet creates the pod's sandbox between the two calls. The claim files are read during that time.
            await asyncio.sleep(_SANDBOX_SECONDS)
            await node.enforcer.claim_files.refresh()
            sandbox, message = _messages(nri_pod, nri_container)
            is_warm_up = number < _WARM_UP_REQUESTS
            created = CallTrace() if is_warm_up else create
            await runtime.call("CreateContainer", pb.CreateContainerRequest(pod=sandbox, container=message), created)
            node.make_cgroups(nri_pod, replace(nri_container, resources=Resources(cpus="2-3", mems="1")))
            message.linux.resources.cpu.cpus = "2-3"
            # While the runtime creates the container, the audit reads the pod's OOM kill count.
            await asyncio.sleep(_SANDBOX_SECONDS)
            started = CallTrace() if is_warm_up else start
            await runtime.call("StartContainer", pb.StartContainerRequest(pod=sandbox, container=message), started)
            await node.stop(nri_container.id, of=nri_pod.uid)
            await node.enforcer.remove_container(nri_pod, nri_container)
            node.unprepare(cpus)
            node.unprepare(memory)


def main() -> None:
    """Prints the functions of both calls."""
    create, start = CallTrace(), CallTrace()

    def both(frame: FrameType, event: str, argument: Any) -> None:
        for trace in (create, start):
            trace(frame, event, argument)

    threading.setprofile(both)
    sys.setprofile(both)
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_containers(create, start, Path(directory)))
    sys.setprofile(None)
    print("CreateContainer", create, "", "StartContainer", start, sep="\n")


if __name__ == "__main__":
    main()
