# SPDX-License-Identifier: Apache-2.0
"""What the memory peer gets wrong and the frontend must not, in the order of its page of facts.

What concerns the backend (limits that overwrite each other, pod limits that grow, Synchronize, reconnection) is tested
there under the same file name.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.commands.provision import WAITS, provision
from dra_frontend.commands.provision_plan import plan, read_requested
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.values import Failure, Prepared
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import HugepagePool, Machine, NumaNode
from dra_frontend.node.machine_watch import HostTrees, MachineWatch
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cdi import cdi_document, request_env
from numa_contract.config import Config, parse_config
from numa_contract.records import AllocationRecord, Owner

from tests.rigs.decisions import decided, view
from tests.rigs.frontend import Frontend
from tests.rigs.trees import NAMES, MemoryTree, captured, small_machine
from tests.strategies.claims import NODE, claim, cpus, memory
from tests.strategies.machines import machine, machines

MIB, GIB = 1 << 20, 1 << 30
M2, G1 = 2 * MIB, GIB
POOLS = (HugepagePool(M2, 512, 512), HugepagePool(G1, 1, 1))


def offered(found: Machine, **config: Any) -> Inventory:
    """Returns what a machine offers."""
    return build_inventory(found, parse_config(config, "test"), NODE)


def host(pools: tuple[HugepagePool, ...] = POOLS, memory_bytes: int = 8 * GIB) -> Machine:
    """Two nodes with these pools each."""
    return machine(memory=memory_bytes, hugepages=pools)


def memory_devices(inventory: Inventory) -> dict[str, MemoryDevice]:
    """Returns the devices of dra.memory by name."""
    return {d.name: d for pool in inventory.pools for d in pool.devices if isinstance(d, MemoryDevice)}


def record(*results: dict[str, Any], **more: Any) -> AllocationRecord:
    """Returns the memory record of the claim ``u``."""
    return decided(view("u", *results, **more), offered(host()), "dra.memory")


def pages(count: str, request: str, node: int = 0, size: str = "2m") -> dict[str, Any]:
    """Returns a result that takes hugepages."""
    return memory(count, request, node, f"hugepages-{size}")


def frontend(path: Path, *documents: dict[str, Any]) -> Frontend:
    """A frontend that has just started."""
    return Frontend(path, offered(host()), *documents)


# Discovery and slices


@given(machines(), st.integers(0, 2048), st.integers(0, 4))
@pytest.mark.fault("memory peer, discovery")
def test_memory_and_hugepages_are_not_promised_twice(found: Machine, small: int, large: int) -> None:
    """On each node plain memory, pages of every size and reserves together are never more than the node has."""
    pools = (HugepagePool(M2, small, small), HugepagePool(G1, large, large))
    nodes = {n: replace(node, memory_bytes=16 * GIB, hugepages=pools) for n, node in found.numa_nodes.items()}
    reserved = [{"numaNode": n, "limits": {"memory": "1Gi"}} for n in nodes]
    promised = memory_devices(offered(replace(found, numa_nodes=nodes), reservedMemory=reserved)).values()
    for node in nodes.values():
        assert sum(d.capacity_bytes for d in promised if d.numa_node == node.id) <= node.memory_bytes - GIB


@pytest.mark.fault("memory peer, discovery")
def test_host_reserves_are_subtracted() -> None:
    """What the operator keeps for the host, of memory and of pages, is offered to nobody."""
    limits = {"memory": "1Gi", "hugepages-2Mi": "64Mi"}
    before, after = (
        memory_devices(offered(host(), reservedMemory=r)) for r in ([], [{"numaNode": 0, "limits": limits}])
    )
    lost = {name: before[name].capacity_bytes - after[name].capacity_bytes for name in before}
    assert lost["memory-numa000"] == GIB
    assert lost["hugepages-2m-numa000"] == 64 * MIB
    assert {name for name, less in lost.items() if less} == {"memory-numa000", "hugepages-2m-numa000"}


@pytest.mark.fault("memory peer, discovery")
def test_nodes_without_memory_publish_nothing() -> None:
    """No device, no pool entry, no failure; their CPUs are offered all the same."""
    found = host()
    empty = replace(found.numa_nodes[1], memory_bytes=0, hugepages=tuple(replace(p, total=0, free=0) for p in POOLS))
    inventory = offered(replace(found, numa_nodes={**found.numa_nodes, 1: empty}))
    assert {device.numa_node for device in memory_devices(inventory).values()} == {0}
    assert [device.name for device in inventory.pools[0].devices] == ["cpudevnuma000", "cpudevnuma001"]


@pytest.mark.fault("memory peer, discovery")
async def test_the_machine_is_not_read_only_once() -> None:
    """Pages that are allocated after the start are offered at the next look, without a restart."""
    tree = small_machine()
    trees = HostTrees(tree, MemoryTree({}))
    watch = MachineWatch(trees, Config(), NODE, lambda: Ledger({}))
    path = "/sys/devices/system/node/node0/hugepages/hugepages-2048kB"
    tree.files |= {f"{path}/nr_hugepages": b"512\n", f"{path}/free_hugepages": b"512\n"}
    before = memory_devices(watch.inventory)["hugepages-2m-numa000"].capacity_bytes
    await watch.read()
    assert memory_devices(watch.inventory)["hugepages-2m-numa000"].capacity_bytes - before == 256 * M2


@pytest.mark.fault("memory peer, discovery")
def test_one_pool_for_each_resource() -> None:
    """As its README promises: what changes in one does not make the others be published anew."""
    pools = {pool.name: pool.driver for pool in offered(host()).pools}
    assert pools == {
        NODE: "dra.cpu",
        f"{NODE}-memory": "dra.memory",
        f"{NODE}-hugepages-2m": "dra.memory",
        f"{NODE}-hugepages-1g": "dra.memory",
    }


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fault("memory peer, discovery")
def test_device_names_are_not_random(name: str) -> None:
    """Every start gives the same names and the same slices, so that claims from before can be prepared."""
    one, two = (
        [document for pool in offered(discover(captured(name))).pools for document in slice_documents(pool, NODE)]
        for _ in range(2)
    )
    assert one == two


@pytest.mark.fault("memory peer, discovery")
def test_requests_are_whole_pages_and_never_beyond_the_device() -> None:
    """The policy that the scheduler rounds by; no step where none fits, which would void the whole slice."""
    devices = memory_devices(offered(host()))
    for device in devices.values():
        capacity = device.capacity
        assert capacity.minimum == device.page_bytes
        assert capacity.default % device.page_bytes == 0
        assert capacity.step is None or capacity.minimum + capacity.step <= capacity.value
    assert devices["hugepages-1g-numa000"].capacity.step is None


@pytest.mark.parametrize(
    ("base", "sizes"),
    [(4 << 10, (64 << 10, M2, 32 << 20, G1)), (64 << 10, (M2, 512 << 20, 16 << 30)), (4 << 10, (M2, G1))],
)
@pytest.mark.fault("memory peer, discovery")
def test_not_only_x86_64(base: int, sizes: tuple[int, ...]) -> None:
    """Every page size of arm64 kernels is found in sysfs, published by its names and claimed in whole pages."""
    tree = small_machine()
    pool = "/sys/devices/system/node/node0/hugepages"
    changes: dict[str, str | bytes | None] = {
        f"{pool[:-10]}/meminfo": f"Node 0 MemTotal: {64 * GIB >> 10} kB\n",
        pool: None,
    }
    for size in sizes:
        files = {"nr_hugepages": "1\n", "free_hugepages": "1\n", "surplus_hugepages": "0\n"}
        changes |= {f"{pool}/hugepages-{size >> 10}kB/{name}": text for name, text in files.items()}
    found = replace(discover(tree.changed(changes)), base_page_bytes=base)
    devices = {d.page_bytes: d for d in memory_devices(offered(found)).values() if d.hugepages and d.numa_node == 0}
    assert set(devices) == set(sizes)
    for size, device in devices.items():
        short = device.attributes["resource.kubernetes.io/pageSize"]
        assert device.name == f"hugepages-{short}-numa000"
        assert device.attributes["dra.memory/pageSize"] == f"{str(short)[:-1]}{str(short)[-1].upper()}i"
        assert device.capacity_bytes == size


# Prepare


@pytest.mark.fault("memory peer, prepare")
async def test_a_claim_may_be_reserved_for_several_pods(tmp_path: Path) -> None:
    """They take turns, or share what cannot be told at this point; the container that comes second is the backend's."""
    one = frontend(tmp_path, claim("u", memory("64Mi"), pods=("p1", "p2")))
    assert isinstance(await one.prepare("u", "dra.memory"), Prepared)
    assert [pod.uid for pod in one.store.ledger.records[0].reserved_for] == ["p1", "p2"]


