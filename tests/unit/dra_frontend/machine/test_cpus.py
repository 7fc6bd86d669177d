# SPDX-License-Identifier: Apache-2.0
"""Discovery of CPUs, cores, packages, L3 groups and core types, rule by rule, on variations of a small machine."""

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import CoreType, DoubtTopic, Machine
from numa_tools.commands.inspect import report

from tests.rigs.trees import Link, MemoryTree, captured, small_machine

CPU = "/sys/devices/system/cpu"
Changes = dict[str, str | None]


def look(changes: Changes) -> Machine:
    """Discovers the small machine with some files changed. Paths are relative to the cpu directory unless absolute."""
    return discover(small_machine().changed({p if p[0] == "/" else f"{CPU}/{p}": t for p, t in changes.items()}))


def each(path: str, *texts: str | None) -> Changes:
    """Returns one file per CPU. If a single string is given, it is the content of all the files."""
    return {f"cpu{cpu}/{path}": texts[cpu % len(texts)] for cpu in range(8)}


def cores(machine: Machine) -> list[list[int]]:
    """Returns the CPU numbers of each core as ``inspect`` reports them."""
    found: list[list[int]] = report(machine)["cores"]
    return found


def test_without_a_cpu_list_the_online_files_are_read() -> None:
    """A CPU without an `online` file cannot be taken offline. All other CPUs report their state in that file. If
    isolcpus= contains the number of a CPU that does not exist, that number is ignored.
    """
    machine = look({"online": None, "cpu1/online": "1\n", "cpu6/online": "0\n", "cpu6/topology": None})
    assert machine.online == {0, 1, 2, 3, 4, 5, 7}
    assert machine.offline == {6}
    assert look({"isolated": "2-3,90\n"}).isolcpus == {2, 3}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"online": "0-3\n"}, "online"),
        ({"online": "0-8\n"}, "online"),
        ({"online": "\n"}, "online"),
        ({"online": "0-7 junk\n"}, "online"),
        ({"cpu5/online": "0\n"}, "online"),
        ({"cpu5/online": "7\n"}, "cpu5/online"),
        ({"online": None, "cpu5/topology": None}, "cpu5/online"),
        ({"isolated": "x"}, "isolated"),
        ({"/sys": None}, ""),
        # If the masks of siblings disagreed, two claims would get CPUs from the same core.
        ({"cpu0/topology/core_cpus": "07\n"}, "cpu1/topology/core_cpus"),
        ({"cpu0/topology/core_cpus": "02\n"}, "cpu0/topology/core_cpus"),
        ({"cpu0/topology/core_cpus": "0c\n"}, "cpu0/topology/core_cpus"),
        ({"cpu0/topology/core_cpus": "\n"}, "cpu0/topology/core_cpus"),
    ],
)
def test_inconsistent_files_about_a_cpu_are_an_error(changes: Changes, path: str) -> None:
    """If two files disagree about a CPU's state or core, or if a file is unreadable, the error names the file."""
    with pytest.raises(HostTreeError) as caught:
        look(changes)
    assert caught.value.path == f"{CPU}/{path}".rstrip("/")


@pytest.mark.parametrize("name", ["core_cpus", "core_cpus_list", "thread_siblings", "thread_siblings_list"])
def test_every_variant_of_the_sibling_files_is_read(name: str) -> None:
    """Old kernels have thread_siblings instead of core_cpus, and some have only the files in list format. All variants
    result in the same cores.
    """
    firsts = [cpu // 2 * 2 for cpu in range(8)]
    texts = [f"{first}-{first + 1}\n" if "list" in name else f"{3 << first:02x}\n" for first in firsts]
    machine = look({**each("topology/core_cpus", None), **each(f"topology/{name}", *texts)})
    assert cores(machine) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("changes", "found", "smt"),
    [
        (each("topology/core_cpus", *["0f"] * 4, *["f0"] * 4), [[0, 1, 2, 3], [4, 5, 6, 7]], True),
        # If only one thread of every core is online, the machine is treated as having no SMT, even if the processor
        # supports it.
        ({"online": "0,2,4,6", **{f"cpu{c}/topology": None for c in (1, 3, 5, 7)}}, [[0], [2], [4], [6]], False),
        # A CPU without a topology directory belongs to the core of the CPUs whose masks contain it.
        ({"cpu3/topology": None}, [[0, 1], [2, 3], [4, 5], [6, 7]], True),
        # If no CPU has a topology directory, each CPU is a core of its own.
        (each("topology", None), [[cpu] for cpu in range(8)], False),
    ],
)
def test_a_core_consists_of_the_cpus_in_its_sibling_lists(changes: Changes, found: list[list[int]], smt: bool) -> None:
    """A core may have any number of threads, not just two."""
    machine = look(changes)
    assert (cores(machine), machine.smt) == (found, smt)
    assert [cpu.core_id == -1 for cpu in machine.cpus.values()] == [
        changes.get(f"cpu{cpu}/topology", "") is None for cpu in machine.cpus
    ]


