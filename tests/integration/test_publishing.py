# SPDX-License-Identifier: Apache-2.0
"""The publisher and the real client with the fake API server, over HTTP."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.requests import Pace
from dra_frontend.devices.gates import ALLOCATABLE_FIELD
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.events.recorder import EventRecorder, NodeEvents
from dra_frontend.machine.model import HugepagePool
from dra_frontend.publishing.publisher import Publisher
from numa_contract.config import Config
from numa_contract.names import DRIVERS
from numa_node.ticks import each_tick
from numa_tools.doctor.sources.cluster import read_cluster

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_allocatable import GATE
from tests.fakes.apiserver_store import NODES, SLICES, Document
from tests.fakes.waiting import eventually
from tests.strategies.machines import machine

NODE = "node-a"
QUICK = (0.02, 0.1)
MACHINE = machine(hugepages=(HugepagePool(2 << 20, 64, 64), HugepagePool(1 << 30, 1, 1)))


def device(name: str, cpus: int = 8, **more: Any) -> Document:
    policy = {"default": "1", "validRange": {"min": "1", "step": "1", "max": str(cpus)}}
    return {
        "name": name,
        "attributes": {"resource.kubernetes.io/numaNode": {"int": 0}},
        "capacity": {"dra.cpu/cpu": {"value": str(cpus), "requestPolicy": policy}},
        "allowMultipleAllocations": True,
        **more,
    }


def wanted(*devices: Document, pool: str = NODE, index: int = 0) -> Document:
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": f"{index:05x}-dra.cpu-{pool}"},
        "spec": {"driver": "dra.cpu", "nodeName": NODE, "pool": {"name": pool}, "devices": list(devices)},
    }


POOLS = {
    NODE: [wanted(device("cpudevnuma000")), wanted(device("cpudevnuma001"), index=1)],
    "more": [wanted(pool="more")],
}


class Rig:
    """An API server with one Node. ``publisher`` starts a publisher that uses this server."""

    def __init__(self, server: ApiServer, client: KubeClient) -> None:
        self.server = server
        self.client = client
        self.client._list_pace = Pace()
        self.notices: list[tuple[str, str]] = []
        """Reason and note of the first Event for each reason."""

    def slices(self) -> list[Document]:
        return list(self.server.store.select(SLICES))

    def shape(self) -> list[tuple[str, int, int, list[str]]]:
        """Returns the published slices: (pool, generation, count, devices) by name."""
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
        self,
        pools: dict[str, list[Document]] | None = None,
        waits: tuple[float, float] = QUICK,
        driver: str = "dra.cpu",
    ) -> AsyncGenerator[Publisher, None]:
        recorder = EventRecorder(self.client, NODE)
        events = NodeEvents(recorder, NODE, "instance")

        def tell(reason: str, note: str) -> None:
            events.notify(reason, note, driver)
            if reason not in {before for before, _ in self.notices}:
                self.notices.append((reason, note))

        publisher = Publisher(self.client, driver, NODE, tell, waits)
        publisher.set_pools(POOLS if pools is None else pools)
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in (publisher.run(), each_tick(recorder.write_due))]
            yield publisher
            for task in running:
                task.cancel()

    def asked(self, verb: str) -> int:
        """Returns the number of requests for slices with this verb."""
        return sum(one.verb == verb and one.resource == "resourceslices" for one in self.server.served)

    async def published(self, publisher: Publisher, pools: int = 3) -> None:
        await eventually(lambda: publisher.ready and len(self.slices()) == pools)

    async def lose_unseen(self) -> None:
        """Breaks the watch and deletes a slice while no watch is open."""
        await eventually(lambda: self.server.watches)
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
        server.store.create(NODES, "", {"metadata": {"name": NODE}, "status": {"declaredFeatures": [GATE]}})
        async with connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as client:
            yield Rig(server, client)


async def test_all_pools_are_published_and_owned_by_the_node(rig: Rig) -> None:
    """The first publication contains every pool, complete and in order, at generation 1, owned by the Node.

    A second start on the same machine sends no writes, not even a dry run.
    """
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    assert sorted(rig.shape()) == sorted(FULL)
    node = rig.server.store.get(NODES, "", NODE)
    for one in rig.slices():
        (owner,) = one["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("Node", node["metadata"]["uid"], True)
    names = [one["metadata"]["name"] for one in rig.slices()]
    assert names == ["00000-dra.cpu-more", "00000-dra.cpu-node-a", "00001-dra.cpu-node-a"]
    # A shutdown deletes nothing: the kubelet deletes the slices if the driver does not return, and claims stay valid.
    assert rig.asked("delete") == 0
    before, asked = rig.slices(), len(rig.server.served)
    async with rig.publisher() as publisher:
        await eventually(lambda: publisher.ready)
    assert rig.slices() == before
    assert {one.verb for one in rig.server.served[asked:]} <= {"list", "watch"}


async def test_slices_of_an_earlier_writer_are_replaced(rig: Rig) -> None:
    """Slices with generated names are deleted after the new ones are complete; for a single slice, consumers see no gap
    at all.
    """
    for pool, documents in POOLS.items():
        for index, one in enumerate(documents):
            spec = {**one["spec"], "pool": {"name": pool, "generation": 5, "resourceSliceCount": len(documents)}}
            name = {"generateName": f"0000{index}-dra.cpu-node-a-"}
            rig.server.store.create(SLICES, "", {"metadata": name, "spec": spec})
    seen: list[list[int]] = []
    rig.server.store.listeners.add(lambda: seen.append([one[1] for one in rig.shape() if one[0] == NODE]))
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    assert sorted(rig.shape()) == sorted((pool, 6, count, devices) for pool, _, count, devices in FULL)
    assert all(one.count(5) == 2 or one.count(6) == 2 for one in seen)
    assert [one.verb for one in rig.server.writes()] == ["create"] * 2 + ["delete"] * 2 + ["create", "delete"]


@pytest.mark.parametrize("dies", [True, False], ids=["expired", "ended"])
async def test_a_watch_that_ends_at_once_does_not_cause_a_busy_loop(rig: Rig, dies: bool) -> None:
    """However a watch ends, the publisher sends few list and watch requests, because it backs off and its requests are
    rate-limited.
    """
    rig.client._list_pace = Pace(per_second=1 / 15, burst=6.0)
    gone = '{"kind": "Status", "code": 410}'
    rig.server.fail_next(10_000, 410 if dies else 200, verb="watch", body=gone if dies else "")
    async with rig.publisher(waits=(0.001, 0.01)) as publisher:
        await rig.published(publisher)
        await asyncio.sleep(0.5)
        assert publisher.ready
    assert rig.asked("list") <= (6 if dies else 1)
    assert rig.asked("watch") <= (6 if dies else 200)


async def test_retry_after_is_obeyed(rig: Rig) -> None:
    """Retry-After takes precedence over the client's own backoff."""
    rig.server.fail_next(1, 429, verb="list", retry_after=1)
    began = asyncio.get_running_loop().time()
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    assert asyncio.get_running_loop().time() - began >= 1
    assert rig.asked("list") == 2


