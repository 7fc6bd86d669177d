# SPDX-License-Identifier: Apache-2.0
"""CPUs, cores, packages, L3 groups and core types, rule by rule on small changes of a small machine."""

import pytest
from dra_frontend.commands.inspect import report
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import CoreType, Machine

from tests.rigs.trees import Link, MemoryTree, captured, small_machine

CPU = "/sys/devices/system/cpu"


def look(**changes: str | None) -> Machine:
    """Discovers the small machine with files below the cpu directory changed; ``__`` stands for a slash."""
    return discover(
        small_machine().changed({f"{CPU}/{path.replace('__', '/')}": text for path, text in changes.items()})
    )


def cores(machine: Machine) -> list[list[int]]:
    """Returns the cores as the report has them."""
    found: list[list[int]] = report(machine)["cores"]
    return found


def test_without_a_list_the_cpus_tell_themselves() -> None:
    """Kernels without cpu/online: a CPU is online unless its own file says 0; without a file it cannot be unplugged."""
    machine = look(online=None, cpu1__online="1\n", cpu6__online="0\n", cpu6__topology=None)
    assert machine.online == {0, 1, 2, 3, 4, 5, 7}
    assert machine.offline == {6}


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"online": "0-3\n"}, "online"),
        ({"online": "0-8\n"}, "online"),
        ({"online": "\n"}, "online"),
        ({"online": "0-7 junk\n"}, "online"),
        ({"cpu5__online": "0\n"}, "online"),
        ({"cpu5__online": "7\n"}, "cpu5/online"),
        ({"online": None, "cpu5__topology": None}, "cpu5/online"),
        ({"isolated": "x"}, "isolated"),
    ],
)
def test_no_cpu_goes_missing_unseen(changes: dict[str, str | None], path: str) -> None:
    """Where two files differ whether a CPU is online, or one is unreadable, the file is named."""
    with pytest.raises(HostTreeError) as caught:
        look(**changes)
    assert caught.value.path == f"{CPU}/{path}"


def test_an_empty_root_is_no_machine() -> None:
    """A wrong host root is told as such."""
    with pytest.raises(HostTreeError, match="has no cpu directory"):
        discover(MemoryTree({}))


def test_isolated_cpus_are_online_ones() -> None:
    """isolcpus= may name CPUs that are not there."""
    assert look(isolated="2-3,90\n").isolated == {2, 3}


@pytest.mark.parametrize("name", ["core_cpus", "core_cpus_list", "thread_siblings", "thread_siblings_list"])
def test_every_name_of_the_sibling_files_is_read(name: str) -> None:
    """Old kernels have thread_siblings, some only the list; all tell the same cores."""
    changes: dict[str, str | None] = {}
    for cpu in range(8):
        changes[f"cpu{cpu}__topology__core_cpus"] = None
    for cpu in range(8):
        first = cpu // 2 * 2
        changes[f"cpu{cpu}__topology__{name}"] = f"{first}-{first + 1}\n" if "list" in name else f"{3 << first:02x}\n"
    assert cores(look(**changes)) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_the_core_of_a_machine_with_smt_4_is_its_four_threads() -> None:
    """Nothing assumes two threads in a core."""
    changes = {f"cpu{cpu}__topology__core_cpus": f"{0xF << cpu // 4 * 4:02x}" for cpu in range(8)}
    machine = look(**changes)
    assert cores(machine) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert machine.smt


def test_smt_is_off_where_no_core_has_two_online_threads() -> None:
    """smt tells what claims can get, not what the processor could do."""
    machine = look(online="0,2,4,6\n", **{f"cpu{cpu}__topology": None for cpu in (1, 3, 5, 7)})
    assert cores(machine) == [[0], [2], [4], [6]]
    assert not machine.smt


def test_a_cpu_without_topology_joins_those_that_name_it() -> None:
    """A CPU whose own topology is missing keeps its core and its package by its siblings' files."""
    machine = look(cpu3__topology=None)
    assert cores(machine) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert machine.cpus[3].package == 0
    assert machine.cpus[3].core_id == -1


def test_without_any_topology_each_cpu_is_a_core_of_one_package() -> None:
    """Kernels that say nothing give single cores and package 0; nothing is dropped."""
    machine = look(**{f"cpu{cpu}__topology": None for cpu in range(8)})
    assert cores(machine) == [[cpu] for cpu in range(8)]
    assert {cpu.package for cpu in machine.cpus.values()} == {0}


@pytest.mark.parametrize("mask", ["07", "02", "0c", ""])
def test_siblings_that_disagree_are_an_error(mask: str) -> None:
    """A sibling mask that the siblings do not share would give one core to two claims."""
    with pytest.raises(HostTreeError, match="topology/core_cpus"):
        look(cpu0__topology__core_cpus=f"{mask}\n")


@pytest.mark.fault("frontend A20")
def test_an_odd_mask_of_a_socket_leaves_the_ids() -> None:
    """Packages are told by two kinds of file: where the masks contradict each other the ids tell, and it is noted."""
    machine = look(cpu3__topology__package_cpus="f0\n")
    assert [cpu.package for cpu in machine.cpus.values()] == [0] * 4 + [1] * 4
    assert machine.doubts == {"socket": f"{CPU}/cpu3/topology/package_cpus: does not name CPU 3 itself"}
    assert (
        look(cpu2__topology__physical_package_id="1\n")
        .doubts["socket"]
        .startswith(f"{CPU}/cpu2/topology/physical_package_id: says 1, but CPU 0 of the same package")
    )


