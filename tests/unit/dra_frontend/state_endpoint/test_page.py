# SPDX-License-Identifier: Apache-2.0
"""The status page without a browser: its document, its files and its access rules. The tests in tests/page use a
browser.
"""

import asyncio
import json
import logging
import re
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.state_endpoint import page as module
from dra_frontend.state_endpoint.page import LOOPBACK, browser_endpoints, page_application, serve_page
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import eventually
from tests.rigs.builders import report
from tests.rigs.node_state import HOSTILE, LARGEST, NodeState, populated
from tests.rigs.trees import NAMES

BROWSER = Path(module.__file__).with_name("browser")
HOST = ("localhost:8082",)


def get(
    state: NodeState, path: str, hosts: tuple[str, ...] = HOST, method: str = "GET"
) -> tuple[int, dict[str, str], bytes]:
    """Calls the page's application and returns the response's status, headers and body."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request"}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", host.encode()) for host in hosts]
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers}
    asyncio.run(page_application(state)(scope, receive, send))
    start, body = sent
    return start["status"], {name.decode(): value.decode() for name, value in start["headers"]}, body["body"]


def document(state: NodeState) -> dict[str, Any]:
    """Returns the page's document as the browser receives it."""
    found: dict[str, Any] = json.loads(get(state, "/v1/node")[2])
    return found


@pytest.mark.parametrize("name", [*NAMES, LARGEST])
def test_every_cpu_has_one_use(name: str) -> None:
    """The document contains each present CPU once, and the CPUs shown as claimed are exactly the claims' CPUs."""
    state = populated(name)
    view = document(state)
    machine = state.watch.machine
    assert sorted(cpu["cpu"] for cpu in view["cpus"]) == sorted(machine.online | machine.offline)
    for claim in view["claims"]:
        shown = {cpu["cpu"] for cpu in view["cpus"] if cpu.get("claimUid") == claim["uid"]}
        assert shown == parse_cpu_list(claim.get("cpus", ""))
    uses = Counter(cpu["use"] for cpu in view["cpus"])
    assert uses["offline"] == len(machine.offline)
    assert uses["pool"] == sum(
        d.amount for p in state.watch.inventory.pools if p.driver == "dra.cpu" for d in p.devices
    ) - (uses["exclusive"] + uses["isolated"] + uses["pod-shared"] + uses["held"])


def test_the_document_contains_each_cpus_use() -> None:
    """A CPU is exclusive, isolated, used by a pod, held by a claim that is being released, free, or reserved for the
    system.
    """
    view = document(populated(LARGEST))
    uses = Counter(cpu["use"] for cpu in view["cpus"])
    assert uses.keys() == {"exclusive", "isolated", "pod-shared", "held", "pool", "reserved"}
    enforced = Counter(claim["enforced"]["status"] for claim in view["claims"])
    assert enforced.keys() == {"True", "False", "Unknown"}


def test_the_page_has_a_symbol_and_an_explanation_for_every_cpu_use() -> None:
    """For each use that the document can contain, the browser script has a symbol and an explanation, and there is a
    CSS class.
    """
    uses = {cpu["use"] for cpu in document(populated(LARGEST))["cpus"]}
    table = (BROWSER / "values.js").read_text().partition("USES = {")[2].partition("};")[0]
    assert uses <= set(re.findall(r'^  "?([a-z-]+)"?: \[', table, re.MULTILINE))
    assert uses - {"pool"} <= set(re.findall(r"^\.cpu\.([a-z-]+) \{", (BROWSER / "cpus.css").read_text(), re.MULTILINE))


def test_claimed_and_free_memory_add_up() -> None:
    """For each device, claimed and free memory add up to the offered memory, which does not exceed the node's
    memory.
    """
    for one in document(populated("memorysidecaches"))["memory"]:
        assert one["claimedBytes"] + one["freeBytes"] == one["capacityBytes"] <= one["totalBytes"]


def test_the_same_node_results_in_the_same_document() -> None:
    """The page redraws only what has changed, so the document contains no times."""
    state = populated("64fake-4n2s2ca2c2t")
    assert get(state, "/v1/node") == get(state, "/v1/node")


