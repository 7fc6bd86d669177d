# SPDX-License-Identifier: Apache-2.0
import itertools
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from dra_frontend.api_server.errors import InvalidError, NotFoundError
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.publishing.status import GateOffError, PublishStatus, Timing, gate_is_off
from dra_frontend.publishing.writer import SliceMirror

Document = dict[str, Any]


def a_pool(name: str, *devices: str, shared: bool = True) -> Document:
    return {
        "metadata": {},
        "spec": {
            "driver": "dra.cpu",
            "nodeName": "node-a",
            "pool": {"name": name},
            "devices": [{"name": one, "allowMultipleAllocations": shared} for one in devices],
        },
    }


class MemoryClient:
    """Keeps slices in a dict; ``calls`` is what it was asked, in order. Pools in ``refused`` are invalid."""

    def __init__(self) -> None:
        self.slices: dict[str, Document] = {}
        self.calls: list[str] = []
        self.refused: set[str] = set()
        self.node_uid: str | None = "node-uid"
        self.drops: tuple[str, ...] = ()
        self._versions = itertools.count(1)

    async def get_node(self, name: str) -> Document | None:
        return None if self.node_uid is None else {"metadata": {"name": name, "uid": self.node_uid}}

    async def list_slices(self, driver: str, node_name: str) -> tuple[list[Document], str]:
        return list(self.slices.values()), str(next(self._versions))

    async def watch_slices(
        self, driver: str, node_name: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, Document], None]:
        for document in self.slices.values():
            yield "ADDED", document

    async def create_slice(self, document: Document, *, dry_run: bool = False) -> Document:
        metadata = document["metadata"]
        name = f"{metadata['generateName']}{next(self._versions)}"
        return self._store("try" if dry_run else "create", {**document, "metadata": {**metadata, "name": name}})

    async def replace_slice(self, document: Document) -> Document:
        return self._store("update", document)

    async def delete_slice(self, name: str, uid: str, resource_version: str) -> None:
        self.calls.append(f"delete {self.slices.pop(name)['spec']['pool']['name']}")

    def _store(self, verb: str, document: Document) -> Document:
        pool = document["spec"]["pool"]["name"]
        self.calls.append(f"{verb} {pool}")
        if pool in self.refused:
            raise InvalidError(f"{verb} resourceslices", "no")
        version = str(next(self._versions))
        document = {**document, "metadata": {**document["metadata"], "uid": "u", "resourceVersion": version}}
        devices = [
            {key: value for key, value in device.items() if key not in self.drops}
            for device in document["spec"]["devices"]
        ]
        document["spec"] = {**document["spec"], "devices": devices}
        if verb != "try":
            self.slices[document["metadata"]["name"]] = document
        return document


@pytest.fixture
def client() -> MemoryClient:
    return MemoryClient()


@pytest.fixture
def mirror(client: MemoryClient) -> SliceMirror:
    return SliceMirror(client, "dra.cpu", "node-a")


async def test_deletes_come_before_updates_and_creates(client: MemoryClient, mirror: SliceMirror) -> None:
    """Obsolete slices go first: a device may move from one slice to another and must not be in both."""
    await mirror.write({"p": [a_pool("p", "a"), a_pool("p", "b"), a_pool("p", "c")]})
    client.calls.clear()
    await mirror.write({"p": [a_pool("p", "b"), a_pool("p", "a")]})
    assert client.calls == ["delete p", "update p", "update p"]
    assert {one["spec"]["pool"]["generation"] for one in client.slices.values()} == {2}


async def test_slices_belong_to_the_node(client: MemoryClient, mirror: SliceMirror) -> None:
    """The owner is the Node of this moment, so that slices go with it and not with a namesake of before."""
    await mirror.write({"p": [a_pool("p", "a")]})
    (document,) = client.slices.values()
    assert document["metadata"]["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "Node", "name": "node-a", "uid": "node-uid", "controller": True}
    ]
    client.node_uid = "another"
    mirror.see("DELETED", document)
    await mirror.write({"p": [a_pool("p", "a")]})
    assert list(client.slices.values())[-1]["metadata"]["ownerReferences"][0]["uid"] == "another"


async def test_missing_node_is_an_error(client: MemoryClient, mirror: SliceMirror) -> None:
    """Without a Node object there is no owner; nothing is written until the kubelet made it."""
    client.node_uid = None
    with pytest.raises(NotFoundError, match="the kubelet makes it"):
        await mirror.write({"p": [a_pool("p", "a")]})
    assert client.slices == {}


