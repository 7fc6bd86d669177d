# SPDX-License-Identifier: Apache-2.0
"""The publisher and the real client against the API server stand-in, over HTTP."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.errors import ForbiddenError
from dra_frontend.devices.allocatable import MappingForm, mapping_form
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.model import Cpu, HugepagePool, Machine, NumaNode
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.publishing.status import Notice, Timing
from numa_contract.config import Config
from numa_contract.names import DRIVERS

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import RESOURCES, Document

BY_NAME = {(resource.group, resource.name): resource for resource in RESOURCES}
SLICES = BY_NAME["resource.k8s.io", "resourceslices"]
NODES = BY_NAME["", "nodes"]
NODE = "node-a"
QUICK = Timing(settle=0.02, longest_settle=0.05, first_retry=0.02, longest_retry=0.1)


def device(name: str, cpus: int = 8, **more: Any) -> Document:
    policy = {"default": "1", "validRange": {"min": "1", "step": "1", "max": str(cpus)}}
    return {
        "name": name,
        "attributes": {"resource.kubernetes.io/numaNode": {"int": 0}},
        "capacity": {"dra.cpu/cpu": {"value": str(cpus), "requestPolicy": policy}},
        "allowMultipleAllocations": True,
        **more,
    }


def wanted(*devices: Document, pool: str = NODE) -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {},
        "spec": {"driver": "dra.cpu", "nodeName": NODE, "pool": {"name": pool}, "devices": list(devices)},
    }


POOLS = {NODE: [wanted(device("cpudevnuma000")), wanted(device("cpudevnuma001"))], "more": [wanted(pool="more")]}


async def until(condition: Callable[[], object], what: str = "condition") -> None:
    """Waits for a condition, at most 10 s."""
    try:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - the other side is a server, which sets no event of ours
                await asyncio.sleep(0.002)
    except TimeoutError:
        pytest.fail(f"{what} did not come true")


class Rig:
    """One server, one node; publishers are started against them."""

    def __init__(self, server: ApiServer, client: KubeClient) -> None:
        self.server = server
        self.client = client
        self.notices: list[Notice] = []

    def slices(self) -> list[Document]:
        return list(self.server.store.select(SLICES))

    def shape(self) -> list[tuple[str, int, int, list[str]]]:
        """What is published: (pool, generation, count, devices) by name."""
        specs = [one["spec"] for one in self.slices()]
        return [
            (
                spec["pool"]["name"],
                spec["pool"]["generation"],
                spec["pool"]["resourceSliceCount"],
                [device["name"] for device in spec.get("devices", [])],
            )
            for spec in specs
        ]

    @asynccontextmanager
    async def publisher(
        self, pools: dict[str, list[Document]] | None = None, timing: Timing = QUICK, driver: str = "dra.cpu"
    ) -> AsyncGenerator[Publisher, None]:
        async def note(notice: Notice) -> None:
            self.notices.append(notice)
            regarding = {"kind": "Node", "name": NODE}
            await self.client.create_event("", regarding, notice.reason, notice.note, notice.kind)

        publisher = Publisher(self.client, driver, NODE, notify=note, timing=timing)
        publisher.set_pools(POOLS if pools is None else pools)
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(publisher.run())
            yield publisher
            run.cancel()

    async def published(self, publisher: Publisher, pools: int = 3) -> None:
        await until(lambda: publisher.status.published and len(self.slices()) == pools, "publication")

    async def lose_unseen(self) -> None:
        """The watch breaks, and a slice is lost while nobody looks."""
        await until(lambda: self.server.watches, "watch")
        self.server.drop_watches()
        self.server.store.delete(SLICES, "", self.slices()[0]["metadata"]["name"])


FULL = [
    ("more", 1, 1, []),
    (NODE, 1, 2, ["cpudevnuma000"]),
    (NODE, 1, 2, ["cpudevnuma001"]),
]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncGenerator[Rig, None]:
    async with ApiServer() as server:
        server.store.create(NODES, "", {"metadata": {"name": NODE}})
        async with await connect(str(server.write_kubeconfig(tmp_path / "kubeconfig"))) as client:
            yield Rig(server, client)


async def test_publishes_all_pools_owned_by_the_node(rig: Rig) -> None:
    """The first publication brings every pool, complete, in order, at generation 1, owned by the Node."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    assert sorted(rig.shape()) == sorted(FULL)
    node = rig.server.store.get(NODES, "", NODE)
    for one in rig.slices():
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("Node", node["metadata"]["uid"], True)
    by_devices = {one["spec"]["devices"][0]["name"]: one for one in rig.slices() if one["spec"].get("devices")}
    assert by_devices["cpudevnuma000"]["metadata"]["name"].startswith("00000-dra.cpu-node-a-")
    assert by_devices["cpudevnuma001"]["metadata"]["name"].startswith("00001-dra.cpu-node-a-")


