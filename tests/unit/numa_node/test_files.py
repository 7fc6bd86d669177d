# SPDX-License-Identifier: Apache-2.0
"""Files that others read at any time are in their place whole, or not at all."""

import stat
from pathlib import Path

import pytest
from numa_node.files import replace_file


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """With the mode that was asked for, and nothing beside it."""
    path = tmp_path / "file.json"
    for data in (b"one", b"another"):
        replace_file(str(path), data, 0o600, sync=True)
        assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    """Whoever placed it does not choose what is written."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    path = tmp_path / "file.json"
    path.symlink_to(precious)
    replace_file(str(path), b"new", 0o600)
    assert (path.is_symlink(), path.read_bytes(), precious.read_text()) == (False, b"new", "precious")


def test_what_cannot_be_replaced_leaves_all_as_it_was(tmp_path: Path) -> None:
    """A directory lies in its place, or there is no directory to write to: no temporary file is left."""
    (tmp_path / "file.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(str(tmp_path / "file.json"), b"new", 0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["file.json"]
    with pytest.raises(FileNotFoundError):
        replace_file(str(tmp_path / "gone" / "file.json"), b"new", 0o600)
