# SPDX-License-Identifier: Apache-2.0
"""Simulated allocation of devices to claims by the scheduler."""

import json
import time
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_tools.scheduling.allocate import Search, UndecidedError, UnschedulableError
from numa_tools.scheduling.claim_spec import read_claim_spec, read_class
from numa_tools.scheduling.fit import AllocatedDevices
from numa_tools.scheduling.published import read_slices
from numa_tools.scheduling.reading import ManifestError

from tests.fakes import scheduler
from tests.fakes.quantities import whole

GROUPS = {
    "capacity": {
        "size": {
            "value": "8Gi",
            "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "max": "8Gi", "step": "1Gi"}},
        }
    }
}
CLASS = {"metadata": {"name": "any"}, "spec": {"selectors": [{"cel": {"expression": 'device.driver == "d"'}}]}}


def device(name: str, node: int | None = None, **more: Any) -> dict[str, Any]:
    """Returns a device as it appears in a slice."""
    attributes = {} if node is None else {"attributes": {"d/node": {"int": node}}}
    return {"name": name, **attributes, **more}


def shared(name: str, node: int) -> dict[str, Any]:
    """Returns an 8 GiB device that several claims can share."""
    return device(name, node, allowMultipleAllocations=True, **GROUPS)


def slices(*devices: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a list with one slice that contains the devices."""
    pool = {"name": "p", "generation": 1, "resourceSliceCount": 1}
    return [
        {"metadata": {"name": "s"}, "spec": {"driver": "d", "pool": pool, "nodeName": "n", "devices": list(devices)}}
    ]


def exact(name: str, **more: Any) -> dict[str, Any]:
    """Returns a request for one device."""
    return {"name": name, "exactly": {"deviceClassName": "any", **more}}


def size(amount: str) -> dict[str, Any]:
    """Returns the capacity request for part of a shared device."""
    return {"capacity": {"requests": {"size": amount}}}


def searching(*devices: dict[str, Any]) -> Search:
    """Returns a search on a node with the given devices."""
    return Search(read_slices(slices(*devices)), {"any": read_class(CLASS)})


def chosen(search: Search, *requests: dict[str, Any], **more: Any) -> dict[str, list[str]]:
    """Returns the names of the chosen devices, keyed by the request's name."""
    found: dict[str, list[str]] = {}
    for one in search.allocate([read_claim_spec({"devices": {"requests": list(requests), **more}})]):
        found.setdefault(one.subrequest.name, []).append(one.device.name)
    return found


def missing(search: Search, *requests: dict[str, Any], **more: Any) -> str:
    """Returns the reason why the claim is not allocated."""
    with pytest.raises(UnschedulableError) as caught:
        chosen(search, *requests, **more)
    return str(caught.value)


def undecided(search: Search, *requests: dict[str, Any], **more: Any) -> str:
    """Returns the reason why it is unknown whether the claim fits."""
    before = search.in_use.copy()
    with pytest.raises(UndecidedError) as caught:
        chosen(search, *requests, **more)
    assert search.in_use == before
    return str(caught.value)


def test_the_first_fitting_device_is_chosen() -> None:
    """A shared device with enough room is used, and a full device is skipped. An unshared device belongs to a single
    claim.
    """
    search = searching(device("a"), shared("b", 0), shared("c", 1))
    assert chosen(search, exact("r", **size("6Gi"))) == {"r": ["b"]}
    assert chosen(search, exact("r", **size("6Gi"))) == {"r": ["c"]}
    assert chosen(search, exact("r")) == {"r": ["a"]}
    assert missing(search, exact("r", **size("3Gi"))) == (
        "request r: a is allocated to a claim; b 2Gi of 8Gi size free, 3Gi requested; "
        "c 2Gi of 8Gi size free, 3Gi requested"
    )
    # An empty request gets the policy's default. A fraction of a step is rounded up to a whole step.
    assert chosen(search, exact("r"), exact("s", **size("512Mi"))) == {"r": ["b"], "s": ["b"]}


def test_constraints_apply_to_all_of_their_requests() -> None:
    """Depending on the constraint, its requests get devices whose attribute values are all equal or all distinct. A
    failed attempt leaves nothing allocated.
    """
    search = searching(shared("a", 0), shared("b", 0), device("c", 1), shared("d", 1))
    same = [{"matchAttribute": "d/node", "requests": ["r", "s"]}]
    whole = [{"cel": {"expression": "!device.allowMultipleAllocations"}}]
    assert chosen(search, exact("r", **size("8Gi")), exact("s", selectors=whole), constraints=same) == {
        "r": ["d"],
        "s": ["c"],
    }
    assert "s: c is allocated to a claim" in missing(search, exact("r"), exact("s", selectors=whole), constraints=same)
    apart = [{"distinctAttribute": "d/node"}]
    assert "but not all of them together under the d/node constraints" in missing(
        search, exact("r"), exact("s"), exact("t"), constraints=apart
    )
    assert chosen(search, exact("r", **size("8Gi"))) == {"r": ["a"]}


def test_a_request_gets_n_all_or_the_first_available_devices() -> None:
    """A request gets N devices, every matching device, or the first alternative that can be met."""
    search = searching(device("a", 0), device("b", 1), device("c", 1))
    assert chosen(search, exact("r", count=2)) == {"r": ["a", "b"]}
    assert (
        missing(search, exact("r", count=2))
        == "request r: 1 of 2 devices; a is allocated to a claim; b is allocated to a claim"
    )
    assert "a is allocated" in missing(search, exact("r", allocationMode="All"))
    two, one = ({"name": name, "deviceClassName": "any", "count": count} for name, count in (("two", 2), ("one", 1)))
    assert chosen(search, {"name": "r", "firstAvailable": [two, one]}) == {"r/one": ["c"]}


def test_a_tainted_device_is_not_used_unless_the_taint_is_tolerated() -> None:
    """For example, an over-claimed device is tainted."""
    search = searching(device("a", taints=[{"key": "k", "value": "true", "effect": "NoSchedule"}]))
    assert missing(search, exact("r")) == "request r: a has the taint k"
    assert chosen(search, exact("r", tolerations=[{"key": "k", "operator": "Exists"}])) == {"r": ["a"]}


ONE = {"name": "one", "deviceClassName": "any"}
SELECTOR = {"cel": {"expression": "true"}}
CLASSLESS = {"name": "s", "exactly": {"deviceClassName": "none"}}
FAILING = exact("s", selectors=[{"cel": {"expression": "device.nothing"}}])


def selecting(*expressions: str) -> dict[str, Any]:
    """Returns a request's selectors."""
    return {"selectors": [{"cel": {"expression": one}} for one in expressions]}


def test_a_selector_that_fails_ends_the_attempt() -> None:
    """As in the scheduler, no other device or alternative is tried afterwards."""
    found = missing(searching(device("a", 0)), exact("r", **selecting('device.attributes["d"].nodes == 0')))
    assert found.startswith("request r: selectors[0]: device a: no such key: nodes; test for the attribute first")
    second = f"{ON_1} || {FAILS}"
    assert "device a: no such key: nothing" in missing(
        searching(device("a", 0), device("b", 1)), either(alternative("x", second), alternative("y", "true"))
    )


def test_a_selector_fails_only_for_devices_that_the_scheduler_tries() -> None:
    """The scheduler evaluates a device's selectors when it tries the device. If the request asks for all devices, it
    evaluates the selectors for all of them.
    """
    search, first = searching(device("a", 0), device("b", 1)), selecting(f"{ON_0} || {FAILS}")
    assert "device b: no such key: nothing" in missing(search, exact("r", allocationMode="All", **first))
    assert "device b: no such key: nothing" in missing(search, exact("r", count=2, **first))
    assert chosen(search, exact("r", **first)) == {"r": ["a"]}
    assert "device b: no such key: nothing" in missing(search, exact("r", **first))


UNKNOWN = "device.odd()"
ON_0, ON_1 = (f'device.attributes["d"].node == {node}' for node in (0, 1))
ODD_ON_1 = f"{ON_1} && {UNKNOWN}"
ODD_ON_0 = f"{ON_0} && {UNKNOWN}"
FAILS = "device.nothing"
MANY = [device(f"d{n:02}", n // 16) for n in range(32)]


def either(*alternatives: dict[str, Any], name: str = "r") -> dict[str, Any]:
    """Returns a request with alternatives, which are tried in order."""
    return {"name": name, "firstAvailable": [{"deviceClassName": "any", **one} for one in alternatives]}


def alternative(name: str, *expressions: str, **more: Any) -> dict[str, Any]:
    """Returns an alternative for a request."""
    return {"name": name, **selecting(*expressions), **more}


@pytest.mark.parametrize(
    "requests",
    [
        [exact("r", **selecting(UNKNOWN))],
        # Device a certainly does not match, so the scheduler tries device b, and the result for device b is unknown.
        [exact("r", **selecting(f"{ON_0} && false || {ODD_ON_1}"))],
        # Two devices are required, and only one certainly matches.
        [exact("r", count=2, **selecting(f"{ON_0} || {UNKNOWN}"))],
        [exact("r", allocationMode="All", **selecting(UNKNOWN))],
        # All matching devices are required, and it is unknown whether the second one matches.
        [exact("r", allocationMode="All", **selecting(f"{ON_0} || {UNKNOWN}"))],
        # The second request fits in any case, but the first one may not.
        [exact("r", **selecting(ODD_ON_1)), exact("s", **selecting(ON_0))],
        # The second request needs device a, which the first request may get.
        [exact("r", **selecting(f"{ODD_ON_0} || {ON_1}")), exact("s", **selecting(ON_0))],
        # The second alternative fits, but the scheduler may choose the first one.
        [either(alternative("first", UNKNOWN), alternative("second", ON_0))],
        [either(alternative("first", UNKNOWN, count=3), alternative("second", ON_0))],
        # A false selector after the unknown one makes no difference, because the unknown one may fail and end the
        # attempt.
        [either(alternative("first", UNKNOWN, "false"), alternative("second", ON_0))],
        # The first alternative may fit, in which case the second one, which fails, is never tried.
        [either(alternative("first", UNKNOWN), alternative("second", FAILS))],
    ],
)
def test_an_unknown_selector_makes_the_outcome_unknown(requests: list[dict[str, Any]]) -> None:
    """The outcome depends on the selector's value, so the claim is reported neither as fitting nor as not fitting."""
    found = undecided(searching(device("a", 0), device("b", 1)), *requests)
    assert "cannot be evaluated: the function odd() is not supported: " in found
    assert "device.odd()" in found


@pytest.mark.parametrize(
    ("requests", "devices"),
    [
        # The scheduler tries device a first.
        ([exact("r", **selecting(f"{ON_0} || {UNKNOWN}"))], ["a"]),
        ([exact("r", **selecting(f"true || {UNKNOWN}"))], ["a"]),
        # The first alternative fits, so the second one is not tried.
        ([either(alternative("first", ON_1), alternative("second", UNKNOWN))], ["b"]),
        # A request's selectors are evaluated in order, up to the first false one.
        ([exact("r", **selecting(ON_1, f"{ON_1} || {UNKNOWN}"))], ["b"]),
        ([exact("r", allocationMode="All", **selecting(ON_1, f"{ON_1} || {UNKNOWN}"))], ["b"]),
    ],
)
def test_a_claim_fits_if_the_scheduler_never_evaluates_the_unknown_part(
    requests: list[dict[str, Any]], devices: list[str]
) -> None:
    """It does not matter if a selector is unknown for a device that is not needed."""
    found = chosen(searching(device("a", 0), device("b", 1)), *requests)
    assert [one for each in found.values() for one in each] == devices


@pytest.mark.parametrize(
    ("requests", "text"),
    [
        (
            [exact("r", **selecting(UNKNOWN)), exact("s", **selecting("false"))],
            "no device on this node is of class any",
        ),
        ([exact("r", **selecting(UNKNOWN, "false"))], "no device on this node is of class any and meets the selectors"),
        ([exact("r", **selecting("false", UNKNOWN))], "no device on this node is of class any and meets the selectors"),
        ([exact("r", **selecting(UNKNOWN, FAILS))], "no device on this node is of class any"),
        ([exact("r", count=3, **selecting(UNKNOWN))], "2 of 3 devices"),
        (
            [exact("r", **selecting(UNKNOWN)), exact("s", count=2)],
            "each request can be met, but not all of them together",
        ),
        ([exact("r", allocationMode="All", **selecting(UNKNOWN)), exact("s", count=2)], "but not all of them together"),
        (
            [exact("r", allocationMode="All", **selecting(f"{ON_0} || {UNKNOWN}")), exact("s", **selecting(ON_0))],
            "not all of them together",
        ),
        ([exact("r", **selecting(UNKNOWN)), exact("s", **selecting(FAILS))], "no such key: nothing"),
        ([either(alternative("first", UNKNOWN, count=3), alternative("second", "false"))], "no device on this node"),
        ([exact("r", **selecting(UNKNOWN)), CLASSLESS], "there is no DeviceClass none"),
    ],
)
def test_a_claim_does_not_fit_whatever_the_unknown_selector_evaluates_to(
    requests: list[dict[str, Any]], text: str
) -> None:
    """If the claim does not fit whatever the selector's value, the cause is reported as usual."""
    assert text in missing(searching(device("a", 0), device("b", 1)), *requests)


def test_constraints_are_considered_even_if_a_selector_is_unknown() -> None:
    """The two devices have different values, so the claim does not fit whichever of them the unknown selector admits.
    If a third device has the same value as one of them, the outcome is unknown.
    """
    request = [exact("r", **selecting(UNKNOWN)), exact("s")]
    same = [{"matchAttribute": "d/node"}]
    assert "under the d/node constraints" in missing(
        searching(device("a", 0), device("b", 1)), *request, constraints=same
    )
    assert "odd()" in undecided(searching(device("a", 0), device("b", 1), device("c", 1)), *request, constraints=same)


def test_the_limit_per_claim_counts_the_devices_that_certainly_match() -> None:
    """One request asks for all devices that match: 16 certainly match, and whether the others match is unknown. The
    other request asks for 16 or 17 more.
    """
    both = [exact("r", allocationMode="All", **selecting(f"{ON_0} || {UNKNOWN}")), exact("s", count=17)]
    assert "number of requested devices 33 exceeds" in missing(searching(*MANY, device("z", 1)), *both)
    both[1] = exact("s", count=16, **selecting(ON_1))
    assert "odd()" in undecided(searching(*MANY), *both)


def test_a_class_selector_that_is_unknown_counts_for_each_request() -> None:
    """The message names the class."""
    odd = {"metadata": {"name": "any"}, "spec": selecting("device.driver == 'd'", UNKNOWN)}
    search = Search(read_slices(slices(device("a", 0))), {"any": read_class(odd)})
    assert undecided(search, exact("r")).startswith("DeviceClass any: selectors[1]: cannot be evaluated")
    assert "no device on this node" in missing(search, exact("r", **selecting(ON_1)))


def test_devices_of_a_claim_with_an_unknown_outcome_are_disputed() -> None:
    """A later claim is reported as fitting only if it fits without the disputed devices, and as not fitting only if it
    would not fit even with them.
    """
    search = searching(shared("a", 0), shared("b", 1))
    assert "odd()" in undecided(search, exact("r", **size("8Gi"), **selecting(ODD_ON_1)))
    assert chosen(search, exact("r", **size("4Gi"))) == {"r": ["a"]}
    text = "device b may be allocated to an earlier claim whose outcome is unknown"
    assert undecided(search, exact("r", **size("8Gi"))) == text
    assert undecided(search, exact("r", **selecting(ON_1))) == text
    assert "at most 8Gi of size, 9Gi requested" in missing(search, exact("r", **size("9Gi")))
    assert chosen(search, exact("r", **size("4Gi"))) == {"r": ["a"]}
    # A disputed device that cannot meet the request in any case does not matter.
    tall = {"value": "16Gi", "requestPolicy": {"default": "1Gi", "validRange": {"min": "1Gi", "max": "16Gi"}}}
    search = searching(shared("b", 1), {**shared("c", 0), "capacity": {"size": tall}})
    assert "odd()" in undecided(search, exact("r", **size("8Gi"), **selecting(ODD_ON_1)))
    assert chosen(search, exact("r", **size("9Gi"))) == {"r": ["c"]}


_terms = st.sampled_from([ON_0, ON_1, "odd()", "true", "false", f"{ON_0} || odd()", f"{ON_1} && odd()", FAILS])
_values = st.sampled_from(["true", "false", "device.failing"])
_open_requests = st.lists(
    st.one_of(
        st.builds(
            lambda text, more: exact("r", **selecting(text), **more),
            _terms,
            st.sampled_from([{}, {"count": 2}, {"allocationMode": "All"}]),
        ),
        st.builds(
            lambda one, other, count: either(alternative("x", one, count=count), alternative("y", other)),
            _terms,
            _terms,
            st.integers(1, 2),
        ),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: [{**one, "name": f"r{n}"} for n, one in enumerate(found)])


def _outcome(search: Search, requests: list[dict[str, Any]]) -> str:
    try:
        return f"fits: {chosen(search, *requests)}"
    except UnschedulableError:
        return "does not fit"
    except UndecidedError:
        return "unknown"


@given(st.lists(st.integers(0, 1), min_size=1, max_size=3), _open_requests, st.lists(_values, min_size=3, max_size=3))
def test_a_certain_outcome_holds_for_every_value_of_the_unknown_part(
    nodes: list[int], requests: list[dict[str, Any]], values: list[str]
) -> None:
    """The unknown part may be true, be false or fail, and the result may differ from device to device. A certain
    outcome is the same in all of these cases.
    """
    devices = [device(f"d{n}", node) for n, node in enumerate(nodes)]
    outcome = _outcome(searching(*devices), requests)
    if outcome == "unknown":
        return
    known = " : ".join(f'device.attributes["d"].place == {n} ? {value}' for n, value in enumerate(values)) + " : false"
    placed = [{**one, "attributes": {**one["attributes"], "d/place": {"int": n}}} for n, one in enumerate(devices)]
    text = json.dumps(requests).replace("odd()", json.dumps(f"({known})")[1:-1])
    assert _outcome(searching(*placed), json.loads(text)) == outcome


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        (exact("r", allocationMode="All", **size("5Gi")), CLASSLESS, "there is no DeviceClass none"),
        (exact("r", count=2), FAILING, "request s: selectors[0]: device a: no such key: nothing"),
        (exact("r"), exact("s", **size("9Gi")), "request s: a allows at most 8Gi of size, 9Gi requested"),
    ],
)
def test_a_failed_attempt_leaves_nothing_allocated(first: dict[str, Any], second: dict[str, Any], text: str) -> None:
    """The next workload finds the node unchanged, however the attempt ended."""
    search = searching(shared("a", 0), shared("b", 1))
    assert text in missing(search, first, second)
    assert chosen(search, exact("r", allocationMode="All", **size("8Gi"))) == {"r": ["a", "b"]}


def test_faulty_requests_are_named_even_if_other_requests_do_not_fit() -> None:
    """A missing class ends the attempt immediately. A faulty selector that was never evaluated is also named."""
    search, large = searching(shared("a", 0)), exact("r", **size("9Gi"))
    assert missing(search, large, CLASSLESS) == "there is no DeviceClass none"
    either = {"name": "r", "firstAvailable": [ONE, {"name": "two", "deviceClassName": "none"}]}
    assert missing(search, either) == "there is no DeviceClass none"
    assert missing(search, large, FAILING).split("; ")[:2] == [
        "request r: a allows at most 8Gi of size, 9Gi requested",
        "request s: selectors[0]: device a: no such key: nothing",
    ]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        ({"requests": [{"name": "r", "deviceClassName": "any"}]}, "the resource.k8s.io/v1beta1 form"),
        ({"requests": [exact("r", adminAccess=True)]}, "adminAccess: is not simulated"),
        ({"requests": [exact("r"), exact("r")]}, "two requests have the same name"),
        ({"requests": [exact("r", count=True)]}, "count: must be a number, not 'True'"),
        ({"requests": [exact("r", count=0)]}, "count: must be a positive 64-bit number"),
        ({"requests": [exact("r", count=2**63)]}, "count: must be a positive 64-bit number"),
        ({"requests": [{"name": "r", "firstAvailable": []}]}, "has neither exactly nor firstAvailable"),
        ({"requests": [exact(f"r{n}") for n in range(600)]}, "requests: has 600 entries; the API accepts at most 32"),
        ({"requests": [{"name": "r", "firstAvailable": [ONE] * 9}]}, "firstAvailable: has 9 entries"),
        ({"requests": [exact("r", selectors=[SELECTOR] * 33)]}, "selectors: has 33 entries"),
        ({"requests": [exact("r", tolerations=[{"operator": "Exists"}] * 17)]}, "tolerations: has 17 entries"),
        ({"requests": [exact("r")], "constraints": [{"matchAttribute": "d/x"}] * 33}, "constraints: has 33 entries"),
        ({"requests": [exact("r")], "config": [{}] * 33}, "config: has 33 entries"),
        ({"requests": [exact("r", **size("much"))]}, "requests.size: quantity 'much'"),
        ({"requests": [exact("r")], "constraints": [{"matchAttribute": "d/x", "requests": ["s"]}]}, "no request s"),
        ({"requests": [exact("r")], "constraints": [{"matchAttribute": "node"}]}, "must have a domain"),
        ({"requests": "r"}, "requests: must be a list"),
    ],
)
def test_an_invalid_spec_is_rejected(spec: dict[str, Any], text: str) -> None:
    """The error names the field and gives the reason."""
    with pytest.raises(ManifestError) as caught:
        read_claim_spec({"devices": spec})
    assert text in str(caught.value)


