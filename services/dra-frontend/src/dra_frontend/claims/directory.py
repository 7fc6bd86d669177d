# SPDX-License-Identifier: Apache-2.0
"""The CDI directory as a database: one file for each claim and driver, whole when it is there.

Two instances share it during an upgrade, so nothing read before the claims lock was taken may be believed.
"""

import hashlib
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from numa_contract.cdi import MAX_CLAIM_FILE, ClaimFile, dump_claim_file
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord
from numa_node.claim_directory import ClaimDirectory, DirectoryView
from numa_node.files import read_regular, replace_file

_log = logging.getLogger(__name__)

# Copies in quarantine, which lies on a tmpfs: the newest are the ones that somebody wants to see.
_MOST_COPIES: Final = 64
_MOST_COPIED_BYTES: Final = 16 << 20
_MOST_SET_ASIDE: Final = 64


class ClaimFiles:
    """The claim files of this node. Every method blocks on the disk and wants the claims lock to be held."""

    def __init__(self, directory: Path, quarantine: Path) -> None:
        self._directory = directory
        self._quarantine = quarantine
        self._reader = ClaimDirectory(str(directory))
        self._copied: dict[str, str] = {}
        self._set_aside: dict[str, str] = {}

    @property
    def view(self) -> DirectoryView:
        """The files as of the last scan, with what was written since."""
        return self._reader.view

    @property
    def problems(self) -> dict[str, str]:
        """What is wrong with files, by name; copies of them lie in quarantine."""
        return {**self._set_aside, **self.view.problems}

    def scan(self, *, thorough: bool) -> DirectoryView:
        """Returns every claim file. Copies what cannot be used to quarantine: the file stays, a pod may need it.

        Not thorough: believes the directory's time, which does not tell of what other instances did within the tick of
        a change of ours. Raises nothing.
        """
        view = self._reader.refresh(thorough=thorough)
        for name, problem in view.problems.items():
            if name and self._copied.get(name) != problem:
                _log.error("claim file cannot be used", extra={"file": name, "problem": problem})
                self._copy(name)
        self._copied = dict(view.problems)
        return view

    def write(self, record: AllocationRecord) -> None:
        """Writes the record's file. When it is in its place the claim is held; OSError leaves all as it was."""
        self._directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        path = self._directory / cdi_file_name(record.driver, record.claim.uid)
        replace_file(str(path), dump_claim_file(record), 0o600, sync=True)
        self._sync()
        self._set_aside.pop(path.name, None)
        self._reader.note((record.driver, record.claim.uid), ClaimFile.of(record))

    def remove(self, driver: str, uid: str) -> None:
        """Removes the claim's file, if there is one. OSError leaves all as it was."""
        name = cdi_file_name(driver, uid)
        (self._directory / name).unlink(missing_ok=True)
        self._sync()
        self._set_aside.pop(name, None)
        self._reader.note((driver, uid), None)

    def set_aside(self, record: AllocationRecord, reason: str) -> None:
        """Takes a readable record out of the directory, keeping a copy: it contradicts another one that is in use."""
        name = cdi_file_name(record.driver, record.claim.uid)
        self._copy(name)
        self.remove(record.driver, record.claim.uid)
        self._set_aside = dict([*self._set_aside.items(), (name, reason)][-_MOST_SET_ASIDE:])

    def _sync(self) -> None:
        # The file is in its place already, and a crash that could undo that empties the directory anyway.
        try:
            descriptor = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            _log.warning("CDI directory not synced", extra={"error": str(error)})

    def _copy(self, name: str) -> None:
        """Keeps a copy in quarantine, one for each content; a full disk must not stop the other claims."""
        try:
            content = read_regular(str(self._directory / name), MAX_CLAIM_FILE)
            self._quarantine.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy = self._quarantine / f"{name}.{hashlib.sha256(content).hexdigest()[:12]}"
            replace_file(str(copy), content, 0o600)
            self._prune()
        except OSError as error:
            _log.warning("claim file not copied to quarantine", extra={"file": name, "error": str(error)})

    def _prune(self) -> None:
        left = _MOST_COPIED_BYTES
        copies = [(path.lstat(), path) for path in self._quarantine.iterdir()]
        for place, (status, path) in enumerate(sorted(copies, key=lambda copy: -copy[0].st_mtime_ns)):
            left -= status.st_size
            if place >= _MOST_COPIES or left < 0:
                path.unlink(missing_ok=True)

    def clear_leftovers(self) -> None:
        """Removes temporary files of an instance that died while it wrote."""
        for directory, pattern in ((self._directory, ".dra.k8s.io-*_claim-*.tmp"), (self._quarantine, ".*.tmp")):
            for path in directory.glob(pattern):
                with suppress(OSError):
                    path.unlink()
