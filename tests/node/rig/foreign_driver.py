# SPDX-License-Identifier: Apache-2.0
"""DRA drivers of other hardware, for claims that join their devices with ours: they register and prepare any claim."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from tests.fakes._pb import dra_v1_pb2, pluginregistration_pb2
from tests.node.rig.wait import until

Document = dict[str, Any]


def slice_document(driver: str, node: str, attribute: str, numa_node: int) -> Document:
    """A ResourceSlice with one device of a driver, which is near a NUMA node."""
    device = {"name": "one", "attributes": {attribute: {"int": numa_node}}}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": driver},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [device]},
    }


def class_document(driver: str) -> Document:
    """The DeviceClass of a driver."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return {"metadata": {"name": driver}, "spec": {"selectors": [selector]}}


@contextmanager
def registered(driver: str, root: Path) -> Iterator[None]:
    """Serves a driver to the kubelet with this root directory; in the block the kubelet has registered it."""
    socket = root / f"plugins_registry/{driver}.sock"
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    server, told = grpc.server(ThreadPoolExecutor(2)), Event()

    def notified(_status: Any) -> Any:
        told.set()
        return pluginregistration_pb2.RegistrationStatusResponse()

    info = pluginregistration_pb2.PluginInfo(
        type="DRAPlugin", name=driver, endpoint=str(socket), supported_versions=["v1.DRAPlugin"]
    )
    registration = {
        "GetInfo": _handler(pluginregistration_pb2.InfoRequest, lambda _: info),
        "NotifyRegistrationStatus": _handler(pluginregistration_pb2.RegistrationStatus, notified),
    }
    plugin = {
        "NodePrepareResources": _handler(dra_v1_pb2.NodePrepareResourcesRequest, _prepared),
        "NodeUnprepareResources": _handler(dra_v1_pb2.NodeUnprepareResourcesRequest, _unprepared),
    }
    for service, handlers in {
        "pluginregistration.Registration": registration,
        "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin": plugin,
    }.items():
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        until(told.is_set, f"the kubelet registers {driver}")
        yield
    finally:
        server.stop(None).wait()
        socket.unlink(missing_ok=True)


def _handler(request: Any, answer: Callable[[Any], Any]) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        lambda message, _: answer(message),
        request_deserializer=request.FromString,
        response_serializer=lambda message: message.SerializeToString(),
    )


def _prepared(request: Any) -> Any:
    answer = dra_v1_pb2.NodePrepareResourcesResponse()
    for claim in request.claims:
        answer.claims[claim.uid].SetInParent()
    return answer


def _unprepared(request: Any) -> Any:
    answer = dra_v1_pb2.NodeUnprepareResourcesResponse()
    for claim in request.claims:
        answer.claims[claim.uid].SetInParent()
    return answer
