# SPDX-License-Identifier: Apache-2.0
"""What was made true for a container, as it is kept where no pod can write. It alone makes an orphan that keeps CPUs.

A proof belongs to one cgroup: a container of the same id after a reboot, or one that a forger names so, has another
inode.
"""

from typing import Annotated, Final

from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_contract.records import Document, check_version
from pydantic import Field, ValidationError

from nri_backend.claims.entitlement import Held
from nri_backend.nri.model import Pod

VERSION: Final = 1
MAX_BYTES: Final = 4 << 20
"""Of a proof: some records of at most 100 KB each."""


class Proof(Document):
    """The claims of one container, as they were enforced."""

    version: int = VERSION
    container: str
    """Its id."""
    name: str = ""
    pod: Pod = Pod("", "", "", "", "")
    cgroup: str = ""
    pod_cgroup: str = ""
    inode: Annotated[int, Field(ge=0)]
    """Of its cgroup; 0 before it has one: then all that is proven is that its creation was answered."""
    claims: tuple[Held, ...] = ()


def proof_name(container_id: str) -> str | None:
    """Returns the name of a container's proof; None for an id that no runtime makes."""
    fits = 0 < len(container_id) <= 128 and container_id.isascii()
    return f"{container_id}.json" if fits and container_id.replace("-", "").replace("_", "").isalnum() else None


def dump_proof(proof: Proof) -> bytes:
    """Returns the bytes of a proof."""
    return proof.model_dump_json().encode()


def parse_proof(name: str, data: bytes) -> Proof:
    """Reads a proof. ContractError: it is damaged, of another container, or of a version out of reach."""
    document = parse_json(data, MAX_BYTES, "proof", name)
    check_version("proof", document, VERSION)
    try:
        proof = Proof.model_validate(document)
    except ValidationError as error:
        raise MalformedError("proof", name, str(error)) from error
    if proof_name(proof.container) != name:
        raise MalformedError("proof", name, "is of another container")
    return proof
