# SPDX-License-Identifier: Apache-2.0
import asyncio
import gzip
import json
import threading
import time
import traceback
import tracemalloc
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from dra_frontend.api_server.client import MAX_SLICES, KubeClient, connect
from dra_frontend.api_server.connection import MAX_WATCH_SECONDS, Connection
from dra_frontend.api_server.credentials import in_cluster, kubeconfig, read_configuration
from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeConfigError,
    KubeError,
    NotFoundError,
    UnavailableError,
    UnreachableError,
    UnreadableError,
    WatchExpiredError,
)
from dra_frontend.api_server.library import Configuration
from dra_frontend.api_server.requests import Call, Pace
from dra_frontend.api_server.responses import MAX_BYTES, read_list, response_error
from dra_frontend.devices.gates import COUNTING_GATE
from dra_frontend.events.event import ObjectReference, Observation, new_event

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import RESOURCES, Document
from tests.fakes.apiserver_values import Options
from tests.fakes.waiting import patience
from tests.rigs.cpu_time import cpu_seconds

TLS = Path(__file__).parents[3] / "data" / "tls"
BY_NAME = {(resource.group, resource.name): resource for resource in RESOURCES}
CLAIMS = BY_NAME["resource.k8s.io", "resourceclaims"]
SLICES = BY_NAME["resource.k8s.io", "resourceslices"]
NODES = BY_NAME["", "nodes"]
EVENTS = BY_NAME["events.k8s.io", "events"]


def a_slice(name: str = "s1", node: str = "node-a", *, devices: int = 0, **metadata: Any) -> Document:
    return {
        "metadata": {"name": name, **metadata},
        "spec": {
            "driver": "example.com",
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": f"d{n}", "attributes": {"a": {"string": "x" * 60}}} for n in range(devices)],
        },
    }


@asynccontextmanager
async def client_of(
    tmp_path: Path, options: Options | None = None, *, call_seconds: float = 5.0
) -> AsyncGenerator[tuple[ApiServer, KubeClient], None]:
    async with ApiServer(options) as server:
        path = server.write_kubeconfig(tmp_path / "kubeconfig")
        async with connect(kubeconfig(str(path)), call_seconds=call_seconds) as client:
            yield server, client


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, KubeClient]]:
    async with client_of(tmp_path) as both:
        yield both


Pair = tuple[ApiServer, KubeClient]
MINE = ("example.com", "node-a")


async def test_claims_and_nodes_are_read(pair: Pair) -> None:
    """An existing object is returned as the document that the server sent, and a missing claim is returned as None."""
    server, client = pair
    claim = server.store.create(CLAIMS, "default", {"metadata": {"name": "c"}, "spec": {}})
    assert await client.get_claim("default", "c") == claim
    assert await client.get_claim("other", "c") is None
    with pytest.raises(NotFoundError, match="get nodes node-a: no such node; the kubelet has not registered it"):
        await client.get_node("node-a")
    node = server.store.create(NODES, "", {"metadata": {"name": "node-a"}})
    assert await client.get_node("node-a") == node


async def test_observers_get_a_claim_after_its_reader(pair: Pair) -> None:
    """A failing observer affects neither the reader nor the other observers. Observers are not called for a missing
    claim.
    """
    server, client = pair
    claim = server.store.create(CLAIMS, "default", {"metadata": {"name": "c"}, "spec": {}})
    observed: list[object] = []
    client.claim_observers += [lambda document: document["no such field"], observed.append]
    assert await client.get_claim("default", "c") == claim
    assert not observed
    await asyncio.sleep(0)
    assert observed == [claim]
    assert await client.get_claim("other", "c") is None
    await asyncio.sleep(0)
    assert observed == [claim]


async def test_only_a_404_for_the_claim_itself_means_that_it_is_gone(tmp_path: Path) -> None:
    """A 404 for the whole API, or one from a proxy, does not prove that the claim is gone. If the driver trusted such a
    404, it would release the claim's CPUs.
    """
    async with client_of(tmp_path, Options(not_served={"resource.k8s.io"})) as (_, client):
        with pytest.raises(KubeError, match=r"resource\.k8s\.io/v1 served\? Kubernetes 1\.34"):
            await client.get_claim("default", "c")


def test_the_end_of_a_long_error_message_is_kept() -> None:
    """In the message, the slice's name, which contains the node's name, precedes the rejected field. If the end of the
    message were cut off, the log would not show why publishing fails.
    """
    name, node = "s" * 253, "n" * 253
    text = (
        f'resourceslices.resource.k8s.io "{name}" is forbidden: node "{node}" does not support {COUNTING_GATE} feature'
    )
    error = response_error(Call("update", "resource.k8s.io", "resourceslices"), 403, {"message": text}, {})
    assert COUNTING_GATE in str(error)


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_403_names_the_missing_rbac_rule(tmp_path: Path, verb: str) -> None:
    """The error for a watch names the rule too. The error for a 401 names the credentials instead."""
    options = Options(forbidden={(verb, "resourceslices")}, tokens={"good"})
    async with client_of(tmp_path, options) as (server, client):
        with pytest.raises(ForbiddenError, match=rf'\["resource.k8s.io"\].*\["resourceslices"\].*\["{verb}"\]'):
            await next_of(client.watch_slices(*MINE, (await client.list_slices(*MINE))[1]))
        server.options.tokens = {"other"}
        with pytest.raises(ForbiddenError, match="was rejected: check the kubeconfig"):
            await client.get_node("node-a")


