# SPDX-License-Identifier: Apache-2.0
"""A node's current state, which ``explain`` reads from files on the node and from the running service."""

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
"""Documents that ``explain`` reads from the state endpoint (``/v1/...``)."""


_Model = TypeVar("_Model", bound=Document)


class PublishedDevice(Document):
    """A device in ``/v1/devices``, with only the fields that ``explain`` cannot derive from the machine and the
    configuration.
    """

    driver: str
    name: str
    health: str = "healthy"
    message: str = ""
    taints: tuple[str, ...] = ()
    """Keys of the device's taints."""


@dataclass(frozen=True)
class NodeSnapshot:
    """Snapshot of a node's state."""

    inventory: Inventory
    config: Config
    files: Mapping[ClaimKey, ClaimFile]
    """Claims that the service reports, plus damaged claims from the claim files. While the service is down, all claims
    come from the claim files.
    """
    containers: tuple[ContainerReport, ...] = ()
    backend: BackendDocument | None = None
    """The ``/v1/backend`` document, or None if it is unknown or unreadable."""
    published: tuple[PublishedDevice, ...] = ()
    no_response: str = ""
    """Reason why the service did not respond, or "" if it did. If it did not, the containers are unknown."""
    refusal_reasons: tuple[str, ...] = ()
    """Reasons why this node currently accepts no claims, whatever they request."""
    kernel: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Contents of the containers' cgroup files, if readable, by container id and file name."""
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that are being released. A claim keeps its resources while one of its containers may still be running."""

    @property
    def exclusivity_reason(self) -> str:
        """Reason why all of the node's claims are enforced by the shared pool, or "" if they are enforced by cpuset
        partitions or the reason is unknown.
        """
        status = self.backend.status if self.backend else None
        return status.exclusivity_reason if status else ""

    @cached_property
    def ledger(self) -> Ledger:
        """Returns the allocations of all claims."""
        releasing = {key: file for key, file in self.releasing.items() if key not in self.files}
        return Ledger(self.files, releasing, self.containers)

    @cached_property
    def devices(self) -> dict[str, tuple[str, Device]]:
        """Returns each device and its driver by device name."""
        return {one.name: (pool.driver, one) for pool in self.inventory.pools for one in pool.devices}

    def records_of(self, uid: str) -> list[AllocationRecord]:
        """Returns a claim's allocation records, one for each driver."""
        return [record for record in self.ledger.records if record.claim.uid == uid]

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the containers that use a claim, including rejected ones."""
        return [one for one in self.containers if uid in one.named_claims]


def read_records(documents: Any) -> dict[ClaimKey, ClaimFile]:
    """Returns the records in ``/v1/claims``. Skips records that cannot be read because another release wrote them."""
    found = {}
    for document in documents if isinstance(documents, list) else ():
        try:
            record = parse_record(document)
        except ContractError:
            continue
        found[record.driver, record.claim.uid] = ClaimFile.of(record)
    return found


def read_backend(document: Any) -> BackendDocument | None:
    """Returns the ``/v1/backend`` document, or None if it is unreadable."""
    return next(_readable(BackendDocument, [document]), None)


def read_containers(documents: Any) -> tuple[ContainerReport, ...]:
    """Returns the containers in ``/v1/containers``, skipping those that cannot be read."""
    return tuple(_readable(ContainerReport, documents))


def read_devices(documents: Any) -> tuple[PublishedDevice, ...]:
    """Returns the devices in ``/v1/devices``, skipping those that cannot be read."""
    return tuple(_readable(PublishedDevice, documents))


def _readable(model: type[_Model], documents: Any) -> Iterator[_Model]:
    for document in documents if isinstance(documents, list) else ():
        try:
            yield model.model_validate(document)
        except ValidationError:
            continue
