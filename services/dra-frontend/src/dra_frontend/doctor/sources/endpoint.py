# SPDX-License-Identifier: Apache-2.0
"""The state endpoint of the service of this pod, asked over its unix socket. Every call blocks, for a few seconds."""

import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

from numa_contract.names import STATE_SOCKET
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus, ContainerReport
from pydantic import BaseModel, ValidationError

from dra_frontend.doctor.facts import Service
from dra_frontend.doctor.model import Unread
from dra_frontend.node.state_client import NoServiceError, StateClient

_SECONDS: Final = 5.0
_UNAVAILABLE: Final = 503
_Model = TypeVar("_Model", bound=BaseModel)


def find_service(run_directory: Path, pod_uid: str) -> StateClient:
    """Returns the service of this pod, or the active one of the node where this is not the driver's pod."""
    own = run_directory / pod_uid
    return StateClient(own if (own / STATE_SOCKET).exists() else run_directory)


def is_served(path: Path) -> bool:
    """Tells whether somebody listens at a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_SECONDS)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def _read(model: type[_Model], documents: Any) -> tuple[_Model, ...]:
    """Returns the documents that can be read: one of a newer release must not hide the others."""
    found = []
    for document in documents if isinstance(documents, Iterable) else ():
        try:
            found.append(model.model_validate(document))
        except ValidationError:
            continue
    return tuple(found)


def read_service(client: StateClient) -> tuple[Service | Unread, BackendStatus | Unread]:
    """Returns what the service says of itself and of its backend."""
    try:
        lines = client.text("/readyz", also=_UNAVAILABLE).splitlines()
        backend = client.document("/v1/backend")
        service = Service(
            version=str(client.document("/v1/version").get("version", "")),
            problems=tuple(one for one in lines if one != "ok" and not one.startswith("warning: ")),
            warnings=tuple(one.removeprefix("warning: ") for one in lines if one.startswith("warning: ")),
            backend_problem=str(backend["problem"]),
            records=_read(AllocationRecord, client.document("/v1/claims")),
            containers=_read(ContainerReport, client.document("/v1/containers")),
            quarantine=dict(client.document("/v1/quarantine")),
            devices=tuple(client.document("/v1/devices")),
        )
        status = _read(BackendStatus, [backend["status"]])
    except (NoServiceError, KeyError, TypeError, ValueError, AttributeError) as error:
        down = Unread(str(error), "see the log of the container frontend, and driver.endpoint")
        return down, down
    if not status:
        return service, Unread("the backend has not reported yet", "see the log of the container backend")
    return service, status[0]