IDS = "topology/physical_package_id"


@pytest.mark.parametrize(
    ("changes", "second", "doubt"),
    [
        ({"cpu3/topology/package_cpus": "f0\n"}, 1, "cpu3/topology/package_cpus: does not include CPU 3 itself"),
        ({f"cpu2/{IDS}": "1\n"}, 1, f"cpu2/{IDS}: is 1, but CPU 0 of the same package has a different ID"),
        ({"cpu3/topology": None}, 1, ""),
        (each("topology", None), 0, ""),
        # POWER and s390 report -1, and on s390 the same IDs appear in every book, so packages are numbered in the order
        # of their lowest-numbered CPUs.
        (each(IDS, "-1\n"), 1, ""),
        (each(IDS, "5\n"), 1, ""),
        # Without masks, packages are determined by their IDs alone, and the IDs may have gaps.
        ({**each("topology/package_cpus", None), **each(IDS, *["0"] * 4, *["36"] * 4)}, 36, ""),
    ],
)
def test_packages_are_determined_by_masks_and_ids(changes: Changes, second: int, doubt: str) -> None:
    """If the masks contradict each other or the IDs, the IDs are used and a warning is recorded."""
    machine = look(changes)
    packages = [cpu.package for cpu in machine.cpus.values()]
    assert packages == ([0] * 4 + [second] * 4 if "cpu2" not in doubt else [0, 0, 1, 0, 1, 1, 1, 1])
    assert machine.doubts == ({DoubtTopic.SOCKET: f"{CPU}/{doubt}"} if doubt else {})


@pytest.mark.parametrize(
    ("changes", "doubt"),
    [
        (
            each("cache/index3/shared_cpu_map", "03\n", "06\n", "0c\n", "18\n", "30\n", "60\n", "c0\n", "81\n"),
            "includes CPU 1",
        ),
        (each("cache/index3/shared_cpu_map", "x\n"), "'x' is not a CPU mask"),
        (each("cache", None), ""),
        (each("cache/index3/level", "2\n"), ""),
        (each("cache/index3/type", "Instruction\n"), ""),
    ],
)
def test_cpus_without_an_l3_are_not_dropped(changes: Changes, doubt: str) -> None:
    """If the files contradict each other and no CPU set is reported by most of its members, the CPUs have no L3, and a
    warning is recorded.
    """
    machine = look(changes)
    assert [(cpu.l3, cpu.l3_id) for cpu in machine.cpus.values()] == [(None, -1)] * 8
    assert doubt in machine.doubts.get(DoubtTopic.L3, "")


@pytest.mark.parametrize(
    ("file", "text", "doubt"),
    [
        ("shared_cpu_map", "03\n", "includes CPU 0, which another file groups with different CPUs"),
        ("shared_cpu_map", "02\n", "which another file groups with different CPUs"),
        ("shared_cpu_map", "0d\n", "does not include CPU 1 itself"),
        ("shared_cpu_map", "zz\n", "'zz' is not a CPU mask"),
        ("level", "3a\n", "is not a number"),
        ("id", "-4\n", "is not a number"),
    ],
)
def test_a_file_that_contradicts_the_others_leaves_one_cpu_without_an_l3(file: str, text: str, doubt: str) -> None:
    """The CPU set that most of the cache's CPUs report is used, and a warning is recorded."""
    machine = look({f"cpu1/cache/index3/{file}": text})
    expected = [(0, 0), (None, -1), (0, 0), (0, 0), *[(4, 1)] * 4]
    assert [(cpu.l3, cpu.l3_id) for cpu in machine.cpus.values()] == expected
    assert doubt in machine.doubts[DoubtTopic.L3]


