# SPDX-License-Identifier: Apache-2.0
"""Hugepages on demand for labelled claims. A claim may have any content. A malformed claim affects only its own pages
and never makes the frontend exit.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.errors import UnavailableError
from dra_frontend.claims.on_demand import HugepagesOnDemand
from dra_frontend.devices.shortages import FIRST_SECONDS, SILENCE_SECONDS, Shortages
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.node.pool_client import HelperError
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, OnDemandPages, ReservedMemory
from numa_contract.names import NOT_PROVISIONED, PROVISIONED

from tests.rigs.builders import NODE, claim, result
from tests.rigs.trees import MemoryTree, small_machine, write_tree

Document = dict[str, Any]


class Api:
    """A fake API server that stores claims and the status conditions written to them."""

    def __init__(self, *events: tuple[str, Document]) -> None:
        self.listed: list[Document] = []
        self.events = events
        self.error: Exception | None = None
        """Error that the next list fails with."""
        self.watch_error: Exception | None = None
        """Error that the next watch fails with."""
        self.answers: dict[str, list[Document]] = {}
        self.monitored = asyncio.Event()

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[Document], Document | None]
    ) -> tuple[list[Document], str]:
        """Returns all claims and a resource version."""
        if (error := self.error) is not None:
            self.error = None
            raise error
        return [kept for one in self.listed if (kept := reduce(one)) is not None], "1"

    async def watch_labelled_claims(
        self, label: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields the changes and then waits."""
        if (error := self.watch_error) is not None:
            self.watch_error = None
            raise error
        for event in self.events:
            yield event
        self.monitored.set()
        await asyncio.Event().wait()

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[Document], manager: str
    ) -> Document:
        """Stores the conditions."""
        self.answers[uid] = devices
        return {}


class Kernel(KernelPools):
    """A fake kernel with memory for a limited number of pages, behind a helper that may be unavailable."""

    most = 1000
    silent = False
    checks = 0
    broken = ""
    """If not empty, the pools of every NUMA node whose name, such as ``node0``, contains this string are unreadable."""

    def pages(self, node: int, page_bytes: int) -> int:
        """Reads the pool's page count."""
        if self.broken and self.broken in f"node{node}":
            raise ValueError("unforeseen")
        return super().pages(node, page_bytes)

    def check(self, node: int, page_bytes: int) -> None:
        """Succeeds unless the helper is unavailable."""
        self.checks += 1
        if self.silent:
            raise HelperError("/run/pools.sock", "Connection refused")
        super().check(node, page_bytes)

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Allocates as many pages as fit into memory, and, like the kernel, reports success even if that is fewer than
        requested.
        """
        self.check(node, page_bytes)
        super().resize(node, page_bytes, min(pages, max(self.most, self.pages(node, page_bytes))))

    def grow(
        self,
        node: int,
        page_bytes: int,
        pages: int,
        left: Callable[[], float],
        sleep: Callable[[float], None] = lambda _: None,
    ) -> None:
        """Allocates pages without waiting for compaction."""
        super().grow(node, page_bytes, pages, left, sleep)


class Node:
    """A node whose NUMA node 0 has no 1 GiB pages and may have up to three."""

    def __init__(self, path: Path, api: Api, **settings: Any) -> None:
        self.ledger, self.now = Ledger({}), 1000.0
        settings = {"hugepages_on_demand": (OnDemandPages(numa_node=0, size="1Gi", pages=3),), **settings}
        config = Config(**settings)
        tree = HostTree(write_tree(small_machine(), path))
        self.watch = watch = MachineWatch(tree, MemoryTree({}), config, NODE, lambda: self.ledger)
        self.api, self.pool = api, path / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages"
        books = lambda: self.ledger, lambda: watch.inventory
        self.shortages, self.kernel = Shortages(lambda: self.now), Kernel(tree)
        self.published: list[tuple[dict[str, str], set[str]]] = []
        """For each publication, the shortages by device, and the claims that had been answered before it."""
        self.on_demand = HugepagesOnDemand(
            api, self.kernel, *books, config, self.shortages, self._publish, lambda: self.now
        )

    def _publish(self) -> None:
        found = {name: one.kind.value for name, one in self.shortages.by_device.items()}
        self.published.append((found, set(self.api.answers)))

    @property
    def pages(self) -> int:
        """Returns the kernel's current number of pages."""
        return int(self.pool.read_text())

    async def follow(self) -> None:
        """Has the driver read the list and the watch events."""
        async with asyncio.timeout(20):
            following = asyncio.create_task(self.on_demand.claims.follow())
            await self.api.monitored.wait()
            following.cancel()
        await self.provide()

    async def provide(self) -> None:
        """Has the driver resize the pools, read the machine again, and write the conditions."""
        await self.on_demand.provide()
        await self.watch.read()
        await self.on_demand.provide()

    def answered(self) -> dict[str, str]:
        """Returns the condition of each claim that has one."""
        return {uid: entries[0]["conditions"][0]["reason"] for uid, entries in self.api.answers.items()}


