# SPDX-License-Identifier: Apache-2.0
"""The present state of a node for ``explain``: from its files, and from the running service."""

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
"""Documents of the state endpoint (``/v1/...``) that are made use of."""


_Model = TypeVar("_Model", bound=Document)


class PublishedDevice(Document):
    """What ``/v1/devices`` says of a device beyond what machine and configuration do."""

    driver: str
    name: str
    health: str = "healthy"
    message: str = ""
    taints: tuple[str, ...] = ()
    """Keys."""


@dataclass(frozen=True)
class Known:
    """One look at a node."""

    inventory: Inventory
    config: Config
    files: Mapping[ClaimKey, ClaimFile]
    """Claims, as the service says, and those of claim files of which it says nothing: damaged ones, or all."""
    containers: tuple[ContainerReport, ...] = ()
    backend: BackendDocument | None = None
    """``/v1/backend``; None if it is not known or cannot be read."""
    published: tuple[PublishedDevice, ...] = ()
    silent: str = ""
    """Reason why the service did not answer. Then only the files are known, and no containers."""
    hindrances: tuple[str, ...] = ()
    """Reasons why no claim can run on this node at present, regardless of its requests."""
    kernel: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Files of the containers' cgroups, by container id and name, where they can be seen."""
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that are released, and hold what they had while a container of theirs may still run."""

    @property
    def exclusivity_reason(self) -> str:
        """Reason why the pool enforces all claims of the node; empty if the kernel can or nothing is reported."""
        status = self.backend.status if self.backend else None
        return status.exclusivity_reason if status else ""

    @cached_property
    def ledger(self) -> Ledger:
        """Returns the allocations."""
        releasing = {key: file for key, file in self.releasing.items() if key not in self.files}
        return Ledger(self.files, releasing, self.containers)

    @cached_property
    def devices(self) -> dict[str, tuple[str, Device]]:
        """Returns driver and device by name."""
        return {one.name: (pool.driver, one) for pool in self.inventory.pools for one in pool.devices}

    def records_of(self, uid: str) -> list[AllocationRecord]:
        """Returns what a claim was given, one record for each driver."""
        return [record for record in self.ledger.records if record.claim.uid == uid]

    def users(self, uid: str) -> list[ContainerReport]:
        """Returns the containers that name a claim, refused ones included."""
        return [one for one in self.containers if uid in one.named_claims]


def read_records(documents: Any) -> dict[ClaimKey, ClaimFile]:
    """Returns the records of ``/v1/claims``; what another release has written and cannot be read is left out."""
    found = {}
    for document in documents if isinstance(documents, list) else ():
        try:
            record = parse_record(document)
        except ContractError:
            continue
        found[record.driver, record.claim.uid] = ClaimFile.of(record)
    return found


def read_backend(document: Any) -> BackendDocument | None:
    """Returns ``/v1/backend``, or None if it cannot be read."""
    return next(_readable(BackendDocument, [document]), None)


def read_containers(documents: Any) -> tuple[ContainerReport, ...]:
    """Returns the containers of ``/v1/containers``, those left out that cannot be read."""
    return tuple(_readable(ContainerReport, documents))


def read_devices(documents: Any) -> tuple[PublishedDevice, ...]:
    """Returns the devices of ``/v1/devices``, those left out that cannot be read."""
    return tuple(_readable(PublishedDevice, documents))


def _readable(model: type[_Model], documents: Any) -> Iterator[_Model]:
    for document in documents if isinstance(documents, list) else ():
        try:
            yield model.model_validate(document)
        except ValidationError:
            continue
