# SPDX-License-Identifier: Apache-2.0
"""The metadata files of claims on the host (KEP-5304), which the claims' CDI devices mount into containers.

They follow the records: written before the CDI file names them, removed with it. A file that cannot be written is not
mounted, since a container whose mount has no source does not start; the claim itself never fails for it.
"""

import json
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

from numa_contract.cdi import ClaimFile
from numa_contract.errors import ContractError, MalformedError
from numa_contract.names import DRIVERS, METADATA_DIRECTORY, metadata_claim_directory, metadata_host_path
from numa_contract.records import AllocationRecord, MetadataFile

from dra_frontend.allocation.claim import ClaimView
from dra_frontend.claims.metadata import with_metadata
from dra_frontend.devices.inventory import Inventory

_LOG = logging.getLogger(__name__)


def _unheard(_driver: str) -> None:
    """Tells nobody."""


class MetadataFiles:
    """The files below ``plugins``, the kubelet's directory of plugins. Blocks; wants the claims lock to be held."""

    def __init__(self, plugins: str = "", *, enabled: bool = False, failed: Callable[[str], None] = _unheard) -> None:
        self._plugins = plugins
        self._enabled = enabled
        self._failed = failed

    def describe(self, record: AllocationRecord, claim: ClaimView, inventory: Inventory) -> AllocationRecord:
        """Returns the record with what its containers shall be told, unless that is switched off. Writes nothing."""
        if not self._enabled:
            return record
        try:
            return with_metadata(record, claim, inventory, self._plugins)
        except MalformedError as error:
            self._give_up(record, "", error)
            return record

    def place(self, record: AllocationRecord) -> AllocationRecord:
        """Makes the files say what the record says; returns it without those that cannot be written."""
        placed = {request: file for request, file in record.metadata.items() if self._placed(record, request, file)}
        return record if len(placed) == len(record.metadata) else record.model_copy(update={"metadata": placed})

    def missing(self, record: AllocationRecord) -> bool:
        """Tells whether a file of the record is gone."""
        # Not Path.exists(), which raises where even the look is denied.
        return not all(os.path.exists(file.host_path) for file in record.metadata.values())  # noqa: PTH110

    def remove(self, record: AllocationRecord, others: Iterable[ClaimFile]) -> None:
        """Removes a claim's files, unless a namesake of it has taken their place. What stays goes at the next start."""
        if not record.metadata or any(other.record and _place(other.record) == _place(record) for other in others):
            return
        try:
            directory = metadata_claim_directory(record.claim.namespace, record.claim.name)
            shutil.rmtree(self._root(record.driver) / directory)
        except FileNotFoundError:
            return
        except (OSError, ContractError) as error:
            _LOG.warning("metadata not removed claim=%s error=%s", record.claim, error)

    def sweep(self, files: Iterable[ClaimFile]) -> None:
        """Removes what belongs to no claim; nothing while there is a claim whose name cannot be told."""
        known = list(files)
        in_use = {_place(file.record) for file in known if file.record}
        for driver in DRIVERS if self._plugins else ():
            if any(file.record is None and file.driver == driver for file in known):
                continue
            for path in self._places(driver):
                if (driver, path.name) not in in_use:
                    _LOG.info("metadata of no claim removed path=%s", path)
                    shutil.rmtree(path, ignore_errors=True)

    def _places(self, driver: str) -> list[Path]:
        """Returns the directories of all claims; none where they cannot be listed: no claim needs that."""
        try:
            return sorted(self._root(driver).iterdir())
        except FileNotFoundError:
            return []
        except OSError as error:
            _LOG.warning("metadata files cannot be listed driver=%s error=%s", driver, error)
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
            _write(Path(path), json.dumps(json.loads(file.content), indent=2) + "\n")
        except (OSError, ContractError, ValueError) as error:
            self._give_up(record, request, error)
            return False
        return True

    def _give_up(self, record: AllocationRecord, request: str, error: Exception) -> None:
        _LOG.warning("container gets no metadata claim=%s request=%s error=%s", record.claim, request, error)
        self._failed(record.driver)


def _place(record: AllocationRecord) -> tuple[str, str]:
    """Returns driver and directory of a record's files, to compare by: paths are made of checked names only."""
    return record.driver, f"{record.claim.namespace}_{record.claim.name}"


def _write(path: Path, text: str) -> None:
    # No fsync: after a crash of the node the claims are prepared again, and a file that differs is written again.
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "w", encoding="utf-8") as file:  # noqa: PTH123
            file.write(text)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