@pytest.mark.fault("memory peer, prepare")
async def test_one_file_for_each_claim(tmp_path: Path) -> None:
    """A claim costs its own file: those of the others are neither read again nor written."""
    first = frontend(tmp_path, claim("u1", memory("64Mi")), claim("u2", pages("4Mi", "r")))
    await first.prepare("u1", "dra.memory")
    (file,) = first.path.glob("*.json")
    stamp = file.stat()
    await first.prepare("u2", "dra.memory")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (stamp.st_ino, stamp.st_mtime_ns)
    assert sorted(path.name for path in first.path.glob("*.json")) == [
        "dra.k8s.io-memory_claim-u1.json",
        "dra.k8s.io-memory_claim-u2.json",
    ]
    await first.unprepare("u2", "dra.memory")
    assert [path.name for path in first.path.glob("*.json")] == [file.name]


@pytest.mark.fault("memory peer, prepare")
def test_two_nodes_of_one_kind_are_both_kept() -> None:
    """A map by resource name would keep the last; here every result is an allocation of its own."""
    made = record(pages("4Mi", "r", 0), pages("6Mi", "r", 1))
    assert [(a.numa_node, a.size) for a in made.memory] == [(0, 4 * MIB), (1, 6 * MIB)]
    assert request_env(made, "r") == {
        "DRAMEMORY_u_NUMANodes": "0-1",
        "DRAMEMORY_u_hugepages_2Mi": "numanode:0,size:4Mi;numanode:1,size:6Mi",
    }