async def test_one_bad_pool_does_not_stop_the_rest(client: MemoryClient, mirror: SliceMirror) -> None:
    """A pool that the server refuses is reported after the others are written."""
    client.refused = {"a"}
    with pytest.raises(InvalidError):
        await mirror.write({"a": [a_pool("a", "x", shared=False)], "b": [a_pool("b", "y", shared=False)]})
    assert client.calls == ["create a", "create b"]


async def test_lagging_watch_causes_no_second_write(client: MemoryClient, mirror: SliceMirror) -> None:
    """Events about what we wrote ourselves, or older than it, are nothing new."""
    await mirror.write({"p": [a_pool("p", "a")]})
    (first,) = client.slices.values()
    await mirror.write({"p": [a_pool("p", "b")]})
    (second,) = client.slices.values()
    assert not mirror.see("ADDED", first)
    assert not mirror.see("MODIFIED", second)
    client.calls.clear()
    await mirror.write({"p": [a_pool("p", "b")]})
    assert client.calls == []


async def test_foreign_changes_are_seen(client: MemoryClient, mirror: SliceMirror) -> None:
    """What others wrote or deleted is news."""
    await mirror.write({"p": [a_pool("p", "a")]})
    (document,) = client.slices.values()
    later = {**document, "metadata": {**document["metadata"], "resourceVersion": "99"}}
    assert mirror.see("MODIFIED", later)
    assert mirror.see("DELETED", later)
    assert not mirror.see("DELETED", later)


async def test_gate_is_tried_without_publishing(client: MemoryClient, mirror: SliceMirror) -> None:
    """With the gate off not even for a moment is a device offered whole; the dry run shows it."""
    client.drops = ("allowMultipleAllocations",)
    with pytest.raises(GateOffError, match="DRAConsumableCapacity"):
        await mirror.write({"p": [a_pool("p", "a")]})
    assert client.calls == ["try p"]


async def test_gate_switched_off_later_withdraws_all(client: MemoryClient, mirror: SliceMirror) -> None:
    """When a later answer lacks the field, every slice of ours is taken back, also those of before."""
    await mirror.write({"p": [a_pool("p", "a")]})
    client.drops = ("allowMultipleAllocations",)
    with pytest.raises(GateOffError):
        await mirror.write({"p": [a_pool("p", "a")], "q": [a_pool("q", "b")]})
    assert client.slices == {}


async def test_one_dry_run_is_enough(client: MemoryClient, mirror: SliceMirror) -> None:
    """The gate is tried once in a process, and not for devices that do not need it."""
    await mirror.write({"a": [a_pool("a", "x", shared=False)]})
    await mirror.write({"a": [a_pool("a", "x", shared=False)], "b": [a_pool("b", "y")]})
    await mirror.write({"b": [a_pool("b", "z")]})
    assert [call for call in client.calls if call.startswith("try")] == ["try b"]


def test_trap_5_13_start_without_pools_is_refused(client: MemoryClient) -> None:
    """An empty first state would delete the slices of claims that run; later on it may be meant."""
    publisher = Publisher(client, "dra.cpu", "node-a")
    with pytest.raises(ValueError, match="without any pool"):
        publisher.set_pools({})
    publisher.set_pools({"p": [a_pool("p", "a")]})
    publisher.set_pools({})


def test_readiness_needs_the_gate() -> None:
    """Ready is: published once, and the gate not known to be off."""
    assert not PublishStatus().ready
    assert PublishStatus(published=True, error="away for a moment").ready
    assert not PublishStatus(published=True, gate_missing="DRAConsumableCapacity").ready


@pytest.mark.parametrize(
    ("path", "gate"),
    [
        ("devices[*].allowMultipleAllocations", True),
        ("devices[*].capacity.dra.cpu/cpu.requestPolicy", True),
        ("devices[*].capacity.dra.cpu/cpu.requestPolicy.default", False),
        ("devices[*].taints", False),
    ],
)
def test_only_a_dropped_field_tells_of_the_gate(path: str, gate: bool) -> None:
    """A changed value below the field, or another field, is no sign of the gate."""
    assert gate_is_off((path,)) is gate


def test_waits_grow_with_jitter_up_to_a_limit() -> None:
    """Retries back off with jitter, repairs of a fight without; both are capped, however long it goes on."""
    draws = [0.0]
    timing = Timing(first_retry=1, longest_retry=60, random=lambda: draws[0])
    assert [timing.retry(n) for n in (1, 2, 3, 7, 5000)] == [0.5, 1, 2, 30, 30]
    draws[0] = 1.0
    assert [timing.retry(n) for n in (1, 2, 3, 7, 5000)] == [1, 2, 4, 60, 60]
    assert [Timing().settled(n) for n in (0, 1, 2, 5000)] == [1, 2, 4, 30]
