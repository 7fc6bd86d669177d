# SPDX-License-Identifier: Apache-2.0
"""The report of ``dra-frontend inspect`` and its table."""

import json

import yaml
from dra_frontend.commands.forms import structured
from dra_frontend.commands.inspect import machine_table, report
from dra_frontend.machine.discovery import discover

from tests.rigs.trees import captured, small_machine


def test_the_report_tells_more_than_hwloc() -> None:
    """Free and surplus hugepages, distances, ids, offline and isolated CPUs are there, under keys of their own."""
    found = report(discover(small_machine().changed({"/sys/devices/system/cpu/isolated": "3\n"})))
    more = {
        "isolated": [3],
        "offline": [],
        "hugepagesFree": {"0": {"2097152": 200, "1073741824": 0}, "1": {"2097152": 200, "1073741824": 1}},
        "hugepagesSurplus": {str(node): {"2097152": 0, "1073741824": 0} for node in range(2)},
        "distances": {"0": {"0": 10, "1": 21}, "1": {"0": 21, "1": 10}},
        "basePageBytes": 4096,
        "packageIds": [0, 1],
        "l3Ids": {"0": 0, "4": 1},
        "coreTypes": {"standard": list(range(8))},
        "smt": True,
    }
    assert {key: found[key] for key in more} == more


def test_json_and_yaml_say_the_same() -> None:
    """Both forms of the report hold the same values, also with page sizes as keys."""
    found = report(discover(captured("memorysidecaches")))
    assert json.loads(structured(found, "json")) == yaml.safe_load(structured(found, "yaml")) == found


def test_the_table() -> None:
    """One row for each NUMA node, aligned, with everything that matters for placing a workload."""
    tree = small_machine().changed({"/sys/devices/system/cpu/isolated": "3\n"})
    assert machine_table(discover(tree)).splitlines() == [
        "CPUs:       8 online (0-7)",
        "Topology:   2 packages, 4 cores, SMT on",
        "Isolated:   3",
        "Memory:     8 GiB",
        "Base page:  4 KiB",
        "",
        "NODE  CPUS  CORES  L3  MEMORY  2Mi FREE/TOTAL  1Gi FREE/TOTAL  DISTANCES",
        "0     0-3   2      1   4 GiB   200/256         0/0             0:10 1:21",
        "1     4-7   2      1   4 GiB   200/256         1/1             0:21 1:10",
    ]


def test_the_table_of_an_uneven_machine() -> None:
    """Core types and offline CPUs get a line where there are any; a node without CPUs or hugepages shows dashes."""
    node = "/sys/devices/system/node"
    tree = small_machine().changed(
        {
            "/sys/devices/cpu_core/cpus": "0-3\n",
            "/sys/devices/cpu_atom/cpus": "4-7\n",
            "/sys/devices/system/cpu/cpu8/online": "0\n",
            f"{node}/online": "0-2\n",
            f"{node}/node0/distance": "10 21 28\n",
            f"{node}/node1/distance": "21 10 28\n",
            f"{node}/node2/cpumap": "00\n",
            f"{node}/node2/meminfo": "Node 2 MemTotal: 1500000 kB\n",
        }
    )
    lines = machine_table(discover(tree)).splitlines()
    assert "Core types: p-core 0-3, e-core 4-7" in lines
    assert "Offline:    8" in lines
    assert lines[-1] == "2     -     0      0   1.4 GiB  -               -               -"