def test_a_claim_has_at_most_32_devices() -> None:
    """The scheduler rejects a larger claim, whatever devices exist. If necessary, it chooses alternatives with fewer
    devices.
    """
    search = searching(*(device(f"d{n:02}", n) for n in range(60)))
    for count in (17, 2**62):
        found = missing(search, exact("r", count=16), exact("s", count=count))
        total = f"number of requested devices {16 + count} exceeds the claim limit of 32"
        assert found == f"requests r, s: {total}; split the claim into several claims"
    assert "number of requested devices 60 exceeds" in missing(search, exact("r", allocationMode="All"))
    assert len(search.allocate([read_claim_spec({"devices": {"requests": [exact("r", count=30)]}})] * 2)) == 60


def test_alternatives_are_chosen_to_keep_a_claim_within_32_devices() -> None:
    """An earlier request gets a smaller alternative if later requests would otherwise exceed the limit. The search
    detects this without trying all devices.
    """
    search = searching(*(device(f"d{n:02}", allowMultipleAllocations=True) for n in range(30)))
    many, few = {**ONE, "name": "many", "count": 17}, {**ONE, "name": "few", "count": 15}
    either = chosen(search, {"name": "r", "firstAvailable": [many, few]}, exact("s", count=16))
    assert {name: len(devices) for name, devices in either.items()} == {"r/few": 15, "s": 16}
    none = {**few, "selectors": [{"cel": {"expression": "false"}}]}
    found = missing(search, {"name": "r", "firstAvailable": [many, none]}, exact("s", count=16))
    assert found == "each request can be met, but not all of them together, with at most 32 devices for each claim"


