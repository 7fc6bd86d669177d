# SPDX-License-Identifier: Apache-2.0
"""The proofs of running containers: what was made true for each, kept where no pod can write. Every call blocks.

A proof alone makes an orphan that keeps CPUs. It belongs to one cgroup: a container of the same id after a reboot, or
one that a forger names so, has another inode.
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

DIRECTORY: Final = "proofs"
PINS: Final = "kubelet-pins.json"
"""Name of the file of pins, which lies next to the directory of proofs."""
_log = logging.getLogger(__name__)
VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
"""Of a proof, when it is written as well as when it is read. The records of 64 claims, with 32 requests and metadata
each, have 5 MB."""
MAX_PINS_BYTES: Final = 1 << 20
"""Of the file of pins: about 10,000 containers."""
Pins = Mapping[str, frozenset[str]]
"""Static managers of the kubelet that the requests for a container showed, by container."""


class EnforcementRecord(Document):
    """The claims of one container, as they were enforced."""

    version: int = VERSION
    container: str
    """Its id."""
    name: str = ""
    pod: Pod = Pod("", "", "", "", "")
    cgroup: str = ""
    pod_cgroup: str = ""
    inode: Annotated[int, Field(ge=0)]
    """Of its cgroup; 0 before it has one: then nothing was made true yet."""
    answered: bool = False
    """The limits that the runtime states include the claimed hugepages, since an answer of ours has added them."""
    claims: tuple[Held, ...] = ()
    pooled: str = ""
    """Why it is no partition although it should be one: the pool keeps others off its CPUs."""


class KubeletPins(Document):
    """The content of the file of pins."""

    version: int = VERSION
    containers: dict[str, frozenset[str]] = Field(default_factory=dict)


def record_name(container_id: str) -> str | None:
    """Returns the name of a container's proof; None for an id that no runtime makes."""
    fits = 0 < len(container_id) <= 128 and container_id.isascii()
    return f"{container_id}.json" if fits and container_id.replace("-", "").replace("_", "").isalnum() else None


def dump_record(proof: EnforcementRecord) -> bytes:
    """Returns the bytes of a proof."""
    return proof.model_dump_json().encode()


def parse_enforcement_record(name: str, data: bytes) -> EnforcementRecord:
    """Reads a proof. ContractError: it is damaged, of another container, or of a version out of reach."""
    document = parse_json(data, MAX_BYTES, "proof", name)
    check_version("proof", document, VERSION)
    try:
        proof = EnforcementRecord.model_validate(document)
    except ValidationError as error:
        raise MalformedError("proof", name, str(error)) from error
    if record_name(proof.container) != name:
        raise MalformedError("proof", name, "is of another container")
    return proof


class EnforcementRecords:
    """A directory with one file for each container that has something of claims."""

    def __init__(self, own_directory: str) -> None:
        self._path = f"{own_directory}/{DIRECTORY}"
        self._pins = f"{own_directory}/{PINS}"

    def load(self, container_ids: Iterable[str]) -> dict[str, EnforcementRecord]:
        """Returns the proofs of these containers, those that can be read."""
        found: dict[str, EnforcementRecord] = {}
        for container_id in container_ids:
            if (name := record_name(container_id)) is None:
                continue
            try:
                found[container_id] = parse_enforcement_record(name, read_regular(f"{self._path}/{name}", MAX_BYTES))
            except FileNotFoundError:
                continue
            except (OSError, ContractError) as error:
                _log.warning("a proof cannot be read", extra={"id": container_id, "error": str(error)})
        return found

    def write(self, proof: EnforcementRecord) -> None:
        """Keeps a proof. Raises OSError, also for one that could not be read again."""
        if (name := record_name(proof.container)) is not None:
            data, path = dump_record(proof), f"{self._path}/{name}"
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
        """Returns the containers of which there are proofs."""
        try:
            names = os.listdir(self._path)  # noqa: PTH208
        except OSError:
            return set()
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    def retain(self, container_ids: Collection[str]) -> set[str]:
        """Removes the proofs of all other containers, and leftovers of a crash; returns the ids that have one."""
        kept = {record_name(container_id) for container_id in container_ids}
        names: set[str] = set()
        with contextlib.suppress(OSError):
            names.update(os.listdir(self._path))  # noqa: PTH208
        for name in names - kept:
            # One that cannot be removed, such as a stray directory, keeps no other.
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{name}")  # noqa: PTH108
        return self.ids()