@pytest.mark.parametrize(
    "why",
    [
        "unable to create new content in namespace ns because it is being terminated",
        "exceeded quota: q, requested: count/events.events.k8s.io=1, used: count/events.events.k8s.io=9",
    ],
)
async def test_a_403_from_admission_control_names_no_rbac_rule(pair: Pair, why: str) -> None:
    """The driver already has the permission, so granting it again would not remove the cause."""
    server, client = pair
    text = f'events.events.k8s.io "p.1" is forbidden: {why}'
    server.fail_next(1, 403, body=json.dumps({"kind": "Status", "code": 403, "message": text}))
    with pytest.raises(ForbiddenError) as caught:
        await client.create_event({"metadata": {"name": "p.1", "namespace": "ns"}})
    assert why in str(caught.value)
    assert "admission control denied this" in str(caught.value)
    assert "grant the service account" not in str(caught.value)


async def test_a_missing_namespace_does_not_mean_that_the_api_is_missing(pair: Pair) -> None:
    """The namespace of a pod may be deleted before the pod's Event is written."""
    server, client = pair
    status = {"kind": "Status", "code": 404, "reason": "NotFound", "details": {"kind": "namespaces", "name": "ns"}}
    server.fail_next(1, 404, body=json.dumps(status | {"message": 'namespaces "ns" not found'}))
    with pytest.raises(KubeError, match="not found") as caught:
        await client.create_event({"metadata": {"name": "p.1", "namespace": "ns"}})
    assert "served?" not in str(caught.value)


async def test_a_slice_is_written_only_if_it_has_not_changed(pair: Pair) -> None:
    """A slice that has changed since it was read is neither overwritten nor deleted. Deleting a slice that is already
    gone succeeds.
    """
    server, client = pair
    created = await client.create_slice(a_slice())
    created["spec"]["pool"]["generation"] = 2
    metadata = (await client.replace_slice(created))["metadata"]
    with pytest.raises(ConflictError, match="update resourceslices s1"):
        await client.replace_slice(created)
    for uid, version in (("other", metadata["resourceVersion"]), (metadata["uid"], "1")):
        with pytest.raises(ConflictError):
            await client.delete_slice("s1", uid, version)
    for _ in range(2):
        await client.delete_slice("s1", metadata["uid"], metadata["resourceVersion"])
    assert list(server.store.select(SLICES)) == []


@pytest.mark.parametrize("fault", ["500", "503", "429", "drop", "hang", "end"])
async def test_transient_errors_are_retriable(tmp_path: Path, fault: str) -> None:
    """Server errors, overload, refused or broken connections and a server that never responds result in
    UnavailableError within a bounded time.
    """
    async with client_of(tmp_path, call_seconds=0.3 if fault == "hang" else 5.0) as (server, client):
        if fault == "end":
            await server.__aexit__(None, None, None)
        server.fail_next(2, fault)
        with pytest.raises(UnavailableError, match=r"^get nodes node-a: ") as caught:
            await client.get_node("node-a")
        assert caught.value.retriable


@pytest.mark.parametrize("name", ["", ".", ".."])
async def test_names_cannot_change_the_path(pair: Pair, name: str) -> None:
    """An empty name, or a name with dots, would address a different resource, so the client rejects it before it sends
    a request.
    """
    with pytest.raises(InvalidError, match="is not a name"):
        await pair[1].get_claim("default", name)
    assert Call("get", "", "nodes", "a/b?c").path == "/api/v1/nodes/a%2Fb%3Fc"


async def next_of(events: AsyncGenerator[tuple[str, Document], None]) -> tuple[str, str]:
    async with asyncio.timeout(5 * patience()):
        kind, document = await anext(events)
    return kind, document["metadata"].get("name", "")


async def test_list_and_watch_cover_one_driver_and_node(pair: Pair) -> None:
    """The selector excludes other nodes' slices from lists and watches. An event may be longer than any buffer that it
    passes through.
    """
    server, client = pair
    server.store.create(SLICES, "", a_slice("mine"))
    server.store.create(SLICES, "", a_slice("other", "node-b"))
    items, version = await client.list_slices(*MINE)
    assert [item["metadata"]["name"] for item in items] == ["mine"]
    async with aclosing(client.watch_slices(*MINE, version)) as events:
        server.store.create(SLICES, "", a_slice("third", "node-b"))
        server.store.create(SLICES, "", a_slice("big", devices=128, annotations={"a": "y" * 3_000_000}))
        assert await next_of(events) == ("ADDED", "big")
        server.store.update(SLICES, "", "big", a_slice("big", labels={"a": "b"}))
        assert await next_of(events) == ("MODIFIED", "big")
        server.store.delete(SLICES, "", "big")
        assert await next_of(events) == ("DELETED", "big")


async def test_many_slices_are_listed_in_pages(pair: Pair) -> None:
    """The slices of a machine with one device per CPU are too large for a single response."""
    server, client = pair
    for number in range(40):
        server.store.create(SLICES, "", a_slice(f"s{number}", annotations={"a": "x" * 200_000}))
    found, version = await client.list_slices(*MINE)
    assert {one["metadata"]["name"] for one in found} == {f"s{number}" for number in range(40)}
    assert version == str(server.store.version)


async def test_an_endless_list_of_slices_is_an_error(pair: Pair) -> None:
    """The publisher keeps all slices in memory, so the number of slices is bounded."""
    server, client = pair
    for number in range(MAX_SLICES + 1):
        server.store.create(SLICES, "", a_slice(f"s{number}"))
    with pytest.raises(
        KubeError, match=r"example\.com has more than 1000 slices on node-a; delete those not created by this driver"
    ):
        await client.list_slices(*MINE)


