# SPDX-License-Identifier: Apache-2.0
"""Failing memory: new claims do not get memory for which the kernel has counted errors."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.rig import kernel
from tests.node.rig.cluster import Cluster
from tests.node.rig.wait import until
from tests.rigs.trees import edac

OVERLAY = Path("/run/node-test/errors.json")
TAINT = {"key": "dra.memory/hardware-errors", "value": "uncorrected", "effect": "NoSchedule"}
# 100 is MADV_HWPOISON (include/uapi/asm-generic/mman-common.h). The kernel kills the process that owns the page, so the
# page must belong to a child process.
_POISON = "import mmap; page = mmap.mmap(-1, mmap.PAGESIZE); page[0] = 1; page.madvise(100)"
by_the_first = pytest.mark.configuration(hardwareErrors={"uncorrected": 1})


def lost_pages() -> dict[int, int]:
    """Returns, for each NUMA node, the number of pages that the kernel has taken out of use after errors."""
    files = kernel.NODES.glob("node*/memory_failure/total")
    return {int(file.parent.parent.name.removeprefix("node")): int(file.read_text()) for file in files}


def tainted(cluster: Cluster) -> set[str]:
    """Returns the devices with a taint for hardware errors."""
    published = cluster.devices().items()
    key = TAINT["key"]
    return {name for name, device in published if any(t["key"] == key for t in device.get("taints", []))}


@by_the_first
def test_a_poisoned_page_taints_the_memory_of_its_node(cluster: Cluster) -> None:
    """The kernel reports which NUMA node lost the page, so all memory devices of that node are tainted, but no CPU
    device.
    """
    before = lost_pages()
    assert subprocess.run([sys.executable, "-c", _POISON], check=False).returncode in (0, -signal.SIGBUS)
    ill = {node for node, count in lost_pages().items() if count > before[node]}
    assert len(ill) == 1
    names = {name for name in cluster.devices() for node in ill if name.endswith(f"-numa{node:03}")}
    assert names
    until(lambda: names <= tainted(cluster), "the node's memory is tainted", within=30)
    assert not {name for name in tainted(cluster) if name.startswith("cpudev")}


@pytest.fixture
def failing_controller() -> None:
    """Writes the files of a failing memory controller on the second socket, which are then overlaid on the machine's
    /sys.
    """
    files = edac(1, "Skylake Socket#1 IMC#0", "CPU_SrcID#1_MC#0_Chan#0_DIMM#0", ue=2)
    OVERLAY.parent.mkdir(exist_ok=True)
    OVERLAY.write_text(json.dumps(files))


@pytest.mark.configuration(hardwareErrors={"uncorrected": 2}, sysfsOverlay=str(OVERLAY))
def test_a_failing_controller_taints_the_memory_of_its_socket(failing_controller: None, cluster: Cluster) -> None:
    """The taint exists from the start, since the kernel had already counted the errors; claims for other devices are
    prepared as usual.
    """
    until(lambda: "memory-numa001" in tainted(cluster), "the socket's memory is tainted", within=30)
    taints = cluster.devices()["hugepages-2m-numa001"]["taints"]
    assert any(taint.items() >= TAINT.items() for taint in taints)  # the server adds a timestamp to the taint
    assert "memory-numa000" not in tainted(cluster)
