# SPDX-License-Identifier: Apache-2.0
"""Fake DRA drivers for other hardware, for claims that combine their devices with this driver's. They register with the
kubelet, and Prepare succeeds for every claim.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import grpc

from tests.fakes._pb import dra_v1_pb2, dra_v1_pb2_grpc, pluginregistration_pb2, pluginregistration_pb2_grpc
from tests.node.rig.wait import until

Document = dict[str, Any]


def slice_document(driver: str, node: str, attribute: str, numa_node: int) -> Document:
    """Returns a ResourceSlice in which a driver publishes one device near a NUMA node."""
    device = {"name": "one", "attributes": {attribute: {"int": numa_node}}}
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": driver},
        "spec": {"driver": driver, "nodeName": node, "pool": pool, "devices": [device]},
    }


def class_document(driver: str) -> Document:
    """Returns the DeviceClass for a driver's devices."""
    selector = {"cel": {"expression": f'device.driver == "{driver}"'}}
    return {"metadata": {"name": driver}, "spec": {"selectors": [selector]}}


@contextmanager
def registered(driver: str, root: Path) -> Iterator[None]:
    """Runs a driver for the kubelet with this root directory. When the block begins, the kubelet has registered the
    driver.
    """
    socket = root / f"plugins_registry/{driver}.sock"
    socket.parent.mkdir(parents=True, exist_ok=True)
    socket.unlink(missing_ok=True)
    server, registration = grpc.server(ThreadPoolExecutor(2)), _Registration(driver, str(socket))
    pluginregistration_pb2_grpc.add_RegistrationServicer_to_server(registration, server)
    dra_v1_pb2_grpc.add_DRAPluginServicer_to_server(_Plugin(), server)
    server.add_insecure_port(f"unix:{socket}")
    server.start()
    try:
        until(registration.notified.is_set, f"the kubelet has registered {driver}")
        yield
    finally:
        server.stop(None).wait()
        socket.unlink(missing_ok=True)


class _Registration(pluginregistration_pb2_grpc.RegistrationServicer):
    def __init__(self, driver: str, socket: str) -> None:
        self.notified = Event()
        self._info = pluginregistration_pb2.PluginInfo(
            type="DRAPlugin", name=driver, endpoint=socket, supported_versions=["v1.DRAPlugin"]
        )

    def GetInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802 - name of the protocol
        return self._info

    def NotifyRegistrationStatus(self, _status: Any, _context: Any) -> Any:  # noqa: N802 - name of the protocol
        self.notified.set()
        return pluginregistration_pb2.RegistrationStatusResponse()


class _Plugin(dra_v1_pb2_grpc.DRAPluginServicer):
    """Prepares every claim without returning a device."""

    def NodePrepareResources(self, request: Any, _context: Any) -> Any:  # noqa: N802 - name of the protocol
        answer = dra_v1_pb2.NodePrepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].SetInParent()
        return answer

    def NodeUnprepareResources(self, request: Any, _context: Any) -> Any:  # noqa: N802 - name of the protocol
        answer = dra_v1_pb2.NodeUnprepareResourcesResponse()
        for claim in request.claims:
            answer.claims[claim.uid].SetInParent()
        return answer
