# SPDX-License-Identifier: Apache-2.0
"""Hugepages on demand with the real frontend, backend and helper as processes, over the real socket."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.node.pool_requests import MAX_RESPONSE_BYTES, PoolResponse, pool_socket
from numa_contract.names import ON_DEMAND_LABEL, pool_socket_path

from tests.fakes.scheduler import UnschedulableError, may_bind, schedule
from tests.rigs.trees import captured, write_tree
from tests.stage.machine import HostDirectory
from tests.stage.pods import NAMESPACE, StagePod, claim_pod, delete_claim, hugepages
from tests.stage.process import Process, wait_for
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError, ask_unix

PAGE = 2 << 20
DEVICE = "hugepages-2m-numa000"
TAINT = "dra.memory/hugepages-unavailable"
CLAIMS = f"/apis/resource.k8s.io/v1/namespaces/{NAMESPACE}/resourceclaims"
SECONDS = 20.0
HELPER = """
import sys
from pathlib import Path
from dra_frontend.node.hugepage_pools import KernelPools
from numa_tools.cli import main

resize, limit = KernelPools.resize, Path(sys.argv.pop(1))
KernelPools.resize = lambda self, node, page, pages: resize(self, node, page, min(pages, int(limit.read_text())))
sys.exit(main())
"""
"""Program that runs the helper as if the kernel only had memory for the number of pages given in a file."""


class Node:
    """A node whose NUMA node 0 has no 2 MiB pages and may have up to 64."""

    def __init__(self, stage: Stage, machine: HostDirectory, limit: Path) -> None:
        self.stage, self.machine, self.limit = stage, machine, limit
        paths = stage.paths
        arguments = ["--config", str(paths.config), "--host-root", str(machine.root), "serve-hugepages"]
        command = [sys.executable, "-c", HELPER, str(limit), *arguments]
        self.helper = Process("hugepages", command, paths.logs / "hugepages", {})
        self.socket = Path(pool_socket_path(str(paths.run_dir)))

    @property
    def pages(self) -> int:
        """Returns the number of pages in the kernel's pool."""
        with suppress(ValueError):  # a real kernel never shows an empty file
            return int(self._file("nr_hugepages").read_text())
        return -1

    def _file(self, name: str) -> Path:
        return self.machine.root / f"sys/devices/system/node/node0/hugepages/hugepages-2048kB/{name}"

    def start_helper(self) -> None:
        """Starts the helper and waits until it answers a request."""
        self.helper.start()
        wait_for("the helper", lambda: self.ask(b"{}").problem)

    def ask(self, data: bytes) -> PoolResponse:
        """Returns the helper's response to a message, or an empty response if the helper sends none."""
        with suppress(OSError), pool_socket() as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(self.socket))
            connection.send(data)
            return PoolResponse.model_validate_json(connection.recv(MAX_RESPONSE_BYTES))
        return PoolResponse()

    def claim(self, name: str, pages: int, **labels: str) -> StagePod:
        """Returns a pod that is not bound yet, with an allocated and labelled claim for pages on NUMA node 0."""
        metadata = {"name": name, "labels": {ON_DEMAND_LABEL: "true", **labels}}
        spec = {"devices": {"requests": [hugepages(pages * PAGE, numa_node=0)]}}
        self.stage.api(CLAIMS, "POST", {"metadata": metadata, "spec": spec})
        pod = StagePod(self.stage, f"{name}-pod")
        try:
            pod.claim = schedule(
                self.stage.server, NAMESPACE, name, pods=[pod.reference], node=self.stage.settings.node
            )
        except UnschedulableError:
            delete_claim(self.stage, name)
            raise
        return pod

    def may_bind(self, pod: StagePod) -> bool:
        """Returns True if the scheduler may bind the pod. Raises UnschedulableError if it has to try another node."""
        assert pod.claim is not None
        return may_bind(self.stage.api(f"{CLAIMS}/{pod.claim['metadata']['name']}"))

    def taints(self) -> list[str]:
        """Returns the values of the taints on the device."""
        devices = [device for one in self.stage.slices() for device in one["spec"].get("devices") or []]
        found = [one for device in devices if device["name"] == DEVICE for one in device.get("taints", [])]
        return [one["value"] for one in found if one["key"] == TAINT]

    def warnings(self) -> str:
        """Returns the service's warnings."""
        return str(ask_unix(self.stage.instances[0].state_socket, "/readyz"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Returns a node with all processes, ready."""
    path = tmp_path_factory.mktemp("pages")
    machine = HostDirectory(write_tree(captured("32intel64-2p8co2t+8ve"), path / "host"))
    machine.set_pages(0, 0, 0)
    limit = path / "limit"
    limit.write_text("1000")
    pools: dict[str, Any] = {"hugepagesOnDemand": [{"numaNode": 0, "size": "2Mi", "pages": 64}]}
    with Stage(StageSettings(host_root=machine.root, config=pools)) as stage:
        node = Node(stage, machine, limit)
        try:
            node.start_helper()
            stage.add_ready_instance()
            wait_for("the device", lambda: DEVICE in json.dumps(stage.slices()))
            yield node
        finally:
            node.helper.kill()


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    """Returns the module's node, whose logs are shown with each failed test."""
    if not shared.helper.alive:
        shared.start_helper()
    yield shared
    print(shared.stage.logs(), shared.helper.tail())


def release(node: Node, pod: StagePod) -> None:
    """Ends a pod, deletes its claim, and waits until its pages are freed."""
    pod.end()
    wait_for("no pages", lambda: node.pages == 0, SECONDS)


def test_pages_are_allocated_before_the_pod_is_bound_and_freed_with_the_claim(node: Node) -> None:
    """The container's limit is the number of bytes claimed, and the first Prepare succeeds."""
    pod = node.claim("db", 16)
    assert (node.pages, node.may_bind(pod)) == (0, False)
    wait_for("the pages", lambda: node.may_bind(pod), SECONDS)
    assert node.pages == 16
    pod.prepare()
    box = pod.run()
    assert box.read("hugetlb.2MB.max") == str(16 * PAGE)
    release(node, pod)


def test_a_killed_frontend_loses_no_claims_or_pages(node: Node) -> None:
    """The frontend dies between growing the pool and writing the record, while a claim is waiting, and while a claim is
    being deleted.
    """
    (instance,) = node.stage.instances
    first = node.claim("first", 8)
    wait_for("the pages", lambda: node.may_bind(first), SECONDS)
    instance.frontend.kill()
    second = node.claim("second", 4)
    instance.frontend.start()
    node.stage.wait_ready_again(instance)
    first.prepare()
    wait_for("the pages", lambda: node.may_bind(second), SECONDS)
    second.prepare()
    assert node.pages == 12
    instance.frontend.kill()
    delete_claim(node.stage, "second")
    instance.frontend.start()
    node.stage.wait_ready_again(instance)
    second.unprepare()
    wait_for("only the other claim's pages to remain", lambda: node.pages == 8, SECONDS)
    release(node, first)


def test_a_device_whose_pages_cannot_be_allocated_is_tainted(node: Node) -> None:
    """The claim fails with the reason, the pages that were allocated so far are freed, and new claims go to other
    nodes.
    """
    node.limit.write_text("3")
    pod = node.claim("large", 16)
    text = f"the kernel has allocated 3 of 16 pages of {DEVICE}"

    def failed() -> bool:
        with pytest.raises(UnschedulableError, match=text):
            return node.may_bind(pod)
        return True

    def answered() -> bool:
        with suppress(UnschedulableError):
            return node.may_bind(pod)
        return True

    wait_for("an answer", answered, SECONDS)
    assert failed()
    wait_for("a taint", lambda: node.taints() == ["growth-failed"], SECONDS)
    wait_for("no pages", lambda: node.pages == 0, SECONDS)
    assert f"{DEVICE}: the kernel found memory for 3 of 16 pages" in node.warnings()
    with pytest.raises(UnschedulableError):
        node.claim("next", 1)
    with pytest.raises(UnschedulableError), claim_pod(node.stage, "plain", hugepages(PAGE, numa_node=0)):
        pass
    # A scheduler that does not wait for conditions has bound the pod.
    with pytest.raises(AnsweredError) as refused:
        pod.prepare()
    for part in ("of them are allocated", "found memory for 3 of 16", "free memory on NUMA node 0", "pod"):
        assert part in str(refused.value)
    node.limit.write_text("1000")
    release(node, pod)
    (instance,) = node.stage.instances
    instance.frontend.kill()
    instance.frontend.start()
    node.stage.wait_ready_again(instance)
    wait_for("no taint", lambda: not node.taints(), SECONDS)


def test_a_helper_that_is_down_is_reported_until_it_is_back(node: Node) -> None:
    """A claim waits for a few seconds and then fails. Once the helper is back, the taint is removed and the claim gets
    its pages.
    """
    node.helper.kill()
    pod = node.claim("early", 2)
    assert not node.may_bind(pod)
    wait_for("a taint", lambda: node.taints() == ["helper-unavailable"], 2 * SECONDS)
    assert "hugepages container in the driver's pod" in node.warnings()
    status = ask_unix(node.stage.instances[0].state_socket, "/v1/status")
    assert ("HugepagesUnavailable", DEVICE) in [(one["code"], one["subject"]) for one in status["warnings"]]
    assert node.pages == 0
    node.start_helper()
    wait_for("no taint", lambda: not node.taints(), 2 * SECONDS)
    wait_for("the pages", lambda: node.pages == 2, SECONDS)

    def answered_again() -> bool:
        with suppress(UnschedulableError):
            return node.may_bind(pod)
        return False

    wait_for("another answer", answered_again, SECONDS)
    pod.prepare()
    release(node, pod)


HOSTILE = {
    "garbage": b"\x00\xff" * 100,
    "too long": b"{" + b" " * 5000 + b"}",
    "another pool": b'{"numaNode":1,"pageBytes":2097152,"pages":5}',
    "too many": b'{"numaNode":0,"pageBytes":2097152,"pages":65}',
}


@pytest.mark.parametrize("how", HOSTILE)
def test_the_helper_rejects_requests_outside_the_configuration(node: Node, how: str) -> None:
    """The helper returns an error, changes nothing, and serves the next request."""
    assert node.ask(HOSTILE[how]).problem
    assert node.pages == 0
    assert node.ask(b'{"numaNode":0,"pageBytes":2097152}') == PoolResponse(pages=0)
    assert node.socket.stat().st_mode & 0o777 == 0o600


def test_a_caller_that_sends_nothing_does_not_stop_the_helper(node: Node) -> None:
    """The caller's connection is closed after five seconds."""
    with pool_socket() as silent:
        silent.connect(str(node.socket))
        assert node.ask(b'{"numaNode":0,"pageBytes":2097152}') == PoolResponse(pages=0)


def test_the_helper_exits_on_a_signal(node: Node) -> None:
    """As the first process of its container, the helper would otherwise not exit until it is killed at the end of the
    grace period.
    """
    assert node.helper.stop() == 0
    node.start_helper()


def test_the_helper_exits_on_a_signal_while_it_waits_for_a_request(node: Node) -> None:
    with pool_socket() as silent:
        silent.connect(str(node.socket))
        time.sleep(0.5)
        assert node.helper.stop() == 0
    node.start_helper()