ODD = (
    '{"ok": true}',
    "{}",
    "[]",
    '{"kind": "ResourceSliceList", "metadata": null, "items": [{}]}',
    '{"type": "ADDED"}',
)


@pytest.mark.parametrize("verb", ["list", "watch", "create", "get"])
@pytest.mark.parametrize("body", ODD, ids=map(str, range(len(ODD))))
async def test_the_publisher_survives_unexpected_responses(rig: Rig, verb: str, body: str) -> None:
    """A proxy that returns 200 with unrelated JSON is treated as an outage: it is reported as such, requests are
    retried, and nothing is deleted.
    """
    rig.server.fail_next(2, 200, verb=verb, body=f"{body}\n")
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await eventually(lambda: not rig.server.faults[0].count)
    assert sorted(rig.shape()) == sorted(FULL)
    assert rig.asked("delete") == 0


async def test_the_publisher_survives_an_unexpected_exception(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """An internal error in one round is logged with its traceback, and the next round is tried."""
    async with rig.publisher({NODE: [{"metadata": {"name": "x"}}]}) as publisher:
        await eventually(lambda: publisher.error)
        publisher.set_pools(POOLS)
        await rig.published(publisher)
    assert any(record.exc_info for record in caplog.records)


async def test_deleted_slices_are_soon_restored(rig: Rig) -> None:
    """Slices that the kubelet deletes with deletecollection are restored once, after the settling time rather than
    after the kubelet plugin helper's 30 s.
    """
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        for one in rig.slices():
            rig.server.store.delete(SLICES, "", one["metadata"]["name"])
        await rig.published(publisher)
    assert sorted(rig.shape()) == sorted(FULL)
    assert len(rig.server.writes()) == 6


async def test_only_one_repair_is_pending_at_a_time(rig: Rig) -> None:
    """A client that writes continuously causes only as many repairs as the waiting times allow, not one per write."""
    async with rig.publisher(waits=(1.0, 1.0)) as publisher:
        await rig.published(publisher)
        await eventually(lambda: rig.server.watches)
        name = next(one["metadata"]["name"] for one in rig.slices() if one["spec"].get("devices"))
        began = time.monotonic()
        for number in range(120):
            (victim,) = (one for one in rig.slices() if one["metadata"]["name"] == name)
            victim["spec"]["devices"][0]["name"] = f"hijacked{number}"
            rig.server.store.update(SLICES, "", name, victim)
            await asyncio.sleep(0.02)
        await eventually(lambda: sorted(rig.shape()) == sorted(FULL))
    assert 1 <= len(rig.server.writes()) - 3 <= 3 + time.monotonic() - began


async def test_slices_of_other_drivers_and_nodes_are_left_alone(rig: Rig) -> None:
    """Slices of other drivers and nodes survive; an obsolete pool of this driver does not."""
    for driver, node, pool in (("other", NODE, "x"), ("dra.cpu", "node-b", "node-b"), ("dra.cpu", NODE, "old")):
        spec = {"driver": driver, "nodeName": node, "pool": {"name": pool, "generation": 1, "resourceSliceCount": 1}}
        rig.server.store.create(SLICES, "", {"metadata": {"name": f"{driver}-{pool}"}, "spec": spec})
    async with rig.publisher() as publisher:
        await rig.published(publisher, 5)
    names = {one["metadata"]["name"] for one in rig.slices()}
    assert {"other-x", "dra.cpu-node-b"} <= names
    assert "dra.cpu-old" not in names


async def test_a_change_is_published_at_once(rig: Rig) -> None:
    """A machine change is published before other clients' writes have been reverted, and it updates only one slice."""
    async with rig.publisher(waits=(3600, 3600)) as publisher:
        await rig.published(publisher)
        await eventually(lambda: rig.server.watches)
        for number in range(3):
            (touched,) = (one for one in rig.slices() if one["spec"]["pool"]["name"] == "more")
            touched["metadata"]["labels"] = {"touched": str(number)}
            rig.server.store.update(SLICES, "", touched["metadata"]["name"], touched)
        publisher.set_pools({**POOLS, NODE: [POOLS[NODE][0], wanted(device("cpudevnuma001", 4), index=1)]})
        await eventually(lambda: len(rig.server.writes()) == 4)
    assert sorted(rig.shape()) == sorted(FULL)
    assert [one.verb for one in rig.server.writes()] == ["create", "create", "create", "update"]
    assert rig.asked("list") == 1


async def test_without_the_gate_nothing_is_published(rig: Rig) -> None:
    """Without DRAConsumableCapacity the devices would be allocated as a whole, so nothing is published, and an Event
    gives the reason.
    """
    rig.server.options.gates["DRAConsumableCapacity"] = False
    async with rig.publisher() as publisher:
        await eventually(lambda: rig.notices and any(one.resource == "events" for one in rig.server.served))
        assert not publisher.ready
        assert "DRAConsumableCapacity" in publisher.error
        assert "DRAConsumableCapacity" in rig.notices[0][1]
        assert rig.server.writes() == []
        rig.server.options.gates["DRAConsumableCapacity"] = True
        await rig.published(publisher)
        assert [reason for reason, _ in rig.notices] == ["FeatureGateMissing"]


def mapped() -> list[Document]:
    """Returns the driver's CPU devices with their mapping to node-allocatable resources."""
    return slice_documents(build_inventory(MACHINE, Config(), NODE).pools[0], NODE, counted=True)


TAINTED = device("a", taints=[{"key": "k", "effect": "NoSchedule"}])


@pytest.mark.parametrize(
    ("pool", "field", "gate"),
    [
        ([wanted(TAINTED)], "devices[*].taints", "DRADeviceTaints"),
        (mapped(), ALLOCATABLE_FIELD, "DRANodeAllocatableResources (Kubernetes 1.37)"),
    ],
)
async def test_other_dropped_fields_are_reported_once(rig: Rig, pool: list[Document], field: str, gate: str) -> None:
    """A field that the server drops is reported once with its gate, and is not sent repeatedly."""
    rig.server.options.gates["DRADeviceTaints"] = False
    async with rig.publisher({NODE: pool}) as publisher:
        await rig.published(publisher, 1)
        (warning,) = publisher.notes.values()
        assert field in warning
        assert gate in warning
        rig.server.compact()
        await eventually(lambda: rig.asked("list") >= 2)
        await eventually(lambda: rig.server.watches)
        assert publisher.ready
    assert len(rig.server.writes()) == 1
    assert [reason for reason, _ in rig.notices] == ["ResourceSliceFieldsDropped"]


async def test_a_device_is_not_published_without_its_binding_conditions(rig: Rig) -> None:
    """Without the conditions, a pod would be bound at once and wait for pages that may never exist. Once the gate is
    on, the device is published.
    """
    conditions: dict[str, Any] = {"bindingConditions": ["a.b/done"], "bindingFailureConditions": ["a.b/failed"]}
    pool = {NODE: [wanted(device("a"), device("b", bindsToNode=True, **conditions))]}
    rig.server.options.gates["DRADeviceBindingConditions"] = False
    async with rig.publisher(pool) as publisher:
        await rig.published(publisher, 1)
        assert rig.shape() == [(NODE, 1, 1, ["a"])]
        assert "DRADeviceBindingConditions" in publisher.notes["BindingConditionsUnsupported"]
        rig.server.options.gates["DRADeviceBindingConditions"] = True
        await eventually(lambda: rig.server.watches)
        rig.server.compact()
        rig.server.drop_watches()
        await eventually(lambda: rig.shape()[0][3] == ["a", "b"])
        await eventually(lambda: not publisher.notes)
    assert [reason for reason, _ in rig.notices] == ["BindingConditionsUnsupported"]
    assert all(one[3] != ["b"] for one in rig.shape()), "the dry run stored nothing"


def listed() -> Document:
    attribute = {"resource.kubernetes.io/pcieRoot": {"strings": ["pci0000:00", "pci0000:80"]}}
    one = device("cpudevnuma000")
    return wanted({**one, "attributes": {**one["attributes"], **attribute}})


def mapped_otherwise() -> Document:
    """Returns the driver's CPU devices with a mapping in an unknown form."""
    (one,) = mapped()
    for each in one["spec"]["devices"]:
        each[ALLOCATABLE_FIELD] = {"cpu": {"another": "form"}}
    return one


@pytest.mark.parametrize(
    ("refused", "field", "reason", "told"),
    [
        (listed(), "pcieRoot", "ResourceSliceListsRefused", "DRAListTypeAttributes"),
        (
            mapped_otherwise(),
            ALLOCATABLE_FIELD,
            "NodeAllocatableMappingUnsupported",
            "refuses nodeAllocatableResources",
        ),
    ],
)
async def test_rejected_fields_are_left_out(rig: Rig, refused: Document, field: str, reason: str, told: str) -> None:
    """A list attribute whose gate is off, or a mapping in a form that the server does not know, is left out, and one
    Event reports the omission.
    """
    rig.server.options.version = "1.37"
    rig.server.options.gates["DRANodeAllocatableResources"] = True
    async with rig.publisher({NODE: [refused]}) as publisher:
        await rig.published(publisher, 1)
        await eventually(lambda: rig.notices)
        assert publisher.error == ""
        publisher.set_pools({NODE: [refused, wanted(device("more"), index=1)]})
        await rig.published(publisher, 2)
        assert list(publisher.notes.values()) == [note for _, note in rig.notices]
    assert field not in str(rig.slices())
    ((noticed, note),) = rig.notices
    assert noticed == reason
    assert told in note


@pytest.mark.parametrize(
    ("release", "gate", "declared", "kept", "told"),
    [
        ("1.34", False, [], False, "ResourceSliceFieldsDropped"),
        ("1.36", True, [], False, "ResourceSliceFieldsDropped"),
        ("1.37", False, [GATE], False, "ResourceSliceFieldsDropped"),
        ("1.37", True, [], False, "NodeAllocatableMappingUnsupported"),
        ("1.37", True, [GATE], True, ""),
    ],
)
async def test_whether_claims_are_counted_depends_on_server_and_kubelet(
    rig: Rig, release: str, gate: bool, declared: list[str], kept: bool, told: str
) -> None:
    """Claims are counted against the Node's allocatable resources only if the server stores the mapping, and
    ``counted`` tells Prepare whether it does. List attributes are published in every case.

    Before 1.37, or without its gate, the server drops the mapping. Since 1.37, the server rejects the mapping for a
    node whose kubelet has not declared that it counts claims.
    """
    rig.server.options.version = release
    rig.server.options.gates |= {GATE: gate, "DRAListTypeAttributes": True}
    rig.server.store.update(NODES, "", NODE, {"status": {"declaredFeatures": declared}}, "status")
    (both,) = mapped()
    both["spec"]["devices"][0]["attributes"] |= listed()["spec"]["devices"][0]["attributes"]
    async with rig.publisher({NODE: [both]}) as publisher:
        assert publisher.counted, "counting is assumed before the server has been asked"
        await rig.published(publisher, 1)
        assert publisher.counted is kept
    (slice_,) = rig.slices()
    assert {ALLOCATABLE_FIELD in device for device in slice_["spec"]["devices"]} == {kept}
    assert "pcieRoot" in str(slice_)
    assert [reason for reason, _ in rig.notices] == ([told] if told else [])


async def test_the_doctor_finds_a_kubelet_that_does_not_count_claims(rig: Rig, tmp_path: Path) -> None:
    """The API server rejects the mapping with status 403, like a request without the necessary right. The doctor
    reports the mapping, as the driver does, and does not suggest granting rights.
    """
    rig.server.options.version = "1.37"
    rig.server.options.gates |= {GATE: True, "DRAListTypeAttributes": True}
    rig.server.store.update(NODES, "", NODE, {"status": {"declaredFeatures": []}}, "status")
    config = Config(publish_node_allocatable_resource_mapping=True)
    load = kubeconfig(str(rig.server.write_kubeconfig(tmp_path / "kubeconfig")))
    found = await read_cluster(load, NODE, build_inventory(MACHINE, config, NODE), [], config)
    assert found["trial"].refused == (GATE,)
    assert rig.slices() == []


@pytest.mark.parametrize(("version", "gate"), [("1.34", False), ("1.36", False), ("1.36", True), ("1.37", True)])
async def test_numa_nodes_are_listed_if_the_server_supports_lists(rig: Rig, version: str, gate: bool) -> None:
    """Each device that spans several nodes lists them. Without the gate, such devices are published without the list,
    and nothing is reported.
    """
    rig.server.options.version, rig.server.options.gates["DRAListTypeAttributes"] = version, gate
    devices = build_inventory(MACHINE, Config(group_by="machine"), NODE).pools[0]
    async with rig.publisher({NODE: slice_documents(devices, NODE)}) as publisher:
        await rig.published(publisher, 1)
        assert (publisher.error, publisher.notes, rig.notices) == ("", {}, [])
    ((attributes,),) = [[one["attributes"] for one in document["spec"]["devices"]] for document in rig.slices()]
    assert attributes.get("resource.kubernetes.io/numaNode") == ({"ints": [0, 1]} if gate else None)
    assert attributes["dra.cpu/numCPUs"]["int"] > 0


async def test_another_fault_is_not_blamed_on_lists(rig: Rig) -> None:
    """A slice that is invalid even without its lists is reported with its actual error."""
    bad = listed()
    bad["spec"]["devices"][0]["name"] = "Not A Label"
    async with rig.publisher({NODE: [bad]}) as publisher:
        await eventually(lambda: rig.notices)
        assert "DNS label" in publisher.error
    assert [reason for reason, _ in rig.notices] == ["ResourceSlicesNotPublished"]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("driver", DRIVERS)
async def test_published_devices_are_valid_and_not_written_again(rig: Rig, driver: str, counted: bool) -> None:
    """The server accepts the slices, and values that its response spells differently are not mistaken for changes."""
    rig.server.options.version = "1.37"
    rig.server.options.gates["DRANodeAllocatableResources"] = True
    inventory = build_inventory(MACHINE, Config(), NODE)
    pools = {p.name: slice_documents(p, NODE, counted=counted) for p in inventory.pools if p.driver == driver}
    count = sum(map(len, pools.values()))
    for _ in range(2):
        async with rig.publisher(pools, driver=driver) as publisher:
            await rig.published(publisher, count)
        assert (publisher.error, publisher.notes, len(rig.server.writes())) == ("", {}, count)
    assert {ALLOCATABLE_FIELD in each for one in rig.slices() for each in one["spec"]["devices"]} == {counted}


async def test_the_publisher_retries_until_an_outage_at_startup_ends(rig: Rig) -> None:
    """All kinds of transient errors are retried with increasing delays until the server has recovered."""
    for answer in ("drop", 500, 429):
        rig.server.fail_next(2, answer)
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        assert publisher.error == ""
    assert sorted(rig.shape()) == sorted(FULL)


async def test_a_failed_write_is_completed_later(rig: Rig) -> None:
    """A partly written pool is completed after the slices have been listed again."""
    rig.server.fail_next(1, 500, verb="create", resource="resourceslices")
    rig.server.fail_next(1, 409, verb="create", resource="resourceslices")
    async with rig.publisher() as publisher:
        await rig.published(publisher)
    shape = rig.shape()
    assert {pool: [one[1:3] for one in shape if one[0] == pool] for pool in (NODE, "more")}["more"] == [(1, 1)]
    assert len({one[1:3] for one in shape if one[0] == NODE}) == 1


async def test_a_broken_watch_is_resumed(rig: Rig) -> None:
    """The watch resumes where it left off, without a new list request, and changes made during the interruption are not
    missed.
    """
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await eventually(lambda: rig.server.watches)
        rig.server.drop_watches()
        await eventually(lambda: rig.server.watches)
        assert rig.asked("list") == 1
        await rig.lose_unseen()
        await eventually(lambda: len(rig.server.writes()) > 3)
        await rig.published(publisher)
    assert rig.asked("list") == 1


async def test_an_expired_watch_lists_again(rig: Rig) -> None:
    """After a 410, the slices are listed again, and a slice that was deleted in the meantime is restored."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await rig.lose_unseen()
        rig.server.compact()
        await eventually(lambda: len(rig.server.writes()) > 3)
    assert rig.asked("list") >= 2


async def test_a_watch_resumes_after_the_delay_that_the_server_requests(rig: Rig) -> None:
    """Until the delay has passed, the nodes of the cluster send no further watch requests to the overloaded server."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        await eventually(lambda: rig.server.watches)
        rig.server.fail_next(1, 429, verb="watch", retry_after=2)
        rig.server.drop_watches()
        await eventually(lambda: [one for one in rig.server.served if one.code == 429])
        refused = time.monotonic()
        await eventually(lambda: rig.server.watches)
        assert time.monotonic() - refused > 1.5


async def test_missing_permissions_are_reported_with_the_rule(rig: Rig) -> None:
    """There is one warning with the rule to add, and no restart is necessary. Events are optional."""
    rig.server.options.forbidden = {("create", "resourceslices"), ("create", "events")}
    async with rig.publisher() as publisher:
        await eventually(lambda: rig.notices)
        assert not publisher.ready
        assert 'verbs: ["create"]' in publisher.error
        rig.server.options.forbidden.remove(("create", "resourceslices"))
        await rig.published(publisher)
    assert [reason for reason, _ in rig.notices] == ["ResourceSlicesNotPublished"]


async def test_slices_that_can_no_longer_be_written_cause_a_warning(rig: Rig) -> None:
    """The driver stays ready, because the published slices remain valid. The warning says that they are outdated."""
    async with rig.publisher() as publisher:
        await rig.published(publisher)
        rig.server.options.forbidden = {("update", "resourceslices")}
        publisher.set_pools({**POOLS, NODE: [POOLS[NODE][0], wanted(device("cpudevnuma001", 4), index=1)]})
        await eventually(lambda: publisher.notes)
        assert publisher.ready
        assert publisher.notes["ResourceSlicesNotPublished"].startswith("dra.cpu: published slices are outdated: ")
        rig.server.options.forbidden.clear()
        await eventually(lambda: not publisher.notes)


async def test_the_publisher_waits_for_a_missing_node(rig: Rig) -> None:
    """A driver that starts before the kubelet has registered its Node publishes once the Node exists."""
    rig.server.store.delete(NODES, "", NODE)
    async with rig.publisher() as publisher:
        await eventually(lambda: "no such node" in publisher.error)
        rig.server.store.create(NODES, "", {"metadata": {"name": NODE}})
        await rig.published(publisher)


async def test_two_instances_do_not_overwrite_each_other(rig: Rig) -> None:
    """During an upgrade both instances publish the same slices: the second one writes nothing, and a race is
    resolved.
    """
    async with rig.publisher() as first, rig.publisher() as second:
        await eventually(lambda: first.ready and second.ready)
        await eventually(lambda: len(rig.slices()) == 3)
        rig.server.store.delete(SLICES, "", rig.slices()[-1]["metadata"]["name"])
        await eventually(lambda: len(rig.slices()) == 3 and len({one[1:3] for one in rig.shape()}) == 2)