def asked(uid: str, *sizes: str | None, pool: str = f"{NODE}-hugepages-1g", device: str = "numa000") -> Document:
    """Returns a claim with one result for each given amount of 1 GiB pages."""
    results = []
    for number, size in enumerate(sizes):
        more = {} if size is None else {"consumedCapacity": {"size": size}}
        results.append(result(f"r{number}", "dra.memory", f"hugepages-1g-{device}", pool, **more))
    return claim(uid, *results)


def changed(document: Document, **status: Any) -> Document:
    """Returns the claim with a different status."""
    return document | {"status": document["status"] | status}


ODD = {
    "second result of zero": asked("odd", "1Gi", "0"),
    "second result with a fraction": asked("odd", "1Gi", "1.5"),
    "second result without an amount": asked("odd", "1Gi", None),
    "second result too large": asked("odd", "1Gi", "9" * 30),
    "second result from another pool": claim(
        "odd",
        asked("x", "1Gi")["status"]["allocation"]["devices"]["results"][0],
        asked("x", "0", pool="elsewhere")["status"]["allocation"]["devices"]["results"][0] | {"request": "other"},
    ),
    "status null": {"metadata": {"uid": "odd", "namespace": "ns", "name": "n"}, "status": None},
    "metadata null": {"metadata": None, "status": {"allocation": {"devices": {"results": [{}]}}}},
    "devices not a list": changed(asked("odd", "1Gi"), devices="x"),
    "results with a string": changed(
        asked("odd", "1Gi"), allocation={"devices": {"results": ["x", {"driver": "dra.memory"}]}}
    ),
    "allocation a string": changed(asked("odd", "1Gi"), allocation="x"),
}


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("by", ["list", "watch", "memory"])
async def test_a_malformed_claim_does_not_affect_others(tmp_path: Path, how: str, by: str) -> None:
    """The other claim gets its page in the same round. The malformed claim gets no condition, or one of its own."""
    good, odd = asked("good", "1Gi"), ODD[how]
    node = Node(tmp_path, Api(("ADDED", good), ("MODIFIED", odd)) if by == "watch" else Api())
    node.api.listed = [] if by == "watch" else [odd, good]
    if by == "memory":
        node.on_demand.claims.by_uid, node.on_demand.claims.version = {"odd": odd, "good": good}, object()
        await node.provide()
    else:
        await node.follow()
    assert node.answered()["good"] == "Provisioned"
    await node.provide()


async def test_a_claim_that_loses_its_status_is_forgotten(tmp_path: Path) -> None:
    """The claim's status reported that its pages could not be allocated. Then the status became null."""
    node = Node(tmp_path, Api(("MODIFIED", {"metadata": {"uid": "u"}, "status": None})))
    node.api.listed = [asked("u", "9Gi")]
    node.on_demand.claims.by_uid, node.on_demand.claims.version = {"u": asked("u", "9Gi")}, object()
    await node.provide()
    assert node.answered() == {"u": "NotProvisioned"}
    await node.follow()
    assert node.on_demand._written_results == {}


@pytest.mark.parametrize("by", ["list", "watch"])
async def test_a_claim_that_is_allocated_again_gets_a_new_condition(tmp_path: Path, by: str) -> None:
    """The claim's pages could not be allocated. Within one tick, the scheduler deallocated the claim and allocated it
    on this node again.
    """
    first, second = asked("u", "9Gi"), asked("u", "1Gi")
    deallocated = {"metadata": first["metadata"], "status": {}}
    node = Node(tmp_path, Api())
    node.api.listed = [first]
    await node.follow()
    assert node.answered() == {"u": "NotProvisioned"}
    node.api.monitored.clear()
    if by == "watch":
        node.api.events = (("MODIFIED", deallocated), ("MODIFIED", second))
    else:
        node.api.listed = [second]
    await node.follow()
    assert node.answered() == {"u": "Provisioned"}