async def test_a_watch_that_breaks_is_unavailable(pair: Pair) -> None:
    """After a broken connection, the watch can be resumed. Only a 410 inside a 200 response means that a new list is
    needed.
    """
    server, client = pair
    version = str(server.store.version)
    events = client.watch_slices(*MINE, version)
    server.store.create(SLICES, "", a_slice())
    await next_of(events)
    server.drop_watches()
    with pytest.raises(UnavailableError, match="watch resourceslices: "):
        await next_of(events)
    server.compact()
    with pytest.raises(WatchExpiredError):
        await next_of(client.watch_slices(*MINE, version))


def an_event(name: str) -> dict[str, Any]:
    """Returns an Event about a Node."""
    node = ObjectReference("Node", "", name, name)
    return new_event(Observation(node, "Reason", "note", name), "node-a", 1, 1)


async def test_an_event_is_created_once_and_patched(pair: Pair) -> None:
    """Later occurrences only patch the Event's series, using the resource version that was read."""
    server, client = pair
    created = await client.create_event(an_event("node-a"))
    with pytest.raises(ConflictError):
        await client.create_event(an_event("node-a"))
    namespace, name = created["metadata"]["namespace"], created["metadata"]["name"]
    assert await client.patch_event(namespace, name, {}) == created
    series = {"count": 2, "lastObservedTime": created["eventTime"]}
    patched = await client.patch_event(namespace, name, {"series": series})
    assert (patched["series"], patched["note"]) == (series, created["note"])
    with pytest.raises(InvalidError, match="note: field is immutable"):
        await client.patch_event(namespace, name, {"note": "other"})
    with pytest.raises(ConflictError):
        await client.patch_event(namespace, name, {"metadata": {"resourceVersion": "1"}, "series": series})
    with pytest.raises(NotFoundError):
        await client.patch_event(namespace, "none", {})
    assert list(server.store.select(EVENTS)) == [patched]


async def test_the_token_is_read_again_each_minute() -> None:
    """The kubelet renews a projected token before it expires. If the file cannot be read, the previous token stays in
    use.
    """
    now, tokens = [0.0], iter(["one", "two"])

    def load(configuration: Configuration) -> None:
        token = next(tokens, None)
        if token is None:
            raise KubeConfigError("token", "gone")
        configuration.api_key = {"BearerToken": token}

    connection = Connection(load, clock=lambda: now[0])
    await connection.open()
    seen = []
    for now[0] in (1.0, 59.0, 60.0, 119.0, 121.0):
        seen.append(await connection.authorization())
    await connection.close()
    assert seen == ["one", "one", "two", "two", "two"]


async def test_a_slow_token_read_delays_only_one_call() -> None:
    """Other calls continue with the current token. A call that the server rejected with the current token waits for the
    newer one.
    """
    now, slow = [0.0], threading.Event()
    slow.set()
    tokens = iter(["one", "two"])

    def load(configuration: Configuration) -> None:
        slow.wait(5)
        configuration.api_key = {"BearerToken": next(tokens)}

    connection = Connection(load, clock=lambda: now[0])
    await connection.open()
    now[0] = 61.0
    slow.clear()
    first, refused = (asyncio.create_task(connection.authorization(token)) for token in ("", "one"))
    await asyncio.sleep(0.01)
    assert await connection.authorization() == "one"
    assert not refused.done()
    slow.set()
    assert await asyncio.gather(first, refused) == ["two", "two"]
    await connection.close()


@pytest.mark.parametrize(
    "text", [None, "", "[1", "a: b", "current-context: x\ncontexts: []\nclusters: []\nusers: []\n", "just words"]
)
async def test_an_unreadable_kubeconfig_is_named(tmp_path: Path, text: str | None) -> None:
    """Any damage to the file results in an error that names the file, instead of a traceback from the library. Outside
    a pod and without a kubeconfig, the error gives a remedy.
    """
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(KubeConfigError, match=str(path)):
        await Connection(kubeconfig(str(path))).open()
    with pytest.raises(KubeConfigError, match="set kubeconfig"):
        await Connection(in_cluster({}, tmp_path)).open()


def test_calls_beyond_the_burst_are_paced() -> None:
    """A burst passes immediately, later calls are paced at the configured rate, and idle time refills the bucket."""
    now = [0.0]
    pace = Pace(per_second=10, burst=3, clock=lambda: now[0])
    assert [pace.take() for _ in range(5)] == pytest.approx([0, 0, 0, 0.1, 0.2])
    now[0] = 60.0
    assert [pace.take() for _ in range(4)] == pytest.approx([0, 0, 0, 0.1])


