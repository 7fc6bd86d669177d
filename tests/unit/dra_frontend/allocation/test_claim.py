# SPDX-License-Identifier: Apache-2.0
"""ResourceClaim documents become values, or a refusal that names claim and remedy; nothing else."""

import copy
import json
from fractions import Fraction
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimRefusal, ClaimView, NodeTerm, RefusalKind, Result, Source, read_claim
from hypothesis import given, settings
from hypothesis import strategies as st

UID = "8d3b3a4e-7f1a-4f7e-9f0c-2b6d5a3e1c00"


def document() -> dict[str, Any]:
    """A claim as the API server of 1.36 gives it, with everything that a scheduler and a template add."""
    claim: dict[str, Any] = json.loads("""{
      "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
      "metadata": {"namespace": "default", "name": "pod-a-cpu-x7k2p",
        "annotations": {"resource.kubernetes.io/pod-claim-name": "cpu"}},
      "spec": {"devices": {"requests": [{"name": "cpus", "exactly": {"deviceClassName": "dra.cpu"}}]}},
      "status": {
        "reservedFor": [{"resource": "pods", "name": "pod-a", "uid": "pod-uid-a"},
          {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang", "uid": "group-uid"}],
        "allocation": {
          "nodeSelector": {"nodeSelectorTerms": [
            {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["node-1"]}]}]},
          "devices": {
            "results": [
              {"request": "cpus/big", "driver": "dra.cpu", "pool": "node-1", "device": "cpudevnuma000",
               "shareID": "1f0c1111-2222-4333-8444-555566667777", "consumedCapacity": {"dra.cpu/cpu": "4"}},
              {"request": "mem", "driver": "dra.memory", "pool": "node-1-memory", "device": "memory-numa000",
               "consumedCapacity": {"size": "1536Mi"}},
              {"request": "watch", "driver": "dra.cpu", "pool": "node-1", "device": "cpudevnuma001",
               "adminAccess": true}],
            "config": [
              {"source": "FromClass", "requests": [],
               "opaque": {"driver": "dra.cpu", "parameters": {"from": "class"}}},
              {"source": "FromClaim", "requests": ["cpus"],
               "opaque": {"driver": "dra.cpu", "parameters": {"from": "claim"}}},
              {"source": "FromClaim", "requests": ["mem"],
               "opaque": {"driver": "dra.memory", "parameters": {"from": "other"}}}]}}}}""")
    claim["metadata"]["uid"] = UID
    return claim


def view(claim: object) -> ClaimView:
    read = read_claim(claim)
    assert isinstance(read, ClaimView), read
    return read


def refusal(claim: object, uid: str | None = None) -> ClaimRefusal:
    read = read_claim(claim, uid)
    assert isinstance(read, ClaimRefusal), read
    return read


def test_a_whole_claim_is_read() -> None:
    """Every field that the driver decides by arrives, and pod groups are no pods."""
    claim = view(document())
    assert (claim.uid, claim.namespace, claim.name) == (UID, "default", "pod-a-cpu-x7k2p")
    assert claim.pod_claim_name == "cpu"
    assert claim.reserved_for == (("pod-uid-a", "pod-a"),)
    first = claim.results[0]
    assert (first.request, first.base_request) == ("cpus/big", "cpus")
    assert (first.driver, first.pool, first.device) == ("dra.cpu", "node-1", "cpudevnuma000")
    assert first.share_id == "1f0c1111-2222-4333-8444-555566667777"
    assert claim.results[1].share_id is None
    assert [result.admin_access for result in claim.results] == [False, False, True]


def test_trap_6_7_results_are_filtered_by_driver() -> None:
    """A claim's results name other drivers too; they must not be prepared as ours."""
    claim = view(document())
    assert [result.request for result in claim.results_of("dra.memory")] == ["mem"]
    assert [result.request for result in claim.results_of("dra.cpu")] == ["cpus/big", "watch"]


@pytest.mark.parametrize(
    ("driver", "published", "asked"),
    [
        ("dra.cpu", "dra.cpu/cpu", "dra.cpu/cpu"),
        ("dra.cpu", "cpu", "dra.cpu/cpu"),
        ("dra.cpu", "dra.cpu/cpu", "cpu"),
        ("dra.memory", "size", "size"),
        ("dra.memory", "dra.memory/size", "size"),
    ],
)
def test_trap_6_9_capacity_is_found_under_both_names(driver: str, published: str, asked: str) -> None:
    """Keys come as published: with the driver's name before them or without."""
    result = Result("r", driver, "p", "d", None, False, {published: Fraction(3)})
    assert result.consumption(asked) == 3
    assert result.consumption("other") is None


def test_quantities_are_exact() -> None:
    """Fractions, suffixes and bare JSON numbers keep their exact value; binary text for CPUs is usual."""
    claim = document()
    capacity = claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"]
    capacity |= {"a": "1500m", "b": "8Ki", "c": 2, "d": 1.5}
    consumed = view(claim).results[0].consumed
    assert consumed["dra.cpu/cpu"] == 4
    assert [consumed[key] for key in "abcd"] == [Fraction(3, 2), 8192, 2, Fraction(3, 2)]