async def test_trap_5_1_restart_writes_nothing(rig: Rig) -> None:
    """A second start on the same machine writes nothing, not even a dry run."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    before, asked = rig.slices(), len(rig.server.served)
    async with rig.publisher() as publisher:
        await until(lambda: publisher.status.published, "second publication")
        assert publisher.status.writes == 0
    assert rig.slices() == before
    assert {one.verb for one in rig.server.served[asked:]} <= {"list", "watch"}


async def test_trap_5_11_stop_leaves_the_slices(rig: Rig) -> None:
    """Stopping deletes nothing: the kubelet wipes when the driver stays away, and claims go on meanwhile."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    assert len(rig.slices()) == 3
    assert all(one.verb != "delete" for one in rig.server.served)


async def test_wiped_slices_come_back_soon(rig: Rig) -> None:
    """The kubelet's deletecollection is repaired after the settling time, once, not after the helper's 30 s."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        for one in rig.slices():
            rig.server.store.delete(SLICES, "", one["metadata"]["name"])
        await rig.published(publisher)
    assert sorted(rig.shape()) == sorted(FULL)
    assert len(rig.server.writes()) == 6


async def test_foreign_change_is_undone(rig: Rig) -> None:
    """Somebody else's edit of our slice is replaced by what we want, in place."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        victim = next(one for one in rig.slices() if one["spec"].get("devices"))
        name = victim["metadata"]["name"]
        victim["spec"]["devices"][0]["name"] = "hijacked"
        rig.server.store.update(SLICES, "", name, victim)
        await until(lambda: publisher.status.writes == 4, "repair")
    assert sorted(rig.shape()) == sorted(FULL)