@pytest.mark.parametrize("before", ["1Gi", "9Gi"])
async def test_a_condition_for_an_earlier_allocation_does_not_count_for_a_later_one(
    tmp_path: Path, before: str
) -> None:
    """While the API server's response to the condition is on its way, the scheduler deallocates the claim and allocates
    it on this node again. The API server drops the condition of the earlier allocation.
    """
    first, second = asked("u", before), asked("u", "1Gi")

    class Slow(Api):
        async def apply_claim_devices(
            self, namespace: str, name: str, uid: str, devices: list[Document], manager: str
        ) -> Document:
            answer = await super().apply_claim_devices(namespace, name, uid, devices, manager)
            if self.listed:
                self.listed = []
                node.on_demand.claims._apply_event("MODIFIED", {"metadata": first["metadata"], "status": {}})
                node.on_demand.claims._apply_event("MODIFIED", second)
                self.answers.clear()
            return answer

    node = Node(tmp_path, Slow())
    node.api.listed = [first]
    await node.follow()
    await node.provide()
    assert node.answered() == {"u": "Provisioned"}


async def test_no_claim_causes_more_pages_than_the_device_offers(tmp_path: Path) -> None:
    """The allocation in one claim's status is larger than the device. Another claim still gets its pages."""
    node = Node(tmp_path, Api())
    node.api.listed = [asked("big", "900Gi"), asked("good", "2Gi")]
    await node.follow()
    assert node.answered() == {"big": "NotProvisioned", "good": "Provisioned"}
    assert node.pages == 2, "the pages that only the large claim needed are freed"
    (entry,) = node.api.answers["big"]
    assert entry["conditions"][0]["message"] == "the kernel has allocated 3 of 902 pages of hugepages-1g-numa000"


async def test_no_error_ends_the_watch_of_claims(tmp_path: Path) -> None:
    """A second after an error, the list of claims is read again."""
    node = Node(tmp_path, Api())
    node.api.listed, node.api.error = [asked("good", "1Gi")], KeyError("metadata")
    await node.follow()
    assert node.answered() == {"good": "Provisioned"}


@pytest.mark.parametrize("of", ["list", "watch"])
async def test_claims_are_listed_again_after_the_delay_that_the_server_requests(tmp_path: Path, of: str) -> None:
    """Otherwise, every node in the cluster would send further requests to an overloaded server during that delay."""
    node = Node(tmp_path, Api())
    overloaded = UnavailableError(f"{of} resourceclaims", "too many requests", 2.0)
    if of == "list":
        node.api.error = overloaded
    else:
        node.api.watch_error = overloaded
    began = time.monotonic()
    await node.follow()
    assert time.monotonic() - began > 1.9


async def test_only_the_needed_parts_of_a_claim_are_retained(tmp_path: Path) -> None:
    """Any tenant can label claims and write most of their content, so the frontend must not retain all of it."""
    node = Node(tmp_path, Api())
    large = asked("large", "1Gi") | {"spec": {"devices": "x" * 100_000}}
    large["metadata"]["annotations"] = {"a": "x" * 100_000}
    large["status"]["allocation"]["devices"]["config"] = ["x" * 100_000]
    node.api.listed = [large, {"metadata": {"uid": "unallocated"}, "spec": {}}]
    await node.follow()
    assert set(node.on_demand.claims.by_uid or ()) == {"large"}
    assert len(str(node.on_demand.claims.by_uid)) < 2000


async def test_pages_are_not_freed_while_a_lost_claim_may_own_them(tmp_path: Path) -> None:
    """It is not yet known which pages belong to the claim whose file was lost."""
    node = Node(tmp_path, Api())
    node.pool.write_text("2\n")
    node.ledger = Ledger({}, absent=frozenset({("dra.memory", "lost")}))
    await node.follow()
    assert node.pages == 2
    node.ledger = Ledger(
        {}, absent=node.ledger.absent, lookup_results={("dra.memory", "lost"): {"hugepages-1g-numa000": 1 << 30}}
    )
    await node.provide()
    assert node.pages == 1
    node.ledger = Ledger({})
    node.on_demand.claims.version = object()
    await node.provide()
    assert node.pages == 0


