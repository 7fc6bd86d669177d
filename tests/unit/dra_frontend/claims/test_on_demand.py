# SPDX-License-Identifier: Apache-2.0
"""Labelled claims of any content: each one concerns its own pages, and none ends the frontend."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.on_demand import HugepagesOnDemand
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.machine_watch import MachineWatch
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, OnDemandPages

from tests.rigs.builders import NODE, claim, result
from tests.rigs.trees import MemoryTree, small_machine, write_tree

Document = dict[str, Any]


class Api:
    """Claims as the API server has them; an answer is stored."""

    def __init__(self, *events: tuple[str, Document]) -> None:
        self.listed: list[Document] = []
        self.events = events
        self.error: Exception | None = None
        self.answers: dict[str, list[Document]] = {}
        self.watched = asyncio.Event()

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[Document], Document | None]
    ) -> tuple[list[Document], str]:
        """Lists once what there is."""
        if (error := self.error) is not None:
            self.error = None
            raise error
        return [kept for one in self.listed if (kept := reduce(one)) is not None], "1"

    async def watch_labelled_claims(
        self, label: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        """Yields the changes, and then nothing more."""
        for event in self.events:
            yield event
        self.watched.set()
        await asyncio.Event().wait()

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[Document], manager: str
    ) -> Document:
        """Stores the conditions."""
        self.answers[uid] = devices
        return {}


class Node:
    """A node whose NUMA node 0 has no page of 1 GiB and may have three."""

    def __init__(self, path: Path, api: Api) -> None:
        self.ledger = Ledger({})
        config = Config(hugepages_on_demand=(OnDemandPages(numa_node=0, size="1Gi", pages=3),))
        tree = HostTree(write_tree(small_machine(), path))
        watch = MachineWatch(tree, MemoryTree({}), config, NODE, lambda: self.ledger)
        self.api, self.pool = api, path / "sys/devices/system/node/node0/hugepages/hugepages-1048576kB/nr_hugepages"
        books = lambda: self.ledger, lambda: watch.inventory
        self.on_demand = HugepagesOnDemand(api, KernelPools(tree), *books, config)

    @property
    def pages(self) -> int:
        """The pages that the kernel has."""
        return int(self.pool.read_text())

    async def follow(self) -> None:
        """Lets the driver read the list and the events."""
        async with asyncio.timeout(20):
            following = asyncio.create_task(self.on_demand.follow())
            await self.api.watched.wait()
            following.cancel()
        await self.on_demand.provide()

    def answered(self) -> dict[str, str]:
        """The condition of each claim that was answered."""
        return {uid: entries[0]["conditions"][0]["reason"] for uid, entries in self.api.answers.items()}


def asked(uid: str, *sizes: str | None, pool: str = f"{NODE}-hugepages-1g", device: str = "numa000") -> Document:
    """A claim with a result for each size."""
    results = []
    for number, size in enumerate(sizes):
        more = {} if size is None else {"consumedCapacity": {"size": size}}
        results.append(result(f"r{number}", "dra.memory", f"hugepages-1g-{device}", pool, **more))
    return claim(uid, *results)


def changed(document: Document, **status: Any) -> Document:
    """The claim with another status."""
    return document | {"status": document["status"] | status}


ODD = {
    "second result 0": asked("odd", "1Gi", "0"),
    "second result a fraction": asked("odd", "1Gi", "1.5"),
    "second result without an amount": asked("odd", "1Gi", None),
    "second result huge": asked("odd", "1Gi", "9" * 30),
    "second result of another pool": claim(
        "odd",
        asked("x", "1Gi")["status"]["allocation"]["devices"]["results"][0],
        asked("x", "0", pool="elsewhere")["status"]["allocation"]["devices"]["results"][0] | {"request": "other"},
    ),
    "status null": {"metadata": {"uid": "odd", "namespace": "ns", "name": "n"}, "status": None},
    "metadata null": {"metadata": None, "status": {"allocation": {"devices": {"results": [{}]}}}},
    "devices no list": changed(asked("odd", "1Gi"), devices="x"),
    "results of texts": changed(
        asked("odd", "1Gi"), allocation={"devices": {"results": ["x", {"driver": "dra.memory"}]}}
    ),
    "allocation a text": changed(asked("odd", "1Gi"), allocation="x"),
}


@pytest.mark.parametrize("how", ODD)
@pytest.mark.parametrize("by", ["list", "watch", "memory"])
async def test_a_claim_of_any_content_stops_no_other(tmp_path: Path, how: str, by: str) -> None:
    """The other claim gets its page in the same round; the odd one gets no answer, or one of its own."""
    good, odd = asked("good", "1Gi"), ODD[how]
    node = Node(tmp_path, Api(("ADDED", good), ("MODIFIED", odd)) if by == "watch" else Api())
    node.api.listed = [] if by == "watch" else [odd, good]
    if by == "memory":
        node.on_demand._claims, node.on_demand._changes = {"odd": odd, "good": good}, object()
        await node.on_demand.provide()
    else:
        await node.follow()
    assert node.answered()["good"] == "Provisioned"
    await node.on_demand.provide()


async def test_a_claim_that_loses_its_status_is_forgotten(tmp_path: Path) -> None:
    """Its status reported that its pages could not be allocated, and then became null."""
    node = Node(tmp_path, Api(("MODIFIED", {"metadata": {"uid": "u"}, "status": None})))
    node.api.listed = [asked("u", "9Gi")]
    node.on_demand._claims, node.on_demand._changes = {"u": asked("u", "9Gi")}, object()
    await node.on_demand.provide()
    assert node.answered() == {"u": "NotProvisioned"}
    await node.follow()
    assert node.on_demand._answered == {}


@pytest.mark.parametrize("by", ["list", "watch"])
async def test_a_claim_that_is_allocated_anew_is_answered_anew(tmp_path: Path, by: str) -> None:
    """Its pages could not be made; the scheduler took it back and chose this node again, all within one tick."""
    first, second = asked("u", "9Gi"), asked("u", "1Gi")
    deallocated = {"metadata": first["metadata"], "status": {}}
    node = Node(tmp_path, Api())
    node.api.listed = [first]
    await node.follow()
    assert node.answered() == {"u": "NotProvisioned"}
    node.api.watched.clear()
    if by == "watch":
        node.api.events = (("MODIFIED", deallocated), ("MODIFIED", second))
    else:
        node.api.listed = [second]
    await node.follow()
    assert node.answered() == {"u": "Provisioned"}


async def test_no_claim_makes_more_pages_than_the_device_offers(tmp_path: Path) -> None:
    """Its status reports that there are too few pages. Another claim still gets its pages."""
    node = Node(tmp_path, Api())
    node.api.listed = [asked("big", "900Gi"), asked("good", "2Gi")]
    await node.follow()
    assert node.answered() == {"big": "NotProvisioned", "good": "Provisioned"}
    assert node.pages == 3
    (entry,) = node.api.answers["big"]
    assert entry["conditions"][0]["message"] == "the kernel has made 3 of 902 pages of hugepages-1g-numa000"


async def test_an_error_of_any_kind_does_not_end_the_following(tmp_path: Path) -> None:
    """The list is read again after a second."""
    node = Node(tmp_path, Api())
    node.api.listed, node.api.error = [asked("good", "1Gi")], KeyError("metadata")
    await node.follow()
    assert node.answered() == {"good": "Provisioned"}


async def test_only_what_is_needed_of_a_claim_is_retained(tmp_path: Path) -> None:
    """Any tenant can label claims and write most of their content."""
    node = Node(tmp_path, Api())
    large = asked("large", "1Gi") | {"spec": {"devices": "x" * 100_000}}
    large["metadata"]["annotations"] = {"a": "x" * 100_000}
    large["status"]["allocation"]["devices"]["config"] = ["x" * 100_000]
    node.api.listed = [large, {"metadata": {"uid": "unallocated"}, "spec": {}}]
    await node.follow()
    assert set(node.on_demand._claims or ()) == {"large"}
    assert len(str(node.on_demand._claims)) < 2000


async def test_pages_are_not_given_back_while_a_lost_claim_may_have_them(tmp_path: Path) -> None:
    """It is not known yet which pages belong to the claim whose file was lost."""
    node = Node(tmp_path, Api())
    node.pool.write_text("2\n")
    node.ledger = Ledger({}, absent=frozenset({("dra.memory", "lost")}))
    await node.follow()
    assert node.pages == 2
    node.ledger = Ledger(
        {}, absent=node.ledger.absent, answered={("dra.memory", "lost"): {"hugepages-1g-numa000": 1 << 30}}
    )
    await node.on_demand.provide()
    assert node.pages == 1
    node.ledger = Ledger({})
    node.on_demand._changes = object()
    await node.on_demand.provide()
    assert node.pages == 0


async def test_pages_that_records_need_are_made_again(tmp_path: Path) -> None:
    """Prepare saw them in an older reading of the machine, and they were given back at the same time."""
    node = Node(tmp_path, Api())
    held = ClaimFile("dra.memory", "u", None, frozenset(), memory={"hugepages-1g-numa000": 2 << 30})
    node.ledger = Ledger({("dra.memory", "u"): held})
    await node.follow()
    assert node.pages == 2
