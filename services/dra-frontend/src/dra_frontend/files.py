# SPDX-License-Identifier: Apache-2.0
"""The CDI directory as a database: one file for each claim and driver, changed under one lock, durable when written.

Two instances share it during an upgrade, so nothing read before the lock was taken may be believed.
"""

import json
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path

from numa_contract.cdi import ClaimFile, dump_claim_file, parse_claim_file
from numa_contract.errors import ContractError
from numa_contract.names import cdi_file_name, parse_cdi_file_name
from numa_contract.records import AllocationRecord

from dra_frontend.ledger import ClaimKey

_Stamp = tuple[int, int, int]
# How many releases are remembered; a restorer looks at it every second.
_RELEASES_KEPT = 512


class ClaimDirectory:
    """The claim files of this node. Every method blocks on the disk and wants the claims lock to be held."""

    def __init__(self, directory: Path, releases: Path, quarantine: Path) -> None:
        self._directory = directory
        self._releases = releases
        self._quarantine = quarantine
        self._parsed: dict[str, tuple[_Stamp, ClaimFile]] = {}
        self.unreadable: dict[str, str] = {}
        """Problems of files by name: copied to quarantine, their CPUs held."""

    def scan(self) -> dict[ClaimKey, ClaimFile]:
        """Returns every claim file; parses only what changed since the last scan."""
        seen: dict[str, tuple[_Stamp, ClaimFile]] = {}
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if parse_cdi_file_name(entry.name) is None:
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
                    known = self._parsed.get(entry.name)
                    if known is not None and known[0] == stamp:
                        seen[entry.name] = known
                    else:
                        self._read(entry.name, stamp, seen)
        self._parsed = seen
        self.unreadable = {name: problem for name, problem in self.unreadable.items() if self._still_bad(name)}
        return {(file.driver, file.uid): file for _, file in seen.values()}

    def _read(self, name: str, stamp: _Stamp, seen: dict[str, tuple[_Stamp, ClaimFile]]) -> None:
        path = self._directory / name
        try:
            file = parse_claim_file(name, path.read_bytes())
        except OSError as error:
            self.unreadable[name] = f"cannot be read: {error.strerror}"
            return
        except ContractError as error:
            # No runtime can use it either, so it may leave the directory.
            self._keep_copy(path)
            path.unlink()
            self.unreadable[name] = str(error)
            return
        if file.problem:
            self._keep_copy(path)
            self.unreadable[name] = file.problem
        seen[name] = (stamp, file)

    def _still_bad(self, name: str) -> bool:
        known = self._parsed.get(name)
        return known is None or bool(known[1].problem)

    def _keep_copy(self, path: Path) -> None:
        self._quarantine.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copyfile(path, self._quarantine / f"{path.name}.{time.time_ns()}")

    def quarantine(self, record: AllocationRecord, reason: str) -> None:
        """Takes a readable record out of the directory, keeping a copy: it contradicts another one that is in use."""
        path = self._directory / cdi_file_name(record.driver, record.claim.uid)
        self._keep_copy(path)
        path.unlink(missing_ok=True)
        self.unreadable[path.name] = reason

    def write(self, record: AllocationRecord) -> None:
        """Writes the record's file; it is on the disk, and visible to the runtime, when this returns.

        The temporary file lies in the same directory: a rename from elsewhere raises no event that runtimes watch for
        (protocols, CDI cache), and its name does not end in .json, so that nobody reads it half written.
        """
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        name = cdi_file_name(record.driver, record.claim.uid)
        temporary = self._directory / f".{name}.{os.getpid()}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:  # noqa: PTH123
                file.write(dump_claim_file(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sync_directory()
        self.unreadable.pop(name, None)

    def remove(self, driver: str, uid: str) -> None:
        """Removes the claim's file and notes the release, so that no instance takes the file for lost."""
        name = cdi_file_name(driver, uid)
        (self._directory / name).unlink(missing_ok=True)
        self._sync_directory()
        # Last: a death before it brings the file back, and the kubelet asks again; the other order would lose CPUs.
        self._note_release(driver, uid)
        self.unreadable.pop(name, None)

    def _sync_directory(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def released(self) -> set[ClaimKey]:
        """Returns the claims that some instance released lately: their files are gone on purpose."""
        try:
            return {(driver, uid) for driver, uid in json.loads(self._releases.read_bytes() or b"[]")}
        except (OSError, ValueError, TypeError):
            return set()

    def _note_release(self, driver: str, uid: str) -> None:
        try:
            kept = [key for key in json.loads(self._releases.read_bytes() or b"[]") if key != [driver, uid]]
        except (OSError, ValueError, TypeError):
            kept = []
        self._releases.write_text(json.dumps([*kept, [driver, uid]][-_RELEASES_KEPT:]))

    def forget_release(self, driver: str, uid: str) -> None:
        """A claim of that UID is prepared again: from now on its file may be restored."""
        if (driver, uid) in self.released():
            kept = [key for key in json.loads(self._releases.read_bytes()) if key != [driver, uid]]
            self._releases.write_text(json.dumps(kept))