async def test_pages_that_records_need_are_allocated_again(tmp_path: Path) -> None:
    """Prepare relied on an outdated view of the machine, and the pages were freed at the same time."""
    node = Node(tmp_path, Api())
    held = ClaimFile("dra.memory", "u", None, frozenset(), memory={"hugepages-1g-numa000": 2 << 30})
    node.ledger = Ledger({("dra.memory", "u"): held})
    await node.follow()
    assert node.pages == 2


DEVICE = "hugepages-1g-numa000"


async def test_a_device_is_tainted_before_the_claim_gets_a_failure_condition(tmp_path: Path) -> None:
    """Without the taint, the scheduler would choose the same device again. The pages that had already been allocated
    for the claim are freed.
    """
    node = Node(tmp_path, Api())
    node.kernel.most = 1
    node.api.listed = [asked("u", "3Gi")]
    await node.follow()
    assert node.answered() == {"u": "NotProvisioned"}
    assert node.published == [({DEVICE: "growth-failed"}, set())]
    text = str(*node.shortages.notices)
    assert text.startswith(f"{DEVICE}: the kernel found memory for 1 of 3 pages at ")
    assert text.endswith("; free memory on NUMA node 0; new claims avoid the device for 5 min")
    node.on_demand.claims.version = object()
    await node.provide()
    assert node.pages == 0


async def test_a_claim_that_stays_allocated_is_retried_after_the_shortage(tmp_path: Path) -> None:
    """A scheduler that does not wait for binding conditions has already bound the pod, so nothing else would trigger
    another attempt.
    """
    node = Node(tmp_path, Api())
    node.kernel.most = 1
    node.api.listed = [asked("u", "3Gi")]
    await node.follow()
    node.kernel.most = 3
    node.now += FIRST_SECONDS - 1
    await node.provide()
    assert node.pages < 3
    node.now += 1
    await node.provide()
    assert (node.answered(), node.pages) == ({"u": "Provisioned"}, 3)
    assert node.published[-1] == ({}, {"u"})


async def test_pages_that_records_need_are_requested_again_after_the_shortage(tmp_path: Path) -> None:
    """The pages were freed while Prepare was allocating them, and the kernel initially has no memory to allocate them
    again.
    """
    node = Node(tmp_path, Api())
    held = ClaimFile("dra.memory", "u", None, frozenset(), memory={DEVICE: 2 << 30})
    node.ledger = Ledger({("dra.memory", "u"): held})
    node.kernel.most = 0
    await node.follow()
    assert set(node.shortages.by_device) == {DEVICE}
    node.kernel.most = 2
    await node.provide()
    assert node.pages == 0
    node.now += FIRST_SECONDS
    await node.provide()
    assert node.pages == 2


async def test_a_claim_larger_than_the_device_is_not_a_shortage(tmp_path: Path) -> None:
    """The kernel has allocated every page that the configuration allows."""
    node = Node(tmp_path, Api())
    node.api.listed = [asked("big", "900Gi")]
    await node.follow()
    assert (node.answered(), node.published) == ({"big": "NotProvisioned"}, [])


async def test_a_helper_restart_fails_no_claim(tmp_path: Path) -> None:
    """The claim waits for the helper. After ten seconds without a response, the failure is written to the claim's
    condition, and the device is tainted until the helper responds.
    """
    node = Node(tmp_path, Api())
    node.kernel.silent = True
    node.api.listed = [asked("u", "1Gi")]
    await node.follow()
    assert (node.answered(), node.published) == ({}, [])
    node.kernel.silent = False
    await node.provide()
    assert node.answered() == {"u": "Provisioned"}

    node.kernel.silent = True
    node.api.answers.clear()
    node.api.listed = [asked("u", "2Gi")]
    node.api.monitored.clear()
    node.now += SILENCE_SECONDS
    await node.follow()
    assert node.answered() == {}
    node.now += SILENCE_SECONDS
    await node.provide()
    assert node.answered() == {"u": "NotProvisioned"}
    assert node.published == [({DEVICE: "helper-unavailable"}, set())]
    node.kernel.silent = False
    node.now += SILENCE_SECONDS
    await node.provide()
    assert (node.answered(), node.pages) == ({"u": "Provisioned"}, 2)
    assert node.published[-1] == ({}, {"u"})