def test_a_pod_with_too_many_requests_is_rejected() -> None:
    """The depth of the search has its own limit, so the selectors are not reported as the cause."""
    search, nested = searching(device("a", allowMultipleAllocations=True)), "(" * 50 + "true" + ")" * 50
    requests = [exact(f"r{n}", selectors=[{"cel": {"expression": nested}}]) for n in range(32)]
    claim = read_claim_spec({"devices": {"requests": requests}})
    assert len(search.allocate([claim] * 10)) == 320
    before = search.in_use.copy()
    with pytest.raises(UndecidedError, match="1280 requests for 1280 devices are too many to simulate at once"):
        search.allocate([claim] * 40)
    assert search.in_use == before


NAMES = [f"d/a{n}" for n in range(32)]
PARTS = [exact(f"r{n}", **size("1Gi" if n < 28 else "5Gi")) for n in range(32)]
"""Requests for more capacity than four devices have in total. A search notices the shortage only at the end of each
combination.
"""


def listed(value: int) -> dict[str, Any]:
    """Returns attributes that have 16 values each."""
    return {name: {"strings": [f"{value}-{n}" for n in range(16)]} for name in NAMES}


@pytest.mark.parametrize(
    ("devices", "requests", "kind"),
    [
        ([shared(f"d{n}", 0) for n in range(4)], PARTS, ""),
        ([{**shared(f"d{n}", 0), "attributes": listed(0)} for n in range(4)], PARTS, "matchAttribute"),
        # There is one value too few for all of the requests.
        (
            [{"name": f"d{n}", "attributes": listed(n % 31)} for n in range(40)],
            [exact(f"r{n}") for n in range(32)],
            "distinctAttribute",
        ),
    ],
)
def test_the_cost_of_a_search_is_limited(
    devices: list[dict[str, Any]], requests: list[dict[str, Any]], kind: str
) -> None:
    """Even for the largest claims that the API accepts, the search ends within seconds with advice for the author, and
    nothing stays allocated.
    """
    search, began = searching(*devices), time.thread_time()
    found = undecided(search, *requests, constraints=[{kind: name} for name in NAMES] if kind else [])
    assert time.thread_time() - began < 20
    simpler = ", or simplify the constraints" if kind else ""
    assert found.startswith("no devices found in ")
    assert found.endswith(f", and the scheduler may give up as well: request fewer devices in total{simpler}")
    assert search.in_use == AllocatedDevices()


