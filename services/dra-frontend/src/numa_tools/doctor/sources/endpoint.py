# SPDX-License-Identifier: Apache-2.0
"""Queries the state endpoint of this pod's service over its unix socket. Every call blocks for up to a few seconds."""

import socket
from pathlib import Path
from typing import Final

from dra_frontend.allocation.ledger import Ledger
from numa_contract.names import STATE_SOCKET
from numa_contract.reports import BackendStatus
from numa_contract.state.devices import DeviceDocument
from numa_contract.state.status import StatusDocument
from pydantic import ValidationError

from numa_tools.doctor.facts import Service
from numa_tools.doctor.model import Unread
from numa_tools.explain.snapshot import read_containers, read_records
from numa_tools.state_client import NoServiceError, StateClient

_TIMEOUT_SECONDS: Final = 5.0


def find_service(run_directory: Path, pod_uid: str) -> StateClient:
    """Returns a client for this pod's service or, outside the driver's pod, for the node's active service."""
    own = run_directory / pod_uid
    return StateClient(own if (own / STATE_SOCKET).exists() else run_directory)


def is_served(path: Path) -> bool:
    """Returns True if a process is listening on a unix socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_TIMEOUT_SECONDS)
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def read_service(client: StateClient) -> tuple[Service | Unread, BackendStatus | Unread]:
    """Returns what the service reports about itself and its backend."""
    try:
        backend = client.document("/v1/backend")
        service = Service(
            status=client.read("/v1/status", StatusDocument),
            records=tuple(Ledger(read_records(client.document("/v1/claims"))).records),
            containers=read_containers(client.document("/v1/containers")),
            quarantine=dict(client.document("/v1/quarantine")),
            devices=client.read_list("/v1/devices", DeviceDocument),
        )
        reported = backend["status"]
    except (NoServiceError, KeyError, TypeError, ValueError, AttributeError) as error:
        down = Unread(str(error), "see the frontend container's log, and driver.endpoint")
        return down, down
    try:
        return service, BackendStatus.model_validate(reported)
    except ValidationError:
        return service, Unread("the backend has not reported yet", "see the backend container's log")
