# SPDX-License-Identifier: Apache-2.0
"""Defines the API server requests that only the doctor sends. Each is sent once and not retried."""

from typing import Final

from dra_frontend.api_server.connection import Connection
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.api_server.requests import Call, Document
from dra_frontend.api_server.responses import MAX_BYTES, read_list
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, shown
from numa_contract.names import DRIVERS

_RESOURCES: Final = "resource.k8s.io"
RIGHTS: Final = (
    *((verb, _RESOURCES, "resourceslices", "") for verb in ("list", "watch", "create", "update", "delete")),
    *((verb, _RESOURCES, "resourceclaims", "") for verb in ("get", "list")),
    ("patch", _RESOURCES, "resourceclaims/status", ""),
    *(("associated-node:patch", _RESOURCES, "resourceclaims/driver", driver) for driver in DRIVERS),
    *((verb, _RESOURCES, "deviceclasses", "") for verb in ("get", "list")),
    ("get", "", "nodes", ""),
    *((verb, "events.k8s.io", "events", "") for verb in ("create", "patch")),
)
"""The driver's rights in the chart's ClusterRole: verb, group, resource and name."""
RIGHTS_ON_DEMAND: Final = (("watch", _RESOURCES, "resourceclaims", ""),)
"""Additional rights that are required for hugepagesOnDemand."""


class _Version(Call):
    """Request for the server's version. Its path does not belong to an API group, and the ClusterRole
    system:public-info-viewer grants access to it.
    """

    @property
    def path(self) -> str:
        """Path on the server."""
        return "/version"


class _Configz(Call):
    """Request through the API server's node proxy for the kubelet's effective configuration, including flags."""

    @property
    def path(self) -> str:
        """Path on the server."""
        return f"{super().path}/configz"


class Inquiry:
    """Queries over one connection. All failures raise KubeError."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def server_version(self) -> str:
        """Returns the server's version, such as ``v1.36.1``."""
        document = await self._request(_Version("get", "", "version"))
        return str(document.get("gitVersion", ""))

    async def kubelet_config(self, node: str) -> Document:
        """Returns a node's effective KubeletConfiguration. Requires ``get`` on ``nodes/proxy``."""
        document = await self._request(_Configz("get", "", "nodes/proxy", node))
        found = document.get("kubeletconfig")
        if not isinstance(found, dict):
            raise UnavailableError("get nodes/proxy", f"the response has no kubeletconfig: {shown(document)}")
        return found

    async def list_classes(self) -> frozenset[str]:
        """Returns the names of all DeviceClasses."""
        call = Call("list", "resource.k8s.io", "deviceclasses")
        items, _ = read_list(call, await self._connection.execute(call), "DeviceClass")
        return frozenset(item["metadata"]["name"] for item in items)

    async def has_right(self, verb: str, group: str, resource: str, name: str = "") -> bool:
        """Returns True if RBAC grants the caller this right. Every user may send this request (system:basic-user).

        An empty name means all objects.
        """
        base, _, part = resource.partition("/")
        attributes = {"verb": verb, "group": group, "resource": base, "subresource": part, "name": name}
        body = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SelfSubjectAccessReview",
            "spec": {"resourceAttributes": {key: value for key, value in attributes.items() if value}},
        }
        document = await self._request(Call("create", "authorization.k8s.io", "selfsubjectaccessreviews", body=body))
        status = document.get("status")
        return isinstance(status, dict) and status.get("allowed") is True

    async def _request(self, call: Call) -> Document:
        try:
            document = parse_json(await self._connection.execute(call), MAX_BYTES, "answer", call.operation)
        except MalformedError as error:
            raise UnavailableError(call.operation, f"the response {error.reason}; is this an API server?") from error
        if not isinstance(document, dict):
            raise UnavailableError(call.operation, f"the response is {shown(document)}; is this an API server?")
        return document
