# SPDX-License-Identifier: Apache-2.0
"""Parsing of objects and strings that any client of the cluster may have written."""

import json
import time
from math import ceil
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubectl_numa.cluster import ClaimName, read_cluster, read_pod
from kubectl_numa.kubectl import MAX_NESTING, shallow
from kubectl_numa.lists import (
    claim_documents,
    claim_row,
    free_documents,
    free_row,
    node_documents,
    node_row,
)
from kubectl_numa.quantity import format_bytes, format_cpus, parse_cpus, parse_quantity
from kubectl_numa.tables import json_text, safe, table, yaml_text
from kubectl_numa.views import explain, explain_missing, explain_pod
from numa_contract import documents, quantity

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=20,
)
WORDS = ("spec", "status", "metadata", "driver", "pool", "devices", "allocation", "results", "capacity", "requests")
ODD = st.recursive(
    JSON | st.sampled_from(["dra.cpu", "dra.memory", "4"]),
    lambda inner: st.dictionaries(st.sampled_from(WORDS), inner | st.lists(inner, max_size=2), max_size=4),
    max_leaves=20,
)


@given(st.integers(0, 1 << 60), st.booleans())
def test_quantities_are_parsed_as_in_the_driver(amount: int, binary: bool) -> None:
    """When the plugin parses a quantity that the driver has formatted, the result is the original amount."""
    assert parse_quantity(quantity.format_quantity(amount, binary=binary)) == amount


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("4", 4),
        ("1500m", 2),
        ("2Gi", 2 << 30),
        ("1.5Ki", 1536),
        ("1e3", 1000),
        ("2E", 2 * 10**18),
        ("1Ei", 1 << 60),
        ("1e60", (1 << 63) - 1),
    ],
)
def test_every_form_of_a_quantity_is_read(text: str, amount: int) -> None:
    """Decimal and binary units, exponents and thousandths are parsed as the driver parses them; fractions are rounded
    up. The plugin imports nothing from the driver, so it has its own parser.
    """
    assert parse_quantity(text) == amount == min(ceil(quantity.parse_quantity(text)), (1 << 63) - 1)


@given(st.text())
def test_an_invalid_quantity_counts_as_zero(text: str) -> None:
    """No string, however long or unusual, makes the command fail."""
    assert parse_quantity(text) >= 0
    assert parse_quantity("9" * 100_000) == 0
    assert format_bytes(parse_quantity("1e60")) == "8191.9Pi", (
        "a larger value than any server stores is shown as the largest stored one"
    )


def test_formatted_bytes_are_short() -> None:
    """Formatted bytes have about three digits and a unit."""
    sizes = (0, 512, 1536, 62 << 30, 3 << 29, (1 << 63) - 1)
    assert [format_bytes(size) for size in sizes] == ["0", "512", "1.5Ki", "62Gi", "1.5Gi", "8191.9Pi"]


@given(st.text())
def test_control_characters_never_reach_the_terminal(text: str) -> None:
    """Control characters include escape sequences and characters that change the writing direction."""
    assert safe(text).isprintable()
    assert table([{"claim": text}]).count("\n") == 1
    for printed, read in ((json_text([{"claim": text}]), json.loads), (yaml_text([{"claim": text}]), yaml.safe_load)):
        assert read(printed) == [{"claim": text}]
        assert printed.isascii()
        assert all(one.isprintable() or one == "\n" for one in printed)


@given(st.lists(st.dictionaries(st.text(max_size=8), JSON, max_size=3), max_size=3))
def test_yaml_and_json_have_the_same_values(documents: list[Any]) -> None:
    """The values include strings that YAML would read as a different type, such as ``no`` and ``0x1``."""
    words = [{"text": text} for text in ("no", "On", "y", "null", "0x1", "1e3", "1:30", "", "- a", "a: b", "~")]
    for one in (documents, words, [{"list": [], "map": {}, "lists": [[1], [{"a": [2]}]]}]):
        assert yaml.safe_load(yaml_text(one)) == json.loads(json_text(one)) == one


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8", [0, 1, 2, 3, 8]),
        ("5", [5]),
        ("", []),
        ("3-1", []),
        ("0-99999", []),
        ("0-8191," * 9000 + "1", []),
        ("0-8191,0", []),
        ("a,1", []),
    ],
    ids=range(8),
)
def test_a_list_of_cpus_is_bounded_before_it_is_expanded(text: str, cpus: list[int]) -> None:
    """The list is part of a claim's status, which other programs may write."""
    assert parse_cpus(text) == cpus


@given(st.sets(st.integers(0, 8191), max_size=40))
def test_cpus_are_formatted_as_the_kernel_does(cpus: set[int]) -> None:
    """The result has ranges in ascending order."""
    assert parse_cpus(format_cpus(sorted(cpus))) == sorted(cpus)
    assert format_cpus([0, 1, 2, 8]) == "0-2,8"


@given(st.lists(ODD.filter(lambda one: isinstance(one, dict)), max_size=3), st.lists(ODD, max_size=3))
def test_a_malformed_object_does_not_make_a_command_fail(slices: list[Any], claims: list[Any]) -> None:
    """Objects of other versions or other authors are read as far as possible."""
    cluster = read_cluster(slices, [one for one in claims if isinstance(one, dict)])
    lists = ((node_documents, node_row), (free_documents, free_row), (claim_documents, claim_row))
    for documents_of, row in lists:
        found = documents_of(cluster)
        assert table([row(one) for one in found]) if found else True
        assert yaml.safe_load(yaml_text(found)) == json.loads(json_text(found))
    assert all(list(explain(cluster, claim)) for claim in cluster.claims)


