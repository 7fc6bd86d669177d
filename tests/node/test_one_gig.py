# SPDX-License-Identifier: Apache-2.0
"""A machine with a single 1 GiB page per NUMA node: its capacity is too small for a request policy with a step."""

import pytest

from tests.node.rig.cluster import Cluster
from tests.node.rig.wait import until
from tests.stage.pods import cpus, hugepages
from tests.stage.wires import AnsweredError

GIB = 1 << 30
HOLD = ["python3", "-IS", "/programs/touch_memory.py", "--hold", "1G:1"]


@pytest.mark.profile("one-gig")
def test_the_only_page_of_a_node_can_be_claimed_once(cluster: Cluster) -> None:
    """The device is published, a claim touches the page, and the driver refuses a second claim for it."""
    devices = cluster.devices()
    for number in (0, 1):
        size = devices[f"hugepages-1g-numa00{number}"]["capacity"]["size"]
        assert size["value"] == "1Gi"
        assert "step" not in size["requestPolicy"].get("validRange", {})

    db = cluster.pod(cpus(1, numa_node=1), hugepages(GIB, "1g"))
    box = db.run(command=HOLD, image="python")
    assert '"nodes": {"1": 1}' in until(box.log, "the program has printed its memory")
    assert box.cgroup.hugetlb("1GB")["rsvd.current"] == db.sandbox.cgroup.hugetlb("1GB")["rsvd.max"] == str(GIB)
    assert [one["error"] for one in box.touch_memory("1G:1")] == ["ENOMEM"]

    second = cluster.pod(cpus(1, numa_node=1), hugepages(GIB, "1g"), prepare=False, overcommit=True)
    with pytest.raises(AnsweredError, match="hugepages-1g-numa001"):
        second.prepare()
    db.end()
    second.prepare()
