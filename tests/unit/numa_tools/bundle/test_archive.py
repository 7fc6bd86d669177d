# SPDX-License-Identifier: Apache-2.0
"""The archive in a bug report: packed files can be unpacked again, and an untrusted archive can do no harm."""

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from numa_tools.bundle.archive import MAX_BYTES, ArchiveError, ArchiveWriter, extract


def packed(*files: tuple[str, str]) -> io.BytesIO:
    """Returns an archive with the given files."""
    made = io.BytesIO()
    archive = ArchiveWriter(made)
    for path, text in files:
        assert archive.add(path, text)
    archive.add_directory("/sys/empty")
    archive.close()
    made.seek(0)
    return made


def foreign(*entries: tuple[str, dict[str, Any], bytes]) -> io.BytesIO:
    """Returns a hand-crafted tar file, since Python 3.13 refuses to write a header whose size differs from the
    content's.
    """
    made = bytearray()
    for name, fields, data in entries:
        entry = tarfile.TarInfo(name)
        entry.size = len(data)
        for field, value in fields.items():
            setattr(entry, field, value)
        made += entry.tobuf(tarfile.PAX_FORMAT) + data + bytes(-len(data) % tarfile.BLOCKSIZE)
    return io.BytesIO(gzip.compress(made + bytes(tarfile.RECORDSIZE)))


# One byte is stored, but 64 MiB would be extracted.
SPARSE = {"pax_headers": {"GNU.sparse.map": "0,1,67108864,0", "GNU.sparse.size": "67108864"}}


def test_files_and_directories_can_be_unpacked(tmp_path: Path) -> None:
    """Unpacked files have the same paths as on the node, and packing the same content again produces a byte-identical
    archive.
    """
    files = ("manifest.json", "{}"), ("/sys/a/b", "0-3\n"), ("/var/run/cdi/x.json", "ü")
    root = extract(packed(*files), tmp_path)
    assert [(root / path.strip("/")).read_text() for path, _ in files] == [text for _, text in files]
    assert (root / "sys/empty").is_dir()
    assert packed(*files).getvalue() == packed(*files).getvalue()


def test_files_beyond_the_limits_are_left_out() -> None:
    """The archive is still readable, and the caller learns which file was left out."""
    archive = ArchiveWriter(io.BytesIO(), max_bytes=10)
    assert archive.add("a", "12345")
    assert not archive.add("b", "123456")
    assert archive.add("c", "12345")
    archive.close()
    deep = ArchiveWriter(io.BytesIO())
    assert (deep.add("a/" * 62 + "b", ""), deep.add("a/" * 63 + "b", "")) == (True, False)
    assert (deep.add_directory("a/" * 63), deep.add_directory("a/" * 64)) == (True, False)
    deep.close()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (io.BytesIO(b"PK\x03\x04 no tar"), "is not an archive"),
        (io.BytesIO(b""), "is not an archive"),
        (io.BytesIO(packed(("manifest.json", "{}")).getvalue()[:60]), "is not an archive"),
        (packed(("other", "{}")), "it has no node/manifest.json"),
        (foreign(("../x", {}, b"")), "outside node/"),
        (foreign(("/etc/x", {}, b"")), "outside node/"),
        (foreign(("node/../../x", {}, b"")), "outside node/"),
        (foreign(("node/link", {"type": tarfile.SYMTYPE, "linkname": "/etc"}, b"")), "neither a file nor a directory"),
        (foreign(("node/link", {"type": tarfile.LNKTYPE, "linkname": "/etc/x"}, b"")), "neither a file nor"),
        (foreign(("node/device", {"type": tarfile.CHRTYPE}, b"")), "neither a file nor a directory"),
        (io.BytesIO(gzip.compress(b"\0" * (2 * MAX_BYTES + 1024), 1)), "is not an archive|is larger than"),
        (foreign(("node" + "/a" * 64, {"type": tarfile.DIRTYPE}, b"")), "more than 64 components"),
        (foreign(("node" + "/a" * 64, {}, b"")), "more than 64 components"),
        (foreign(*((f"node/sparse{number}", SPARSE, b"x") for number in range(8))), "is a sparse file"),
        (foreign(("node/a", {}, b"x"), ("node/b", {"size": MAX_BYTES}, b"")), "more than 134217728 bytes of file data"),
        (foreign(("node/a", {"pax_headers": {"comment": "x" * (64 << 10)}}, b"")), "header is larger than 65536 bytes"),
        # The tarfile module reads each of these headers recursively.
        (foreign(*[("node/a", {"type": tarfile.GNUTYPE_LONGNAME}, b"")] * 5000), "header is larger than 65536 bytes"),
    ],
)
def test_malformed_and_malicious_archives_are_refused(data: io.BytesIO, text: str, tmp_path: Path) -> None:
    """No file is written outside the target directory, and no archive can fill up the disk."""
    with pytest.raises(ArchiveError, match=text):
        extract(data, tmp_path / "into")
    assert {one.name for one in tmp_path.iterdir()} <= {"into"}


def test_a_file_in_place_of_a_directory_raises_os_error(tmp_path: Path) -> None:
    """The caller handles OSError."""
    with pytest.raises((NotADirectoryError, FileExistsError)):
        extract(foreign(("node/a", {}, b"x"), ("node/a/b", {}, b"x")), tmp_path)
