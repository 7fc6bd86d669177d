# SPDX-License-Identifier: Apache-2.0
"""Writes device metadata for containers (KEP-5304): one JSON file for each request, mounted through CDI.

A record includes the contents of its files, so that a lost file can be rewritten. The files are written before the CDI
file that names them, and removed together with the CDI file. A file that cannot be written is not mounted, because a
container does not start if a mount has no source. Metadata errors never cause a claim to fail.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.cpuset import format_cpu_list
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
from numa_contract.records import AllocationRecord, MetadataFile
from numa_node.files import read_regular, replace_file

from dra_frontend.allocation.claim import ClaimView, amount_of
from dra_frontend.devices.inventory import Inventory

_log = logging.getLogger(__name__)

API_VERSION: Final = "metadata.resource.k8s.io/v1beta1"
# Attributes that contain the amount allocated from a device; they exist only in metadata files, not in slices. The CPU
# attribute has the same name as in dra-driver-cpu.
_ALLOCATED: Final = {CPU_DRIVER: "dra.cpu/allocatedNumCPUs", MEMORY_DRIVER: "dra.memory/allocatedBytes"}
_OWN_CPUS: Final = "dra.cpu/exclusiveCPUs"
_POOL_CPUS: Final = "dra.cpu/poolCPUs"
_MAX_FILE_BYTES: Final = 1 << 20


def _document(record: AllocationRecord, view: ClaimView, request: str, inventory: Inventory) -> dict[str, Any]:
    """Returns the metadata document for one request (base name). Names inside the document include the subrequest."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    driver, cpus = record.driver, _cpu_attributes(record, request)
    for result in [result for result in view.results[driver] if result.base == request]:
        attributes = dict(inventory.attributes.get((driver, result.pool, result.device), {}))
        if (amount := amount_of(driver, result)) is not None:
            attributes[_ALLOCATED[driver]] = {"int": int(amount)}
        attributes |= cpus
        entry = {"driver": driver, "pool": result.pool, "name": result.device, "attributes": attributes}
        by_name.setdefault(result.request, []).append(entry)
    claim = view.claim
    return {
        "apiVersion": API_VERSION,
        "kind": "DeviceMetadata",
        "metadata": {"name": claim.name, "namespace": claim.namespace, "uid": claim.uid, "generation": 1},
        **({} if view.pod_claim_name is None else {"podClaimName": view.pod_claim_name}),
        "requests": [{"name": name, "devices": devices} for name, devices in by_name.items()],
    }


def _cpu_attributes(record: AllocationRecord, request: str) -> dict[str, Any]:
    """Returns the claimed CPUs and the pool's CPUs as attributes if containers that use the request also use the shared
    pool; otherwise returns an empty dict.
    """
    pool = record.pool_cpus.get(request)
    sets = {_OWN_CPUS: record.cpus_of([request]), _POOL_CPUS: pool.cpus} if pool else {}
    return {name: {"string": format_cpu_list(cpus)} for name, cpus in sets.items()}


