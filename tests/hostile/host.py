# SPDX-License-Identifier: Apache-2.0
"""Disturbances on the host: a script removes unknown files, and file operations hang."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import Field
from tests.stage.process import wait_for


@contextmanager
def _sockets_removed(field: Field) -> Iterator[str]:
    paths = field.stage.paths
    plugins = [
        *(paths.kubelet_root / "plugins_registry").rglob("*.sock"),
        *(paths.kubelet_root / "plugins").rglob("*.sock"),
    ]
    removed = [*plugins, field.instance.state_socket, paths.run_dir / "state.sock"]
    assert len(removed) == 6
    with field.victim():
        for path in removed:
            path.unlink()
        wait_for("the sockets", lambda: all(path.is_socket() for path in removed))
        field.ready()
    yield "all are back"


@contextmanager
def _cdi_directory_replaced(field: Field) -> Iterator[str]:
    directory = field.stage.paths.cdi_dir

    def records() -> set[str]:
        return {path.name for path in directory.glob("*.json")}

    with field.victim():
        before = records()
        # The directory is renamed before it is removed, so that a concurrent writer cannot prevent the removal.
        directory.rename(directory.with_name("old"))
        directory.mkdir()
        shutil.rmtree(directory.with_name("old"))
        wait_for("the records", lambda: records() == before)
    yield "the records were written again"


@parametrized
def _with_fifo(field: Field, path_of: str) -> Iterator[str]:
    """Replaces a host file with a FIFO for the duration of the block. Every plain read or write of the FIFO hangs."""
    path = field.settings.host_root / path_of
    aside = path.with_name("aside")
    path.rename(aside)
    os.mkfifo(path)
    try:
        with field.victim():
            yield field.stage.unready(field.instance) or "ready"
    finally:
        aside.replace(path)


@contextmanager
def _journal_garbage(field: Field) -> Iterator[str]:
    journal = field.stage.paths.run_dir / "claims.journal"
    for garbage in (os.urandom(256 << 10), b"dra-driver-numa journal 1 " + b"9" * 60, b"[" * (256 << 10), b""):
        with field.victim():
            journal.write_bytes(garbage)
            field.works()
    field.ready()
    yield "the journal is written again"


@contextmanager
def _journal_fifo(field: Field) -> Iterator[str]:
    journal = field.stage.paths.run_dir / "claims.journal"
    with field.victim():
        journal.unlink()
        os.mkfifo(journal)
        field.works()
        wait_for("a journal", journal.is_file)
        field.ready()
    yield "the journal is a file again"


@contextmanager
def _cgroups_away(field: Field) -> Iterator[str]:
    """Hides the cgroup tree during one audit; the containers keep running."""
    root = field.stage.paths.cgroup_root
    aside = root.with_name("aside")
    with field.victim() as (_, _, given), field.pod("plain") as web:
        plain = web.run()
        root.rename(aside)
        time.sleep(2.0)
        aside.rename(root)
        plain.wait_for_cpus(field.pool - given)
        wait_for("both containers to run", lambda: _states(field) == "running running")
        yield _states(field)


def _states(field: Field) -> str:
    return " ".join(sorted(one["state"] for one in field.stage.state("/v1/containers")))


_PAGES = "sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages"
_attack = partial(Attack, Actor.HOST)

ATTACKS = [
    _attack("every socket is removed", _sockets_removed, "are back"),
    _attack("the CDI directory is replaced", _cdi_directory_replaced, "again"),
    _attack("the journal contains garbage", _journal_garbage, "again", 2.0),
    _attack("the journal is a FIFO", _journal_fifo, "again", 1.0),
    _attack("the cgroup tree disappears for a moment", _cgroups_away, r"\Arunning running\Z", 1.0),
    _attack("a file in /sys hangs", _with_fifo(_PAGES), "ready"),
]
