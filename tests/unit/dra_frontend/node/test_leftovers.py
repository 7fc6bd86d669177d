# SPDX-License-Identifier: Apache-2.0
"""Removal of the sockets of killed instances, and of nothing else."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dra_frontend.node.leftovers import Leftovers, remove_hidden_links
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.node.sockets import listen_unix

ME, OTHER = (f"{n * 8}-0000-4000-8000-{n * 12}" for n in "12")


class Places:
    """The kubelet's two directories for a driver, and the run directory."""

    def __init__(self, root: Path) -> None:
        self.plugins, self.registry, self.run = root / "p", root / "r", root / "run"
        for place in (self.plugins, self.registry, self.run):
            place.mkdir()
        own = self.plugins / f"dra-{ME}.sock", self.registry / f"reg-{ME}.sock"
        self.leftovers = Leftovers(self.run, frozenset({*own, self.run / ME}), own)

    def sockets(self, uid: str) -> list[Path]:
        """Creates all of an instance's sockets."""
        (self.run / uid).mkdir(exist_ok=True)
        return [
            self.plugins / f"dra-{uid}.sock",
            self.registry / f"reg-{uid}.sock",
            self.run / uid / "state.sock",
        ]


@pytest.fixture
def places(short_root: Path) -> Places:
    """Returns the empty directories."""
    return Places(short_root)


def dead(path: Path) -> Path:
    """Creates a socket whose process has been killed."""
    script = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen()"
    subprocess.run([sys.executable, "-c", script, str(path)], check=True)
    return path


def test_sockets_of_killed_instances_are_removed(places: Places) -> None:
    """The sockets are in the kubelet's directories and in the run directory, where the instance's subdirectory is also
    removed.
    """
    for path in places.sockets(OTHER):
        dead(path)
    removed = places.leftovers.sweep()
    assert len(removed) == 4
    assert [list(place.iterdir()) for place in (places.plugins, places.registry, places.run)] == [[], [], []]
    assert places.leftovers.sweep() == []


def test_sockets_of_running_instances_stay(places: Places) -> None:
    """Even the sockets of a frozen or flooded instance stay, although new connections to them remain pending because
    the instance does not accept them.
    """
    listening = [listen_unix(path)[0] for path in places.sockets(OTHER)]
    for path in places.sockets(ME):
        dead(path)  # left by this pod's previous container; the socket is replaced, not removed
    floods = []
    for _ in range(5000):
        flood = socket.socket(socket.AF_UNIX)
        flood.setblocking(False)
        floods.append(flood)
        if flood.connect_ex(str(places.plugins / f"dra-{OTHER}.sock")):
            break
    assert places.leftovers.sweep() == []
    assert all(path.is_socket() for uid in (ME, OTHER) for path in places.sockets(uid))
    for one in (*listening, *floods):
        one.close()


def test_foreign_files_stay(places: Places) -> None:
    """Sockets whose names do not match the driver's patterns, regular files, links, directories that do not belong to
    an instance, and directories that contain anything other than sockets are left alone.
    """
    dead(places.plugins / "dra.sock")
    dead(places.plugins / "csi.sock")
    dead(places.registry / f"dra.cpu-{OTHER}-reg.sock")
    (places.plugins / f"dra-{OTHER}.sock").write_text("a file")
    (places.registry / f"reg-{OTHER}.sock").symlink_to(places.plugins / "csi.sock")
    (places.run / OTHER).mkdir()
    (places.run / OTHER / "notes").write_text("")
    (places.run / "backend").mkdir()
    (places.run / "quarantine").mkdir()
    (places.run / "claims.lock").write_text("")
    elsewhere = places.run.parent / "elsewhere"
    elsewhere.mkdir()
    dead(elsewhere / "state.sock")
    (places.run / ME.replace("1", "3")).symlink_to(elsewhere)
    before = sorted(places.run.parent.rglob("*"))
    assert places.leftovers.sweep() == []
    assert sorted(places.run.parent.rglob("*")) == before


def test_a_socket_that_does_not_listen_yet_stays_for_a_while(places: Places) -> None:
    """A new socket is bound under a hidden name before it listens. A file's ctime cannot be set, so the test cannot
    make the socket old enough to be removed.
    """
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(places.plugins / ".0a1b2c"))
        assert places.leftovers.sweep() == []
        assert (places.plugins / ".0a1b2c").is_socket()
        assert time.time() - (places.plugins / ".0a1b2c").lstat().st_ctime < 60


async def test_an_instance_can_listen_after_its_empty_directory_was_removed(short_root: Path) -> None:
    """Another instance mistook the directory for a dead instance's."""
    root = short_root / "run"
    async with RunDirectory(root, ME) as one:
        assert Leftovers(root, frozenset({root / OTHER}), ()).sweep() == [root / ME]
        with await one.listen():
            assert one.state_socket.is_socket()
            assert Leftovers(root, frozenset({root / OTHER}), ()).sweep() == []


async def test_links_left_by_killed_instances_are_removed_when_the_active_instance_changes(short_root: Path) -> None:
    """An instance may have been killed between creating the link and renaming it."""
    root = short_root / "run"
    async with RunDirectory(root, ME) as one:
        (root / ".a1b2c3").symlink_to("nowhere")
        (root / ".a1b2c4").write_text("no link")
        with await one.listen():
            await one.become_active()
        assert sorted(path.name for path in root.iterdir()) == [".a1b2c4", ME, "claims.lock", "state.sock"]
        remove_hidden_links(root)
        assert (root / "state.sock").is_symlink()
