# SPDX-License-Identifier: Apache-2.0
"""Attributes that tell a custom scheduler which CPUs a device has and which of them share a core."""

from typing import Any

import pytest
from dra_frontend.devices.cpu_lists import CPU_IDS, SMT_LAYOUT, smt_layout
from dra_frontend.devices.inventory import Inventory, MismatchKind, build_inventory
from dra_frontend.machine.model import Machine
from hypothesis import given
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list

from tests.strategies.machines import Core, assemble, machine, machines

EVERY_FOURTH = assemble([Core(node=number % 4, threads=1) for number in range(128)])
"""A machine whose CPUs are numbered round-robin across its NUMA nodes."""


def offered(found: Machine, **keys: Any) -> Inventory:
    """Returns the devices that a node publishes for an external allocator."""
    return build_inventory(found, Config(allocator="external", **keys), "n")


def decoded(layout: str) -> dict[int, int]:
    """Returns each CPU's sibling as a reader decodes it from the attributes. A CPU without a sibling maps to itself."""
    other: dict[int, int] = {}
    for entry in layout.split(";"):
        cpus, _, stride = entry.partition(">")
        for cpu in sorted(parse_cpu_list(cpus)):
            if cpu not in other:
                other[cpu] = cpu + int(stride or 0)
                other[other[cpu]] = cpu
    return other


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (machine(), "0-7>4"),
        (machine(threads=1), "0-3"),
        (assemble([Core(threads=2)] * 4, adjacent=True), "0-7>1"),
        (assemble([*[Core(threads=2)] * 4, *[Core(threads=1)] * 4], adjacent=True), "0-7>1;8-11"),
        (machine(offline=frozenset({7})), "0-2,4-6>4;3"),
        (machine(threads=4), ""),
    ],
)
def test_siblings_are_encoded_by_their_distance(found: Machine, expected: str) -> None:
    """Each pair of siblings is encoded by the distance between their numbers, and CPUs without a sibling come last. A
    layout that this format cannot express is not published.
    """
    assert smt_layout(found) == expected


@given(machines())
def test_the_layout_can_be_decoded(found: Machine) -> None:
    """However the CPUs are numbered, decoding returns each CPU's own sibling, or none if it has none."""
    layout = smt_layout(found)
    cores = [
        {one for one in found.cpus if found.cpus[one].core == core} for core in {c.core for c in found.cpus.values()}
    ]
    if max(map(len, cores)) > 2:
        assert layout == ""
    else:
        assert {frozenset(pair) for pair in decoded(layout).items()} == {frozenset(core) for core in cores}


def test_devices_list_their_cpus_for_an_external_allocator() -> None:
    """The devices list the CPUs that claims can get. The layout covers the whole machine and is the same on every
    device.
    """
    inventory = offered(machine(), reserved_cpus=frozenset({0}))
    said = {d.name: (d.attributes[CPU_IDS], d.attributes[SMT_LAYOUT]) for d in inventory.pools[0].devices}
    assert said == {"cpudevnuma000": ("1,4-5", "0-7>4"), "cpudevnuma001": ("2-3,6-7", "0-7>4")}
    assert inventory.warnings == ()


@pytest.mark.parametrize("config", [Config(), Config(allocator="external", cpu_device_mode="individual")])
def test_other_configurations_publish_no_cpu_lists(config: Config) -> None:
    """A device with a single CPU already has an attribute with the CPU's number. If this driver chooses the claims'
    CPUs, no scheduler needs the lists.
    """
    for device in build_inventory(machine(), config, "n").pools[0].devices:
        assert not {CPU_IDS, SMT_LAYOUT} & device.attributes.keys()


def test_a_list_that_is_too_long_is_left_out_with_a_warning() -> None:
    """The server rejects a slice with a string longer than 64 bytes, and a truncated CPU list would be incorrect."""
    inventory = offered(EVERY_FOURTH)
    assert not any(CPU_IDS in device.attributes for device in inventory.pools[0].devices)
    assert {one.kind for one in inventory.mismatches} == {MismatchKind.TOO_LONG}
    (warning,) = [one for one in inventory.warnings if CPU_IDS in one]
    assert "cpudevnuma000, cpudevnuma001" in warning
    assert "groupBy with smaller groups" in warning
    (warning,) = [one for one in offered(machine(threads=4)).warnings if SMT_LAYOUT in one]
    assert "cores with up to 2 threads" in warning
