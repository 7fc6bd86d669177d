# SPDX-License-Identifier: Apache-2.0
"""Hardware errors that the kernel counts: they are read from sysfs, attributed to NUMA nodes and CPUs, and turned into
faults.
"""

from dataclasses import replace

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.errors import ErrorCounter, read_errors
from dra_frontend.machine.faults import ErrorRates
from dra_frontend.machine.file_tree import Reader
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import HardwareErrors

from tests.rigs.trees import MemoryTree, captured, edac, small_machine

EIGHT_NODES = "48amd64-4pa2n6c-sparse"
"""Four sockets with two NUMA nodes each."""


def counters(tree: MemoryTree) -> dict[str, ErrorCounter]:
    """Returns a machine's error counters by source."""
    found, problems = read_errors(Reader(tree), discover(tree))
    assert problems == {}
    return {one.source: one for one in found}


def nodes(tree: MemoryTree, name: str, label: str = "", number: int = 1) -> set[int]:
    """Returns the NUMA nodes to which a controller's errors may belong."""
    return set(counters(tree.changed(edac(number, name, label)))[f"mc{number}"].numa_nodes)


def test_a_machine_without_counters_has_no_errors() -> None:
    """Virtual machines have no EDAC, and older kernels have no page counters. Neither is an error."""
    assert counters(small_machine()) == {}


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("Broadwell SrcID#1_Ha#0", ""),
        ("Intel_10nm Socket#0 IMC#1", "CPU_SrcID#1_MC#1_Chan#0_DIMM#0"),
        ("F17h_M30h", "mc#1csrow#0channel#0"),
        ("F19h", ""),
        ("F1Ah_M11h", ""),
    ],
)
def test_a_controllers_socket_is_derived_from_its_driver(name: str, label: str) -> None:
    """If the socket has a single NUMA node, the errors belong to that node. If the socket has several nodes, the errors
    may belong to any of these nodes, since sysfs does not report which one.
    """
    assert nodes(small_machine(), name, label) == {1}
    sockets = discover(captured(EIGHT_NODES))
    assert nodes(captured(EIGHT_NODES), name, label) == {
        cpu.numa_node for cpu in sockets.cpus.values() if cpu.package == 1
    }
    assert len(nodes(captured(EIGHT_NODES), name, label)) == 2


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("ghes_edac", "DIMM 3"),
        ("F17h", ""),
        ("MI300A", ""),
        ("Intel_10nm Socket#1 IMC#1", "labelled by the operator"),
        ("Intel_10nm Socket#1 IMC#8", "CPU_SrcID#1_HBMC#0_Chan#0"),
        ("Broadwell SrcID#7_Ha#0", ""),
    ],
)
def test_an_unknown_controllers_errors_may_belong_to_any_node(name: str, label: str) -> None:
    """On first-generation Zen, a die is not a socket. Some firmware exposes one controller for all memory, and HBM may
    form a separate NUMA node.
    """
    assert nodes(small_machine(), name, label) == {0, 1}


def test_memory_outside_all_numa_nodes_is_left_out() -> None:
    """The HBM on an MI200 accelerator has error counters like a memory controller's, but is not system memory."""
    assert counters(small_machine().changed(edac(1, "MI200", ue=5))) == {}


def test_the_message_names_controller_nodes_and_dimm() -> None:
    """The DIMM's label is the one printed on the board, so a technician can find the DIMM. Strings from the firmware
    stay on one line.
    """
    label = "CPU_SrcID#0_MC#0_Chan#0_DIMM#0"
    (one,) = counters(captured(EIGHT_NODES).changed(edac(0, "Skylake Socket#0 IMC#0", label, ue=2))).values()
    named = f"memory controller mc0 ('Skylake Socket#0 IMC#0') of one of the NUMA nodes 0-1, DIMM '{label}'"
    assert (one.description, one.uncorrected) == (named, 2)
    (one,) = counters(small_machine().changed(edac(0, "x\ny", "a\nb", ce=1))).values()
    assert "\n" not in one.description


