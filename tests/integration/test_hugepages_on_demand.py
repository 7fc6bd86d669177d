# SPDX-License-Identifier: Apache-2.0
"""A claim for hugepages that do not exist yet: they are allocated before its pod is bound, and freed once
the claim is gone (ADR 23).
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from dra_frontend.allocation.claim import RefusedError, parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.allocation.memory import allocate_memory
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.claims.on_demand import HugepagesOnDemand
from dra_frontend.devices.shortages import Shortages
from dra_frontend.devices.slices import slice_documents
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.machine_watch import MachineWatch
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, OnDemandPages
from numa_contract.names import MEMORY_DRIVER, ON_DEMAND_LABEL
from numa_contract.records import AllocationRecord, MemoryAllocation

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import CLAIMS, NODES, SLICES, Document
from tests.fakes.apiserver_values import Options
from tests.fakes.scheduler import UnschedulableError, allocate, may_bind
from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import MemoryTree, small_machine, write_tree

NODE = "node-a"
GIB = 1 << 30
DEVICE = "hugepages-1g-numa000"
CLASSES = {
    "dra.hugepages-1g": {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{MEMORY_DRIVER}"'}}]}}
}


class Rig:
    """A node whose NUMA node 0 has no 1 GiB pages and may have up to three, with an API server and the part of the
    driver under test.
    """

    def __init__(self, root: Path, server: ApiServer, client: KubeClient) -> None:
        self.server, self.root = server, root
        self.ledger = Ledger({})
        self.config = Config(hugepages_on_demand=(OnDemandPages(numa_node=0, size="1Gi", pages=3),))
        tree = HostTree(write_tree(small_machine(), root))
        self.watch = MachineWatch(tree, MemoryTree({}), self.config, NODE, lambda: self.ledger)
        parts = lambda: self.ledger, lambda: self.watch.inventory
        self.on_demand = HugepagesOnDemand(client, KernelPools(tree), *parts, self.config, Shortages())
        self.pool = root / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages"
        server.store.create(NODES, "", {"metadata": {"name": NODE}})
        for pool in self.watch.inventory.pools:
            for document in slice_documents(pool, NODE) if pool.name.endswith("1g") else ():
                server.store.create(SLICES, "", document)

    @property
    def pages(self) -> int:
        """Returns the number of pages in the kernel's pool."""
        return int(self.pool.read_text())

    def claim(self) -> Document:
        """Returns the claim as the server stores it."""
        return self.server.store.get(CLAIMS, "ns", "c")

    def asked(self, gibibytes: int) -> Document:
        """Creates a claim with the label, allocated on NUMA node 0, as the scheduler leaves it before binding the
        pod.
        """
        numa = [{"cel": {"expression": 'device.attributes["resource.kubernetes.io"].numaNode == 0'}}]
        amount = {"requests": {"size": f"{gibibytes}Gi"}}
        exactly = {"deviceClassName": "dra.hugepages-1g", "selectors": numa, "capacity": amount}
        spec = {"devices": {"requests": [{"name": "pages", "exactly": exactly}]}}
        metadata = {"name": "c", "namespace": "ns", "labels": {ON_DEMAND_LABEL: "true"}}
        made = self.server.store.create(CLAIMS, "ns", {"metadata": metadata, "spec": spec})
        pods = [{"name": "pod", "uid": "11111111-2222-3333-4444-555555555555"}]
        allocated = allocate(made, self.server.store.select(SLICES), CLASSES, pods=pods, node=NODE)
        return self.server.store.update(CLAIMS, "ns", "c", allocated, "status")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Runs the driver until the condition holds."""
        async with asyncio.timeout(5 * PATIENCE):
            while not condition():
                await self.on_demand.provide()
                await self.watch.read()
                await asyncio.sleep(0.01)

    def prepare(self) -> tuple[MemoryAllocation, ...]:
        """Prepares the claim and returns the result."""
        view = parse_claim(self.claim())
        return allocate_memory(view.claim.uid, view.results[MEMORY_DRIVER], self.watch.inventory, self.ledger)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """Returns the node, whose driver watches claims."""
    async with ApiServer(Options(version="1.36")) as server:
        access = kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        async with connect(access) as client, asyncio.TaskGroup() as tasks:
            rig = Rig(tmp_path / "host", server, client)
            following = tasks.create_task(rig.on_demand.claims.follow())
            yield rig
            following.cancel()


async def test_pages_are_allocated_before_the_pod_is_bound(rig: Rig) -> None:
    """The scheduler does not bind the pod until the condition is true. Prepare fails before the pages exist, and
    succeeds afterwards.
    """
    claim = rig.asked(2)
    (result,) = claim["status"]["allocation"]["devices"]["results"]
    assert (result["device"], result["bindingConditions"]) == (DEVICE, ["dra.memory/provisioned"])
    assert (rig.pages, may_bind(claim)) == (0, False)
    with pytest.raises(RefusedError, match=f"only 0 of them are allocated.*{ON_DEMAND_LABEL}"):
        rig.prepare()
    await rig.until(lambda: may_bind(rig.claim()))
    assert rig.pages == 2
    await rig.watch.read()
    (given,) = rig.prepare()
    assert (given.device, given.size) == (DEVICE, 2 * GIB)


async def test_pages_are_freed_with_the_claim(rig: Rig) -> None:
    """The pages of a prepared claim are freed only once its record is gone, because a container may use them until
    then. A claim that was never prepared has no record, so its pages are freed as soon as the claim is deleted.
    """
    rig.asked(2)
    await rig.until(lambda: rig.pages == 2)
    await rig.watch.read()
    view = parse_claim(rig.claim())
    results = view.results[MEMORY_DRIVER]
    record = AllocationRecord(driver=MEMORY_DRIVER, claim=view.claim, results=results, memory=rig.prepare())
    rig.ledger = Ledger({(MEMORY_DRIVER, view.claim.uid): ClaimFile.of(record)})
    rig.server.store.delete(CLAIMS, "ns", "c")
    for _ in range(20):
        await rig.on_demand.provide()
        await asyncio.sleep(0.01)
    assert rig.pages == 2
    rig.ledger = Ledger({})
    await rig.until(lambda: rig.pages == 0)
    rig.asked(1)
    await rig.until(lambda: rig.pages == 1)
    rig.server.store.delete(CLAIMS, "ns", "c")
    await rig.until(lambda: rig.pages == 0)


async def test_a_claim_whose_pages_cannot_be_allocated_is_released(rig: Rig) -> None:
    """The failure condition gives the reason, so the scheduler tries another node."""
    rig.asked(3)
    rig.pool.unlink()
    with pytest.raises(UnschedulableError, match="nr_hugepages: is missing"):
        await rig.until(lambda: may_bind(rig.claim()))


async def test_memory_reserved_for_hugepages_is_not_published_as_plain_memory(rig: Rig) -> None:
    """Memory that may become hugepages is not published as plain memory, whether or not the pages have been allocated.
    The hugepage device publishes all of it from the start.
    """

    def sizes(watch: MachineWatch) -> dict[str, int]:
        return {device.name: device.amount for pool in watch.inventory.pools for device in pool.devices}

    without = sizes(MachineWatch(HostTree(rig.root), MemoryTree({}), Config(), NODE, lambda: rig.ledger))
    before = sizes(rig.watch)
    assert (before[DEVICE], DEVICE in without) == (3 * GIB, False)
    assert before["memory-numa000"] == without["memory-numa000"] - 3 * GIB
    rig.pool.write_text("2\n")
    await rig.watch.read()
    assert sizes(rig.watch) == before
