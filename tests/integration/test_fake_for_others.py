# SPDX-License-Identifier: Apache-2.0
"""The fake API server serves clients of other projects: streaming lists and protobuf, as client-go uses them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from tests.fakes.apiserver import ApiServer

SLICES = "/apis/resource.k8s.io/v1/resourceslices"
STREAMING = {
    "watch": "true",
    "sendInitialEvents": "true",
    "resourceVersionMatch": "NotOlderThan",
    "allowWatchBookmarks": "true",
    "resourceVersion": "",
}
PROTOBUF = "application/vnd.kubernetes.protobuf"
ACCEPT = {"Accept": f"{PROTOBUF},application/json"}


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


@pytest.fixture
async def client(server: ApiServer) -> AsyncIterator[aiohttp.ClientSession]:
    """Returns a client that sends requests as client-go does."""
    async with aiohttp.ClientSession(server.url, headers=ACCEPT) as client:
        yield client


def field(number: int, value: bytes | str | int) -> bytes:
    """Returns an encoded field of a protobuf message: an integer below 128, or fewer than 16,384 bytes of data."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    data = value.encode() if isinstance(value, str) else value
    assert len(data) < 1 << 14
    size = [len(data)] if len(data) < 128 else [len(data) & 127 | 128, len(data) >> 7]
    return bytes([number << 3 | 2, *size]) + data


def enveloped(kind: str, raw: bytes, api_version: str = "resource.k8s.io/v1") -> bytes:
    """Returns an object in the envelope in which client-go sends it. Like client-go, it includes empty fields."""
    return b"k8s\0" + field(1, field(1, api_version) + field(2, kind)) + field(2, raw) + field(3, "") + field(4, "")


def a_slice(name: str) -> bytes:
    """Returns a slice with two devices."""
    # Names and values as other drivers publish them. The server must keep an attribute with the value 0, but omit an
    # empty name.
    metadata = field(1, name) + field(2, "") + field(3, "") + field(8, b"") + field(13, field(1, "Node") + field(6, 1))
    pool = field(1, "node-a") + field(2, 1) + field(3, 1)
    attributes = field(2, field(1, "numaNode") + field(2, field(2, 0)))
    attributes += field(2, field(1, "kind") + field(2, field(4, "")))
    step = field(3, field(1, "1"))
    policy = field(1, field(1, "1")) + field(4, field(1, field(1, "1")) + step)
    capacity = field(3, field(1, "cpus") + field(2, field(1, field(1, "8")) + field(2, policy)))
    device = field(1, "d0") + attributes + capacity + field(12, 1)
    spec = field(1, "example.com") + field(2, pool) + field(3, "node-a") + field(6, device) + field(6, field(1, "d1"))
    return enveloped("ResourceSlice", field(1, metadata) + field(2, spec))


async def create(client: aiohttp.ClientSession, name: str) -> dict[str, Any]:
    async with client.post(SLICES, data=a_slice(name), headers={"Content-Type": PROTOBUF}) as answer:
        assert (answer.status, answer.content_type) == (201, "application/json"), await answer.text()
        made: dict[str, Any] = await answer.json()
        return made


async def test_a_protobuf_body_is_stored_as_the_object(client: aiohttp.ClientSession) -> None:
    """Fields that the writer left empty are omitted; the response is JSON."""
    made = await create(client, "s")
    assert {key: made["metadata"].get(key) for key in ("name", "namespace", "ownerReferences")} == {
        "name": "s",
        "namespace": None,
        "ownerReferences": [{"kind": "Node", "controller": True}],
    }
    first, second = made["spec"]["devices"]
    assert second == {"name": "d1"}
    assert first == {
        "name": "d0",
        "attributes": {"numaNode": {"int": 0}, "kind": {"string": ""}},
        "capacity": {
            "cpus": {"value": "8", "requestPolicy": {"default": "1", "validRange": {"min": "1", "step": "1"}}}
        },
        "allowMultipleAllocations": True,
    }
    assert made["spec"]["pool"] == {"name": "node-a", "generation": 1, "resourceSliceCount": 1}


async def test_a_slice_is_deleted_with_options_in_protobuf(client: aiohttp.ClientSession) -> None:
    """Preconditions apply: a resourceVersion that does not match causes a conflict."""
    uid = (await create(client, "s"))["metadata"]["uid"]
    for wanted, status in (("other", 409), (uid, 200)):
        options = enveloped("DeleteOptions", field(2, field(1, wanted)), "v1")
        async with client.delete(f"{SLICES}/s", data=options, headers={"Content-Type": PROTOBUF}) as answer:
            assert answer.status == status


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (enveloped("Pod", b""), 415),
        (b"{}", 400),
        (b"k8s\0\xff", 400),
        (enveloped("ResourceSlice", b"\x0a\x7f"), 400),
        (enveloped("ResourceSlice", field(1, b"\x0d\0\0\0\0")), 400),
    ],
)
async def test_unreadable_bodies_are_rejected(client: aiohttp.ClientSession, body: bytes, status: int) -> None:
    """Covers a kind that no driver sends, and bytes that are not an object."""
    async with client.post(SLICES, data=body, headers={"Content-Type": PROTOBUF}) as answer:
        assert (answer.status, (await answer.json())["kind"]) == (status, "Status")


async def test_a_client_that_does_not_accept_json_is_rejected(client: aiohttp.ClientSession) -> None:
    """The server can only return JSON."""
    async with client.get(SLICES, headers={"Accept": PROTOBUF}) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (406, "NotAcceptable")


async def events(client: aiohttp.ClientSession, **query: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Returns the events from a watch."""
    async with client.get(SLICES, params={**STREAMING, **query}) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            event = json.loads(line)
            yield event["type"], event["object"]


@pytest.mark.parametrize("version", ["", "0", "1"])
async def test_a_streaming_list_ends_with_a_bookmark(client: aiohttp.ClientSession, version: str) -> None:
    """All existing objects come first, then the bookmark that marks their end, then changes."""
    names = {(await create(client, name))["metadata"]["name"] for name in ("a", "b")}
    seen = events(client, resourceVersion=version)
    assert {(await anext(seen))[1]["metadata"]["name"] for _ in names} == names
    kind, bookmark = await anext(seen)
    assert (kind, bookmark["kind"], bookmark["apiVersion"]) == ("BOOKMARK", "ResourceSlice", "resource.k8s.io/v1")
    assert bookmark["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}
    assert int(bookmark["metadata"]["resourceVersion"]) > 0
    made = await create(client, "c")
    assert await anext(seen) == ("ADDED", made)
    await seen.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("query", [{"resourceVersionMatch": ""}, {"sendInitialEvents": ""}])
async def test_options_of_a_streaming_list_depend_on_each_other(
    client: aiohttp.ClientSession, query: dict[str, str]
) -> None:
    """client-go falls back to an ordinary list if the options are rejected."""
    asked = {key: value for key, value in {**STREAMING, **query}.items() if value or key == "resourceVersion"}
    async with client.get(SLICES, params=asked) as answer:
        assert (answer.status, (await answer.json())["reason"]) == (422, "Invalid")
