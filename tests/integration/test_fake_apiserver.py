# SPDX-License-Identifier: Apache-2.0
"""The fake API server must be as strict as the real one; otherwise tests that use it prove nothing."""

from typing import Any

import pytest

from tests.fakes import quantities
from tests.fakes.apiserver_patches import strategic_merge
from tests.fakes.apiserver_rules import GATES_OF_1_36, admit
from tests.fakes.apiserver_store import CLAIMS, SLICES, ApiError, Document, Store


def document(*devices: Document, **spec: Any) -> Document:
    pool = {"name": "node-a", "generation": 1, "resourceSliceCount": 1}
    return {
        "metadata": {"name": "s"},
        "spec": {"driver": "example.com", "nodeName": "node-a", "pool": pool, "devices": list(devices), **spec},
    }


def shared(value: str = "8Gi", **policy: Any) -> Document:
    return {
        "name": "d",
        "allowMultipleAllocations": True,
        "capacity": {"size": {"value": value, "requestPolicy": policy}},
    }


def check(slice_document: Document, **gates: bool) -> Document:
    return admit({**GATES_OF_1_36, **gates}, SLICES, slice_document, None)


SPAN = {"min": "4Ki", "step": "4Ki", "max": "8Gi"}
INVALID = {
    "65 devices with taints": document(
        *({"name": f"d{n}", "taints": [{"key": "k", "effect": "NoSchedule"}]} for n in range(65))
    ),
    "129 devices": document(*({"name": f"d{n}"} for n in range(129))),
    "33 attributes and capacities": document(
        {
            "name": "d",
            "attributes": {f"a{n}": {"int": 1} for n in range(32)},
            "capacity": {"c": {"value": "1"}},
        }
    ),
    "string of 66 bytes": document({"name": "d", "attributes": {"a": {"string": "ä" * 33}}}),
    "version without a patch number": document({"name": "d", "attributes": {"a": {"version": "1.2"}}}),
    "pool without a slice count": document(pool={"name": "p", "generation": 1}),
    "underscore in a device name": document({"name": "d_1"}),
    "hyphen in an attribute name": document({"name": "d", "attributes": {"a-b": {"int": 1}}}),
    "attribute with two values": document({"name": "d", "attributes": {"a": {"int": 1, "bool": True}}}),
    "list attribute without its feature gate": document({"name": "d", "attributes": {"a": {"ints": [1]}}}),
    "two devices with the same name": document({"name": "d"}, {"name": "d"}),
    "devices and counters": document(sharedCounters=[]),
    "both nodeName and allNodes": document(allNodes=True),
    "request policy on an exclusive device": document({**shared(default="1Mi"), "allowMultipleAllocations": None}),
    "request policy without a default": document(shared(validRange=SPAN)),
    "default below min": document(shared(default="1Ki", validRange=SPAN)),
    "default between two steps": document(shared(default="5Ki", validRange=SPAN)),
    "max above the capacity": document(shared("4Gi", default="1Mi", validRange=SPAN)),
    "min + step above a capacity of one page": document(
        shared("4Ki", default="4Ki", validRange={"min": "4Ki", "step": "4Ki", "max": "4Ki"})
    ),
    "step of 0": document(shared(default="4Ki", validRange={**SPAN, "step": "0"})),
    "valid values and a valid range": document(shared(default="4Ki", validRange=SPAN, validValues=["4Ki"])),
    "valid values out of order": document(shared(default="1", validValues=["2", "1"])),
    "upper-case K as a decimal suffix": document({"name": "d", "capacity": {"c": {"value": "1K"}}}),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_slices_are_refused(name: str) -> None:
    """Each violated validation rule results in a 422 with its cause."""
    with pytest.raises(ApiError) as caught:
        check(INVALID[name])
    assert caught.value.code == 422


def test_a_valid_slice_is_returned_in_the_servers_form() -> None:
    """The server puts quantities into canonical form and sets timestamps; drivers must expect this."""
    device = {**shared("8192Mi", default="1024Ki", validRange=SPAN), "taints": [{"key": "k", "effect": "NoSchedule"}]}
    (stored,) = check(document(device))["spec"]["devices"]
    assert stored["capacity"]["size"]["value"] == "8Gi"
    assert stored["capacity"]["size"]["requestPolicy"]["default"] == "1Mi"
    assert stored["taints"][0]["timeAdded"].endswith("Z")


def test_fields_of_a_disabled_gate_are_dropped() -> None:
    """Without DRAConsumableCapacity the device is stored as unshared, without an error."""
    (stored,) = check(document(shared(default="1Mi")), DRAConsumableCapacity=False)["spec"]["devices"]
    assert stored == {"name": "d", "capacity": {"size": {"value": "8Gi"}}}


def test_fields_in_use_are_kept_while_the_gate_is_off() -> None:
    """An object that already has the field keeps it while the gate is off."""
    old = check(document(shared(default="1Mi")))
    gates = {**GATES_OF_1_36, "DRAConsumableCapacity": False}
    assert admit(gates, SLICES, old, old)["spec"]["devices"][0]["allowMultipleAllocations"]


def test_the_store_uses_optimistic_locking() -> None:
    """An update with a stale resourceVersion fails with a conflict, and an update without changes writes nothing."""
    store = Store()
    made = store.create(CLAIMS, "ns", {"metadata": {"name": "c"}, "spec": {}, "status": {}})
    assert store.update(CLAIMS, "ns", "c", made)["metadata"]["resourceVersion"] == made["metadata"]["resourceVersion"]
    newer = store.update(CLAIMS, "ns", "c", {**made, "status": {"reservedFor": []}}, "status")
    assert newer["metadata"]["generation"] == 1
    with pytest.raises(ApiError, match="cannot be fulfilled"):
        store.update(CLAIMS, "ns", "c", made)


@pytest.mark.parametrize(
    ("text", "printed"),
    [("1.5", "1500m"), ("0.5Gi", "512Mi"), ("3000", "3k"), ("1024", "1024"), ("2048Mi", "2Gi"), ("0.5Ki", "512")],
)
def test_quantities_are_formatted_as_in_the_go_library(text: str, printed: str) -> None:
    """The test vectors come from the Go library."""
    assert quantities.canonical(text) == printed
    assert quantities.parse(text) == quantities.parse(printed)


def test_a_strategic_merge_patch_merges_items_by_their_key() -> None:
    """As with patches from kubectl and Helm, only the named container changes, lists without a merge key are replaced,
    and null removes a field.
    """
    containers = [{"name": "a", "image": "a:1", "args": ["-x"]}, {"name": "b", "image": "b:1"}, {"name": "c"}]
    old = {"spec": {"containers": containers, "nodeSelector": {"x": "y"}}, "rules": [1, 2]}
    changes = [{"name": "b", "image": "b:2"}, {"name": "c", "$patch": "delete"}]
    patch = {
        "spec": {"containers": changes, "$setElementOrder/containers": [{"name": "a"}], "nodeSelector": None},
        "rules": [3],
    }
    merged = {"spec": {"containers": [containers[0], {"name": "b", "image": "b:2"}]}, "rules": [3]}
    assert strategic_merge(old, patch) == merged
    assert strategic_merge({"a": {"b": 1}}, {"a": {"c": 2, "$patch": "replace"}}) == {"a": {"c": 2}}