@pytest.mark.fault("frontend A20")
def test_an_odd_mask_of_a_cache_leaves_no_l3() -> None:
    """Which CPUs share an L3 is told in one way only; where that is not true no CPU has one, and all stay."""
    machine = look(cpu1__cache__index3__shared_cpu_map="03\n")
    assert {(cpu.l3, cpu.l3_id) for cpu in machine.cpus.values()} == {(None, -1)}
    assert "names CPU 0, which goes with other CPUs" in machine.doubts["l3"]


def test_packages_whose_ids_say_nothing_are_numbered() -> None:
    """POWER and s390 give -1, s390 repeats ids in each book: packages are then numbered by their lowest CPU."""
    minus = look(**{f"cpu{cpu}__topology__physical_package_id": "-1\n" for cpu in range(8)})
    same = look(**{f"cpu{cpu}__topology__physical_package_id": "5\n" for cpu in range(8)})
    for machine in (minus, same):
        assert [cpu.package for cpu in machine.cpus.values()] == [0] * 4 + [1] * 4


def test_without_masks_the_package_id_groups() -> None:
    """A kernel without package masks still has ids; they are kept as they are, gaps and all."""
    changes: dict[str, str | None] = {f"cpu{cpu}__topology__package_cpus": None for cpu in range(8)}
    changes |= {f"cpu{cpu}__topology__physical_package_id": f"{36 * (cpu // 4)}" for cpu in range(8)}
    assert [cpu.package for cpu in look(**changes).cpus.values()] == [0] * 4 + [36] * 4


def test_cpus_without_an_l3_have_none_and_stay() -> None:
    """No cache directory, no level 3, or an instruction cache of level 3: no L3, and the CPU stays."""
    changes: dict[str, str | None] = {f"cpu{cpu}__cache": None for cpu in (0, 1)}
    changes |= {f"cpu{cpu}__cache__index3__level": "2\n" for cpu in (2, 3)}
    changes |= {f"cpu{cpu}__cache__index3__type": "Instruction\n" for cpu in (4, 5, 6, 7)}
    machine = look(**changes)
    assert [(cpu.l3, cpu.l3_id) for cpu in machine.cpus.values()] == [(None, -1)] * 8


def test_intel_core_types() -> None:
    """cpu_core and cpu_atom tell the types; cpu_lowpower are small cores, too; a lone cpu_core tells nothing apart."""
    tree = small_machine()
    hybrid = discover(tree.changed({"/sys/devices/cpu_core/cpus": "0-3\n", "/sys/devices/cpu_atom/cpus": "4-7\n"}))
    assert report(hybrid)["coreTypes"] == {"p-core": [0, 1, 2, 3], "e-core": [4, 5, 6, 7]}
    three = {
        "/sys/devices/cpu_core/cpus": "0-3\n",
        "/sys/devices/cpu_atom/cpus": "4-5\n",
        "/sys/devices/cpu_lowpower/cpus": "6-7\n",
    }
    assert report(discover(tree.changed(three)))["coreTypes"] == {"p-core": [0, 1, 2, 3], "e-core": [4, 5, 6, 7]}
    alone = discover(tree.changed({"/sys/devices/cpu_core/cpus": "0-7\n"}))
    assert {cpu.core_type for cpu in alone.cpus.values()} == {CoreType.STANDARD}


def test_arm_core_types() -> None:
    """Capacities far below the biggest are e-cores; favoured cores, some percent faster, are not another kind."""
    capacities = [1024, 1017, 997, 1024, 731, 718, 250, 446]
    machine = look(**{f"cpu{cpu}__cpu_capacity": f"{value}\n" for cpu, value in enumerate(capacities)})
    assert report(machine)["coreTypes"] == {"p-core": [0, 1, 2, 3], "e-core": [4, 5, 6, 7]}
    even = look(**{f"cpu{cpu}__cpu_capacity": "1024\n" for cpu in range(8)})
    assert report(even)["coreTypes"] == {"standard": list(range(8))}


def test_a_captured_hybrid_machine_with_its_pmus() -> None:
    """Performance cores with two threads and efficiency cores with one: types and SMT per core are kept apart."""
    pmus = {"/sys/devices/cpu_core/cpus": "0-11\n", "/sys/devices/cpu_atom/cpus": "12-19\n"}
    machine = discover(captured("20em64t-hybrid-1p6c2t+2ca4co1t").changed(dict(pmus)))
    assert {cpu.id for cpu in machine.cpus.values() if cpu.core_type == CoreType.EFFICIENCY} == set(range(12, 20))
    assert len(cores(machine)) == 14
    assert machine.smt


def test_a_link_is_an_entry_like_any_other() -> None:
    """The node link of a CPU whose node has no directory names its node, which has no memory."""
    tree = small_machine().changed({"/sys/devices/system/node/node0": None, "/sys/devices/system/node/online": "1\n"})
    linked = MemoryTree({**tree.files, **{f"{CPU}/cpu{cpu}/node0": Link("../../node/node0") for cpu in range(4)}})
    machine = discover(linked)
    assert [cpu.numa_node for cpu in machine.cpus.values()] == [0] * 4 + [1] * 4
    assert not machine.numa_nodes[0].online
    assert machine.numa_nodes[0].memory_bytes == 0
    assert [node["id"] for node in report(machine)["numaNodes"]] == [1]
    assert {cpu.numa_node for cpu in discover(tree).cpus.values()} == {1}
