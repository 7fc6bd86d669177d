# SPDX-License-Identifier: Apache-2.0
"""The proofs of running containers: files in the backend's own part of the run directory. Every call blocks."""

import contextlib
import logging
import os
from collections.abc import Collection, Iterable
from typing import Final

from numa_contract.errors import ContractError
from numa_node.files import read_regular, replace_file

from nri_backend.claims.proof import MAX_BYTES, Proof, dump_proof, parse_proof, proof_name

DIRECTORY: Final = "proofs"
_log = logging.getLogger(__name__)


class Proofs:
    """A directory with one file for each container that has something of claims."""

    def __init__(self, own_directory: str, former_lock: str) -> None:
        self._path = f"{own_directory}/{DIRECTORY}"
        self._noted = f"{own_directory}/former"
        self._former_lock = former_lock

    def begin(self) -> bool:
        """Tells whether release 0.1.0, which wrote no proofs, enforced until now, or nobody did; True once each time.

        That release writes its lock when it becomes active: another time of change than the one that is noted.
        """
        try:
            changed = str(os.stat(self._former_lock).st_mtime_ns)  # noqa: PTH116
        except OSError:
            changed = "none"
        try:
            if read_regular(self._noted, 64) == changed.encode():
                return False
        except OSError:
            pass  # not there, or nothing of ours
        with contextlib.suppress(OSError):
            os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
            replace_file(self._noted, changed.encode(), 0o600)
        return True

    def load(self, container_ids: Iterable[str]) -> dict[str, Proof]:
        """Returns the proofs of these containers, those that can be read."""
        found: dict[str, Proof] = {}
        for container_id in container_ids:
            if (name := proof_name(container_id)) is None:
                continue
            try:
                found[container_id] = parse_proof(name, read_regular(f"{self._path}/{name}", MAX_BYTES))
            except FileNotFoundError:
                continue
            except (OSError, ContractError) as error:
                _log.warning("a proof cannot be read", extra={"id": container_id, "error": str(error)})
        return found

    def write(self, proof: Proof) -> None:
        """Keeps a proof. OSError."""
        if (name := proof_name(proof.container)) is not None:
            os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
            replace_file(f"{self._path}/{name}", dump_proof(proof), 0o600)

    def ids(self) -> set[str]:
        """Returns the containers of which there are proofs."""
        try:
            names = os.listdir(self._path)  # noqa: PTH208
        except OSError:
            return set()
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    def retain(self, container_ids: Collection[str]) -> set[str]:
        """Forgets the proofs of all other containers, and what a crash has left; returns of whom there are some."""
        kept = {proof_name(container_id) for container_id in container_ids}
        with contextlib.suppress(OSError):
            for name in set(os.listdir(self._path)) - kept:  # noqa: PTH208
                os.unlink(f"{self._path}/{name}")  # noqa: PTH108
        return self.ids()
