# SPDX-License-Identifier: Apache-2.0
"""The run directory and its sockets: the link to the active instance, atomic socket creation, and cleanup."""

import asyncio
import shutil
import socket
from pathlib import Path

import pytest
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.node.sockets import listen_unix
from numa_contract.errors import MalformedError
from numa_node.addresses import SocketPathError


async def test_the_link_points_to_the_instance_that_became_active_last(short_root: Path) -> None:
    """A client of state.sock reaches the active instance. The link is relative, so it works wherever the directory is
    mounted.
    """
    (short_root / "run").mkdir(mode=0o755)  # with the mode that the kubelet sets
    async with RunDirectory(short_root / "run", "old") as old, RunDirectory(short_root / "run", "new") as new:
        for instance in (old, new):
            listening = await instance.listen()
            await instance.become_active()
            reader, writer = await asyncio.open_unix_connection(short_root / "run" / "state.sock")
            assert (short_root / "run" / "state.sock").resolve() == instance.state_socket
            writer.close()
            await writer.wait_closed()
            assert reader is not None
            listening.close()
        assert (short_root / "run" / "state.sock").readlink() == Path("new/state.sock")
        assert (short_root / "run").stat().st_mode & 0o777 == 0o700


async def test_shutdown_removes_only_the_instances_own_files(short_root: Path) -> None:
    """The old instance's shutdown removes neither the new instance's link nor its socket, and lock files stay."""
    root = short_root / "run"
    async with RunDirectory(root, "new") as new, RunDirectory(root, "old") as old:
        with await old.listen():
            await old.become_active()
            with await new.listen():
                await new.become_active()
                await old.__aexit__(None, None, None)
                assert not (root / "old").exists()
                assert (root / "state.sock").readlink() == Path("new/state.sock")
                assert new.state_socket.is_socket()
                await new.__aexit__(None, None, None)
    assert [path.name for path in root.iterdir()] == ["claims.lock"]


def test_an_invalid_path_is_rejected_immediately(short_root: Path) -> None:
    """A path with an invalid pod UID must not lead out of the directory, and a socket that cannot be bound leaves
    nothing behind.
    """
    for uid in ("", "..", "a/b"):
        with pytest.raises(MalformedError):
            RunDirectory(short_root, uid)
    with pytest.raises(SocketPathError):
        RunDirectory(short_root / ("x" * 80), "0c7d6f4e-8a0c-4b69-9f86-1f1f3f0b9f11")


async def test_removed_files_are_restored(short_root: Path) -> None:
    """A removed socket, link or run directory is restored at the next check, and the new socket is served."""
    root = short_root / "run"
    async with RunDirectory(root, "one") as one:
        served = [await one.listen()]

        async def reopen() -> None:
            served.append(await one.listen())

        await one.check(leads=True, reopen=reopen)
        assert (root / "state.sock").resolve() == one.state_socket
        assert len(served) == 1
        one.state_socket.unlink()
        await one.check(leads=True, reopen=reopen)
        assert (len(served), one.state_socket.is_socket(), one.problem) == (2, True, "")
        (root / "state.sock").unlink()
        await one.check(leads=False, reopen=reopen)
        assert (root / "state.sock").resolve() == one.state_socket
        shutil.rmtree(root)
        await one.check(leads=False, reopen=reopen)
        assert (root / "state.sock").resolve() == one.state_socket
        assert one.state_socket.is_socket()
        for listening in served:
            listening.close()


async def test_a_file_that_cannot_be_restored_is_reported(short_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A directory in place of the link is not removed. The instance keeps running and logs the problem once."""
    root = short_root / "run"
    async with RunDirectory(root, "one") as one:
        with await one.listen():
            (root / "state.sock").mkdir(parents=True)
            (root / "state.sock" / "x").write_text("")

            async def reopen() -> None:
                raise AssertionError("the socket already exists")

            for _ in range(2):
                await one.check(leads=True, reopen=reopen)
            assert "cannot be used" in one.problem
            assert len(caplog.records) == 1
            shutil.rmtree(root / "state.sock")
            await one.check(leads=True, reopen=reopen)
            assert one.problem == ""
            assert (root / "state.sock").resolve() == one.state_socket


def test_a_listening_socket_replaces_a_stale_one_and_only_its_owner_can_connect(short_root: Path) -> None:
    """After a crash, the old socket file remains. The new socket, which has mode 0600, replaces it."""
    stale, _ = listen_unix(short_root / "s.sock")
    stale.close()
    listening, placed = listen_unix(short_root / "s.sock")
    with listening, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(short_root / "s.sock"))
        assert (short_root / "s.sock").stat().st_mode & 0o777 == 0o600
        placed.remove()
    assert list(short_root.iterdir()) == []


def test_a_foreign_file_in_place_of_the_socket_is_left_alone(short_root: Path) -> None:
    """A regular file in place of the socket is reported and not removed, and no temporary file remains."""
    (short_root / "s.sock").write_text("precious")
    with pytest.raises(FileExistsError, match="is not a socket"):
        listen_unix(short_root / "s.sock")
    assert [path.name for path in short_root.iterdir()] == ["s.sock"]
    assert (short_root / "s.sock").read_text() == "precious"


def test_a_successors_socket_with_the_same_name_survives(short_root: Path) -> None:
    """With a fixed name, the old instance's shutdown must not remove the new instance's socket."""
    old, placed_by_old = listen_unix(short_root / "s.sock")
    new, placed_by_new = listen_unix(short_root / "s.sock")
    with old, new:
        placed_by_old.remove()
        assert (short_root / "s.sock").is_socket()
        placed_by_new.remove()
        assert not (short_root / "s.sock").exists()


async def test_a_shutdown_while_files_are_created_leaves_none_behind(short_root: Path) -> None:
    """The service stops while a thread creates the link, or a socket in place of a removed one."""
    for turns in [*range(2, 12)] * 6:
        async with RunDirectory(short_root / "run", "own") as own:
            listening = [await own.listen()]

            async def reopen(own: RunDirectory = own, listening: list[socket.socket] = listening) -> None:
                listening.append(await own.listen())

            own.state_socket.unlink()
            checking = asyncio.create_task(own.check(leads=True, reopen=reopen))
            for _ in range(turns):
                await asyncio.sleep(0)
            checking.cancel()
            await asyncio.wait([checking])
        await asyncio.sleep(0.001)
        assert [path.name for path in (short_root / "run").iterdir() if path.name != "claims.lock"] == []
        for one in listening:
            one.close()
