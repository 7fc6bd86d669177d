# SPDX-License-Identifier: Apache-2.0
"""Claims counted against the node (KEP-5517): the form by release, and what a device says in it."""

from typing import Any

import pytest
from dra_frontend.devices.allocatable import MappingForm, mapping_form
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import Machine
from dra_frontend.publishing.compare import canonical, differences
from hypothesis import given, settings
from numa_contract.config import Config

from tests.fakes.apiserver_rules import GATES_OF_1_36, admit
from tests.fakes.apiserver_store import ApiError, Resource
from tests.fakes.trees import small_machine
from tests.strategies.machines import machine, machines

SLICES = Resource("resource.k8s.io", "resourceslices", "ResourceSlice")
GATES = {**GATES_OF_1_36, "DRANodeAllocatableResources": True}
RELEASES = {"1.36": MappingForm.V1_36, "1.37": MappingForm.V1_37}


def documents(found: Machine, mapping: MappingForm | None, **config: Any) -> list[dict[str, Any]]:
    """All slices of a machine."""
    pools = build_inventory(found, Config(**config), "n").pools
    return [one for pool in pools for one in slice_documents(pool, "n", mapping=mapping)]


def said(mapping: MappingForm | None, **config: Any) -> dict[str, Any]:
    """What each device of a small machine with hugepages says, by name."""
    slices = documents(discover(small_machine()), mapping, **config)
    return {d["name"]: d.get(mapping or "") for one in slices for d in one["spec"]["devices"]}


def test_the_release_decides_the_form() -> None:
    """1.36 has one field, 1.37 another in its place, and no release knows both; before, there is none."""
    forms = {
        version: mapping_form(version) for version in [(1, 34), (1, 35), (1, 36), (1, 37), (1, 40), (2, 0), (0, 0)]
    }
    assert [form and form.name for form in forms.values()] == [None, None, "V1_36", "V1_37", "V1_37", "V1_37", None]


def test_amounts_are_those_of_the_capacity() -> None:
    """CPUs, bytes of memory and bytes of hugepages by size, one to one, by the name of the device's own capacity."""
    for form, entry in (
        (MappingForm.V1_36, lambda key: {"capacityKey": key, "allocationMultiplier": "1"}),
        (MappingForm.V1_37, lambda key: {"mapping": {"capacityKey": key, "capacityMultiplier": "1"}}),
    ):
        found = said(form)
        assert found["cpudevnuma000"] == {"cpu": entry("dra.cpu/cpu")}
        assert found["memory-numa000"] == {"memory": entry("size")}
        assert found["hugepages-2m-numa000"] == {"hugepages-2Mi": entry("size")}
        assert found["hugepages-1g-numa001"] == {"hugepages-1Gi": entry("size")}


def test_a_single_cpu_counts_by_the_device() -> None:
    """It has no capacity: each device is one CPU."""
    assert said(MappingForm.V1_36, cpu_device_mode="individual")["cpudev001"] == {"cpu": {"allocationMultiplier": "1"}}
    by_device = {"cpu": {"mapping": {"deviceMultiplier": "1"}}}
    assert said(MappingForm.V1_37, cpu_device_mode="individual")["cpudev001"] == by_device


def test_off_there_is_no_field() -> None:
    """Opt-in: without it slices are as before."""
    for one in documents(machine(), None):
        assert not any(form in device for device in one["spec"]["devices"] for form in MappingForm)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("mode", ["grouped", "individual"])
@settings(max_examples=8)
@given(found=machines())
def test_every_machine_passes_the_rules_of_both_releases(version: str, mode: str, found: Machine) -> None:
    """With the gate on nothing is changed by the server; one of the other release drops the field it does not know."""
    form = RELEASES[version]
    for one in documents(found, form, cpu_device_mode=mode)[:3]:
        sent = {**one, "metadata": {"name": "s"}}
        stored = admit(GATES, SLICES, sent, None, version)
        assert canonical(stored["spec"]) == canonical(one["spec"])
        other = admit(GATES, SLICES, sent, None, {"1.36": "1.37", "1.37": "1.36"}[version])
        lost = differences(one["spec"], other["spec"])
        assert set(lost) == ({f"devices[*].{form}"} if one["spec"]["devices"] else set())


@pytest.mark.parametrize("form", MappingForm)
def test_multipliers_are_compared_by_value(form: MappingForm) -> None:
    """The server may spell a quantity its own way; that is no change."""
    (one, *_) = documents(machine(), form)
    text = str(canonical(one["spec"]))
    respelt = {**one["spec"], "devices": [_respelt(device, form) for device in one["spec"]["devices"]]}
    assert str(canonical(respelt)) == text


def _respelt(device: dict[str, Any], form: MappingForm) -> dict[str, Any]:
    def spell(value: Any) -> Any:
        return (
            {k: spell(v) for k, v in value.items()} if isinstance(value, dict) else "1000m" if value == "1" else value
        )

    return {**device, form: spell(device[form])}


@pytest.mark.parametrize(
    ("version", "field", "entry"),
    [
        ("1.36", MappingForm.V1_36, {}),
        ("1.36", MappingForm.V1_36, {"capacityKey": "other"}),
        ("1.36", MappingForm.V1_36, {"allocationMultiplier": "0"}),
        ("1.37", MappingForm.V1_37, {}),
        ("1.37", MappingForm.V1_37, {"mapping": {"capacityKey": "dra.cpu/cpu"}}),
        ("1.37", MappingForm.V1_37, {"mapping": {"capacityMultiplier": "1"}}),
        ("1.37", MappingForm.V1_37, {"mapping": {"deviceMultiplier": "-1"}}),
    ],
)
def test_the_stand_in_refuses_what_the_server_refuses(version: str, field: str, entry: dict[str, Any]) -> None:
    """Else the tests above would prove nothing."""
    (one, *_) = documents(machine(), None)
    one["metadata"] = {"name": "s"}
    one["spec"]["devices"][0][field] = {"cpu": entry}
    with pytest.raises(ApiError, match="cpu"):
        admit(GATES, SLICES, one, None, version)
