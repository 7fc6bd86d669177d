# SPDX-License-Identifier: Apache-2.0
"""``enforcement: observe`` on a real kernel: no file changes, and enforcement writes exactly the reported changes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.node.rig.cluster import Cluster
from tests.node.rig.kernel import CGROUPS, NODES
from tests.node.rig.wait import until

_PATTERNS: Final = (
    *(f"**/{file}" for file in ("cpuset.cpus", "cpuset.mems", "cpuset.cpus.exclusive", "cpuset.cpus.partition")),
    *(f"**/{file}" for file in ("cpu.max", "memory.low", "memory.min", "memory.high", "memory.max", "hugetlb.*.max")),
)


def _files() -> Iterator[Path]:
    for pattern in _PATTERNS:
        yield from CGROUPS.glob(pattern)
    yield from Path("/proc/irq").glob("*/smp_affinity_list")
    yield Path("/proc/irq/default_smp_affinity")
    yield Path("/sys/devices/virtual/workqueue/cpumask")
    yield from NODES.glob("node*/hugepages/*/nr_hugepages")


def contents() -> dict[str, str]:
    """Returns the contents of all files on the node that the driver may write."""
    found = {}
    for path in _files():
        try:
            found[str(path)] = path.read_text().strip()
        except OSError:  # the cgroup was removed, or the interrupt was freed
            continue
    return found


@pytest.mark.core
@pytest.mark.configuration(enforcement="observe")
def test_observing_changes_nothing_and_enforcing_writes_the_reported_values(cluster: Cluster) -> None:
    """While the driver only observes, with two pods running, the files of cgroups, interrupts, workqueues and hugepage
    pools do not change. Once enforcement is enabled, the driver writes the reported values.
    """
    boxes = [cluster.node.pod(name).run() for name in ("web", "job")]
    instance = cluster.instance
    before, passes = contents(), instance.counter("audits")
    until(lambda: instance.counter("audits") >= passes + 2, "the backend has made two more audits", within=60)
    after = contents()
    assert {path: after[path] for path in before if path in after} == before
    desired = {
        f"{CGROUPS}/{one['cgroup']}/{one['file']}": one["desired"]
        for one in instance.lease()["observation"]["changes"]
        if any(one["cgroup"] == box.cgroup.path.lstrip("/") for box in boxes)
    }
    assert desired, "the containers run on reserved CPUs, so changes are reported"
    cluster.configure({})
    until(lambda: contents().items() >= desired.items(), "all reported changes are written")
    after = contents()
    ours = tuple(f"{box.cgroup.directory}/" for box in boxes)
    changed = {path: text for path, text in after.items() if path.startswith(ours) and text != before[path]}
    assert changed == desired