def pmus(**cpus: str) -> Changes:
    """Returns a hybrid machine's PMU files."""
    return {f"/sys/devices/{name}/cpus": text for name, text in cpus.items()}


@pytest.mark.parametrize(
    ("changes", "small"),
    [
        (pmus(cpu_core="0-3\n", cpu_atom="4-7\n"), 4),
        (pmus(cpu_core="0-3\n", cpu_atom="4-5\n", cpu_lowpower="6-7\n"), 4),
        # A cpu_core PMU alone does not distinguish core types.
        (pmus(cpu_core="0-7\n"), 8),
        # On Arm, a core has a different type if its capacity is far below the highest capacity. Favoured cores, which
        # are only a few percent faster than the others, have the same type.
        (each("cpu_capacity", "1024", "1017", "997", "1024", "731", "718", "250", "446"), 4),
        (each("cpu_capacity", "1024\n"), 8),
        # If the kernel reports neither core types nor capacities, base frequencies distinguish core types (i9-13900),
        # whatever the maximum frequencies are.
        (
            each("cpufreq/base_frequency", *["2000000"] * 4, *["1500000"] * 4)
            | each("cpufreq/cpuinfo_max_freq", "5000000"),
            4,
        ),
        (each("acpi_cppc/nominal_freq", *["2500"] * 4, *["1800"] * 4), 4),
        # If base frequencies are missing or do not differ, maximum frequencies distinguish core types (i9-12900H).
        # Favoured cores (i7-6950X) do not have a different type.
        (each("cpufreq/cpuinfo_max_freq", *["5000000"] * 4, *["3800000"] * 4), 4),
        (each("cpufreq/cpuinfo_max_freq", "4000000", *["3500000"] * 7), 8),
        (each("cpufreq/base_frequency", *["2450000"] * 4, *["2445000"] * 4), 8),
        # A frequency is ignored if one of the CPUs does not report it, or if the CPUs report a type or a capacity.
        (each("cpufreq/base_frequency", *["2000000"] * 4, *["1500000"] * 3, "0"), 8),
        (each("cpu_capacity", "1024") | each("cpufreq/cpuinfo_max_freq", *["5000000"] * 4, *["3000000"] * 4), 8),
    ],
)
def test_core_types(changes: Changes, small: int) -> None:
    """The machine has CPUs 0-7. Those from number ``small`` upwards are E-cores, so if ``small`` is 8, all CPUs have
    the same type.
    """
    expected = {"p-core": [*range(small)], "e-core": [*range(small, 8)]} if small < 8 else {"standard": [*range(8)]}
    assert report(look(changes))["coreTypes"] == expected


def test_a_captured_hybrid_machine_with_its_pmus() -> None:
    """Performance cores have two threads and efficiency cores have one. Core type and SMT are determined per core."""
    files = pmus(cpu_core="0-11\n", cpu_atom="12-19\n")
    machine = discover(captured("20em64t-hybrid-1p6c2t+2ca4co1t").changed(files))
    assert {cpu.id for cpu in machine.cpus.values() if cpu.core_type == CoreType.EFFICIENCY} == set(range(12, 20))
    assert len(cores(machine)) == 14
    assert machine.smt


def test_a_symlink_is_read_like_any_other_entry() -> None:
    """If a CPU's node has no directory, the CPU's node link still names the node, which then has no memory."""
    tree = small_machine().changed({"/sys/devices/system/node/node0": None, "/sys/devices/system/node/online": "1\n"})
    linked = MemoryTree({**tree.files, **{f"{CPU}/cpu{cpu}/node0": Link("../../node/node0") for cpu in range(4)}})
    machine = discover(linked)
    assert [cpu.numa_node for cpu in machine.cpus.values()] == [0] * 4 + [1] * 4
    assert (machine.numa_nodes[0].online, machine.numa_nodes[0].memory_bytes) == (False, 0)
    assert [node["id"] for node in report(machine)["numaNodes"]] == [1]
    assert {cpu.numa_node for cpu in discover(tree).cpus.values()} == {1}