async def test_slices_of_others_are_left_alone(rig: Rig) -> None:
    """Another driver's slice and another node's slice survive; a forgotten pool of ours does not."""
    for driver, node, pool in (("other", NODE, "x"), ("dra.cpu", "node-b", "node-b"), ("dra.cpu", NODE, "old")):
        spec = {"driver": driver, "nodeName": node, "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1}}
        rig.server.store.create(SLICES, "", {"metadata": {"name": f"{driver}-{pool}"}, "spec": spec})
    async with rig.publisher() as publisher:
        await rig.published(publisher, 5)
    names = {one["metadata"]["name"] for one in rig.slices()}
    assert {"other-x", "dra.cpu-node-b"} <= names
    assert "dra.cpu-old" not in names


async def test_new_wish_is_published_at_once(rig: Rig) -> None:
    """A change of the machine does not wait for the settling time, and touches one slice only."""
    async with rig.publisher(timing=Timing(settle=3600)) as publisher:
        await rig.published(publisher)
        publisher.set_pools({**POOLS, NODE: [POOLS[NODE][0], wanted(device("cpudevnuma001", 4))]})
        await until(lambda: publisher.status.writes == 4, "update")
    assert sorted(rig.shape()) == sorted(FULL)
    assert [one.verb for one in rig.server.writes()] == ["create", "create", "create", "update"]


async def test_trap_5_4_gate_off_publishes_nothing_and_says_why(rig: Rig) -> None:
    """Without DRAConsumableCapacity the devices would be given away whole: nothing is published, an Event says so."""
    rig.server.options.gates["DRAConsumableCapacity"] = False
    async with rig.publisher() as publisher:
        await until(lambda: rig.notices and any(one.resource == "events" for one in rig.server.served), "event")
        assert not publisher.status.ready
        assert publisher.status.gate_missing == "DRAConsumableCapacity"
        assert "DRAConsumableCapacity" in rig.notices[0].note
        assert rig.server.writes() == []
        rig.server.options.gates["DRAConsumableCapacity"] = True
        await rig.published(publisher)
        assert publisher.status.ready
        assert [notice.reason for notice in rig.notices] == ["FeatureGateMissing"]


async def test_trap_5_4_other_dropped_fields_are_adopted(rig: Rig) -> None:
    """A field that the server drops is reported once and not sent for ever."""
    rig.server.options.gates["DRADeviceTaints"] = False
    taint = {"key": "k", "effect": "NoSchedule"}
    async with rig.publisher({NODE: [wanted(device("a", taints=[taint]))]}) as publisher:
        await rig.published(publisher, 1)
        assert publisher.status.dropped == ("devices[*].taints",)
        await until(lambda: rig.notices, "notice")
        rig.server.compact()
        await until(lambda: sum(one.verb == "list" for one in rig.server.served) >= 2, "second list")
        await until(lambda: rig.server.watches, "second watch")
        assert publisher.status.ready
    assert len(rig.server.writes()) == 1
    assert [notice.reason for notice in rig.notices] == ["ResourceSliceFieldsDropped"]


def listed() -> Document:
    attribute = {"resource.kubernetes.io/pcieRoot": {"strings": ["pci0000:00", "pci0000:80"]}}
    one = device("cpudevnuma000")
    return wanted({**one, "attributes": {**one["attributes"], **attribute}})


def attributes(rig: Rig) -> set[str]:
    """The names of the published attributes."""
    return {name for one in rig.slices() for each in one["spec"]["devices"] for name in each["attributes"]}


async def test_lists_that_the_server_refuses_are_left_out(rig: Rig) -> None:
    """Without DRAListTypeAttributes a list costs the whole slice (needs B62): published without, an Event says so."""
    async with rig.publisher({NODE: [listed()]}) as publisher:
        await rig.published(publisher, 1)
        await until(lambda: rig.notices, "notice")
        assert publisher.status.ready
        assert publisher.status.error is None
        publisher.set_pools({NODE: [listed(), wanted(device("cpudevnuma001"))]})
        await rig.published(publisher, 2)
    assert attributes(rig) == {"resource.kubernetes.io/numaNode"}
    (notice,) = rig.notices
    assert notice.reason == "ResourceSliceListsRefused"
    assert "resource.kubernetes.io/pcieRoot" in notice.note
    assert "DRAListTypeAttributes" in notice.note


async def test_lists_come_when_the_gate_is_on(rig: Rig) -> None:
    """As they are; and when the gate is switched on later, with the next look at the whole."""
    async with rig.publisher({NODE: [listed()]}) as publisher:
        await rig.published(publisher, 1)
        rig.server.options.gates["DRAListTypeAttributes"] = True
        await until(lambda: rig.server.watches, "watch")
        rig.server.compact()
        await until(lambda: "resource.kubernetes.io/pcieRoot" in attributes(rig), "lists")
    async with rig.publisher({NODE: [listed()]}) as publisher:
        await until(lambda: publisher.status.published, "second publication")
        assert publisher.status.writes == 0


async def test_another_fault_is_not_blamed_on_lists(rig: Rig) -> None:
    """A slice that is invalid without its lists, too, is reported for what is wrong with it."""
    bad = listed()
    bad["spec"]["devices"][0]["name"] = "Not A Label"
    async with rig.publisher({NODE: [bad]}) as publisher:
        await until(lambda: rig.notices, "notice")
        assert "DNS label" in (publisher.status.error or "")
    assert [notice.reason for notice in rig.notices] == ["ResourceSlicesNotPublished"]


@pytest.mark.parametrize(("version", "form"), [("1.36", MappingForm.V1_36), ("1.37", MappingForm.V1_37)])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_claims_are_counted_against_the_node(rig: Rig, version: str, form: MappingForm, driver: str) -> None:
    """With the gate on, the field of the server's release comes back as it was sent; a restart writes nothing."""
    rig.server.options.version = version
    rig.server.options.gates["DRANodeAllocatableResources"] = True
    inventory = build_inventory(MACHINE, Config(), NODE)
    mapping = mapping_form(await rig.client.get_version())
    pools = {p.name: slice_documents(p, NODE, mapping=mapping) for p in inventory.pools if p.driver == driver}
    count = sum(map(len, pools.values()))
    for writes in (count, 0):
        async with rig.publisher(pools, driver=driver) as publisher:
            await rig.published(publisher, count)
        assert (publisher.status.writes, publisher.status.dropped) == (writes, ())
    assert all(form in each for one in rig.slices() for each in one["spec"]["devices"])


async def test_a_mapping_that_the_server_drops_is_told_with_its_gate(rig: Rig) -> None:
    """DRANodeAllocatableResources is off by default: published without it, one Event says what is missing."""
    inventory = build_inventory(MACHINE, Config(), NODE)
    pool = inventory.pools[0]
    async with rig.publisher({NODE: slice_documents(pool, NODE, mapping=MappingForm.V1_36)}) as publisher:
        await rig.published(publisher, 1)
        await until(lambda: rig.notices, "notice")
        assert publisher.status.ready
    (notice,) = rig.notices
    assert notice.reason == "ResourceSliceFieldsDropped"
    assert "DRANodeAllocatableResources" in notice.note


async def test_outage_at_the_start_is_waited_out(rig: Rig) -> None:
    """Errors of every passing kind are retried with growing waits until the server is well again."""
    for answer in ("drop", 500, 429):
        rig.server.fail_next(2, answer)
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        assert publisher.status.error is None
    assert sorted(rig.shape()) == sorted(FULL)


async def test_failed_write_is_finished_later(rig: Rig) -> None:
    """A pool that was written in half is completed from a fresh list."""
    rig.server.fail_next(1, 500, verb="create", resource="resourceslices")
    rig.server.fail_next(1, 409, verb="create", resource="resourceslices")
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    shape = rig.shape()
    assert {pool: [one[1:3] for one in shape if one[0] == pool] for pool in (NODE, "more")}["more"] == [(1, 1)]
    assert len({one[1:3] for one in shape if one[0] == NODE}) == 1


async def test_broken_watch_is_resumed(rig: Rig) -> None:
    """A watch that breaks is taken up where it ended, without a list, and what happened meanwhile is seen."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await rig.lose_unseen()
        await until(lambda: publisher.status.writes > 3, "repair")
        await rig.published(publisher)
    assert sum(one.verb == "list" for one in rig.server.served) == 1


async def test_expired_watch_lists_again(rig: Rig) -> None:
    """After 410 the state is read anew, and a change that fell into the gap is repaired."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await rig.lose_unseen()
        rig.server.compact()
        await until(lambda: publisher.status.writes > 3, "repair")
    assert sum(one.verb == "list" for one in rig.server.served) >= 2


async def test_forbidden_is_told_with_the_rule(rig: Rig) -> None:
    """Missing RBAC is a notice with the rule to add, once, and mended without a restart."""
    rig.server.options.forbidden = {("create", "resourceslices")}
    async with rig.publisher() as publisher:
        await until(lambda: rig.notices, "notice")
        assert not publisher.status.ready
        assert 'verbs: ["create"]' in (publisher.status.error or "")
        rig.server.options.forbidden = set()
        await rig.published(publisher)
    assert [notice.reason for notice in rig.notices] == ["ResourceSlicesNotPublished"]


async def test_missing_node_is_waited_for(rig: Rig) -> None:
    """A driver that starts before the kubelet registered its Node publishes as soon as it has."""
    rig.server.store.delete(NODES, "", NODE)
    async with rig.publisher() as publisher:
        await until(lambda: "no such node" in (publisher.status.error or ""), "error")
        rig.server.store.create(NODES, "", {"metadata": {"name": NODE}})
        await rig.published(publisher)


async def test_two_instances_do_not_fight(rig: Rig) -> None:
    """During an upgrade both instances want the same: whoever comes second writes nothing, and a race is settled."""
    async with rig.publisher() as first, rig.publisher() as second:
        await until(lambda: first.status.published and second.status.published, "publication")
        await until(lambda: len(rig.slices()) == 3, "one set of slices")
        rig.server.store.delete(SLICES, "", rig.slices()[-1]["metadata"]["name"])
        await until(lambda: len(rig.slices()) == 3 and len({one[1:3] for one in rig.shape()}) == 2, "one set again")


async def test_many_devices_are_published_in_chunks(rig: Rig) -> None:
    """Several full slices make one pool of one generation; changing one later is one write."""
    chunks = [wanted(*(device(f"cpudev{n:03}", n % 7 + 2) for n in range(64 * k, 64 * k + 64))) for k in range(4)]
    async with rig.publisher({NODE: chunks}) as publisher:
        await rig.published(publisher, 4)
        assert {(one[1], one[2], len(one[3])) for one in rig.shape()} == {(1, 4, 64)}
        publisher.set_pools({NODE: [*chunks[:3], wanted(*(device(f"cpudev{n:03}", 9) for n in range(192, 256)))]})
        await until(lambda: publisher.status.writes == 5, "one update")
        assert {(one[1], one[2], len(one[3])) for one in rig.shape()} == {(1, 4, 64)}


async def test_events_that_cannot_be_recorded_do_not_stop_publication(rig: Rig) -> None:
    """Events are a courtesy: without the right to write them slices are published all the same."""
    rig.server.options.forbidden = {("create", "events")}
    rig.server.options.gates["DRADeviceTaints"] = False
    async with rig.publisher({NODE: [wanted(device("a", taints=[{"key": "k", "effect": "NoSchedule"}]))]}) as publisher:
        await until(lambda: rig.notices, "notice")
        await rig.published(publisher, 1)
    with pytest.raises(ForbiddenError):
        await rig.client.create_event("", {"name": NODE}, "R", "n")


MACHINE = Machine(
    cpus={n: Cpu(n, n, n, n // 4, n // 4, n // 4 * 4, n // 4) for n in range(8)},
    numa_nodes={
        k: NumaNode(
            k,
            frozenset(range(4 * k, 4 * k + 4)),
            8 << 30,
            (HugepagePool(2 << 20, 64, 64), HugepagePool(1 << 30, k, k)),
            {0: 10 + 11 * k, 1: 21 - 11 * k},
        )
        for k in range(2)
    },
)


@pytest.mark.parametrize("driver", DRIVERS)
async def test_our_devices_pass_validation_and_come_back_equal(rig: Rig, driver: str) -> None:
    """What inventory and slices make is valid for the server, and no spelling of its answer looks like a change."""
    inventory = build_inventory(MACHINE, Config(), NODE)
    pools = {pool.name: slice_documents(pool, NODE) for pool in inventory.pools if pool.driver == driver}
    count = sum(map(len, pools.values()))
    for writes in (count, 0):
        async with rig.publisher(pools, driver=driver) as publisher:
            await rig.published(publisher, count)
        assert publisher.status.error is None
        assert (publisher.status.writes, publisher.status.dropped) == (writes, ())
    by_device = {device["name"] for one in rig.slices() for device in one["spec"]["devices"]}
    assert "cpudevnuma000" in by_device or "memory-numa000" in by_device
