# SPDX-License-Identifier: Apache-2.0
"""The helper container resizes the configured hugepage pools within their limits."""

import json
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.node.pool_client import HelperError, HelperPools
from dra_frontend.node.pool_helper import PoolHelper, _listen, _serve
from dra_frontend.node.pool_requests import MAX_REQUEST_BYTES, MAX_RESPONSE_BYTES, PoolRequest, PoolResponse
from hypothesis import example, given
from hypothesis import strategies as st
from numa_contract.config import Config, OnDemandPages, ReservedMemory

from tests.rigs.trees import small_machine, write_tree

GIB = 1 << 30
CONFIG = Config(
    hugepages_on_demand=(OnDemandPages(numa_node=0, size="1Gi", pages=3),),
    reserved_memory=(ReservedMemory(numa_node=0, limits={"hugepages-1Gi": GIB}),),
)


class Rig:
    """A machine with one 1 GiB page on each of its two NUMA nodes, and a helper that may allocate up to three pages on
    node 0.
    """

    def __init__(self, root: Path) -> None:
        write_tree(small_machine(), root)
        self.files = [
            root / f"sys/devices/system/node/node{node}/hugepages/hugepages-1048576kB/nr_hugepages" for node in (0, 1)
        ]
        for file in self.files:
            file.write_text("1\n")
        self.helper = PoolHelper(KernelPools(HostTree(root)), CONFIG)

    @property
    def pages(self) -> list[int]:
        """Returns each NUMA node's page count."""
        return [int(file.read_text()) for file in self.files]

    def ask(self, node: int = 0, page_bytes: int = GIB, pages: int | None = None) -> tuple[int, str]:
        """Sends a request, and returns the page count and the problem that the response contains."""
        request = PoolRequest(numa_node=node, page_bytes=page_bytes, pages=pages, seconds=1)
        answer = self.helper.handle(request.model_dump_json(exclude_none=True).encode())
        return answer.pages, ": ".join(filter(None, (answer.subject, answer.problem)))


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    """Returns a rig with its own machine."""
    return Rig(tmp_path)


def test_a_pool_is_resized_within_its_limits(rig: Rig) -> None:
    """A pool may grow to the number of pages in hugepagesOnDemand and shrink to the reserve."""
    assert rig.ask(pages=3) == (3, "")
    assert rig.ask(pages=1) == (1, "")
    assert rig.pages == [1, 1]
    assert rig.ask(pages=4) == (0, "hugepagesOnDemand: allows 3 pages of 1Gi on NUMA node 0, but 4 were requested")
    problem = f"reservedMemory: reserves {GIB} bytes in pages of 1Gi on NUMA node 0, but 0 pages were requested"
    assert rig.ask(pages=0) == (0, problem)
    assert rig.pages == [1, 1]


@pytest.mark.parametrize(("node", "page_bytes"), [(1, GIB), (0, 2 << 20), (7, GIB), (0, 12345)])
def test_other_pools_are_not_touched(rig: Rig, node: int, page_bytes: int) -> None:
    """Pools that are not configured neither grow nor shrink."""
    for pages in (0, 1, 2):
        assert rig.ask(node, page_bytes, pages)[1]
    assert rig.pages == [1, 1]


def test_a_pool_that_is_larger_than_allowed_may_shrink(rig: Rig) -> None:
    """The pool was allocated at boot, and claims do not need all of its pages."""
    rig.files[0].write_text("9\n")
    assert rig.ask(pages=9) == (9, "")
    assert rig.ask(pages=8) == (8, "")
    assert rig.ask(pages=9)[1].startswith("hugepagesOnDemand: allows 3 pages")


def test_a_check_changes_nothing(rig: Rig) -> None:
    """To find out whether a write would succeed, a check opens the file for writing, as a resize does."""
    assert rig.ask() == (1, "")
    assert rig.pages == [1, 1]
    rig.files[0].unlink()
    pages, problem = rig.ask()
    assert (pages, problem.rpartition("/")[2]) == (0, "nr_hugepages: cannot be written: No such file or directory")


HOSTILE: dict[str, Any] = {
    "not JSON": b"pages",
    "not UTF-8": b"\xff\xfe",
    "not an object": b"[]",
    "unknown field": {"numaNode": 0, "pageBytes": GIB, "pages": 2, "path": "/etc/passwd"},
    "missing field": {"numaNode": 0, "pages": 2},
    "negative pages": {"numaNode": 0, "pageBytes": GIB, "pages": -1},
    "too many pages": {"numaNode": 0, "pageBytes": GIB, "pages": 1 << 40},
    "string for a number": {"numaNode": "0", "pageBytes": GIB, "pages": 2},
    "boolean for a number": {"numaNode": False, "pageBytes": GIB, "pages": 2},
    "fraction": {"numaNode": 0, "pageBytes": GIB, "pages": 1.5},
    "another directory": {"numaNode": "../../..", "pageBytes": GIB, "pages": 2},
    "timeout too long": {"numaNode": 0, "pageBytes": GIB, "pages": 2, "seconds": 1e9},
    "timeout NaN": b'{"numaNode": 0, "pageBytes": 1073741824, "pages": 2, "seconds": NaN}',
    "request too long": b'{"numaNode": 0, "pageBytes": 1073741824, "pages": 2' + b" " * MAX_REQUEST_BYTES + b"}",
    "nested too deeply": b"[" * MAX_REQUEST_BYTES,
}


@pytest.mark.parametrize("how", HOSTILE)
def test_a_malformed_request_is_answered_and_changes_nothing(rig: Rig, how: str) -> None:
    data = HOSTILE[how]
    answer = rig.helper.handle(data if isinstance(data, bytes) else json.dumps(data).encode())
    assert answer.problem == "is malformed; frontend and helper have different versions"
    assert rig.pages == [1, 1]


@given(st.text(), st.text())
@example("\x1f" * 6, "\x1f" * 6)
def test_a_response_fits_into_one_message(subject: str, problem: str) -> None:
    """Strings that are too long are truncated, not rejected, whatever their content."""
    answer = PoolResponse.of_problem(subject * 100, problem * 100)
    data = answer.model_dump_json().encode()
    assert len(data) <= MAX_RESPONSE_BYTES
    assert PoolResponse.model_validate_json(data) == answer


def test_no_pool_is_resized_on_a_node_in_observe_mode(tmp_path: Path) -> None:
    """The class that writes the file rejects the request, so no caller can resize a pool."""
    rig = Rig(tmp_path)
    rig.helper = PoolHelper(KernelPools(HostTree(tmp_path), observes=True), CONFIG)
    (_, problem) = rig.ask(pages=3)
    assert "only observes (enforcement: observe)" in problem
    assert rig.pages == [1, 1]


def test_a_request_whose_caller_has_left_is_not_executed(tmp_path: Path, short_root: Path) -> None:
    """A frontend that no longer waits has computed the number of pages from claims that may have changed since."""
    rig, path = Rig(tmp_path), short_root / "hugepages.sock"
    rig.files[0].write_text("3\n")
    kernel = KernelPools(HostTree(tmp_path))
    with _listen(path) as listening:
        # The kernel accepts the connection, but the helper is still busy with another request.
        with pytest.raises(HelperError, match="timed out"):
            HelperPools(kernel, str(path), patience=0.1).shrink(0, GIB, 1)

        def serve() -> None:
            with suppress(OSError):  # the listening socket was shut down
                _serve(listening, rig.helper)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            pools = HelperPools(kernel, str(path))
            pools.check(0, GIB)
            assert rig.pages == [3, 1]
            pools.shrink(0, GIB, 2)
            assert rig.pages == [2, 1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