def test_the_total_cost_of_a_pods_selectors_is_limited() -> None:
    """Each selector may be within its own limit, but a claim can have a thousand selectors for many devices."""
    equal = f"cel.bind(l, {list(range(1000))}, {' && '.join(['l == l'] * 45)})"
    requests = [exact(f"r{n}", selectors=[{"cel": {"expression": equal}}] * 32) for n in range(4)]
    search, began = searching(*(shared(f"d{n:02}", 0) for n in range(8))), time.thread_time()
    assert "the preceding selectors used up the evaluation limit" in undecided(search, *requests)
    spec = read_claim_spec({"devices": {"requests": requests[:1]}}).requests[0].subrequests[0]
    assert (
        "costs too much: this and all preceding selectors handle" in [one.unknown for one in search.verdicts(spec)][-1]
    )
    assert time.thread_time() - began < 20


def test_a_request_that_cannot_be_met_on_its_own_is_named_without_a_search() -> None:
    """The claim's earlier requests make no difference. If a single request is at fault, no combinations
    are reported.
    """
    search = searching(*(shared(f"d{n}", 0) for n in range(4)))
    found = missing(search, *PARTS[:31], exact("large", **size("9Gi")))
    assert found.startswith("request large: d0 allows at most 8Gi of size, 9Gi requested; d1")