def test_lost_pages_and_cpu_errors_are_counted_by_location() -> None:
    """The kernel counts poisoned pages per NUMA node, and some Arm kernels count cache errors per CPU."""
    node, cpu = "/sys/devices/system/node/node1/memory_failure/total", "/sys/devices/system/edac/cpu/cpu5"
    found = counters(small_machine().changed({node: "3\n", f"{cpu}/ce_count": "7\n", f"{cpu}/ue_count": "0\n"}))
    assert found["node1"] == ErrorCounter("node1", "pages of NUMA node 1", 0, 3, frozenset({1}))
    assert found["cpu5"] == ErrorCounter("cpu5", "caches of CPU 5", 7, 0, cpus=frozenset({5}))


def test_a_negative_counter_is_read_as_a_large_number() -> None:
    """The kernel prints the counter's 32 bits as a signed number."""
    (one,) = counters(small_machine().changed(edac(0, "F19h", ce=-1))).values()
    assert one.corrected == 2**32 - 1


def test_a_damaged_counter_does_not_hide_others() -> None:
    """Each counter is read separately, and the error names the counter's file."""
    tree = small_machine().changed(edac(0, "F19h") | edac(1, "F19h", ue=1))
    damaged = tree.changed({"/sys/devices/system/edac/mc/mc0/ce_count": "many"})
    found, problems = read_errors(Reader(damaged), discover(damaged))
    assert [one.source for one in found] == ["mc1"]
    assert "/sys/devices/system/edac/mc/mc0/ce_count" in problems["mc0"]


COUNTER = ErrorCounter("mc0", "controller", 0, 0, frozenset({0}))


def kinds(rates: ErrorRates, now: float, ce: int = 0, ue: int = 0) -> list[str]:
    """Takes a sample and returns the kinds of faults that exist afterwards."""
    return [one.kind for one in rates.sample([replace(COUNTER, corrected=ce, uncorrected=ue)], now)]


def test_uncorrected_errors_count_from_the_start_of_the_kernels_counter() -> None:
    """Errors that occurred before this process was restarted count too. Resetting the counter clears the fault."""
    for threshold, seen in ((1, ["uncorrected"]), (3, []), (0, [])):
        assert kinds(ErrorRates(HardwareErrors(uncorrected=threshold)), 0, ue=2) == seen
    rates = ErrorRates(HardwareErrors())
    assert kinds(rates, 0, ue=1)
    assert not kinds(rates, 10, ue=0)


def test_corrected_errors_count_for_an_hour() -> None:
    """Errors from before the first sample do not count. A counter that is lower than before has restarted from zero."""
    rates = ErrorRates(HardwareErrors(corrected_per_hour=10))
    assert not kinds(rates, 0, ce=5000)
    assert not kinds(rates, 10, ce=5009)
    assert kinds(rates, 3600, ce=5010) == ["corrected"]
    assert not kinds(rates, 3610, ce=5010)
    assert kinds(rates, 3620, ce=9) == ["corrected"]
    assert not kinds(ErrorRates(HardwareErrors(corrected_per_hour=0)), 0, ce=9)


@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 5)), min_size=1, max_size=60))
def test_a_fault_depends_on_the_errors_in_the_last_hour(rises: list[tuple[int, int]]) -> None:
    """For any sequence of samples, the fault exists for exactly as long as the errors in the last hour reach the
    threshold.
    """
    rates, now, count, seen = ErrorRates(HardwareErrors(corrected_per_hour=8)), 0.0, 7, list[tuple[float, int]]()
    kinds(rates, now, ce=count)
    for wait, rise in rises:
        now, count = now + wait, count + rise
        seen.append((now, rise))
        assert bool(kinds(rates, now, ce=count)) == (sum(one for at, one in seen if at > now - 3600) >= 8)
