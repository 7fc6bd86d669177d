# SPDX-License-Identifier: Apache-2.0
"""The CDI directory as a database: one file for each claim and driver, changed under one lock, durable when written.

Two instances share it during an upgrade, so nothing read before the lock was taken may be believed. Both keep a journal
beside the lock: a generation that each change raises, and the latest releases (docs/adr/0004-journal.md).
"""

import hashlib
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from numa_contract.cdi import ClaimFile, dump_claim_file, parse_claim_file
from numa_contract.errors import ContractError
from numa_contract.names import ClaimKey, cdi_file_name, parse_cdi_file_name
from numa_contract.records import AllocationRecord

from dra_frontend.claims.journal import Journal

_Stamp = tuple[int, int, int]
# Problems of files that have left the directory, remembered for people.
_MOVED_KEPT = 64


class ClaimDirectory:
    """The claim files of this node. Every method blocks on the disk and wants the claims lock to be held."""

    def __init__(self, directory: Path, journal: Path, quarantine: Path) -> None:
        self._directory = directory
        self._journal = Journal(journal)
        self._quarantine = quarantine
        self._parsed: dict[str, tuple[_Stamp, ClaimFile]] = {}
        self._unread: dict[str, str] = {}
        self._moved: dict[str, str] = {}
        self._seen: tuple[int, int] | None = None
        self._view: Mapping[ClaimKey, ClaimFile] = MappingProxyType({})

    @property
    def problems(self) -> dict[str, str]:
        """Returns what is wrong with files, by name; copies of them lie in quarantine."""
        broken = {name: file.problem for name, (_, file) in self._parsed.items() if file.problem}
        return {**self._moved, **self._unread, **broken}

    def scan(self, *, thorough: bool = True) -> Mapping[ClaimKey, ClaimFile]:
        """Returns every claim file, parsing only what changed.

        Not thorough: believes the directory's time and the journal, which tell of every instance's changes, and returns
        the same object when nothing did. What others do to the directory within the clock tick of a change of ours
        (10 ms) is then seen by the next thorough scan, within a second.
        """
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        now = (self._directory.stat().st_mtime_ns, self._journal.generation)
        if not thorough and now == self._seen:
            return self._view
        seen: dict[str, tuple[_Stamp, ClaimFile]] = {}
        self._unread = {}
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if parse_cdi_file_name(entry.name) is not None:
                    with suppress(FileNotFoundError):
                        self._look(entry, seen)
        self._parsed = seen
        # Not compared with the former view: equal records may differ in fields that a newer release wrote.
        self._view = MappingProxyType({(file.driver, file.uid): file for _, file in seen.values()})
        self._seen = now
        return self._view

    def _look(self, entry: "os.DirEntry[str]", seen: dict[str, tuple[_Stamp, ClaimFile]]) -> None:
        stamp = _stamp(entry.stat())
        known = self._parsed.get(entry.name)
        if known is not None and known[0] == stamp:
            seen[entry.name] = known
            return
        path = self._directory / entry.name
        try:
            file = parse_claim_file(entry.name, path.read_bytes())
        except FileNotFoundError:
            raise
        except OSError as error:
            self._unread[entry.name] = f"cannot be read: {error.strerror}"
            if known is not None:
                seen[entry.name] = (stamp, known[1])
        except ContractError as error:
            # No runtime can use it either, so it may leave the directory.
            self._unread[entry.name] = str(error)
            self._move(path, str(error))
        else:
            if file.problem:
                self._copy(path)
            seen[entry.name] = (stamp, file)

    def _copy(self, path: Path) -> bool:
        """Keeps a copy in quarantine, one for each content; a full disk must not stop the other claims."""
        try:
            content = path.read_bytes()
            self._quarantine.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self._quarantine / f"{path.name}.{hashlib.sha256(content).hexdigest()[:12]}").write_bytes(content)
        except OSError as error:
            self._unread[path.name] = f"cannot be copied to {self._quarantine}: {error.strerror}"
            return False
        return True

    def _move(self, path: Path, problem: str) -> None:
        if self._copy(path):
            path.unlink(missing_ok=True)
            self._unread.pop(path.name, None)
            self._moved = dict([*self._moved.items(), (path.name, problem)][-_MOVED_KEPT:])

    def quarantine(self, record: AllocationRecord, reason: str) -> None:
        """Takes a readable record out of the directory, keeping a copy: it contradicts another one that is in use."""
        key = (record.driver, record.claim.uid)
        path = self._directory / cdi_file_name(*key)
        if path.exists():
            self._move(path, reason)
        self._changed(key, None)
        self._journal.released(key)

    def write(self, record: AllocationRecord) -> None:
        """Writes the record's file; it is on the disk, and visible to the runtime, when this returns.

        The temporary file lies in the same directory: a rename from elsewhere raises no event that runtimes watch for
        (protocols, CDI cache), and its name does not end in .json, so that nobody reads it half written.
        """
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        name = cdi_file_name(record.driver, record.claim.uid)
        temporary = self._directory / f".{name}.{secrets.token_hex(4)}.tmp"
        try:
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:  # noqa: PTH123
                file.write(dump_claim_file(record))
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._directory / name)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        self._sync()
        self._moved.pop(name, None)
        key = (record.driver, record.claim.uid)
        self._changed(key, ClaimFile.of(record))
        self._note_seen(self._journal.written(key))

    def remove(self, driver: str, uid: str) -> None:
        """Removes the claim's file and notes the release, so that no instance takes the file for lost."""
        name = cdi_file_name(driver, uid)
        (self._directory / name).unlink(missing_ok=True)
        self._sync()
        self._moved.pop(name, None)
        self._changed((driver, uid), None)
        # Last: a death before it brings the file back, and the kubelet asks again; the other order would lose CPUs.
        self._note_seen(self._journal.released((driver, uid)))

    def _changed(self, key: ClaimKey, file: ClaimFile | None) -> None:
        """Takes one change into what is remembered of all files; those of the other claims are not looked at."""
        name = cdi_file_name(*key)
        parsed, view = dict(self._parsed), dict(self._view)
        if file is None:
            parsed.pop(name, None)
            view.pop(key, None)
        else:
            parsed[name] = (_stamp((self._directory / name).stat()), file)
            view[key] = file
        self._parsed, self._view = parsed, MappingProxyType(view)

    def _note_seen(self, generation: int) -> None:
        self._seen = (self._directory.stat().st_mtime_ns, generation)

    def _sync(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def releases(self) -> frozenset[ClaimKey]:
        """Returns the claims that some instance released lately: their files are gone on purpose."""
        return self._journal.releases

    def remove_leftovers(self) -> None:
        """Removes temporary files of an instance that died while it wrote."""
        for path in self._directory.glob(".dra.k8s.io-*_claim-*.tmp"):
            path.unlink(missing_ok=True)


def _stamp(status: os.stat_result) -> _Stamp:
    return status.st_ino, status.st_size, status.st_mtime_ns