@dataclass(slots=True, eq=False)
class MetadataFiles:
    """The files under ``plugins``, the kubelet's plugin directory. Methods block and require the claims lock."""

    plugins: str = ""
    enabled: bool = False
    """True if new records get metadata files. Existing files are kept in any case."""
    on_failure: Callable[[str], object] = str
    """Callback that is called with a claim's driver name if one of the claim's files could not be written."""

    def describe(self, record: AllocationRecord, view: ClaimView, inventory: Inventory) -> AllocationRecord:
        """Returns the record with a metadata file for each request. Writes nothing.

        If the record already has a file at the correct path, that file is kept. Returns the record unchanged if
        metadata is disabled or if a file's path would be invalid.
        """
        if not self.enabled:
            return record
        claim, driver = record.claim, record.driver
        files: dict[str, MetadataFile] = {}
        try:
            for request in record.requests:
                host = metadata_host_path(self.plugins, driver, claim.namespace, claim.name, request)
                file = record.metadata.get(request)
                if file is None or file.host_path != host:
                    mounted = metadata_mount_path(driver, claim.name, view.pod_claim_name, request)
                    content = json.dumps(_document(record, view, request, inventory), separators=(",", ":"))
                    file = MetadataFile(host_path=host, mount_path=mounted, content=content)
                files[request] = file
        except MalformedError as error:
            self._give_up(record, "", error)
            return record
        return record.model_copy(update={"metadata": files})

    def write(self, record: AllocationRecord) -> AllocationRecord:
        """Writes a record's files. Returns the record without the files that cannot be written."""
        written = {request: file for request, file in record.metadata.items() if self._write(record, request, file)}
        return record if len(written) == len(record.metadata) else record.model_copy(update={"metadata": written})

    def _write(self, record: AllocationRecord, request: str, file: MetadataFile) -> bool:
        claim = record.claim
        try:
            path = metadata_host_path(self.plugins, record.driver, claim.namespace, claim.name, request)
            if path != file.host_path:
                below = f"is not under {self.plugins}"
                raise MalformedError("metadata file", file.host_path, below)
            data = file.content.encode() + b"\n"
            if len(data) > _MAX_FILE_BYTES:
                raise MalformedError("metadata file", path, f"is {len(data)} bytes long, more than {_MAX_FILE_BYTES}")
            # No fsync: after a node crash the claims are prepared again, and files that differ are rewritten.
            if not _has_content(path, data):
                # pathlib would take twice as long.
                os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
                replace_file(path, data, 0o644)
        except (OSError, ValueError) as error:  # a ContractError is a ValueError
            self._give_up(record, request, error)
            return False
        return True

    def _give_up(self, record: AllocationRecord, request: str, error: Exception) -> None:
        extra = {"claim": record.claim.full_name, "request": request, "error": str(error)}
        _log.warning("cannot write device metadata, so the container starts without it", extra=extra)
        self.on_failure(record.driver)

    def has_missing_files(self, record: AllocationRecord) -> bool:
        """Returns True if any of the record's files does not exist."""
        # Path.exists() would raise if access is denied.
        return not all(os.path.exists(file.host_path) for file in record.metadata.values())  # noqa: PTH110

    def remove(self, record: AllocationRecord, others: Iterable[ClaimFile]) -> None:
        """Removes a claim's files, unless another claim with the same name now uses them. A failed removal is retried
        when the service next starts.
        """
        claim, driver = record.claim, record.driver
        if not record.metadata or any(
            one.record and one.record.claim.name == claim.name and one.record.claim.namespace == claim.namespace
            for one in others
            if one.driver == driver
        ):
            return
        try:
            name = metadata_claim_directory(record.claim.namespace, record.claim.name)
            shutil.rmtree(Path(self.plugins) / record.driver / METADATA_DIRECTORY / name)
        except FileNotFoundError:
            return
        except (OSError, ContractError) as error:
            _log.warning("cannot remove metadata", extra={"claim": record.claim.full_name, "error": str(error)})

    def sweep(self, files: Iterable[ClaimFile]) -> None:
        """Removes files that do not belong to any claim. Removes nothing while any claim's name is unknown."""
        known = list(files)
        in_use = {_directory_key(file.record) for file in known if file.record}
        nameless = {file.driver for file in known if file.record is None}
        for driver in DRIVERS if self.plugins else ():
            try:
                root = Path(self.plugins) / driver / METADATA_DIRECTORY
                found = [] if driver in nameless or not root.exists() else sorted(root.iterdir())
            except OSError as error:  # claims work without metadata, so the error is only logged
                _log.warning("cannot list metadata files", extra={"driver": driver, "error": str(error)})
                continue
            for path in found:
                if (driver, path.name) not in in_use:
                    _log.info("removed stale metadata", extra={"path": str(path)})
                    shutil.rmtree(path, ignore_errors=True)


def _has_content(path: str, data: bytes) -> bool:
    """Returns True if a file has exactly the given contents. Reads only as much of the file as necessary."""
    try:
        return read_regular(path, len(data)) == data
    except OSError:
        return False


def _directory_key(record: AllocationRecord) -> tuple[str, str]:
    """Returns a record's driver and the name of the record's metadata directory, for comparison with existing
    directories. Paths are built only from validated names.
    """
    return record.driver, f"{record.claim.namespace}_{record.claim.name}"
