# SPDX-License-Identifier: Apache-2.0
"""Many pods, each with CPUs, memory and hugepages from a single NUMA node: `ALIGNED_PODS=200 tests/node/run.sh -k
aligned`.
"""

import os
import statistics
import time

import pytest

from tests.fakes.waiting import PATIENCE
from tests.node.rig import figures, kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import Cluster
from tests.node.rig.pods import Container
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages, memory

MIB = 1 << 20
COUNT = int(os.environ["ALIGNED_PODS"])
HOLD = ["python3", "-IS", "/programs/touch_memory.py", "--hold", "2M:2", "4K:300"]


def misplaced(pod: ClaimPod, box: Container) -> str:
    """Returns those of the container's resources that are not on the NUMA node of its CPUs, or ""."""
    (node,) = (number for number in kernel.numa_nodes() if pod.cpus <= kernel.node_cpus(number))
    pages = kernel.numa_maps(box.process)
    seen = {
        "cpus": box.cpus_allowed == pod.cpus,
        "mems": box.mems_allowed == {node},
        "hugepages": [one.pages for one in pages if one.page_kib == 2048] == [{node: 2}],
        "memory": {node: 300} in [one.pages for one in pages],
    }
    return " ".join(what for what, right in seen.items() if not right)


@pytest.mark.timeout((240 + 40 * COUNT) * PATIENCE)  # the 240 s cover the start of both services
def test_pods_one_after_another_are_all_aligned(cluster: Cluster) -> None:
    """Each pod's CPUs, allowed memory node and touched pages belong to a single NUMA node, although the previous pod is
    still running.
    """
    faults: dict[int, str] = {}
    seconds: list[float] = []
    used: list[int] = []
    before: ClaimPod | None = None
    for number in range(COUNT):
        began = time.monotonic()
        pod = cluster.pod(cpus(2), memory(16 * MIB), hugepages(4 * MIB))
        box = pod.run(command=HOLD, image="python")
        until(box.log, "the program has printed its memory")
        if fault := misplaced(pod, box):
            faults[number] = fault
        used += box.mems_allowed
        if before is not None:
            before.end()
        before = pod
        seconds.append(time.monotonic() - began)
    share = ", ".join(f"{used.count(node)} on node {node}" for node in sorted(set(used)))
    figures.note("pods aligned in CPUs, memory and hugepages", f"{COUNT - len(faults)} of {COUNT} ({share})")
    figures.note("time per aligned pod", f"median {statistics.median(seconds):.1f} s, worst {max(seconds):.1f} s")
    assert not faults
    assert set(used) == set(kernel.numa_nodes())
