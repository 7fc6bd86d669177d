# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the archive that ``gather`` creates: a gzipped tar of regular files and directories.

All entries are under one directory. The node's files keep their paths, so every command can use the unpacked directory
as its host root (``--from``):

  node/                          top directory; an archive with an entry outside it is invalid
    manifest.json                the archive's version, and the files that could not be read
    state/claims.json, ...       responses of the service's state endpoint
    journal.json, kubelet.json   the claim journal, and the kubelet settings that the doctor examines
    sys/..., proc/..., run/...   the node's files under their own paths

Identical contents produce byte-identical archives: entries have no timestamps or owners. A reader must not trust an
archive, since anyone can create one. Therefore limits on the size, number, path depth and header size of its entries
are enforced during reading, before anything is expanded, and links, devices and sparse files are rejected.
"""

import gzip
import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

MAX_BYTES: Final = 128 << 20
"""Maximum total size of all files. The archive of a machine with 512 CPUs and 500 containers is about 5 % of this size.
"""
MAX_ENTRIES: Final = 200_000
_MAX_HEADER: Final = 64 << 10
"""Maximum number of header bytes before a file's content. A Linux path is at most 4 KiB long, but the headers of a
sparse file have no maximum size.
"""
MAX_PARTS: Final = 64
"""Maximum number of components of a path. Paths in sysfs have at most 20. Directories are removed recursively, and an
archive could nest them thousands of levels deep.
"""
MANIFEST: Final = "manifest.json"
"""File that contains the archive's version and lists the files that could not be read."""
STATE: Final = "state"
"""Directory that contains the service's responses."""
JOURNAL: Final = "journal.json"
"""File with the contents of the claim journal."""
KUBELET: Final = "kubelet.json"
"""File with the kubelet settings that the doctor examines. The kubelet's own files are left out of the archive, since
they may contain secrets.
"""
_TOP_DIRECTORY: Final = "node"


class ArchiveError(Exception):
    """Raised for a file that ``gather`` did not create or that is too large. The message gives the reason."""


class ArchiveWriter:
    """Builds a reproducible archive: identical contents produce byte-identical output."""

    def __init__(self, file: BinaryIO, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._zip = gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="")
        self._tar = tarfile.TarFile.open(fileobj=self._zip, mode="w|", format=tarfile.PAX_FORMAT)
        self._bytes = 0
        self._entries = 0

    def add(self, path: str, text: str) -> bool:
        """Adds a file under its path on the node. Returns False if the archive would become too large or the path is
        too deep.
        """
        data = text.encode(errors="surrogateescape")
        if self._bytes + len(data) > self._max_bytes or not self._has_room(path):
            return False
        entry = self._entry(path)
        entry.size = len(data)
        self._tar.addfile(entry, io.BytesIO(data))
        self._bytes += len(data)
        return True

    def add_directory(self, path: str) -> bool:
        """Adds a directory. Returns False if the archive would have too many entries or the path is too deep."""
        if not self._has_room(path):
            return False
        entry = self._entry(path)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        self._tar.addfile(entry)
        return True

    def _has_room(self, path: str) -> bool:
        return self._entries < MAX_ENTRIES and len(PurePosixPath(_TOP_DIRECTORY, path.strip("/")).parts) <= MAX_PARTS

    def _entry(self, path: str) -> tarfile.TarInfo:
        self._entries += 1
        return tarfile.TarInfo(f"{_TOP_DIRECTORY}/{path.strip('/')}")

    def close(self) -> None:
        """Finishes the archive. Raises OSError."""
        self._tar.close()
        self._zip.close()


class _BoundedStream(io.RawIOBase):
    """Stream of decompressed bytes that limits the size of the whole archive and of each entry with its header."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._left = 2 * MAX_BYTES
        self._left_in_entry = _MAX_HEADER

    def allow(self, size: int = 0) -> None:
        """Permits reading ``size`` bytes of content and the next header."""
        self._left_in_entry = size + _MAX_HEADER

    def read(self, size: int = -1) -> bytes:
        limit = min(self._left, self._left_in_entry)
        data = self._file.read(min(size, limit) if size >= 0 else limit)
        self._left -= len(data)
        self._left_in_entry -= len(data)
        if self._left <= 0:
            raise ArchiveError(f"is larger than {2 * MAX_BYTES} bytes")
        if self._left_in_entry <= 0:
            raise ArchiveError(f"has an entry whose header is larger than {_MAX_HEADER} bytes")
        return data


def extract(file: BinaryIO, into: Path) -> Path:
    """Unpacks an untrusted archive into a directory and returns the node's root. Raises ArchiveError and OSError."""
    entries, size, stream = 0, 0, _BoundedStream(file)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for entry in tar:
                entries, size = entries + 1, size + max(entry.size, 0)
                if entries > MAX_ENTRIES or size > MAX_BYTES:
                    raise ArchiveError(
                        f"has more than {MAX_ENTRIES} entries, or more than {MAX_BYTES} bytes of file data"
                    )
                stream.allow(max(entry.size, 0))
                _extract_entry(tar, entry, into)
                stream.allow()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ArchiveError(f"is not an archive created by dra-frontend gather: {error}") from error
    root = into / _TOP_DIRECTORY
    if not (root / MANIFEST).is_file():
        raise ArchiveError(f"is not an archive created by dra-frontend gather: it has no {_TOP_DIRECTORY}/{MANIFEST}")
    return root


def _extract_entry(tar: tarfile.TarFile, entry: tarfile.TarInfo, into: Path) -> None:
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (_TOP_DIRECTORY,) or "\0" in entry.name:
        raise ArchiveError(f"has an entry outside {_TOP_DIRECTORY}/")
    if len(path.parts) > MAX_PARTS:
        raise ArchiveError(f"has a path with more than {MAX_PARTS} components")
    if entry.type == tarfile.DIRTYPE:
        (into / path).mkdir(parents=True, exist_ok=True)
        return
    # A sparse file of a few stored bytes could expand to any size.
    plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
    content = tar.extractfile(entry) if plain else None
    if content is None:
        raise ArchiveError("has an entry that is neither a file nor a directory, or is a sparse file")
    (into / path).parent.mkdir(parents=True, exist_ok=True)
    (into / path).write_bytes(content.read())
