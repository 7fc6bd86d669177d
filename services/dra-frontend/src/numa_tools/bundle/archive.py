# SPDX-License-Identifier: Apache-2.0
"""Writes and reads the archive: a gzipped tar of plain files and directories, bounded in both directions."""

import gzip
import io
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

MOST_BYTES: Final = 128 << 20
"""Maximum size of all files together. A machine of 512 CPUs with 500 containers has a twentieth of it."""
MOST_ENTRIES: Final = 200_000
_MOST_HEADER: Final = 64 << 10
"""Bytes before the content of a file; a path of the kernel has 4 KiB. What lists pieces of a file has any number."""
MOST_PARTS: Final = 64
"""Maximum depth of a path; sysfs needs 20. Removing directories is recursive, and an archive can nest thousands."""
MANIFEST: Final = "manifest.json"
"""What the archive is, and what could not be read."""
STATE: Final = "state"
"""The directory of what the service said."""
JOURNAL: Final = "journal.json"
"""What the journal of claims said."""
KUBELET: Final = "kubelet.json"
"""The kubelet's configuration, as far as the doctor examines it. The files themselves may contain secrets."""
_TOP: Final = "node"


class ArchiveError(Exception):
    """A file is no archive of this command, or one that is too large; the text says why."""


class ArchiveWriter:
    """An archive in the making. The same content is the same archive, byte for byte."""

    def __init__(self, file: BinaryIO, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._zip = gzip.GzipFile(fileobj=file, mode="wb", mtime=0, filename="")
        self._tar = tarfile.TarFile.open(fileobj=self._zip, mode="w|", format=tarfile.PAX_FORMAT)
        self._bytes = 0
        self._entries = 0

    def add(self, path: str, text: str) -> bool:
        """Adds a file by its path on the node; False, and nothing, where the archive would be too large or too deep."""
        data = text.encode(errors="surrogateescape")
        if self._bytes + len(data) > self._most_bytes or not self._has_room(path):
            return False
        entry = self._entry(path)
        entry.size = len(data)
        self._tar.addfile(entry, io.BytesIO(data))
        self._bytes += len(data)
        return True

    def add_directory(self, path: str) -> bool:
        """Adds a directory, as :meth:`add` does a file."""
        if not self._has_room(path):
            return False
        entry = self._entry(path)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        self._tar.addfile(entry)
        return True

    def _has_room(self, path: str) -> bool:
        return self._entries < MOST_ENTRIES and len(PurePosixPath(_TOP, path.strip("/")).parts) <= MOST_PARTS

    def _entry(self, path: str) -> tarfile.TarInfo:
        self._entries += 1
        return tarfile.TarInfo(f"{_TOP}/{path.strip('/')}")

    def close(self) -> None:
        """Ends it; OSError."""
        self._tar.close()
        self._zip.close()


class _Bounded(io.RawIOBase):
    """Uncompressed bytes, and no more of them than an archive may have, nor than its next part may."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = gzip.GzipFile(fileobj=file, mode="rb")
        self._left = 2 * MOST_BYTES
        self._of_part = _MOST_HEADER

    def allow(self, size: int = 0) -> None:
        """Lets a content of so many bytes be read, and the header that follows it."""
        self._of_part = size + _MOST_HEADER

    def read(self, size: int = -1) -> bytes:
        most = min(self._left, self._of_part)
        data = self._file.read(min(size, most) if size >= 0 else most)
        self._left -= len(data)
        self._of_part -= len(data)
        if self._left <= 0:
            raise ArchiveError(f"has more than {2 * MOST_BYTES} bytes")
        if self._of_part <= 0:
            raise ArchiveError(f"has an entry whose header has more than {_MOST_HEADER} bytes")
        return data


def extract(file: BinaryIO, into: Path) -> Path:
    """Unpacks an archive, whoever made it, into a directory; returns the node's root. ArchiveError, OSError."""
    entries, size, stream = 0, 0, _Bounded(file)
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for entry in tar:
                entries, size = entries + 1, size + max(entry.size, 0)
                if entries > MOST_ENTRIES or size > MOST_BYTES:
                    raise ArchiveError(
                        f"has more than {MOST_ENTRIES} entries, or more than {MOST_BYTES} bytes in files"
                    )
                stream.allow(max(entry.size, 0))
                _extract_one(tar, entry, into)
                stream.allow()
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, ValueError) as error:
        raise ArchiveError(f"is no archive of dra-frontend gather: {error}") from error
    root = into / _TOP
    if not (root / MANIFEST).is_file():
        raise ArchiveError(f"is no archive of dra-frontend gather: it has no {_TOP}/{MANIFEST}")
    return root


def _extract_one(tar: tarfile.TarFile, entry: tarfile.TarInfo, into: Path) -> None:
    path = PurePosixPath(entry.name)
    if path.is_absolute() or ".." in path.parts or path.parts[:1] != (_TOP,) or "\0" in entry.name:
        raise ArchiveError(f"has an entry outside of {_TOP}/")
    if len(path.parts) > MOST_PARTS:
        raise ArchiveError(f"has a path of more than {MOST_PARTS} parts")
    if entry.type == tarfile.DIRTYPE:
        (into / path).mkdir(parents=True, exist_ok=True)
        return
    # Of a sparse file a few bytes are stored, and any number would be written.
    plain = entry.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not entry.issparse()
    content = tar.extractfile(entry) if plain else None
    if content is None:
        raise ArchiveError("has an entry that is neither a file nor a directory, or is a sparse file")
    (into / path).parent.mkdir(parents=True, exist_ok=True)
    (into / path).write_bytes(content.read())
