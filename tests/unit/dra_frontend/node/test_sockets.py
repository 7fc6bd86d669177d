# SPDX-License-Identifier: Apache-2.0
"""Sockets are placed whole, checked for length, and removed only by their maker."""

import socket
from pathlib import Path

import pytest
from dra_frontend.node.sockets import listen_unix


def test_listening_socket_replaces_a_stale_one_and_only_its_owner_reads_it(short_root: Path) -> None:
    """After a crash the old file is in the way; the new socket takes its place with mode 0600."""
    stale, _ = listen_unix(short_root / "s.sock")
    stale.close()
    listening, placed = listen_unix(short_root / "s.sock")
    with listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(short_root / "s.sock"))
        assert (short_root / "s.sock").stat().st_mode & 0o777 == 0o600
        placed.remove()
    assert list(short_root.iterdir()) == []


def test_something_else_in_the_way_is_left_alone(short_root: Path) -> None:
    """A file that is no socket belongs to somebody; it is named, not removed, and nothing else is left behind."""
    (short_root / "s.sock").write_text("precious")
    with pytest.raises(FileExistsError, match="is not a socket"):
        listen_unix(short_root / "s.sock")
    assert [path.name for path in short_root.iterdir()] == ["s.sock"]
    assert (short_root / "s.sock").read_text() == "precious"


@pytest.mark.fault("protocol trap 4.12")
def test_a_successors_socket_of_the_same_name_survives(short_root: Path) -> None:
    """With a fixed name the old instance's shutdown must not remove the new instance's socket."""
    old, placed_by_old = listen_unix(short_root / "s.sock")
    new, placed_by_new = listen_unix(short_root / "s.sock")
    with old, new:
        placed_by_old.remove()
        assert (short_root / "s.sock").is_socket()
        placed_by_new.remove()
        assert not (short_root / "s.sock").exists()
