# SPDX-License-Identifier: Apache-2.0
"""Attacks by who can write into the CDI directory: another driver, a bad disk, a newer release with a fault."""

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER, cdi_file_name

from tests.hostile.attack import Actor, Attack
from tests.hostile.field import Field
from tests.stage.pods import cpus, memory
from tests.stage.process import wait_for

_SCANS = 2.5
"""Seconds in which both look at the directory more than once, of their own accord."""


def _told(field: Field) -> str:
    return json.dumps([field.stage.state("/v1/quarantine"), field.stage.state("/v1/backend")["status"]["problems"]])


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def with_entry(
    make: Callable[[Path], object], driver: str = CPU_DRIVER
) -> Callable[[Field], AbstractContextManager[str]]:
    """Puts something into the directory under the name of a claim file."""

    @contextmanager
    def attack(field: Field) -> Iterator[str]:
        path = field.stage.paths.cdi_dir / cdi_file_name(driver, str(uuid.uuid4()))
        make(path)
        try:
            wait_for("both to tell of it", lambda: _told(field).count(path.name) >= 2)
            time.sleep(_SCANS)
            yield _told(field).replace(path.name, "FILE")
        finally:
            _remove(path)

    return attack


def with_record(
    change: Callable[[Any], None], request: Any, driver: str = CPU_DRIVER
) -> Callable[[Field], AbstractContextManager[str]]:
    """Changes the record in the file of a claim whose container runs. The container keeps what it has."""

    @contextmanager
    def attack(field: Field) -> Iterator[str]:
        with field.claim_pod(cpus(2), request) as pod:
            field.patiently(pod.prepare)
            box, given = pod.run(), field.stage.held(pod.claim_uid)
            box.comes_to(given)
            path = field.stage.paths.cdi_dir / cdi_file_name(driver, pod.claim_uid)
            document = json.loads(path.read_text())
            record = json.loads(document["annotations"]["dra-driver-numa/record"])
            change(record)
            fresh = path.with_name(".fresh")
            fresh.write_text(json.dumps(document | {"annotations": {"dra-driver-numa/record": json.dumps(record)}}))
            fresh.replace(path)
            time.sleep(_SCANS)
            yield _told(field)
            box.comes_to(given)

    return attack


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


def _row(name: str, make: Callable[[Path], object], expects: str, *findings: str) -> Attack:
    return Attack(Actor.FILE, name, with_entry(make), expects, seconds=1.0, findings=findings)


def _record_row(name: str, change: Callable[[Any], None], *findings: str) -> Attack:
    run = with_record(change, memory("64Mi"), MEMORY_DRIVER)
    return Attack(Actor.FILE, name, run, "", seconds=1.0, findings=findings)


ATTACKS = [
    _row("a FIFO", os.mkfifo, "FILE is not a regular file", "frontend A11", "security S12"),
    _row("a link to itself", lambda path: path.symlink_to(path), "FILE is not a regular file", "frontend A11"),
    _row("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero"), "FILE is not a regular", "frontend A11"),
    _row("a directory", Path.mkdir, "FILE is not a regular file", "frontend A11"),
    _row("100 MB", _large, "FILE", "frontend A11", "security S12"),
    _row("JSON that ends too soon", lambda path: path.write_text('{"kind": "dra.k8s.io/cpu", "dev'), "FILE"),
    _row("lists nested 500,000 deep", lambda path: path.write_text("[" * 500_000), "FILE", "security S13"),
    _row("a lone surrogate", _surrogate, "FILE", "backend A5", "frontend A13"),
]