STATUS = (
    "resourceClaimStatuses",
    "containerStatuses",
    "state",
    "waiting",
    "terminated",
    "message",
    "reason",
    "conditions",
)


@given(st.dictionaries(st.sampled_from(("spec", "status")), st.dictionaries(st.sampled_from(STATUS), ODD)) | ODD)
def test_a_malformed_pod_does_not_make_a_command_fail(pod: Any) -> None:
    """A pod of another version is read as far as possible."""
    read = read_pod(pod)
    lines = [*explain_pod(read, "ns", "p"), *(line for one in read.claims for line in missing(one))]
    assert all(isinstance(line, str) for line in lines)


def missing(use: ClaimName) -> list[str]:
    """Returns the lines about a missing claim."""
    return list(explain_missing(use, "ns", template_exists=None))


def slice_of(generation: int, *devices: dict[str, Any]) -> dict[str, Any]:
    """Returns a ResourceSlice with CPU devices of node-a."""
    pool = {"name": "node-a", "generation": generation, "resourceSliceCount": 1}
    return {"spec": {"driver": "dra.cpu", "nodeName": "node-a", "pool": pool, "devices": list(devices)}}


def test_only_the_newest_generation_of_a_pool_counts() -> None:
    """Slices that are about to be deleted must not make a node appear larger."""
    old = slice_of(1, {"name": "a", "capacity": {"dra.cpu/cpu": {"value": "8"}}})
    new = slice_of(2, {"name": "b", "capacity": {"dra.cpu/cpu": {"value": "4"}}})
    for slices in ([old, new], [new, old]):
        assert [one["cpus"] for one in free_documents(read_cluster(slices, []))] == [4]


def test_a_large_cluster_is_read_in_seconds() -> None:
    """The time grows with the number of nodes plus the number of claims, not with their product."""
    slices, claims = [], []
    for number in range(1000):
        pool = {"name": f"n{number}", "generation": 1}
        devices = [{"name": "d", "capacity": {"dra.cpu/cpu": {"value": "64"}}}]
        slices.append({"spec": {"driver": "dra.cpu", "nodeName": f"n{number}", "pool": pool, "devices": devices}})
        result = {"driver": "dra.cpu", "pool": f"n{number}", "device": "d", "consumedCapacity": {"dra.cpu/cpu": "2"}}
        status = {"allocation": {"devices": {"results": [result]}}}
        claims += [{"metadata": {"name": f"c{number}-{one}"}, "status": status} for one in range(20)]
    cluster, began = read_cluster(slices, claims), time.process_time()
    assert {one["claims"] for one in node_documents(cluster)} == {20}
    assert time.process_time() - began < 3


def test_administrative_access_does_not_use_up_a_device() -> None:
    """A claim with adminAccess leaves a device as free as before, and a single CPU without a capacity counts as one."""
    slices = [slice_of(1, {"name": "cpudev000"}, {"name": "cpudev001"})]
    results = [
        {"driver": "dra.cpu", "pool": "node-a", "device": "cpudev000", "adminAccess": True},
        {"driver": "dra.cpu", "pool": "node-a", "device": "cpudev001"},
    ]
    claim = {"metadata": {"name": "c"}, "status": {"allocation": {"devices": {"results": results}}}}
    assert [one["cpus"] for one in free_documents(read_cluster(slices, [claim]))] == [1]


@pytest.mark.parametrize(
    "deep", ["[" * 9000 + "]" * 9000, '{"a":' * 9000 + "1" + "}" * 9000, '["]",' * 9000 + "1" + "]" * 9000]
)
def test_a_deeply_nested_claim_does_not_hide_other_claims(deep: str) -> None:
    """Values nested more deeply than the limit are read as null, even if the interpreter could read them."""
    text = f'{{"items": [{{"name": "a"}}, {{"name": "b", "deep": {deep}}}, {{"name": "c", "text": "]}}\\"["}}]}}'
    found = json.loads(shallow(text))["items"]
    assert [one["name"] for one in found] == ["a", "b", "c"]
    assert found[2]["text"] == ']}"['


def test_the_nesting_limit_equals_the_drivers() -> None:
    """The plugin is installed without the driver's packages, so it defines the limit itself."""
    assert MAX_NESTING == documents.MAX_NESTING


@given(JSON)
def test_documents_within_the_depth_limit_are_unchanged(value: Any) -> None:
    """The text of a document is not changed if its nesting does not exceed the limit."""
    text = "[" * (MAX_NESTING - 10) + json.dumps(value) + "]" * (MAX_NESTING - 10)
    assert shallow(text) == text


@pytest.mark.parametrize("text", ["[" * 1_000_000, '"' * 999_999, '\\"' * 500_000], ids=range(3))
def test_removing_deeply_nested_values_takes_linear_time(text: str) -> None:
    """The time grows linearly with the length of the text."""
    began = time.thread_time()
    shallow(text)
    assert time.thread_time() - began < 2