async def test_a_cancelled_wait_returns_its_token() -> None:
    """Cancelled calls must not starve later ones."""
    pace = Pace(per_second=1, burst=1, clock=lambda: 0.0)
    await pace.acquire()
    async with asyncio.TaskGroup() as tasks:
        waiting = [tasks.create_task(pace.acquire()) for _ in range(50)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
    assert pace.take() == pytest.approx(1.0)


def test_a_thousand_claims_are_read_within_the_kubelets_timeout() -> None:
    """With 250 pods that have four claims each, the last call starts long before the kubelet's timeout of 45 s."""
    pace = Pace(clock=lambda: 0.0)
    assert max(pace.take() for _ in range(1000)) < 20


async def test_rate_limiting_does_not_count_as_server_time(tmp_path: Path) -> None:
    """Time spent waiting for the client's own rate limit is not reported as a server timeout."""
    async with client_of(tmp_path, call_seconds=0.2) as (_, client):
        client._pace = Pace(per_second=4, burst=1)
        async with asyncio.TaskGroup() as tasks:
            reads = [tasks.create_task(client.get_claim("default", "c")) for _ in range(3)]
    assert [read.result() for read in reads] == [None] * 3


async def test_events_never_delay_reading_a_claim(pair: Pair) -> None:
    """Events have their own rate limit: even with fifty Events waiting, a claim is read immediately."""
    _, client = pair
    events = [asyncio.create_task(client.create_event(an_event(f"n{n}"))) for n in range(50)]
    try:
        async with asyncio.timeout(5 * patience()):
            while sum(event.done() for event in events) < 20:  # noqa: ASYNC110 - the burst
                await asyncio.sleep(0.01)
            assert await client.get_claim("default", "c") is None
        assert sum(event.done() for event in events) < 30
    finally:
        for event in events:
            event.cancel()
        # On a busy machine some of the connections time out, which is not what this test is about.
        await asyncio.gather(*events, return_exceptions=True)


A_CLAIM = {"metadata": {"name": "c"}, "spec": {}}


@pytest.mark.parametrize("fault", ["409", "429", "500", "503", "drop", "hang"])
async def test_reading_a_claim_is_retried(tmp_path: Path, fault: str) -> None:
    """A transient error delays Prepare by less than a second, not by the kubelet's retry interval of a minute."""
    async with client_of(tmp_path, call_seconds=0.3 if fault == "hang" else 5.0) as (server, client):
        claim = server.store.create(CLAIMS, "default", A_CLAIM)
        server.fail_next(1, fault, verb="get")
        assert await client.get_claim("default", "c") == claim
        assert [one.code for one in server.served][-1] == 200


async def test_retry_after_is_honoured(pair: Pair) -> None:
    """The claim is read again after the time given in Retry-After. If that time exceeds the call's time limit, the
    claim is read again a second before the limit.
    """
    server, client = pair
    server.fail_next(9, 429, retry_after=60)
    began = asyncio.get_running_loop().time()
    with pytest.raises(UnavailableError, match="injected fault 429") as caught:
        await client.get_claim("default", "c", patience=2.3)
    assert asyncio.get_running_loop().time() - began >= 1.3
    assert caught.value.retry_after == 60
    assert len(server.served) == 2


@pytest.mark.parametrize("code", [403, 404, 422])
async def test_permanent_errors_are_raised_immediately(pair: Pair, code: int) -> None:
    """If an error is permanent or outlasts the retries, the exception gives the server's reason."""
    server, client = pair
    server.fail_next(1, code)
    with pytest.raises(KubeError, match=f"injected fault {code}"):
        await client.get_claim("default", "c")
    server.fail_next(9, 503)
    with pytest.raises(UnavailableError, match="injected fault 503"):
        await client.get_claim("default", "c", patience=0.1)
    assert [one.code for one in server.served] == [code, 503]


ODD = [
    '{"ok": true}',
    "{}",
    "[]",
    "null",
    "1",
    "<html>",
    '{"kind": "ResourceClaim"}',
    '{"kind": "ResourceClaim", "metadata": null}',
    '{"kind": "ResourceClaim", "metadata": {"name": "other", "uid": "u"}}',
    '{"kind": "ResourceClaimList", "metadata": {}, "items": [1]}',
    '{"kind": "ResourceClaimList", "metadata": null, "items": []}',
    '{"kind": "ResourceClaimList", "metadata": {}, "items": {}}',
    '{"kind": "ResourceSlice", "metadata": {"name": "s", "uid": "u"}}',
    '{"kind": "ResourceSlice", "metadata": {"name": "s", "uid": "u"}, "spec": {"pool": {"name": 1}}}',
    '{"kind": "Node", "metadata": {"name": "node-a"}}',
    "[" * 200_000,
    '{"kind": "ResourceClaim", "metadata": {"name": "c", "uid": "\\ud800"}}',
    '{"kind": "ResourceClaim", "metadata": {"name": "c", "uid": "u"}, "spec": 1e999}',
    "x" * (MAX_BYTES + 1),
]


@pytest.mark.parametrize("body", ODD, ids=map(str, range(len(ODD))))
async def test_a_malformed_response_counts_as_unavailable(pair: Pair, body: str) -> None:
    """A 200 response with unexpected JSON probably comes from a proxy. It raises the same error as an outage, and never
    means "not found".
    """
    server, client = pair
    server.fail_next(99, 200, body=body)
    calls = [
        ("get resourceclaims", client.get_claim("default", "c", patience=0)),
        ("list resourceclaims", anext(client.list_claims())),
        ("get nodes", client.get_node("node-a")),
        ("list resourceslices", client.list_slices(*MINE)),
        ("create resourceslices", client.create_slice(a_slice())),
        ("update resourceslices", client.replace_slice(a_slice())),
    ]
    for operation, call in calls:
        with pytest.raises(UnavailableError, match=operation):
            await call


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"type": "ADDED"}', UnavailableError),
        ('{"kind": "Status", "code": 500}', UnavailableError),
        ('{"type": "BOOKMARK", "object": {"metadata": null}}', UnavailableError),
        ('{"type": "ERROR", "object": {"code": "gone"}}', UnavailableError),
        ('{"type": "ERROR", "object": {"code": 410}}', WatchExpiredError),
        ('{"type": "ERROR", "object": {"code": 403, "kind": "Status", "message": 5}}', ForbiddenError),
        ('{"type": "ADDED", "object": {"metadata": {"name": "s", "resourceVersion": "7"}}}', "BOOKMARK"),
        ('{"type": "OTHER", "object": {"metadata": {"resourceVersion": "7"}}}', "BOOKMARK"),
        ('{"type": ["ADDED"], "object": {"metadata": {"resourceVersion": "7"}}}', "BOOKMARK"),
    ],
)
async def test_a_malformed_watch_event_raises_an_error_or_becomes_a_bookmark(
    pair: Pair, line: str, what: type[KubeError] | str
) -> None:
    """A response that is not a watch stream counts as an outage. If only an event's object cannot be parsed, its
    resource version is still used.
    """
    server, client = pair
    server.fail_next(1, 200, verb="watch", body=f"{line}\n")
    events = client.watch_slices(*MINE, "1")
    if isinstance(what, str):
        kind, document = await anext(events)
        assert (kind, document["metadata"]["resourceVersion"]) == (what, "7")
    else:
        with pytest.raises(what, match="watch resourceslices"):
            await anext(events)
    await events.aclose()