@pytest.mark.fault("memory peer, prepare")
def test_a_claim_may_have_several_allocations() -> None:
    """Memory and two page sizes, in one request or in several; each container is told those that it holds."""
    made = record(memory("64Mi", "m"), pages("4Mi", "h"), pages("1Gi", "h", 0, "1g"))
    assert [(a.request, a.page_bytes, a.size) for a in made.memory] == [
        ("m", 4096, 64 * MIB),
        ("h", M2, 4 * MIB),
        ("h", G1, GIB),
    ]
    environment = {d["name"]: d["containerEdits"]["env"] for d in cdi_document(made)["devices"]}
    assert environment["claim-u-h"] == [
        "DRAMEMORY_u_h_NUMANodes=0",
        "DRAMEMORY_u_h_hugepages_1Gi=numanode:0,size:1Gi",
        "DRAMEMORY_u_h_hugepages_2Mi=numanode:0,size:4Mi",
    ]


@pytest.mark.fault("memory peer, prepare")
async def test_a_restart_knows_every_claim(tmp_path: Path) -> None:
    """Also those without a container: hugepages that are prepared are not given to anybody else."""
    one, two = claim("u1", pages("1000Mi", "r")), claim("u2", pages("512Mi", "r"))
    assert isinstance(await frontend(tmp_path, one).prepare("u1", "dra.memory"), Prepared)
    restarted = frontend(tmp_path, one, two)
    answer = await restarted.prepare("u2", "dra.memory")
    assert isinstance(answer, Failure)
    assert "25165824 of 1073741824 unclaimed" in answer.text
    assert restarted.store.ledger.records[0].memory[0].size == 1000 * MIB


@pytest.mark.fault("memory peer, prepare")
async def test_the_owner_survives_a_restart(tmp_path: Path) -> None:
    """Bindings are in the record, not in the memory of a process."""
    first = frontend(tmp_path, claim("u", memory("64Mi")))
    await first.prepare("u", "dra.memory")
    owned = first.store.ledger.records[0].model_copy(update={"owner": Owner(pod_uid="pod-1", container="c")})
    await first.store.transact(lambda transaction: transaction.write(owned))
    again = frontend(tmp_path, claim("u", memory("64Mi")))
    await again.prepare("u", "dra.memory")
    assert again.store.ledger.records[0].owner == owned.owner


