# SPDX-License-Identifier: Apache-2.0
"""Current state of a node for ``explain``, from its files and the running service."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import Device
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.errors import ContractError
from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord, Document, parse_record
from numa_contract.reports import ContainerReport
from numa_contract.state.service import BackendDocument
from pydantic import ValidationError

STATE_PATHS = ("claims", "containers", "backend", "devices")
"""Documents of the state endpoint (``/v1/...``) that are used."""


_Model = TypeVar("_Model", bound=Document)


class PublishedDevice(Document):
    """Fields of ``/v1/devices`` that cannot be derived from machine and configuration."""

    driver: str
    name: str
    health: str = "healthy"
    message: str = ""
    taints: tuple[str, ...] = ()
    """Keys of the taints."""


@dataclass(frozen=True)
class Known:
    """Snapshot of a node."""

    inventory: Inventory
    config: Config
    files: Mapping[ClaimKey, ClaimFile]
    """Claims as reported by the service. Claim files add damaged claims, or all claims if the service is silent."""
    containers: tuple[ContainerReport, ...] = ()
    backend: BackendDocument | None = None
    """Document of ``/v1/backend``, or None if it is unknown or unreadable."""
    published: tuple[PublishedDevice, ...] = ()
    silent: str = ""
    """Reason why the service did not answer, or "". Without the service, containers are unknown."""
    hindrances: tuple[str, ...] = ()
    """Reasons why this node cannot run any claim at present, regardless of its requests."""
    kernel: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Cgroup files of the containers by container id and file name, if visible."""
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims being released. They keep their resources while one of their containers may still run."""

    @property
    def exclusivity_reason(self) -> str:
        """Reason why the pool enforces all claims of the node, or "" if the kernel does or it is unknown."""
        status = self.backend.status if self.backend else None
        return status.exclusivity_reason if status else ""

    @cached_property
    def ledger(self) -> Ledger:
        """Returns the allocations."""
        releasing = {key: file for key, file in self.releasing.items() if key not in self.files}
        return Ledger(self.files, releasing, self.containers)

    @cached_property
    def devices(self) -> dict[str, tuple[str, Device]]:
        """Returns driver and device by device name."""
        return {one.name: (pool.driver, one) for pool in self.inventory.pools for one in pool.devices}

    def records_of(self, uid: str) -> list[AllocationRecord]:
        """Returns the allocation records of a claim, one for each driver."""
        return [record for record in self.ledger.records if record.claim.uid == uid]

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the containers that use a claim, including rejected ones."""
        return [one for one in self.containers if uid in one.named_claims]


def read_records(documents: Any) -> dict[ClaimKey, ClaimFile]:
    """Returns the records of ``/v1/claims``. Skips unreadable ones, which another release wrote."""
    found = {}
    for document in documents if isinstance(documents, list) else ():
        try:
            record = parse_record(document)
        except ContractError:
            continue
        found[record.driver, record.claim.uid] = ClaimFile.of(record)
    return found


def read_backend(document: Any) -> BackendDocument | None:
    """Returns the document of ``/v1/backend``, or None if it is unreadable."""
    return next(_readable(BackendDocument, [document]), None)


def read_containers(documents: Any) -> tuple[ContainerReport, ...]:
    """Returns the containers of ``/v1/containers``, without unreadable ones."""
    return tuple(_readable(ContainerReport, documents))


def read_devices(documents: Any) -> tuple[PublishedDevice, ...]:
    """Returns the devices of ``/v1/devices``, without unreadable ones."""
    return tuple(_readable(PublishedDevice, documents))


def _readable(model: type[_Model], documents: Any) -> Iterator[_Model]:
    for document in documents if isinstance(documents, list) else ():
        try:
            yield model.model_validate(document)
        except ValidationError:
            continue