UNREADABLE = ["[" * 62 + "]" * 62, "1e999", "9" * 30, '"\\ud800"', "NaN"]


@pytest.mark.parametrize("value", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_an_event_with_an_unreadable_object_is_skipped(
    pair: Pair, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression test: a single 400-byte claim ended the watch on every node, and did so again after each new list."""
    metadata = '"metadata": {"name": "%s", "uid": "u", "resourceVersion": "7"}'
    spec = f'"spec": {{"devices": {{"config": [{{"opaque": {{"parameters": {value}}}}}]}}}}'
    odd = f'{{"type": "ADDED", "object": {{{metadata % "odd"}, {spec}}}}}'
    plain = f'{{"type": "ADDED", "object": {{{metadata % "plain"}}}}}'
    pair[0].fail_next(1, 200, verb="watch", body=f"{odd}\n{odd}\n{plain}\n{odd}\n")
    seen = [document["metadata"]["name"] async for _, document in pair[1].watch_labelled_claims("a/b", "1")]
    assert seen == ["plain"]
    assert [one.message for one in caplog.records if one.name.startswith("dra")] == ["watch event skipped"]


@pytest.mark.parametrize("line", ["[" * 9000, "1e999", "<html>", '{"object": 1e999}'])
async def test_a_line_that_is_not_an_event_ends_the_watch(pair: Pair, line: str) -> None:
    """A tenant can write only the object inside an event, so a malformed line means a broken connection."""
    pair[0].fail_next(1, 200, verb="watch", body=f"{line}\n")
    with pytest.raises(UnavailableError) as caught:
        await anext(pair[1].watch_slices(*MINE, "1"))
    assert caught.value.retriable


@pytest.mark.parametrize("value", UNREADABLE, ids=range(len(UNREADABLE)))
async def test_an_unreadable_claim_is_not_requested_again(pair: Pair, value: str) -> None:
    """Repeating the request would return the same document."""
    body = f'{{"kind": "ResourceClaim", "metadata": {{"name": "c", "uid": "u"}}, "spec": [{value}]}}'
    pair[0].fail_next(99, 200, body=body.replace("[" * 62, "[" * 66).replace("]" * 62, "]" * 66))
    with pytest.raises(UnreadableError) as caught:
        await pair[1].get_claim("default", "c")
    assert not caught.value.retriable
    assert len(pair[0].served) == 1


@pytest.mark.parametrize("items", ["[]", "null", "[ ]"])
def test_every_encoding_of_an_empty_list_is_accepted(items: str) -> None:
    """Go can encode an empty list in three ways. A nested field with the same name is not mistaken for the list."""
    text = f'{{"metadata": {{"items": [{{}}], "resourceVersion": "7"}}, "kind": "KList", "items": {items}}}'
    assert read_list(Call("list", "g", "r"), text.encode(), "K")[0] == []


HOSTILE = ["[" * 9000 + "]" * 9000, '{"a":' * 3000 + "1" + "}" * 3000, "1e999", "9" * 5000, '"\\ud800"', "NaN"]


@pytest.mark.parametrize("value", HOSTILE, ids=map(str, range(len(HOSTILE))))
def test_one_claim_cannot_hide_the_others(value: str) -> None:
    """A claim's author controls part of the list response. An unreadable claim is left out, and all others are
    returned.
    """
    item = '{"metadata": {"name": "%s", "uid": "u-%s"}, "spec": {"parameters": %s}}'
    items = ",".join(item % (name, name, value if name == "b" else '"[{\\"]}"') for name in "abc")
    text = f'{{"kind": "ResourceClaimList", "metadata": {{"continue": "more"}}, "items": [{items}]}}'
    found, metadata = read_list(Call("list", "g", "r"), text.encode(), "ResourceClaim")
    assert [one["metadata"]["name"] for one in found] == ["a", "c"]
    assert found[0]["spec"]["parameters"] == '[{"]}'
    assert metadata == {"continue": "more"}


MONSTERS = [
    b'"' + b'\\"' * 500_000,
    b'["' + b"a" * 1_000_000,
    b'"' * 999_999,
    b"\\" * 999_999,
    b"[]" * 300_000,
    b'{"a":' * 99_999,
]


@pytest.mark.parametrize("data", MONSTERS, ids=map(str, range(len(MONSTERS))))
def test_a_hostile_list_takes_linear_time(data: bytes) -> None:
    """Hundreds of thousands of unterminated strings, quotes, backslashes and brackets are parsed in linear time,
    without backtracking.
    """

    def refuse() -> None:
        with pytest.raises(UnavailableError):
            read_list(Call("list", "g", "r"), b'{"metadata": {}, "items": [' + data, "K")

    assert cpu_seconds(refuse) < 3


async def test_claims_are_listed_by_namespace_and_page(pair: Pair) -> None:
    """The claims in one namespace, or in all of them, are listed in pages of 500."""
    server, client = pair
    for number in range(1003):
        server.store.create(CLAIMS, f"ns-{number % 2}", {"metadata": {"name": f"c{number}"}, "spec": {}})
    assert len([one async for one in client.list_claims("ns-0")]) == 502
    assert len({one["metadata"]["uid"] async for one in client.list_claims()}) == 1003
    assert len(server.served) == 2 + 3


async def test_pages_that_are_too_long_are_requested_again_in_smaller_sizes(pair: Pair) -> None:
    """A tenant's large claims cause additional requests, but listing never fails because of them."""
    server, client = pair
    for number in range(40):
        claim = {"metadata": {"name": f"c{number}", "annotations": {"a": "x" * 200_000}}}
        server.store.create(CLAIMS, "default", claim)
    assert len([one async for one in client.list_claims()]) == 40


@pytest.mark.parametrize("odd", [0, 3, 9])
async def test_a_claim_that_is_too_long_hides_no_others(pair: Pair, odd: int) -> None:
    """In JSON, a 1.5 MiB object may become six times as long, because `<` is escaped."""
    server, client = pair
    for number in range(10):
        size = MAX_BYTES if number == odd else 1
        metadata = {"name": f"c{number}", "labels": {"a": "true"}, "annotations": {"a": "x" * size}}
        server.store.create(CLAIMS, "default", {"metadata": metadata})
    names = [f"c{number}" for number in range(10) if number != odd]
    assert [one["metadata"]["name"] async for one in client.list_claims()] == names
    items, version = await client.list_labelled_claims("a", lambda one: one)
    assert [one["metadata"]["name"] for one in items] == names
    assert version
    found, _ = await client.list_labelled_claims("a", lambda one: one if one["metadata"]["name"] == names[4] else None)
    assert found == [items[4]]


async def test_an_event_that_is_too_long_is_skipped(pair: Pair) -> None:
    """The next event is read. An event that never ends causes the client to close the watch."""
    event = '{"type": "ADDED", "object": {"metadata": {"name": "%s", "uid": "u", "resourceVersion": "7"}}}'
    long = event % ("x" * (2 * MAX_BYTES))
    pair[0].fail_next(1, 200, verb="watch", body=f"{event % 'a'}\n{long}\n{event % 'b'}\n")
    seen = [one["metadata"]["name"] async for _, one in pair[1].watch_labelled_claims("a", "1")]
    assert seen == ["a", "b"]
    pair[0].fail_next(1, 200, verb="watch", body=event % ("x" * (9 * MAX_BYTES)))
    with pytest.raises(UnavailableError, match="is larger than"):
        await anext(pair[1].watch_labelled_claims("a", "1"))


async def test_a_repeated_page_is_an_error(pair: Pair) -> None:
    """A server that repeats the same continue token would otherwise keep the client in a loop."""
    server, client = pair
    server.fail_next(9, 200, body='{"kind": "ResourceClaimList", "metadata": {"continue": "again"}, "items": []}')
    with pytest.raises(UnavailableError, match="the same page"):
        await anext(client.list_claims())
    assert len(server.served) == 2


def a_page(token: str, items: str = "[]") -> str:
    """Returns one page of a list, with a continue token."""
    return f'{{"kind": "ResourceClaimList", "metadata": {{"continue": "{token}"}}, "items": {items}}}'


async def test_pages_that_alternate_are_an_error(pair: Pair) -> None:
    """Each continue token differs from the previous one, but the list never ends."""
    server, client = pair
    for token in "abab":
        server.fail_next(1, 200, body=a_page(token))
    with pytest.raises(UnavailableError, match="the same page"):
        await anext(client.list_claims())
    assert len(server.served) == 3


@pytest.mark.parametrize("items", ["[]", '[{"metadata": {"name": "c", "uid": "u"}}]'])
async def test_a_list_that_always_has_a_new_continue_token_is_an_error(pair: Pair, items: str) -> None:
    """The number of requested items is bounded, whether or not the pages contain any."""
    server, client = pair
    for token in range(9):
        server.fail_next(1, 200, body=a_page(f"t{token}", items))
    bounded = KubeClient(client._connection, max_listed=2000)
    with pytest.raises(UnavailableError, match="the list is not complete after 2000 items"):
        [one async for one in bounded.list_claims()]
    with pytest.raises(UnavailableError, match="the list is not complete after 2000 items"):
        await bounded.list_labelled_claims("l", lambda one: one)
    assert len(server.served) == 8


async def test_a_continue_token_that_is_too_long_is_an_error(pair: Pair) -> None:
    """The token would become part of the next request's URL."""
    server, client = pair
    server.fail_next(1, 200, body=a_page("x" * 9000))
    with pytest.raises(UnavailableError, match="a continue token has more than 8192 characters"):
        await anext(client.list_claims())
    assert len(server.served) == 1


async def test_labelled_claims_are_listed_by_page_and_only_parts_are_retained(pair: Pair) -> None:
    """A tenant's large claims cause additional requests, but listing never fails because of them. Of each claim, only
    the part that the caller's function returns is kept; if the function returns None, the claim is left out.
    """
    server, client = pair
    for number in range(40):
        metadata = {"name": f"c{number}", "labels": {"l": "true"}, "annotations": {"a": "x" * 200_000}}
        server.store.create(CLAIMS, "default", {"metadata": metadata})
    found, version = await client.list_labelled_claims(
        "l", lambda one: {"name": one["metadata"]["name"]} if one["metadata"]["name"] != "c7" else None
    )
    assert (len(found), {len(one) for one in found}) == (39, {1})
    assert version


@asynccontextmanager
async def connection_to(
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]], host: str = "127.0.0.1", **more: Any
) -> AsyncGenerator[Connection, None]:
    """Returns a connection to a server that answers every request with the same response."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    def load(configuration: Configuration) -> None:
        configuration.host = f"http://{host}:{runner.addresses[0][1]}"

    connection = Connection(load, **more)
    await connection.open()
    try:
        yield connection
    finally:
        await connection.close()
        await runner.cleanup()


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    ("location", "said"),
    [
        ("http://me:secret@other.example:81/x?token=1", "redirected to 'other.example:81'; redirects are not followed"),
        ("/elsewhere", "redirected to another path; redirects are not followed"),
        (f"https://{'x' * 3000}/", "redirected to 'xxx.*'... .2040 characters.; redirects are not followed"),
        ("http://[bad/", "redirected to another path; redirects are not followed"),
        (None, "HTTP 30.: redirected; redirects are not followed"),
    ],
)
async def test_a_redirect_is_an_error_that_names_the_host(code: int, location: str | None, said: str) -> None:
    """If the client followed the redirect, it would send the request to whatever address the response contains. On the
    same host, it would send the token as well.
    """
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=code, headers={"Location": location} if location else {})

    async with connection_to(answer) as connection:
        client = KubeClient(connection)
        with pytest.raises(UnavailableError, match=said) as caught:
            await client.get_claim("default", "c", patience=0)
        assert "secret" not in str(caught.value)
        with pytest.raises(UnavailableError, match="not followed"):
            await client.create_slice(a_slice())
        with pytest.raises(UnavailableError, match="not followed"):
            await anext(client.watch_slices(*MINE, "1"))
    assert len(asked) == 3


async def test_a_cookie_is_not_sent_back() -> None:
    """Otherwise, aiohttp would keep every cookie that a server sets, without a limit, and send them all with each
    request.
    """
    sent: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        sent.append(request.headers.get("Cookie"))
        response = web.json_response({"kind": "Node", "metadata": {"name": "n", "uid": "u"}})
        response.set_cookie(f"c{len(sent)}", "x" * 1000)
        return response

    async with connection_to(answer, "localhost") as connection:
        client = KubeClient(connection)
        for _ in range(3):
            await client.get_node("n")
    assert sent == [None] * 3


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_a_response_is_never_decompressed(coding: str) -> None:
    """64 KiB can expand to 64 MiB in one step, before the length is checked against the limit."""
    bomb = gzip.compress(bytes(64 << 20)) if coding == "gzip" else zlib.compress(bytes(64 << 20))

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=bomb, headers={"Content-Encoding": coding})

    async with connection_to(answer) as connection:
        tracemalloc.start()
        with pytest.raises(UnavailableError, match=f"the response is compressed .'{coding}'., which was not requested"):
            await KubeClient(connection).get_node("n")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert most < 8 << 20


async def test_the_client_ends_a_watch_that_the_server_does_not() -> None:
    """The server ignores the timeout that the client requested. Only the server's blank lines keep the connection from
    being idle.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        assert int(request.query["timeoutSeconds"]) <= MAX_WATCH_SECONDS
        response = web.StreamResponse()
        await response.prepare(request)
        with suppress(ConnectionError):
            while True:
                await response.write(b"\n")
                await asyncio.sleep(0.01)
        return response

    async with connection_to(answer, watch_seconds=0.3) as connection, asyncio.timeout(10):
        with pytest.raises(UnavailableError, match="watch resourceslices: "):
            await anext(KubeClient(connection).watch_slices(*MINE, "1"))