@pytest.mark.fault("memory peer, prepare")
def test_the_lowest_cdi_version() -> None:
    """0.8.0 voids the file for older libraries; annotations need 0.6.0, and so far nothing needs more."""
    assert cdi_document(record(memory("64Mi")))["cdiVersion"] == "0.6.0"


@pytest.mark.fault("memory peer, prepare")
async def test_cpus_and_memory_are_one_claim(tmp_path: Path) -> None:
    """Two drivers in one process prepare it with one record each, and neither touches the other's."""
    both = frontend(tmp_path, claim("u", cpus(2), memory("64Mi"), pages("4Mi", "r")))
    for driver in ("dra.cpu", "dra.memory"):
        assert isinstance(await both.prepare("u", driver), Prepared)
    assert [(r.driver, len(r.cpus), len(r.memory)) for r in both.store.ledger.records] == [
        ("dra.cpu", 1, 0),
        ("dra.memory", 0, 2),
    ]


# Setup helpers


class Kernel:
    """Pools that grow to a limit, whatever is written; the write succeeds."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.pools: dict[tuple[int, int], int] = {}

    def pages(self, node: int, page_bytes: int) -> int:
        """What the pool has."""
        return self.pools.get((node, page_bytes), 0)

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Takes a number."""
        self.pools[node, page_bytes] = min(pages, self.limit)

    def compact(self, node: int) -> None:
        """Finds nothing."""


def provisioned(limit: int, *wanted: dict[str, Any]) -> tuple[Kernel, list[int | None]]:
    """Returns what the kernel has in the end, and what is missing of each target."""
    requested = read_requested({"kind": "HugePageProvision", "spec": {"pages": list(wanted)}}, "f")
    kernel = Kernel(limit)
    outcomes = provision(plan(host(), requested), kernel, sum(WAITS) + 1, lambda: 0.0, lambda _: None)
    return kernel, [outcome.short for outcome in outcomes]


@pytest.mark.fault("memory peer, setup")
def test_a_node_is_honoured_on_machines_with_several() -> None:
    """Pages for one node go there and nowhere else."""
    kernel, short = provisioned(9999, {"size": "2M", "count": 100, "node": 1})
    assert (kernel.pools, short) == ({(1, M2): 100}, [0])


@pytest.mark.fault("memory peer, setup")
def test_the_remainder_does_not_pile_up_on_node_0() -> None:
    """One page each, from the lowest node on, over nodes that have memory."""
    nodes = {n: NumaNode(n, frozenset({n}), 8 * GIB * (n != 1), POOLS) for n in range(5)}
    requested = read_requested({"kind": "HugePageProvision", "spec": {"pages": [{"size": "2M", "count": 7}]}}, "f")
    targets = plan(replace(host(), numa_nodes=nodes), requested)
    assert {target.node: target.pages for target in targets} == {0: 2, 2: 2, 3: 2, 4: 1}


@pytest.mark.fault("memory peer, setup")
def test_the_result_is_checked() -> None:
    """The kernel takes any number and allocates what it finds: that is looked at, by node."""
    kernel, short = provisioned(60, {"size": "2M", "count": 200})
    assert (kernel.pools, short) == ({(0, M2): 60, (1, M2): 60}, [40, 40])


@pytest.mark.parametrize("size", ["64K", "32Mi", "512MB", "hugepages-16777216kB"])
@pytest.mark.fault("memory peer, setup")
def test_every_page_size_and_spelling(size: str) -> None:
    """Not 2M and 1G alone: what the kernel has is what may be asked for."""
    sizes = {"64K": 64 << 10, "32Mi": 32 << 20, "512MB": 512 << 20, "hugepages-16777216kB": 16 << 30}
    found = host((HugepagePool(sizes[size], 0, 0),), 64 * GIB)
    requested = read_requested({"kind": "HugePageProvision", "spec": {"pages": [{"size": size, "count": 2}]}}, "f")
    assert {(t.node, t.page_bytes, t.pages) for t in plan(found, requested)} == {(n, sizes[size], 1) for n in (0, 1)}
