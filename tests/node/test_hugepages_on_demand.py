# SPDX-License-Identifier: Apache-2.0
"""Hugepages on demand on a real kernel: the helper container of the rendered pod writes nr_hugepages without
capabilities.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from numa_contract.names import ON_DEMAND_LABEL

from tests.fakes.scheduler import UnschedulableError, may_bind
from tests.node.rig import kernel
from tests.node.rig.claims import ClaimPod
from tests.node.rig.cluster import Cluster
from tests.node.rig.wait import until
from tests.stage.pods import hugepages

PAGE = 2 << 20
SMALL, LARGE = (kernel.NODES / f"node1/hugepages/hugepages-{kib}kB/nr_hugepages" for kib in (2048, 1 << 20))
HOLD = ["python3", "-IS", "/programs/touch_memory.py", "--hold", "2M:260"]


def pages(pool: Path) -> int:
    """Returns the number of pages in a pool, as the kernel reports it."""
    return int(pool.read_text())


@pytest.fixture
def at_boot() -> dict[Path, str]:
    """Returns the number of pages in both pools, read before the driver frees those that no claim holds."""
    return {pool: pool.read_text() for pool in (SMALL, LARGE)}


@pytest.fixture
def restored(at_boot: dict[Path, str], cluster: Cluster) -> Iterator[None]:
    """Restores both pools' pages for the following tests, once a driver that does not resize the pools is running."""
    yield
    cluster.configure({})
    for pool, count in at_boot.items():
        with suppress(OSError):
            pool.write_text(count)


def path(pod: ClaimPod) -> str:
    """Returns the API path of the pod's claim."""
    return f"/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/{pod.claims[0]['metadata']['name']}"


def claimed(cluster: Cluster, size: int, page: str) -> ClaimPod:
    """Returns a pod that is not bound yet, with an allocated and labelled claim for pages on NUMA node 1.

    The chart's policy sets the label when a claim is created; the fake API server has no policies.
    """
    pod = cluster.pod(hugepages(size, page, numa_node=1), prepare=False)
    claim: dict[str, Any] = cluster.api(path(pod))
    claim["metadata"]["labels"] = {ON_DEMAND_LABEL: "true"}
    cluster.api(path(pod), "PUT", claim)
    return pod


@pytest.mark.configuration(hugepagesOnDemand=[{"numaNode": 1, "size": "2Mi", "pages": 288}])
def test_pages_are_allocated_for_a_claim_and_freed_with_it(restored: None, cluster: Cluster) -> None:
    """The claim requests more pages than the pool had at boot. A container touches them on its NUMA node. Once the pod
    has ended, the pool is empty.
    """
    helper = cluster.instance.pod.containers["hugepages"]
    assert {int(helper.status(name), 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    until(lambda: pages(SMALL) == 0, "pages that no claim holds are freed", within=60)
    db = claimed(cluster, 260 * PAGE, "2m")
    until(lambda: may_bind(cluster.api(path(db))), "the pages exist", within=60)
    assert pages(SMALL) == 260
    db.prepare()
    box = db.run(command=HOLD, image="python", mode=None)
    assert '"nodes": {"1": 260}' in until(box.log, "the program has printed its memory")
    db.end()
    until(lambda: pages(SMALL) == 0, "the pages are freed", within=60)


@pytest.mark.profile("one-gig")
@pytest.mark.configuration(hugepagesOnDemand=[{"numaNode": 1, "size": "1Gi", "pages": 64}])
def test_pages_that_cannot_be_allocated_taint_the_device(restored: None, cluster: Cluster) -> None:
    """The NUMA node has 4 GiB and the claim requests 32 GiB: the claim fails, the device is tainted, and the allocated
    pages are freed.
    """
    pod = claimed(cluster, 32 << 30, "1g")

    def failed() -> bool:
        try:
            return may_bind(cluster.api(path(pod)))
        except UnschedulableError:
            return True

    until(failed, "the claim fails", within=180)
    until(
        lambda: "hugepages-unavailable" in str(cluster.devices()["hugepages-1g-numa001"]),
        "the device is tainted",
        within=60,
    )
    until(lambda: pages(LARGE) == 0, "the pages are freed", within=60)