async def test_concurrent_calls_all_survive_a_token_rotation(tmp_path: Path) -> None:
    """A call that was rejected with the previous token is retried with the current one, whichever call has read that
    token.
    """
    token = tmp_path / "token"
    token.write_text("first")
    async with ApiServer(Options(tokens={"first"})) as server:
        path = server.write_kubeconfig(tmp_path / "kubeconfig", user={"tokenFile": str(token)})
        async with connect(kubeconfig(str(path))) as client:
            token.write_text("second")
            server.options.tokens = {"second"}
            async with asyncio.TaskGroup() as tasks:
                reads = [tasks.create_task(client.get_claim("default", f"c{n}")) for n in range(8)]
    assert [read.result() for read in reads] == [None] * 8


async def test_a_rotated_ca_is_trusted_without_a_restart(tmp_path: Path) -> None:
    """The pod's service account is sufficient: the address comes from the environment, and the CA and the token come
    from the account's directory. The CA bundle and the client certificate are read again every minute, as is the
    token. If the new files are damaged or incomplete, the previous ones stay in use.
    """
    now = [0.0]
    ca = tmp_path / "ca.crt"
    (tmp_path / "token").write_text("secret\n")
    ca.write_bytes((TLS / "other-ca.pem").read_bytes())
    options = Options(tokens={"secret"}, certificate=TLS / "server.pem", key=TLS / "server-key.pem")
    async with ApiServer(options) as server:
        node = server.store.create(NODES, "", {"metadata": {"name": "node-a"}})
        environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": server.url.rpartition(":")[2]}
        connection = Connection(in_cluster(environ, tmp_path), clock=lambda: now[0])
        await connection.open()
        async with AsyncExitStack() as stack:
            stack.push_async_callback(connection.close)
            client = KubeClient(connection)
            for text, works in (
                (None, False),
                ("damage", False),
                ((TLS / "ca.pem").read_text(), True),
                ("damage", True),
            ):
                if text is not None:
                    ca.write_text(text)
                now[0] += 60
                if works:
                    assert await client.get_node("node-a") == node
                else:
                    with pytest.raises(UnavailableError, match="certificate"):
                        await client.get_node("node-a")


