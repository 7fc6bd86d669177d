# SPDX-License-Identifier: Apache-2.0
"""What containers can read of their devices (KEP-5304): a document for each request, as a file that CDI mounts.

A record carries the documents, so that a lost file can be written again. The files are written before the CDI file
names them and removed with it. One that cannot be written is not mounted, since a container whose mount has no source
does not start; the claim itself never fails for it.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.documents import parse_json
from numa_contract.errors import ContractError, MalformedError
from numa_contract.names import (
    CPU_DRIVER,
    DRIVERS,
    MEMORY_DRIVER,
    METADATA_DIRECTORY,
    metadata_claim_directory,
    metadata_host_path,
    metadata_mount_path,
)
from numa_contract.records import AllocationRecord, AllocationResult, MetadataFile
from numa_node.files import replace_file

from dra_frontend.allocation.claim import ClaimView, amount_of
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import attribute_document

_log = logging.getLogger(__name__)

API_VERSION: Final = "metadata.resource.k8s.io/v1beta1"
# What was taken of a shared device; these are in no slice. The first name is the CPU peer's.
_ALLOCATED: Final = {CPU_DRIVER: "dra.cpu/allocatedNumCPUs", MEMORY_DRIVER: "dra.memory/allocatedBytes"}
_LARGEST: Final = 1 << 20


def with_metadata(record: AllocationRecord, view: ClaimView, inventory: Inventory, plugins: str) -> AllocationRecord:
    """Returns the record with a metadata file for each request; what it has in the right place already stays.

    ``plugins`` is the kubelet's directory of plugins. Raises MalformedError when a name may not be part of a path.
    """
    claim, driver = record.claim, record.driver
    files: dict[str, MetadataFile] = {}
    for request in record.requests:
        host = metadata_host_path(plugins, driver, claim.namespace, claim.name, request)
        known = record.metadata.get(request)
        if known is not None and known.host_path == host:
            files[request] = known
            continue
        mounted = metadata_mount_path(driver, claim.name, view.pod_claim_name, request)
        content = json.dumps(_document(view, driver, request, inventory), separators=(",", ":"))
        files[request] = MetadataFile(host_path=host, mount_path=mounted, content=content)
    return record.model_copy(update={"metadata": files})


def _document(view: ClaimView, driver: str, request: str, inventory: Inventory) -> dict[str, Any]:
    """Returns the document of one request (base name); inside, a request keeps its full name with the subrequest."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for result in view.results[driver]:
        if result.base == request:
            by_name.setdefault(result.request, []).append(_device(driver, result, inventory))
    claim = view.claim
    return {
        "apiVersion": API_VERSION,
        "kind": "DeviceMetadata",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **({} if view.pod_claim_name is None else {"podClaimName": view.pod_claim_name}),
        "requests": [{"name": name, "devices": devices} for name, devices in by_name.items()],
    }


def _device(driver: str, result: AllocationResult, inventory: Inventory) -> dict[str, Any]:
    device, taken = inventory.device(driver, result.pool, result.device), amount_of(driver, result)
    attributes = {} if device is None else {n: attribute_document(v) for n, v in device.attributes.items()}
    if taken is not None:
        attributes[_ALLOCATED[driver]] = attribute_document(int(taken))
    return {"driver": driver, "pool": result.pool, "name": result.device, "attributes": attributes}


def _uncounted(_driver: str) -> None:
    """Counts nothing."""


class MetadataFiles:
    """The files below ``plugins``, the kubelet's directory of plugins. Blocks; wants the claims lock to be held."""

    def __init__(self, plugins: str = "", *, enabled: bool = False, failed: Callable[[str], None] = _uncounted) -> None:
        self._plugins = plugins
        self.enabled = enabled
        """Whether new records get metadata; files of those that have it are kept in any case."""
        self._failed = failed

    def describe(self, record: AllocationRecord, view: ClaimView, inventory: Inventory) -> AllocationRecord:
        """Returns the record with what its containers shall know, as far as names allow it. Writes nothing."""
        try:
            return with_metadata(record, view, inventory, self._plugins)
        except MalformedError as error:
            self._give_up(record, "", error)
            return record

    def place(self, record: AllocationRecord) -> AllocationRecord:
        """Makes the files say what the record says; returns it without those that cannot be written."""
        placed = {request: file for request, file in record.metadata.items() if self._placed(record, request, file)}
        return record if len(placed) == len(record.metadata) else record.model_copy(update={"metadata": placed})

    def missing(self, record: AllocationRecord) -> bool:
        """Tells whether a file of the record is gone."""
        # Not Path.exists(), which raises where even that is denied.
        return not all(os.path.exists(file.host_path) for file in record.metadata.values())  # noqa: PTH110

    def remove(self, record: AllocationRecord, others: Iterable[ClaimFile]) -> None:
        """Removes a claim's files, unless a namesake of it has taken their place. What stays goes at the next start."""
        if not record.metadata or any(other.record and _place(other.record) == _place(record) for other in others):
            return
        try:
            shutil.rmtree(
                self._root(record.driver) / metadata_claim_directory(record.claim.namespace, record.claim.name)
            )
        except FileNotFoundError:
            return
        except (OSError, ContractError) as error:
            _log.warning("metadata not removed", extra={"claim": str(record.claim), "error": str(error)})

    def sweep(self, files: Iterable[ClaimFile]) -> None:
        """Removes what belongs to no claim; nothing while there is a claim whose name is not known."""
        known = list(files)
        in_use = {_place(file.record) for file in known if file.record}
        for driver in DRIVERS if self._plugins else ():
            if any(file.record is None and file.driver == driver for file in known):
                continue
            for path in self._places(driver):
                if (driver, path.name) not in in_use:
                    _log.info("metadata of no claim removed", extra={"path": str(path)})
                    shutil.rmtree(path, ignore_errors=True)

    def _places(self, driver: str) -> list[Path]:
        """Returns the directories of all claims; none where they cannot be listed: no claim needs that."""
        try:
            return sorted(self._root(driver).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            _log.warning("metadata files cannot be listed", extra={"driver": driver, "error": str(error)})
            return []

    def _root(self, driver: str) -> Path:
        return Path(self._plugins) / driver / METADATA_DIRECTORY

    def _placed(self, record: AllocationRecord, request: str, file: MetadataFile) -> bool:
        claim = record.claim
        try:
            path = metadata_host_path(self._plugins, record.driver, claim.namespace, claim.name, request)
            if path != file.host_path:
                raise MalformedError(
                    "metadata file", file.host_path, f"is not below {self._plugins}, where the host is"
                )
            document = parse_json(file.content.encode(), _LARGEST, "metadata file", path)
            _write(Path(path), json.dumps(document, indent=2).encode() + b"\n")
        except (OSError, ValueError) as error:  # a ContractError is a ValueError
            self._give_up(record, request, error)
            return False
        return True

    def _give_up(self, record: AllocationRecord, request: str, error: Exception) -> None:
        extra = {"claim": str(record.claim), "request": request, "error": str(error)}
        _log.warning("container gets no metadata", extra=extra)
        self._failed(record.driver)


def _place(record: AllocationRecord) -> tuple[str, str]:
    """Returns driver and directory of a record's files, to compare by: paths are made of checked names only."""
    return record.driver, f"{record.claim.namespace}_{record.claim.name}"


def _write(path: Path, data: bytes) -> None:
    # No fsync: after a crash of the node the claims are prepared again, and a file that differs is written again.
    if not path.is_file() or path.read_bytes() != data:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        replace_file(str(path), data, 0o644)
