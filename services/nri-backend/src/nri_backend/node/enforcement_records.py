# SPDX-License-Identifier: Apache-2.0
"""Stores the enforcement records of running containers. Every call blocks.

An enforcement record is a file with the claims that were applied to one container's cgroup. It lies in a directory of
the backend where no pod can write, since a record is sufficient to give its container CPUs: if the claim's own record
is lost, the container becomes an orphan, which keeps its CPUs until it ends (enforcement/recorder.py).

A record contains the inode of the cgroup, which no other cgroup has until the next reboot. A container with the same id
after a reboot, or one that was given this id on purpose, has another inode, and the record does not apply to it.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Final

from numa_contract.documents import parse_json
from numa_contract.errors import ContractError, MalformedError
from numa_contract.records import Document, check_version
from numa_node.files import read_regular, replace_file
from pydantic import Field, ValidationError

from nri_backend.claims.entitlement import Held
from nri_backend.nri.model import Pod

DIRECTORY: Final = "enforcement-records"
PINS: Final = "kubelet-pins.json"
"""Name of the file of pins, which lies next to the directory of enforcement records."""
_log = logging.getLogger(__name__)
VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
"""Maximum size of an enforcement record, for writes and reads. The claim records of 64 claims, with 32 requests and
metadata each, take 5 MB."""
MAX_PINS_BYTES: Final = 1 << 20
"""Maximum size of the file of pins, sufficient for about 10,000 containers."""
Pins = Mapping[str, frozenset[str]]
"""Static managers of the kubelet that requests for a container have shown, by container id."""


class EnforcementRecord(Document):
    """The claims that were applied to one container's cgroup."""

    version: int = VERSION
    container: str
    """Container id."""
    name: str = ""
    pod: Pod = Pod("", "", "", "", "")
    cgroup: str = ""
    pod_cgroup: str = ""
    inode: Annotated[int, Field(ge=0)]
    """Inode of the container's cgroup. 0 before the cgroup exists: nothing has been applied to it yet."""
    answered: bool = False
    """True if the limits in the runtime include the claimed hugepages, which an answer of this plugin has added."""
    claims: tuple[Held, ...] = ()
    pooled: str = ""
    """Reason why the pool enforces the CPU claims although the cgroup should be a partition; empty if it does not."""


class KubeletPins(Document):
    """The content of the file of pins."""

    version: int = VERSION
    containers: dict[str, frozenset[str]] = Field(default_factory=dict)


def record_name(container_id: str) -> str | None:
    """Returns the file name of a container's record, or None for an id that no runtime generates."""
    fits = 0 < len(container_id) <= 128 and container_id.isascii()
    return f"{container_id}.json" if fits and container_id.replace("-", "").replace("_", "").isalnum() else None


def dump_record(record: EnforcementRecord) -> bytes:
    """Serializes a record."""
    return record.model_dump_json().encode()


def parse_enforcement_record(name: str, data: bytes) -> EnforcementRecord:
    """Parses a record. Raises ContractError if it is damaged, of another container, or of an unsupported version."""
    document = parse_json(data, MAX_BYTES, "enforcement record", name)
    check_version("enforcement record", document, VERSION)
    try:
        record = EnforcementRecord.model_validate(document)
    except ValidationError as error:
        raise MalformedError("enforcement record", name, str(error)) from error
    if record_name(record.container) != name:
        raise MalformedError("enforcement record", name, "is of another container")
    return record


class EnforcementRecords:
    """The directory with one file for each container with claims, and the file of pins next to it."""

    def __init__(self, own_directory: str) -> None:
        self._path = f"{own_directory}/{DIRECTORY}"
        self._pins = f"{own_directory}/{PINS}"

    def load(self, container_ids: Iterable[str]) -> dict[str, EnforcementRecord]:
        """Returns the records of these containers. Those that do not exist or cannot be read are left out."""
        found: dict[str, EnforcementRecord] = {}
        for container_id in container_ids:
            if (name := record_name(container_id)) is None:
                continue
            try:
                found[container_id] = parse_enforcement_record(name, read_regular(f"{self._path}/{name}", MAX_BYTES))
            except FileNotFoundError:
                continue
            except (OSError, ContractError) as error:
                _log.warning("an enforcement record cannot be read", extra={"id": container_id, "error": str(error)})
        return found

    def write(self, record: EnforcementRecord) -> None:
        """Writes a record. Raises OSError, also if the record is too large to be read again."""
        if (name := record_name(record.container)) is not None:
            data, path = dump_record(record), f"{self._path}/{name}"
            if len(data) > MAX_BYTES:
                raise OSError(errno.EFBIG, f"would have {len(data)} bytes, more than {MAX_BYTES}", path)
            os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
            replace_file(path, data, 0o600)

    def load_pins(self) -> Pins:
        """Returns the stored pins. Returns none if there is no file or if it cannot be read."""
        try:
            document = parse_json(read_regular(self._pins, MAX_PINS_BYTES), MAX_PINS_BYTES, "kubelet pins", PINS)
            check_version("kubelet pins", document, VERSION)
            return KubeletPins.model_validate(document).containers
        except FileNotFoundError:
            return {}
        except (OSError, ContractError, ValidationError) as error:
            _log.warning("the file of kubelet pins cannot be read", extra={"error": str(error)})
            return {}

    def write_pins(self, pins: Pins) -> None:
        """Replaces the stored pins. Raises OSError."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
        replace_file(self._pins, KubeletPins(containers=dict(pins)).model_dump_json().encode(), 0o600)

    def ids(self) -> set[str]:
        """Returns the ids of the containers that have a record."""
        try:
            names = os.listdir(self._path)  # noqa: PTH208
        except OSError:
            return set()
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    def retain(self, container_ids: Collection[str]) -> set[str]:
        """Removes the records of all other containers, and temporary files of a crash. Returns the remaining ids."""
        kept = {record_name(container_id) for container_id in container_ids}
        names: set[str] = set()
        with contextlib.suppress(OSError):
            names.update(os.listdir(self._path))  # noqa: PTH208
        for name in names - kept:
            # If one entry cannot be removed, such as a stray directory, the others are removed all the same.
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{name}")  # noqa: PTH108
        return self.ids()