def test_an_ipv6_service_address_is_put_in_brackets(tmp_path: Path) -> None:
    """The kubelet writes the address to the environment variable without brackets."""
    (tmp_path / "token").write_text("secret")
    (tmp_path / "ca.crt").write_bytes((TLS / "ca.pem").read_bytes())
    environ = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    configuration, _ = read_configuration(in_cluster(environ, tmp_path))
    assert configuration.host == "https://[fd00::1]:443"
    assert configuration.api_key == {"BearerToken": "Bearer secret"}


async def test_the_kubeconfigs_proxy_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """`proxy-url` in a kubeconfig takes precedence. The HTTPS_PROXY environment variable is ignored for a server
    without TLS.
    """
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response({"kind": "Node", "metadata": {"name": "n", "uid": "u"}})

    async with connection_to(answer) as proxy:
        address = proxy._clients[0].configuration.host

        def load(configuration: Configuration) -> None:
            configuration.host, configuration.proxy = "http://server.example", address

        for connection in (proxy, Connection(load)):
            await connection.open()
            await KubeClient(connection).get_node("n")
        await connection.close()
    assert asked == ["/api/v1/nodes/n", "http://server.example/api/v1/nodes/n"]


@pytest.mark.parametrize(("no_proxy", "path"), [("", "http://server.example/api/v1/nodes/n"), ("server.example", None)])
async def test_the_proxy_from_the_environment_is_used(
    no_proxy: str, path: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP_PROXY applies to servers without TLS, and NO_PROXY lists servers that are reached directly."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.raw_path)
        return web.json_response({"kind": "Node", "metadata": {"name": "n", "uid": "u"}})

    def load(configuration: Configuration) -> None:
        configuration.host = "http://server.example"

    async with connection_to(answer) as proxy:
        monkeypatch.setenv("http_proxy", proxy._clients[0].configuration.host or "")
        monkeypatch.setenv("no_proxy", no_proxy)
        connection = Connection(load)
        await connection.open()
        with suppress(UnreachableError):
            await KubeClient(connection).get_node("n")
        await connection.close()
    assert asked == [path] * bool(path)


async def test_a_request_uses_neither_a_thread_nor_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry in ~/.netrc would conflict with the token, and the request would fail."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    headers: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        headers.append(request.headers.get("Authorization", ""))
        return web.json_response({"kind": "Node", "metadata": {"name": "n", "uid": "u"}})

    async with connection_to(answer) as connection:
        connection._clients[0].configuration.api_key = {"BearerToken": "Bearer t"}
        with ThreadPoolExecutor() as closed:
            asyncio.get_running_loop().set_default_executor(closed)
        await KubeClient(connection).get_node("n")
    assert headers == ["Bearer t"]


@pytest.mark.parametrize(
    ("server", "proxy"),
    [
        ("https://127.0.0.1:1", "http://user:secret/2@proxy.example:3128"),
        ("https://user:secret@127.0.0.1:https", None),
        ("ftp://user:secret@127.0.0.1", None),
    ],
)
async def test_the_error_about_an_invalid_url_contains_no_password(server: str, proxy: str | None) -> None:
    """The error message appears in the log, at /readyz and in Events."""

    def load(configuration: Configuration) -> None:
        configuration.host, configuration.proxy = server, proxy

    connection = Connection(load)
    await connection.open()
    with pytest.raises(UnreachableError, match="check server and proxy-url in the kubeconfig") as caught:
        await KubeClient(connection).get_node("n")
    await connection.close()
    assert "secret" not in "".join(traceback.format_exception(caught.value, chain=False))
    assert caught.value.__suppress_context__


async def test_only_whole_lines_are_events(pair: Pair) -> None:
    """Blank lines and an unfinished last line are not events, and the buffer for a line is bounded."""
    event = '{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "7"}}}'
    pair[0].fail_next(1, 200, verb="watch", body=f'\n \n{event}\n{event}\n\n{{"c')
    assert [kind async for kind, _ in pair[1].watch_slices(*MINE, "1")] == ["BOOKMARK"] * 2
    pair[0].fail_next(1, 200, verb="watch", body="x" * (MAX_BYTES + 1))
    with pytest.raises(UnavailableError, match="is larger than"):
        await anext(pair[1].watch_slices(*MINE, "1"))


async def test_an_event_in_many_small_pieces_takes_linear_time(tmp_path: Path) -> None:
    """The bytes of an incomplete line are not copied again for each additional piece, so the time is linear and other
    tasks are not blocked.
    """
    whole = b'{"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "' + b"7" * (3 << 20) + b'"}}}\n'
    crumbs = b"".join(b"%x\r\n%s\r\n" % (len(whole[n : n + 16]), whole[n : n + 16]) for n in range(0, len(whole), 16))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + crumbs + b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        config: Document = {"clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}]}
        config |= {"contexts": [{"name": "c", "context": {"cluster": "c"}}], "current-context": "c"}
        (tmp_path / "kubeconfig").write_text(json.dumps(config))
        async with connect(kubeconfig(str(tmp_path / "kubeconfig"))) as client:
            began = time.process_time()
            assert [kind async for kind, _ in client.watch_slices(*MINE, "1")] == ["BOOKMARK"]
            assert time.process_time() - began < 3
