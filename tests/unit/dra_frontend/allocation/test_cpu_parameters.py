# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for CPUs: strict, claim over class, for each request by itself."""

from typing import Any

import pytest
from dra_frontend.allocation.cpu_parameters import CpuConfig, cpu_parameters
from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.parameters import read_parameters
from dra_frontend.devices.cpu_groups import DeviceKind
from numa_contract.records import CpuParameters

from tests.rigs.decisions import view
from tests.strategies.claims import cpus, opaque


def wish(*config: dict[str, Any], request: str = "cpus", kind: DeviceKind = DeviceKind.NUMA_NODE) -> CpuParameters:
    """Returns the parameters of one request."""
    stated = read_parameters(view("u", cpus(2, request), cpus(2, "other"), config=config), {"dra.cpu": CpuConfig})
    return cpu_parameters(stated.get(("dra.cpu", request), {}), kind)


def fault(*config: dict[str, Any], kind: DeviceKind = DeviceKind.NUMA_NODE) -> str:
    """Returns the text of the refusal."""
    with pytest.raises(Refused) as caught:
        wish(*config, kind=kind)
    return caught.value.text.removeprefix("request cpus: ")


def raw(parameters: Any) -> dict[str, Any]:
    """Returns an entry with these parameters, whatever they are."""
    entry = opaque({})
    entry["opaque"]["parameters"] = parameters
    return entry


def test_without_parameters_everything_is_the_default() -> None:
    """Nothing has to be given."""
    assert wish() == wish(raw({})) == wish(opaque({})) == CpuParameters()


def test_every_field_arrives() -> None:
    """All fields of the table, with values that are no defaults."""
    given = wish(
        opaque({"fullPhysicalCores": True, "l3": "required", "isolated": "only", "coreType": "performance"}),
        opaque({"sharing": "pod", "quota": "keep"}),
    )
    assert given == CpuParameters(
        full_physical_cores=True, l3="required", isolated="only", core_type="performance", quota="keep"
    )
    assert wish(opaque({"strategy": "spread", "numa": "distribute"})) == CpuParameters(
        strategy="spread", numa="distribute"
    )


def test_the_claim_beats_the_class_field_by_field() -> None:
    """What the claim does not say, the class decides; the order of the list does not matter."""
    class_says = opaque({"strategy": "spread", "l3": "ignore"}, from_class=True)
    claim_says = opaque({"l3": "required"})
    expected = CpuParameters(strategy="spread", l3="required")
    assert wish(class_says, claim_says) == wish(claim_says, class_says) == expected


def test_each_request_has_its_own() -> None:
    """Parameters for another request change nothing; a subrequest is meant by its own name and by its request's."""
    config = (opaque({"strategy": "spread"}, "other"), opaque({"isolated": "never"}, "cpus"))
    assert wish(*config) == CpuParameters(isolated="never")
    assert wish(*config, request="cpus/big") == CpuParameters(isolated="never")
    assert wish(opaque({"l3": "ignore"}, "cpus/big"), request="cpus/big") == CpuParameters(l3="ignore")


def test_parameters_of_other_drivers_are_not_ours() -> None:
    """Whatever they contain."""
    assert wish(opaque({"x": 1}, driver="gpu.example.com")) == wish()


@pytest.mark.fault("cpu peer 9.4.3")
@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"cpuConfig": {}}, "apiVersion: is missing; it must be 'v1alpha1'"),
        ({"apiVersion": "v1", "cpuConfig": {}}, "apiVersion: 'v1': input should be 'v1alpha1'"),
        ({"apiVersion": "v1alpha1", "cpuConfg": {}}, "cpuConfg: unknown field; known are apiVersion, cpuConfig"),
        ({"apiVersion": "v1alpha1", "kind": "X"}, "kind: unknown field"),
        ({"apiVersion": "v1alpha1", "memoryConfig": {}}, "memoryConfig: is for the driver dra.memory"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"FullPhysicalCores": True}}, "known are sharing, cpuset, strategy"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"full_physical_cores": True}}, "unknown field"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"strategy": "best"}}, "cpuConfig.strategy: 'best': input should be"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"fullPhysicalCores": "yes"}}, "cpuConfig.fullPhysicalCores: 'yes'"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"fullPhysicalCores": 1}}, "valid boolean"),
        ({"apiVersion": "v1alpha1", "cpuConfig": {"cpuset": 3}}, "valid string; write it in quotes"),
        ({"apiVersion": "v1alpha1", "cpuConfig": []}, "cpuConfig: must be a map of fields"),
        ({"apiVersion": "v1alpha1", "cpuConfig": None}, "cpuConfig: must be a map of fields"),
        ({"apiVersion": "v1alpha1"}, "cpuConfig: is missing"),
    ],
)
def test_what_is_not_understood_is_refused(parameters: Any, text: str) -> None:
    """Nothing is silently ignored; source and field are named."""
    shown = fault(raw(parameters))
    assert shown.startswith("parameters FromClaim: ")
    assert text in shown


def test_a_class_is_named_as_the_source() -> None:
    """The administrator is told, not the user."""
    assert fault(opaque({"strategy": "x"}, from_class=True)).startswith("parameters FromClass: cpuConfig.strategy: ")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            [opaque({"strategy": "spread"}, from_class=True), opaque({"fullPhysicalCores": True})],
            "parameters FromClass: cpuConfig.strategy: spread contradicts fullPhysicalCores: true (FromClaim)",
        ),
        (
            [opaque({"numa": "distribute", "l3": "required"})],
            "cpuConfig.numa: distribute contradicts l3: required (FromClaim)",
        ),
    ],
)
def test_contradictions_are_refused(config: list[dict[str, Any]], text: str) -> None:
    """Two wishes that cannot both come true are a mistake, not a preference."""
    assert text in fault(*config)


def test_a_claim_may_name_its_cpus_in_machine_mode() -> None:
    """Only there, only by the claim, once for a request, and beside it nothing that chooses CPUs."""
    machine = DeviceKind.MACHINE
    named = opaque({"cpuset": "2-3"}, "cpus")
    assert wish(named, opaque({"quota": "keep", "sharing": "pod"}), kind=machine) == CpuParameters(
        cpuset=frozenset({2, 3}), quota="keep"
    )
    assert "only in groupBy machine, and this node publishes its CPUs by numanode" in fault(named)
    assert "may come from the claim only" in fault(opaque({"cpuset": "2"}, from_class=True), kind=machine)
    assert "cpuConfig.cpuset: '3-1': the range 3-1 runs" in fault(opaque({"cpuset": "3-1"}), kind=machine)
    assert "names no CPU" in fault(opaque({"cpuset": ""}), kind=machine)
    assert "given twice" in fault(named, opaque({"cpuset": "2-3"}), kind=machine)
    for other in ({"strategy": "packed"}, {"l3": "ignore"}, {"fullPhysicalCores": False}):
        assert "excludes cpuset" in fault(named, opaque(other, from_class=True), kind=machine)


def test_single_cpus_are_chosen_by_the_scheduler() -> None:
    """In individual mode only what does not choose CPUs is allowed."""
    kind = DeviceKind.CPU
    assert wish(opaque({"sharing": "pod", "quota": "keep"}), kind=kind) == CpuParameters(quota="keep")
    assert "the scheduler has chosen" in fault(opaque({"strategy": "spread"}), kind=kind)
