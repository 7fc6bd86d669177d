# SPDX-License-Identifier: Apache-2.0
"""The plugin as a single file, as users get it, and a cluster for it.

The environment variable KUBECTL names a real kubectl; without it a fake is used.
"""

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.device_status import entry_documents, read_entries, status_entries
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.model import Machine

from hack.plugin import main
from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import CLAIMS, RESOURCES, SLICES
from tests.rigs.builders import NODE, claim, memory, report
from tests.rigs.decisions import INVENTORY, decided, holding, view

ROOT = Path(__file__).parents[2]
REAL = os.environ.get("KUBECTL", "")
PODS, TEMPLATES = (next(one for one in RESOURCES if one.name == name) for name in ("pods", "resourceclaimtemplates"))
SHARE = "6f1b0c5e-0000-4000-8000-000000000001"
TAKEN = {
    "request": "cpus",
    "driver": "dra.cpu",
    "pool": NODE,
    "device": "cpudevnuma000",
    "consumedCapacity": {"dra.cpu/cpu": "2"},
    "shareID": SHARE,
}


@dataclass(slots=True)
class Plugin:
    """The plugin with its cluster."""

    server: ApiServer
    path: Path

    async def run(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Runs a command and returns its exit status, output and errors."""
        kubeconfig = f"--kubeconfig={self.path / 'kubeconfig'}"
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", str(self.path / "kubectl-numa"), *arguments, kubeconfig),
            env={**os.environ, "KUBECTL": REAL or str(self.path / "kubectl"), "HOME": str(self.path), **environment},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    async def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """Runs a command with ``-o json`` and returns the rows in its output."""
        code, out, err = await self.run(*arguments, "-o", "json")
        assert (code, err) == (0, "")
        found: list[dict[str, Any]] = json.loads(out)
        return found

    def add_pod(self, name: str, **more: Any) -> None:
        """Adds a pod to the ``ns`` namespace."""
        self.server.store.create(PODS, "ns", {"metadata": {"name": name}, "spec": {}, **more})


def write_executable(path: Path, text: str) -> None:
    """Writes an executable script."""
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
async def plugin(tmp_path: Path) -> AsyncIterator[Plugin]:
    """Yields the plugin with a cluster of one node, on which a container uses a claim for CPUs and memory."""
    assert main([str(tmp_path)]) == 0
    write_executable(
        tmp_path / "kubectl", f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.fakes.kubectl "$@"\n'
    )
    async with ApiServer() as server:
        server.write_kubeconfig(tmp_path / "kubeconfig")
        for pool in INVENTORY.pools:
            for document in slice_documents(pool, NODE):
                server.store.create(SLICES, "", document)
        server.store.create(CLAIMS, "ns", prepared(INVENTORY.machine))
        yield Plugin(server, tmp_path)


def prepared(machine: Machine, exclusivity: str = "partition", node_reason: str = "") -> dict[str, Any]:
    """Returns a claim as the scheduler, the kubelet and this driver leave it. ``node_reason`` is the reason why the
    node does not support partitions.
    """
    document = claim("u", TAKEN, memory("1Gi"), name="train")
    records = [decided(view("u", TAKEN, memory("1Gi")), driver) for driver in ("dra.cpu", "dra.memory")]
    uses = [{"uid": "u", "driver": one.driver} for one in records]
    runs = report(claims=uses, cpus="1,5", mems="0", exclusivity=exclusivity)
    ledger = holding(*records, containers=(runs,))
    entries = status_entries(ledger, machine, silent=False, node_reason=node_reason)["u"]
    document["status"]["devices"] = entry_documents(entries, read_entries(document), "2026-01-01T00:00:00Z")
    return document