def test_problems_precede_warnings_and_appear_once() -> None:
    """Identical messages are merged."""
    state = populated("64fake-4n2s2ca2c2t")
    state.problems = ["dra.cpu: not registered with the kubelet"] * 2
    state.backend.containers = {**state.backend.containers, "r": report("r", refused="CPU 3 is gone; delete the claim")}
    problems = document(state)["problems"]
    assert [one["level"] for one in problems] == sorted(one["level"] for one in problems)
    texts = [one["text"] for one in problems]
    assert texts.count("dra.cpu: not registered with the kubelet") == 1
    assert any("was refused: CPU 3 is gone" in text for text in texts)
    assert state.backend.status is not None
    lease = {"exclusivity": "pool", "exclusivity_reason": "nri-backend lacks the capability SYS_ADMIN"}
    reports = [one.model_dump(mode="json") for one in state.backend.containers.values()]
    state.backend.renew(state.backend.status.model_copy(update=lease), reports)
    (pooled,) = (one for one in document(state)["problems"] if "lacks the capability SYS_ADMIN" in one["text"])
    assert pooled["level"] == "warning"
    assert pooled["text"].startswith("CPU claims on this node are enforced by the shared pool")
    state.backend.config = Config(cpu_exclusivity="partition")
    (refused,) = (one for one in document(state)["problems"] if "lacks the capability SYS_ADMIN" in one["text"])
    assert refused["text"].startswith("CPU claims for a single container are refused on this node")
    state.problems = [f"problem {number}" for number in range(5000)]
    assert len(document(state)["problems"]) == 101


def test_names_are_data_and_never_markup() -> None:
    """Container names are strings in a JSON document, and no script interprets strings as markup."""
    status, headers, body = get(populated("64fake-4n2s2ca2c2t"), "/v1/node")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert HOSTILE in {one["name"] for one in json.loads(body)["containers"]}
    for script in BROWSER.glob("*.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", script.read_text()
        )


def test_the_browser_must_not_load_anything_from_elsewhere() -> None:
    """The content security policy in every response allows only this server's own files, and these files do not refer
    to any other server.
    """
    state = populated("2i386-2t-hugepagesizecount")
    for path in browser_endpoints(state):
        status, headers, body = get(state, path)
        policy = headers["content-security-policy"]
        assert status == 200
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'")
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert b"://" not in body
    html = (BROWSER / "index.html").read_text()
    named = re.findall(r'(?:src|href)="([^"#]+)"', html)
    assert {one for one in named if not one.startswith("data:")} <= {file.name for file in BROWSER.iterdir()}
    assert not re.search(r"\son\w+=|style=|<script>", html)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (("localhost:8082",), 200),
        (("127.0.0.1",), 200),
        (("[::1]:1234",), 200),
        (("evil.example:8082",), 403),
        (("localhost.evil.example",), 403),
        (("localhost@evil.example",), 403),
        (("localhost", "evil.example"), 403),
        (("",), 403),
        ((), 403),
    ],
)
def test_a_request_with_a_foreign_host_name_is_rejected(hosts: tuple[str, ...], status: int) -> None:
    """A website whose name resolves to the loopback address gets no data (DNS rebinding)."""
    assert get(populated("2i386-2t-hugepagesizecount"), "/v1/node", hosts)[0] == status


def test_the_tcp_port_is_read_only() -> None:
    """PUT, POST and DELETE requests are rejected, and so are requests for the state socket's paths."""
    state = populated("2i386-2t-hugepagesizecount")
    assert set(browser_endpoints(state)) >= {"/", "/v1/node", "/page.js"}
    assert not set(browser_endpoints(state)) & {"/v1/backend", "/v1/records", "/v1/claims", "/metrics"}
    for method in ("PUT", "POST", "DELETE"):
        assert get(state, "/v1/node", method=method)[0] == 405
    assert get(state, "/../settings.py")[0] == 404


async def test_a_page_port_in_use_does_not_end_the_service(caplog: pytest.LogCaptureFixture) -> None:
    """The service keeps running, reports which setting to change, and listens on the loopback address as soon as the
    port is free.
    """
    with socket.create_server((LOOPBACK, 0)) as other:
        serving = asyncio.ensure_future(serve_page(populated("2i386-2t-hugepagesizecount"), other.getsockname()[1]))
        await eventually(lambda: page_warnings(caplog))
        assert not serving.done()
    serving.cancel()
    assert "set another pagePort" in page_warnings(caplog)[0].__dict__["error"]


def page_warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns the log from serve_page(), without asyncio's messages about tasks from earlier tests."""
    return [one for one in caplog.records if one.name == serve_page.__module__]
