# SPDX-License-Identifier: Apache-2.0
"""Attacks by writers of the CDI directory: another driver, a broken disk, a faulty newer release."""

import copy
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from numa_contract.cdi import RECORD_ANNOTATION
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, cdi_file_name

from tests.hostile.attack import Actor, Attack, parametrized
from tests.hostile.field import Field
from tests.stage.pods import memory
from tests.stage.process import wait_for

_SCANS = 2.5
"""Seconds for which the entries stay in the directory after both processes have reported them, so that the periodic
scans also read them.
"""


def _told(field: Field) -> str:
    return json.dumps([field.stage.state("/v1/quarantine"), field.stage.state("/v1/backend")["status"]["problems"]])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@parametrized
def with_entries(field: Field, *entries: Callable[[Path], object]) -> Iterator[str]:
    """Creates entries with the names of claim files in the CDI directory, and checks that both processes report each
    of them.
    """
    names = [cdi_file_name(CPU_DRIVER, f"{number}-{uuid.uuid4()}") for number, _ in enumerate(entries)]
    paths = [field.stage.paths.cdi_dir / name for name in names]
    try:
        for path, make in zip(paths, entries, strict=True):
            make(path)
        # Some of the entries are noticed only at the next scan. The frontend's CPU time for answering the checks counts
        # towards the attack's limit, so there are only a few checks.
        wait_for(
            "both processes to report every entry",
            lambda: (told := _told(field)) and all(told.count(name) >= 2 for name in names),
            interval=0.25,
        )
        time.sleep(_SCANS)
        heard = _told(field)
    finally:
        # A container runtime also reads the entries, and some of them could make it hang forever.
        for path in paths:
            _remove(path)
    yield heard


@parametrized
def with_records(field: Field, *changes: Callable[[Any], None]) -> Iterator[str]:
    """Repeatedly damages the memory record of a claim whose container is running. The container must keep its CPUs."""
    with field.victim(2, memory("64Mi")) as (pod, _, _):
        path = field.stage.paths.cdi_dir / cdi_file_name(MEMORY_DRIVER, pod.claim_uid)

        def record() -> Any:
            return json.loads(json.loads(path.read_text())["annotations"][RECORD_ANNOTATION])

        document, whole = json.loads(path.read_text()), record()
        for change in changes:
            damaged = copy.deepcopy(whole)
            change(damaged)
            fresh = path.with_name(".fresh")
            fresh.write_text(json.dumps(document | {"annotations": {RECORD_ANNOTATION: json.dumps(damaged)}}))
            fresh.replace(path)
            time.sleep(0.3)
        field.stage.runtime("restart")
        field.ready()
        wait_for("the record", lambda: record()["memory"] == whole["memory"])
        yield "the record was written again"


def _memory(**fields: object) -> Callable[[Any], None]:
    return lambda record: record["memory"][0].update(fields)


def _high(value: float) -> Callable[[Any], None]:
    return lambda record: record["memoryParameters"].update({"memory": {"high": value}})


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"{")
        file.truncate(100 << 20)


def _surrogate(path: Path) -> None:
    record = json.dumps({"version": "\ud800"})
    path.write_text(json.dumps({"kind": "dra.k8s.io/cpu", "annotations": {"dra-driver-numa/record": record}}))


_NO_FILES = (os.mkfifo, lambda path: path.symlink_to(path), lambda path: path.symlink_to("/dev/zero"), Path.mkdir)
_NO_JSON = (
    lambda path: path.write_text('{"kind": "dra.k8s.io/cpu", "dev'),
    lambda path: path.write_text("[" * 500_000),
    lambda path: path.write_bytes(os.urandom(50_000)),
    _surrogate,
    _large,
)

_attack = partial(Attack, Actor.FILE)

ATTACKS = [
    _attack(
        "a FIFO, a symlink to itself, a symlink to /dev/zero, a directory",
        with_entries(*_NO_FILES),
        "is not a regular file",
    ),
    _attack(
        "truncated JSON, 500,000 nested lists, random bytes, a lone surrogate, 100 MB",
        with_entries(*_NO_JSON),
        "(?s)(?=.*nested more than 64 levels deep).*larger than 1048576 bytes",
    ),
    _attack(
        "invalid amounts in the record of a running container",
        with_records(
            _memory(pageBytes=0),
            _memory(pageBytes=1000, hugepages=True),
            _memory(size=-1, numaNode=1 << 40),
            _memory(device="\ud800"),
            _high(float("nan")),
            _high(float("inf")),
        ),
        "written again",
    ),
]