async def test_a_pool_that_cannot_be_written_is_tainted_immediately(tmp_path: Path) -> None:
    """The helper reports that the pool's file is missing. The taint is removed once the file is back."""
    node = Node(tmp_path, Api())
    node.pool.unlink()
    await node.follow()
    assert node.published == [({DEVICE: "helper-unavailable"}, set())]
    node.pool.write_text("0\n")
    node.now += SILENCE_SECONDS
    await node.provide()
    assert node.published[-1][0] == {}


async def test_a_silent_helper_is_asked_about_one_pool_only(tmp_path: Path) -> None:
    """While claims wait, each call to a hung helper blocks for the full timeout, so only one pool is checked. The
    devices of all pools are tainted.
    """
    entries = tuple(OnDemandPages(numa_node=node, size="1Gi", pages=3) for node in (0, 1))
    node = Node(tmp_path, Api(), hugepages_on_demand=entries)
    node.kernel.silent = True
    await node.on_demand.provide()
    assert (node.kernel.checks, node.published) == (1, [])
    node.now += SILENCE_SECONDS
    await node.on_demand.provide()
    assert node.kernel.checks == 2
    (published,) = node.published
    assert sorted(published[0].values()) == ["helper-unavailable"] * 2


async def test_a_failing_pool_is_retried_regardless_of_other_pools(tmp_path: Path) -> None:
    """A claim for pages from the failing pool gets no condition until the outcome is known. Claims for pages from the
    other pool get their conditions.
    """
    entries = tuple(OnDemandPages(numa_node=node, size="1Gi", pages=3) for node in (0, 1))
    node = Node(tmp_path, Api(), hugepages_on_demand=entries)
    node.kernel.broken = "node0"
    node.api.listed = [asked("first", "1Gi"), asked("second", "1Gi", device="numa001")]
    await node.follow()
    assert node.answered() == {"second": "Provisioned"}
    node.kernel.broken = ""
    await node.provide()
    assert node.answered() == {"first": "Provisioned", "second": "Provisioned"}


async def test_reserved_pages_are_allocated_in_addition(tmp_path: Path) -> None:
    """One page is reserved, so a claim for two pages needs a pool of three pages, and one page remains afterwards."""
    reserved = (ReservedMemory(numa_node=0, limits={"hugepages-1Gi": 1 << 30}),)
    node = Node(tmp_path, Api(), reserved_memory=reserved)
    node.api.listed = [asked("u", "2Gi")]
    await node.follow()
    assert (node.answered(), node.pages) == ({"u": "Provisioned"}, 3)
    node.on_demand.claims.by_uid, node.on_demand.claims.version = {}, object()
    await node.provide()
    assert node.pages == 1


async def test_a_claim_gets_its_condition_after_the_machine_has_been_read_again(tmp_path: Path) -> None:
    """Prepare uses the machine as it was last read. If Prepare were called before the machine had been read again, it
    would fail, and the kubelet would retry only after a minute.
    """
    node = Node(tmp_path, Api())
    node.on_demand.claims.by_uid, node.on_demand.claims.version = {"u": asked("u", "2Gi")}, object()
    await node.on_demand.provide()
    assert (node.pages, node.answered()) == (2, {})
    await node.watch.read()
    await node.on_demand.provide()
    assert node.answered() == {"u": "Provisioned"}


async def test_a_later_condition_replaces_the_earlier_one(tmp_path: Path) -> None:
    """The scheduler does not use a claim while the claim's failure condition is true."""
    node = Node(tmp_path, Api())
    document = asked("u", "1Gi")
    (one,) = document["status"]["allocation"]["devices"]["results"]
    name = {key: one[key] for key in ("driver", "pool", "device")}
    failed = {"type": NOT_PROVISIONED, "status": "True", "reason": "NotProvisioned", "message": "no memory"}
    failed["lastTransitionTime"] = "2026-01-01T00:00:00Z"
    document["status"]["devices"] = [{**name, "conditions": [failed]}]
    node.api.listed = [document]
    await node.follow()
    (entry,) = node.api.answers["u"]
    assert {one["type"]: one["status"] for one in entry["conditions"]} == {
        PROVISIONED: "True",
        NOT_PROVISIONED: "False",
    }