def test_trap_6_8_class_parameters_come_before_those_of_the_claim() -> None:
    """Later entries override earlier ones, so the claim's are last, whatever order the document has."""
    claim = document()
    config = claim["status"]["allocation"]["devices"]["config"]
    for order in (config, config[::-1]):
        claim["status"]["allocation"]["devices"]["config"] = order
        read = view(claim)
        fitting = read.configs_for(read.results[0])
        assert [entry.parameters["from"] for entry in fitting] == ["class", "claim"]
        assert [entry.source for entry in fitting] == [Source.DEVICE_CLASS, Source.CLAIM]


@pytest.mark.parametrize(
    ("requests", "applies"),
    [([], True), (None, True), (["cpus"], True), (["cpus/big"], True), (["cpus/small"], False), (["mem"], False)],
)
def test_parameters_match_by_nothing_by_base_or_by_full_name(requests: list[str] | None, applies: bool) -> None:
    """An entry is for a result if it names no request, its base request, or exactly its subrequest."""
    claim = document()
    claim["status"]["allocation"]["devices"]["config"] = [
        {"source": "FromClaim", "requests": requests, "opaque": {"driver": "dra.cpu", "parameters": {}}}
    ]
    read = view(claim)
    assert bool(read.configs_for(read.results[0])) is applies


def test_node_selection() -> None:
    """Only the node's name is looked at: terms are alternatives, fields of a term all hold."""
    claim = document()
    assert view(claim).nodes == (NodeTerm(frozenset({"node-1"}), frozenset()),)
    assert view(claim).allocated_to("node-1")
    assert not view(claim).allocated_to("node-2")
    selector = claim["status"]["allocation"]["nodeSelector"]
    selector["nodeSelectorTerms"].append(
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-3"]}]}
    )
    assert view(claim).allocated_to("node-2")
    assert not view(claim).allocated_to("node-3")
    del claim["status"]["allocation"]["nodeSelector"]
    assert view(claim).allocated_to("anywhere")


def test_trap_6_10_another_object_of_the_same_name_is_refused() -> None:
    """The kubelet asks for a UID; a claim made anew under that name is another claim."""
    refused = refusal(document(), "other-uid")
    assert refused.kind is RefusalKind.REPLACED
    assert refused.claim == "claim default/pod-a-cpu-x7k2p"
    assert f"UID other-uid was replaced by {UID}; delete the pod" in refused.text


def test_unallocated_and_unreserved_claims_are_refused() -> None:
    """A claim that the scheduler has not finished is told apart from a damaged one, and both names are in the text."""
    claim = document()
    claim["status"]["reservedFor"] = claim["status"]["reservedFor"][1:]
    refused = refusal(claim)
    assert refused.kind is RefusalKind.NOT_RESERVED
    assert "default/pod-a-cpu-x7k2p: reserved for no pod" in refused.text
    assert isinstance(read_claim(claim, reserved=False), ClaimView)
    for absent in ({}, {"allocation": None}, None):
        claim["status"] = absent
        assert refusal(claim).kind is RefusalKind.NOT_ALLOCATED


@pytest.mark.parametrize("path", ["device", "pool", "driver", "request"])
@pytest.mark.parametrize("value", [None, "", 3, {}])
def test_damaged_results_are_refused_by_field(path: str, value: object) -> None:
    """The text names the claim and the field that is wrong."""
    claim = document()
    claim["status"]["allocation"]["devices"]["results"][0][path] = value
    refused = refusal(claim)
    assert refused.kind is RefusalKind.MALFORMED
    assert f"claim default/pod-a-cpu-x7k2p: field '{path}'" in refused.text


@pytest.mark.parametrize(
    "value", ["4K", "", "1.5.2", True, [], "1e", "nan", float("inf"), pytest.param(10**5000, id="huge")]
)
def test_damaged_quantities_are_refused(value: object) -> None:
    """What is no quantity is refused with the name of the capacity."""
    claim = document()
    claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"] = {"dra.cpu/cpu": value}
    assert "consumedCapacity[dra.cpu/cpu]" in refusal(claim).text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_a_value_or_a_refusal(garbage: object) -> None:
    """Nothing that JSON can say raises."""
    assert isinstance(read_claim(garbage), ClaimView | ClaimRefusal)


def _places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    below = [place for key in keys for place in _places(value[key], (*path, key))]  # type: ignore[index]  # one of both
    return ([path] if path else []) + below


@settings(max_examples=300)
@given(st.sampled_from(_places(document())), JSON)
def test_a_claim_with_any_one_field_damaged_is_a_value_or_a_refusal(place: tuple[Any, ...], garbage: object) -> None:
    """Whatever stands in the place of any field, reading gives a claim that can be used or a refusal."""
    claim = copy.deepcopy(document())
    holder: Any = claim
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = garbage
    read = read_claim(claim, UID)
    if isinstance(read, ClaimView):
        for result in read.results:
            read.configs_for(result)
            result.consumption("dra.cpu/cpu")
        read.allocated_to("node-1")
    else:
        assert read.text.startswith(read.claim)
