# SPDX-License-Identifier: Apache-2.0
"""Parsing of ResourceClaim documents, and their refusal with a message that names the claim and a remedy."""

from fractions import Fraction
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView, RefusedError, Source, amount_of, count_of, covers, parse_claim
from numa_contract.records import AllocationResult

from tests.rigs.builders import NODE, claim, cpus, memory, result

UID = "8d3b3a4e-7f1a-4f7e-9f0c-2b6d5a3e1c00"


def document() -> dict[str, Any]:
    """Returns a ResourceClaim as a Kubernetes 1.36 API server returns it, including all the fields that are set by the
    scheduler and by a claim template.
    """
    config = [
        {"source": source, "requests": requests, "opaque": {"driver": driver, "parameters": {"from": said}}}
        for source, requests, driver, said in (
            ("FromClass", [], "dra.cpu", "class"),
            ("FromClaim", ["cpus"], "dra.cpu", "claim"),
            ("FromClaim", ["mem"], "dra.memory", "other"),
        )
    ]
    watching = result("watch", "dra.cpu", "cpudevnuma001", adminAccess=True)
    found = claim(
        UID,
        *(cpus(4, "cpus/big"), memory("1536Mi", "mem"), watching),
        pods=("pod-uid-a",),
        name="pod-a-cpu-x7k2p",
        namespace="default",
        config=config,
    )
    found["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": "cpu"}
    group = {"apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "gang", "uid": "group-uid"}
    found["status"]["reservedFor"].append(group)
    return found


def read(document: object, uid: str = UID) -> ClaimView:
    """Returns the parsed claim. Raises RefusedError if the document is malformed or the claim is not usable."""
    view = parse_claim(document)
    view.check_usable(uid)
    return view


def refusal(document: object, uid: str = UID) -> str:
    with pytest.raises(RefusedError) as caught:
        read(document, uid)
    return str(caught.value)


def consuming(amount: object, key: str = "dra.cpu/cpu") -> dict[str, Any]:
    """Returns the claim with the given consumed capacity in its first result."""
    claim = document()
    claim["status"]["allocation"]["devices"]["results"][0]["consumedCapacity"] = {key: amount, "other": "4"}
    return claim


def test_a_whole_claim_is_read() -> None:
    """All fields that the driver uses are parsed. Pod groups are not treated as pods, and adminAccess results get no
    devices.
    """
    claim = read(document())
    assert (claim.claim.uid, str(claim)) == (UID, "claim default/pod-a-cpu-x7k2p")
    assert claim.pod_claim_name == "cpu"
    assert [(pod.uid, pod.name) for pod in claim.reserved_for] == [("pod-uid-a", "name-pod-uid-a")]
    (first,), (second,) = claim.results["dra.cpu"], claim.results["dra.memory"]
    assert (first.base, count_of("dra.cpu", first)) == ("cpus", 4)
    assert first == AllocationResult(
        request="cpus/big",
        pool=NODE,
        device="cpudevnuma000",
        share_id="share-cpus/big",
        consumed={"dra.cpu/cpu": "4"},
    )
    assert (second.share_id, count_of("dra.memory", second)) == (None, 1536 << 20)
    assert {driver: [r.request for r in results] for driver, results in claim.monitored.items()} == {
        "dra.cpu": ["watch"],
        "dra.memory": [],
    }


def test_results_are_filtered_by_driver() -> None:
    """Other drivers' results and parameters have their own formats and must be ignored."""
    found = document()
    devices = found["status"]["allocation"]["devices"]
    devices["results"].append({"driver": "gpu.example.com", "request": 3})
    devices["config"].append({"source": "FromMars", "opaque": {"driver": "gpu.example.com", "parameters": [1]}})
    assert read(found) == read(document())


@pytest.mark.parametrize(("driver", "key"), [("dra.cpu", "cpu"), ("dra.memory", "size")])
def test_a_capacity_is_found_under_both_names(driver: str, key: str) -> None:
    """A capacity name may be published with or without the driver's name as a prefix."""
    for name in (key, f"{driver}/{key}"):
        (result,) = read(consuming("3", name)).results["dra.cpu"]
        assert count_of(driver, result) == 3


@pytest.mark.parametrize(
    ("amount", "exact"), [("1500m", Fraction(3, 2)), ("8Ki", 8192), (2, 2), (1.5, Fraction(3, 2)), ("-1", -1)]
)
def test_quantities_are_exact(amount: object, exact: Fraction | int) -> None:
    """Fractions, suffixes and bare JSON numbers keep their exact value. CPU amounts may use binary suffixes."""
    assert amount_of("dra.cpu", read(consuming(amount)).results["dra.cpu"][0]) == exact


@pytest.mark.parametrize("amount", ["0", "-1", "1500m", "10E", "1e30", "1e300"])
def test_invalid_amounts_are_refused(amount: str) -> None:
    """An amount that no device can have is refused before it is used in a calculation."""
    with pytest.raises(RefusedError, match="is not a positive whole number of CPUs"):
        count_of("dra.cpu", read(consuming(amount)).results["dra.cpu"][0])


def test_class_parameters_precede_those_from_the_claim() -> None:
    """Later entries override earlier ones, so the claim's entries come last, whatever their order in the document."""
    claim = document()
    config = claim["status"]["allocation"]["devices"]["config"]
    for order in (config, config[::-1]):
        claim["status"]["allocation"]["devices"]["config"] = order
        view = read(claim)
        (result,) = view.results["dra.cpu"]
        fitting = [config for config in view.configs if config.applies_to("dra.cpu", result)]
        assert [entry.parameters["from"] for entry in fitting] == ["class", "claim"]
        assert [entry.source for entry in fitting] == [Source.DEVICE_CLASS, Source.CLAIM]


@pytest.mark.parametrize(
    ("requests", "applies"),
    [([], True), (None, True), (["cpus"], True), (["cpus/big"], True), (["cpus/small"], False), (["mem"], False)],
)
def test_parameters_match_by_base_request_or_full_name(requests: list[str] | None, applies: bool) -> None:
    """An entry applies to a result if it lists no requests, the result's base request, or exactly the result's
    subrequest.
    """
    claim = document()
    claim["status"]["allocation"]["devices"]["config"] = [
        {"source": "FromClaim", "requests": requests, "opaque": {"driver": "dra.cpu", "parameters": {}}}
    ]
    view = read(claim)
    assert view.configs[0].applies_to("dra.cpu", view.results["dra.cpu"][0]) is applies


def test_node_selection() -> None:
    """Only the node names that a term requires are evaluated. The terms are ORed, and a term that requires no node name
    is assumed to match this node.
    """
    claim = document()
    assert read(claim).is_for(NODE, UID)
    assert not read(claim).is_for("node-2", UID)
    selector = claim["status"]["allocation"]["nodeSelector"]
    selector["nodeSelectorTerms"].append(
        {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node-3"]}]}
    )
    assert read(claim).is_for("node-2", UID)
    del claim["status"]["allocation"]["nodeSelector"]
    assert read(claim).is_for("anywhere", UID)


def test_another_claim_with_the_same_name_is_refused() -> None:
    """The kubelet identifies a claim by its UID. A claim recreated with the same name is a different claim."""
    text = refusal(document(), "other-uid")
    assert text.startswith(f"claim default/pod-a-cpu-x7k2p: UID other-uid was replaced by {UID}; delete the pod")
    assert not read(document()).is_for(NODE, "other-uid")


def test_unallocated_and_unreserved_claims_are_refused() -> None:
    """The message distinguishes a claim that the scheduler has not finished allocating from a damaged one, and gives
    the claim's namespace and name.
    """
    claim = document()
    claim["status"]["reservedFor"] = claim["status"]["reservedFor"][1:]
    assert "default/pod-a-cpu-x7k2p: status.reservedFor contains no pod" in refusal(claim)
    assert parse_claim(claim).is_for(NODE, UID)
    for absent in ({}, {"allocation": None}, None):
        claim["status"] = absent
        assert "not allocated" in refusal(claim)
        assert not parse_claim(claim).is_for(NODE, UID)


@pytest.mark.parametrize("path", ["device", "pool", "request"])
@pytest.mark.parametrize("value", [None, "", 3, {}])
def test_a_refusal_of_damaged_results_names_the_field(path: str, value: object) -> None:
    """The message names the claim and the invalid field."""
    claim = document()
    claim["status"]["allocation"]["devices"]["results"][0][path] = value
    assert f"claim default/pod-a-cpu-x7k2p: field '{path}'" in refusal(claim)
    claim["status"]["allocation"]["devices"]["results"][0] = [value]
    assert "field 'results[]' must be an object, not list" in refusal(claim)


@pytest.mark.parametrize("value", ["4K", "", True, [], "nan", float("inf"), pytest.param(10**5000, id="huge")])
def test_damaged_quantities_are_refused(value: object) -> None:
    """The message names the damaged capacity."""
    assert "consumedCapacity[dra.cpu/cpu]" in refusal(consuming(value))


def test_an_unknown_parameter_source_is_refused() -> None:
    """A parameter's source determines its precedence."""
    claim = document()
    claim["status"]["allocation"]["devices"]["config"][0]["source"] = "FromMars"
    assert "field 'source' is 'FromMars', neither FromClass nor FromClaim" in refusal(claim)


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        (("allocation", "devices", "results"), {"driver": "dra.cpu", "request": "r", "pool": "p", "device": "d"}),
        (("allocation", "devices", "config"), {"source": "FromClaim", "opaque": {"driver": "dra.cpu"}}),
        (("reservedFor",), {"resource": "pods", "uid": "u", "name": "n"}),
    ],
)
def test_a_claim_has_at_most_the_entries_that_the_api_allows(path: tuple[str, ...], entry: dict[str, Any]) -> None:
    """Lists longer than the API server accepts are not read."""
    claim = document()
    holder = claim["status"]
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = [entry] * 300
    assert f"field '{path[-1]}' has 300 entries" in refusal(claim)


@pytest.mark.parametrize(
    ("requests", "request_name", "covered"),
    [((), "r/a", True), (("r",), "r/a", True), (("r/a",), "r/a", True), (("r/b",), "r/a", False), (("s",), "r", False)],
)
def test_a_requests_list_names_requests_or_subrequests(
    requests: tuple[str, ...], request_name: str, covered: bool
) -> None:
    """The lists in constraints and in opaque parameters follow the same rule, and an empty list means all requests."""
    assert covers(frozenset(requests), request_name) is covered