_devices = st.lists(st.tuples(st.booleans(), st.integers(0, 2)), min_size=1, max_size=5).map(
    lambda kinds: [(shared if part else device)(f"d{n}", node) for n, (part, node) in enumerate(kinds)]
)
_requests = st.lists(
    st.one_of(
        st.sampled_from(["1Gi", "3Gi", "8Gi", "1500Mi"]).map(size), st.integers(1, 2).map(lambda n: {"count": n})
    ),
    min_size=1,
    max_size=3,
).map(lambda found: [exact(f"r{n}", **one) for n, one in enumerate(found)])
_claims = st.builds(
    lambda requests, match: {
        "requests": requests,
        **({"constraints": [{"matchAttribute": "d/node"}]} if match else {}),
    },
    _requests,
    st.booleans(),
)


@given(_devices, st.lists(_claims, min_size=1, max_size=4))
def test_the_result_agrees_with_the_fake_scheduler(devices: list[dict[str, Any]], claims: list[dict[str, Any]]) -> None:
    """The simulation and the fake scheduler are independent implementations of the same rules. For every claim, they
    allocate the same devices and amounts, or neither allocates any.
    """
    search, published = searching(*devices), slices(*devices)
    before: list[dict[str, Any]] = []
    for number, spec in enumerate(claims):
        document = {"metadata": {"name": f"c{number}"}, "spec": {"devices": spec}}
        try:
            allocated = scheduler.allocate(document, published, {"any": CLASS}, others=before)
        except scheduler.UnschedulableError:
            missing(search, *spec["requests"], **{key: spec[key] for key in spec if key != "requests"})
            continue
        before.append(allocated)
        results = allocated["status"]["allocation"]["devices"]["results"]
        choices = search.allocate([read_claim_spec({"devices": spec})])
        assert [one.device.name for one in choices] == [one["device"] for one in results]
        amounts = [None if one.consumed is None else one.consumed["size"] for one in choices]
        assert amounts == [
            Fraction(whole(one["consumedCapacity"]["size"])) if "consumedCapacity" in one else None for one in results
        ]
