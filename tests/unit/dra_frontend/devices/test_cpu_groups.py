# SPDX-License-Identifier: Apache-2.0
"""Grouping of CPUs into devices."""

import pytest
from dra_frontend.devices.cpu_groups import cpu_groups
from dra_frontend.devices.model import CpuDevice
from dra_frontend.machine.model import Machine

from tests.strategies.machines import Core, assemble, hybrid, machine


def groups(found: Machine, group_by: str) -> dict[str, CpuDevice]:
    """Returns the CPU groups by name."""
    return {group.name: group for group in cpu_groups(found, "grouped", group_by)}


NODE = dict.fromkeys(
    ("resource.kubernetes.io/numaNode", "dra.cpu/numaNodeID", "dra.net/numaNode", "dra.cpu/nearestNumaNode"), 1
)
L3 = {**NODE, "dra.cpu/socketID": 0, "dra.cpu/coreType": "standard", "dra.cpu/cacheL3ID": 4}
SOCKET = {"dra.cpu/socketID": 1}
EFFICIENT = {"dra.cpu/coreType": "e-core"}
MIXED = assemble(hybrid(2, 1, 1), adjacent=True)


@pytest.mark.parametrize(
    ("group_by", "found", "names", "cpus", "attributes"),
    [
        ("socket", machine(2, 2), ["cpudevsocket000", "cpudevsocket001"], {4, 5, 6, 7, 12, 13, 14, 15}, SOCKET),
        ("machine", machine(), ["cpudevmachine"], set(range(8)), {}),
        ("l3", machine(1, 2, 2, 2, 2), [f"cpudevl300{n}" for n in (0, 2, 6, 4)], {4, 5, 12, 13}, L3),
        ("coretype", MIXED, ["cpudevpcore", "cpudevecore"], {4, 5, 6, 7, 8}, EFFICIENT),
        ("coretype", machine(), ["cpudevmachine"], set(range(8)), {"dra.cpu/coreType": "standard"}),
    ],
)
def test_a_group_publishes_the_attributes_that_all_of_its_cpus_share(
    group_by: str, found: Machine, names: list[str], cpus: set[int], attributes: dict[str, int | str]
) -> None:
    """A socket that spans several NUMA nodes has no NUMA attribute."""
    made = groups(found, group_by)
    assert set(made) == set(names)
    assert made[names[-1]].cpus == cpus
    assert made[names[-1]].attributes.items() >= attributes.items()


def test_an_l3_that_spans_numa_nodes_has_no_numa_attribute() -> None:
    """With sub-NUMA clusters, one L3 spans several NUMA nodes. An attribute that applies to only some of a device's
    CPUs is not published.
    """
    (group,) = groups(assemble([Core(node=0), Core(node=1)]), "l3").values()
    assert not [name for name in group.attributes if "numaNode" in name or "NumaNode" in name]
    (mixed,) = groups(assemble(hybrid(low_power=0)), "l3").values()
    assert "dra.cpu/coreType" not in mixed.attributes


def test_cpus_without_an_l3_are_offered_by_numa_node() -> None:
    """CPUs without a cache directory are grouped by the next larger unit instead of being dropped."""
    found = groups(assemble(hybrid(2, 1, 2), adjacent=True), "l3")
    assert {name: sorted(group.cpus) for name, group in found.items()} == {
        "cpudevl3000": list(range(8)),
        "cpudevnuma000": [8, 9],
    }
    assert found["cpudevnuma000"].attributes["dra.cpu/cacheL3ID"] == -1


def test_a_node_that_spans_sockets_always_names_the_same_socket() -> None:
    """The device names the socket of its lowest-numbered CPU rather than an arbitrary socket."""
    found = assemble([Core(package=1), Core(package=0)])
    (group,) = groups(found, "numanode").values()
    assert group.attributes["dra.cpu/socketID"] == 1
