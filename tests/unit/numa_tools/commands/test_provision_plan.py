# SPDX-License-Identifier: Apache-2.0
"""HugePageProvision files and the pages that they plan for each NUMA node."""

from dataclasses import replace
from typing import Any

import pytest
from dra_frontend.machine.model import HugepagePool, Machine, NumaNode
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import ConfigError
from numa_tools.commands.provision_plan import plan, read_requested

from tests.strategies.machines import machine

M2, G1, GIB = 2 << 20, 1 << 30, 1 << 30
POOLS = (HugepagePool(M2, 0, 0), HugepagePool(G1, 0, 0))


def node(number: int, cpus: frozenset[int] = frozenset(), memory: int = 64 * GIB) -> NumaNode:
    """Returns a node without hugepages."""
    return NumaNode(number, cpus, memory, POOLS)


def host(*nodes: NumaNode) -> Machine:
    """Returns a machine with the given nodes, by default two nodes with one CPU each."""
    found = nodes or (node(0, frozenset({0})), node(1, frozenset({1})))
    return replace(machine(), numa_nodes={each.id: each for each in found})


def file(*pages: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Returns a file as users of dra-driver-memory write it."""
    return {"kind": "HugePageProvision", "metadata": {"name": "n"}, "spec": {"pages": list(pages)}, **more}


def planned(*files: dict[str, Any], on: Machine | None = None) -> dict[tuple[int, int], int]:
    """Returns the planned pages by page size and node."""
    requested = [one for number, each in enumerate(files) for one in read_requested(each, f"{number}.yaml")]
    return {(target.page_bytes, target.node): target.pages for target in plan(on or host(), requested)}


def fault(*files: dict[str, Any], on: Machine | None = None) -> str:
    """Returns the error that the given files cause."""
    with pytest.raises(ConfigError) as caught:
        planned(*files, on=on)
    return str(caught.value)


SPELLINGS = ["2M", "2Mi", "2m", "2MB", "2048kB", "2048Ki", "hugepages-2Mi", "hugepages-2048kB"]
ONE, TWO = {"size": "2M", "count": 8, "node": 0}, {"size": "2M", "count": 6, "node": 1}
BOOT = {"defaultHugepagesSize": "1G"}
SEVEN = file({"size": "2M", "count": 7})
FAR, BARE, OFF = node(2), node(1, frozenset({1}), memory=0), replace(node(3), online=False)


@pytest.mark.parametrize(
    ("nodes", "files", "counts"),
    [
        # Kubernetes, kernel parameters, sysfs, OCI and dra-driver-memory each spell page sizes differently.
        *([[0, 1], [file({"size": size, "count": 4})], {(M2, 0): 2, (M2, 1): 2}] for size in SPELLINGS),
        # The remainder of a split goes to the lowest nodes, one page each.
        ([0, 2, 5, 7], [file({"size": "1G", "count": 10})], {(G1, 0): 3, (G1, 2): 3, (G1, 5): 2, (G1, 7): 2}),
        # Nodes without memory get no pages. By default, nodes with far memory get none either if other nodes have CPUs.
        ([0, BARE, FAR, OFF], [SEVEN], {(M2, 0): 7}),
        ([BARE, FAR, node(4)], [SEVEN], {(M2, 2): 4, (M2, 4): 3}),
        # A node that is named explicitly gets its pages, even if it has far memory.
        ([0, 1, FAR], [file(TWO, {"size": "1G", "count": 2, "node": 2})], {(M2, 1): 6, (G1, 2): 2}),
        # The entries in several files are added up, but identical entries in two files count once.
        (
            [0, 1],
            [file(ONE), file(TWO, ONE), file({"size": "1G", "count": 1})],
            {(M2, 0): 8, (M2, 1): 6, (G1, 0): 1, (G1, 1): 0},
        ),
        # The files of dra-driver-memory may contain apiVersion, status and the boot parameter, which have no effect at
        # run time.
        ([0], [{**SEVEN, "apiVersion": "v0", "status": {}, "spec": {**SEVEN["spec"], **BOOT}}], {(M2, 0): 7}),
    ],
)
def test_pages_are_planned_by_size_and_node(
    nodes: list[int | NumaNode], files: list[dict[str, Any]], counts: dict[tuple[int, int], int]
) -> None:
    """The plan lists pages by size and node across all files. A number without a node is split among the nodes with
    CPUs.
    """
    found = host(*(one if isinstance(one, NumaNode) else node(one, frozenset({one})) for one in nodes))
    assert planned(*files, on=found) == counts


def test_contradictory_plans_are_rejected() -> None:
    """The error names both entries by file and field. A split and an explicit number for the same node also
    contradict each other.
    """
    text = fault(file({"size": "2M", "count": 8, "node": 0}), file({"size": "2048kB", "count": 9, "node": 0}))
    assert text.startswith("1.yaml: spec.pages.0: 9 pages of 2Mi on node 0, but 0.yaml: spec.pages.0 requests 8")
    assert "requests 4" in fault(file({"size": "2M", "count": 8}, {"size": "2M", "count": 5, "node": 1}))


@pytest.mark.parametrize(
    ("document", "text"),
    [
        (None, "file: "),
        ({"kind": "Pod", "spec": {"pages": []}}, "kind: got the text 'Pod'; input should be 'HugePageProvision'"),
        (file({"size": "2M"}), "spec.pages.0.count: Field required"),
        (file({"size": "2M", "count": -1}), "spec.pages.0.count: got the integer -1; input should be greater"),
        (file({"size": "2M", "count": "2"}), "spec.pages.0.count: got the text '2'; input should be a valid integer"),
        (file({"size": 2, "count": 2}), "spec.pages.0.size: must be a string such as 2Mi"),
        (file({"size": "2Q", "count": 2}), "spec.pages.0.size: '2Q' is not a page size such as"),
        (file({"size": "2M", "count": 2, "nodes": 1}), "spec.pages.0.nodes: unknown key"),
        (
            file({"size": "2M", "count": 2, "node": -1}),
            "spec.pages.0.node: got the integer -1; input should be greater",
        ),
        (
            {"kind": "HugePageProvision", "spec": {"pages": [], "defaultHugepagesSize": "1Q"}},
            "spec.defaultHugepagesSize: '1Q' is not a page size",
        ),
    ],
)
def test_unknown_fields_and_values_are_rejected(document: Any, text: str) -> None:
    """The error names the file and the field."""
    assert fault(document).startswith("0.yaml: ")
    assert text in fault(document)


def test_plans_that_the_machine_cannot_fulfil_are_rejected() -> None:
    """Covers a page size that the kernel does not have, a node that does not exist or has no memory, and more pages
    than the node's memory can hold.
    """
    small = {"size": "2M", "count": 1}
    bare = host(node(0, frozenset({0})), node(1, frozenset({1}), memory=0))
    for pages, machine_, text in (
        ({"size": "512M", "count": 1}, None, "this kernel has no 512Mi pages; it has 2Mi, 1Gi"),
        ({**small, "node": 3}, None, "NUMA node 3 does not exist or has no memory; the NUMA nodes with memory are 0-1"),
        ({**small, "node": 1}, bare, "NUMA node 1 does not exist or has no memory"),
        (small, host(node(0, memory=0)), "none of this machine's NUMA nodes has memory"),
    ):
        assert text in fault(file(pages), on=machine_)
    text = fault(file({"size": "1G", "count": 64, "node": 1}), file({**small, "node": 1}))
    assert "0.yaml: spec.pages.0, 1.yaml: spec.pages.0: 68721573888 bytes of hugepages are requested on node 1" in text


def test_existing_pages_of_other_sizes_take_up_memory() -> None:
    """A plan for one page size cannot use memory that pages of another size occupy, unless the plan shrinks the other
    size's pool.
    """
    half = replace(node(0, frozenset({0})), hugepages=(HugepagePool(M2, 0, 0), HugepagePool(G1, 32, 32)))
    most = {"size": "2M", "count": 57 * 512}
    text = fault(file(most), on=host(half))
    assert f"{57 * GIB} bytes of hugepages are requested on node 0, which has only" in text
    assert f"; {32 * GIB} bytes in pages of other sizes stay allocated there" in text
    assert planned(file({"size": "2M", "count": 32 * 512}), on=host(half)) == {(M2, 0): 32 * 512}
    assert planned(file(most, {"size": "1G", "count": 7}), on=host(half)) == {(M2, 0): 57 * 512, (G1, 0): 7}


@given(st.integers(0, 1000), st.sets(st.integers(0, 15), min_size=1))
def test_a_split_is_even_and_adds_up(count: int, ids: set[int]) -> None:
    """The parts add up to the total, differ by at most one page, and do not increase with the node number."""
    counts = planned(file({"size": "2M", "count": count}), on=host(*(node(n, frozenset({n})) for n in ids)))
    parts = [counts[M2, n] for n in sorted(ids)]
    assert sum(parts) == count
    assert parts == sorted(parts, reverse=True)
    assert parts[0] - parts[-1] <= 1
