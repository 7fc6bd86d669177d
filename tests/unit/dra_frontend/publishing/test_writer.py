# SPDX-License-Identifier: Apache-2.0
"""Writing slices through the real client: the feature gate, the order of writes, and a lagging watch."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import InvalidError, WatchExpiredError
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.publishing.writer import GateOffError, SliceWriter

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import RESOURCES
from tests.fakes.waiting import patience

Document = dict[str, Any]
BY_NAME = {(resource.group, resource.name): resource for resource in RESOURCES}
SLICES, NODES = BY_NAME["resource.k8s.io", "resourceslices"], BY_NAME["", "nodes"]


def a_slice(pool: str, device: str, index: int = 0, count: int = 1, *, shared: bool = True) -> Document:
    """Returns a desired slice with one device."""
    capacity = {"c": {"value": "1", "requestPolicy": {"default": "1", "validRange": {"min": "1", "max": "1"}}}}
    more = {"allowMultipleAllocations": True, "capacity": capacity} if shared else {}
    return {
        "metadata": {"name": f"{index:05x}-{pool}"},
        "spec": {
            "driver": "dra.cpu",
            "nodeName": "node-a",
            "pool": {"name": pool, "generation": 1, "resourceSliceCount": count},
            "devices": [{"name": device, "attributes": {}, **more}],
        },
    }


@dataclass
class Rig:
    """An API server with one Node object, and a writer that is connected to it."""

    server: ApiServer
    client: KubeClient
    writer: SliceWriter

    def slices(self) -> list[Document]:
        return list(self.server.store.select(SLICES))

    def calls(self) -> list[str]:
        """Returns the attempted writes in the order in which they were made."""
        tried = [one for one in self.server.served if one.resource == "resourceslices" and one.verb != "list"]
        return [f"{'try' if one.dry_run else one.verb} {one.name}".strip() for one in tried]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with ApiServer() as server:
        server.store.create(NODES, "", {"metadata": {"name": "node-a"}})
        async with connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as client:
            yield Rig(server, client, SliceWriter(client, "dra.cpu", "node-a"))


async def test_one_rejected_pool_does_not_stop_the_others(rig: Rig) -> None:
    """The error for the pool that the server rejects is raised after the other pools have been written."""
    with pytest.raises(InvalidError, match="DNS label"):
        await rig.writer.write({"a": [a_slice("a", "Bad Name")], "b": [a_slice("b", "y")]})
    assert [one["spec"]["pool"]["name"] for one in rig.slices()] == ["b"]


async def test_only_foreign_writes_count_as_changes(rig: Rig) -> None:
    """Older events and those about the driver's own writes are ignored, and so is the deletion of an earlier slice with
    the same name.
    """
    await rig.writer.write({"p": [a_slice("p", "a")], "q": [a_slice("q", "a")]})
    first, gone = rig.slices()
    await rig.writer.write({"p": [a_slice("p", "b")]})
    (second,) = rig.slices()
    for kind, document in (("ADDED", first), ("MODIFIED", second), ("DELETED", first), ("DELETED", gone)):
        assert not rig.writer.apply_event(kind, document)
    asked = len(rig.server.served)
    later = {**second, "metadata": {**second["metadata"], "resourceVersion": "9997", "labels": {"a": "b"}}}
    assert rig.writer.apply_event("MODIFIED", later)
    await rig.writer.write({"p": [a_slice("p", "b")]})
    assert len(rig.server.served) == asked, "a label does not change what the driver publishes"
    assert rig.writer.apply_event("DELETED", {**later, "metadata": {**later["metadata"], "resourceVersion": "9998"}})
    assert not rig.writer.apply_event("DELETED", later)
    assert rig.writer.apply_event("ADDED", {**later, "metadata": {**later["metadata"], "name": "foreign"}})


async def test_the_gate_is_checked_by_a_dry_run(rig: Rig) -> None:
    """If the gate is off, no device may be published as unshared, even for a moment, so a dry run checks the gate
    before the first write. Once the gate has been found on, the check is not repeated.
    """
    rig.server.options.gates["DRAConsumableCapacity"] = False
    with pytest.raises(GateOffError, match="DRAConsumableCapacity"):
        await rig.writer.write({"p": [a_slice("p", "a")]})
    assert (rig.calls(), rig.slices()) == (["try"], [])
    rig.server.options.gates["DRAConsumableCapacity"] = True
    await rig.writer.write({"a": [a_slice("a", "x", shared=False)]})
    await rig.writer.write({"a": [a_slice("a", "x", shared=False)], "b": [a_slice("b", "y")], "c": [a_slice("c", "z")]})
    assert rig.calls() == ["try", "create", "try", "create", "create"]


async def test_switching_the_gate_off_later_withdraws_all_slices(rig: Rig) -> None:
    """If the gated field is absent from a later response, all of the driver's slices are deleted, including those
    written earlier.
    """
    await rig.writer.write({"p": [a_slice("p", "a")]})
    rig.server.options.gates["DRAConsumableCapacity"] = False
    with pytest.raises(GateOffError):
        await rig.writer.write({"p": [a_slice("p", "a")], "q": [a_slice("q", "b")]})
    assert rig.slices() == []


async def test_rejected_fields_are_retried_after_the_slices_are_listed(rig: Rig) -> None:
    """Until the slices are listed again, the fields that the server rejected for a pool are remembered, omitted and
    reported.
    """
    listed = a_slice("p", "a")
    listed["spec"]["devices"][0]["attributes"] = {"l": {"strings": ["x"]}}
    pools = {"p": [listed], "q": [a_slice("q", "b")]}
    for _ in range(2):
        await rig.writer.write(pools)
        assert rig.calls() == ["try", "try", "create", "create"]
        assert list(rig.writer.notes()) == ["ResourceSliceListsRefused"]
    await rig.writer.write({**pools, "p": [a_slice("p", "c")]})
    assert rig.writer.notes() == {}
    await rig.writer.write(pools)
    rig.server.options.gates["DRAListTypeAttributes"] = True
    rig.writer.reset(rig.slices())
    await rig.writer.write(pools)
    assert rig.writer.notes() == {}
    assert rig.slices()[0]["spec"]["devices"][0]["attributes"] == {"l": {"strings": ["x"]}}


async def test_an_empty_set_of_pools_is_not_published(rig: Rig) -> None:
    """A machine that has never been read has no pools. Publishing an empty set would delete the slices for running
    claims.
    """
    publisher = Publisher(rig.client, "dra.cpu", "node-a", lambda _reason, _note: None)
    for pools, wakes in (({}, False), ({"p": [a_slice("p", "a")]}, True)):
        publisher.set_pools(pools)
        assert publisher._wake.is_set() == wakes


@pytest.mark.parametrize("steps", range(4))
async def test_a_publisher_can_be_stopped_while_its_watch_fails(rig: Rig, steps: int) -> None:
    """If a publisher is stopped just as its watch fails permanently, it ends within one event loop iteration."""
    watching, fails = asyncio.Event(), asyncio.Event()

    async def watch(*_: object) -> AsyncIterator[tuple[str, Document]]:
        watching.set()
        await fails.wait()
        raise WatchExpiredError("watch", "gone")
        yield  # turns the function into a generator

    rig.client.watch_slices = watch  # type: ignore[method-assign, assignment] # a watch that fails when it is told to
    publisher = Publisher(rig.client, "dra.cpu", "node-a", lambda _reason, _note: None)
    publisher.set_pools({"p": [a_slice("p", "a")]})
    async with asyncio.timeout(5 * patience()), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(publisher.run())
        await watching.wait()
        fails.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        run.cancel()
