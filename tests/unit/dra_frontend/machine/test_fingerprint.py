# SPDX-License-Identifier: Apache-2.0
"""Which changes of the machine a fingerprint shows, and which it must not."""

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.fingerprint import read_fingerprint, with_free_pages

from tests.rigs.trees import NAMES, captured, small_machine

NODE = "/sys/devices/system/node/node1"
PAGES = f"{NODE}/hugepages/hugepages-2048kB"


@pytest.mark.parametrize(
    "changes",
    [
        {"/sys/devices/system/cpu/online": "0-6\n"},
        {"/sys/devices/system/cpu/isolated": "3\n"},
        {f"{PAGES}/nr_hugepages": "255\n"},
        {f"{PAGES}/surplus_hugepages": "1\n"},
        {f"{NODE}/meminfo": "Node 1 MemTotal: 8388608 kB\n"},
        {NODE: None},
    ],
)
def test_what_changes_the_offer_changes_the_shape(changes: dict[str, str | None]) -> None:
    """CPUs, nodes, pages and memory that come or go call for a discovery."""
    assert read_fingerprint(small_machine().changed(changes)).shape != read_fingerprint(small_machine()).shape


@pytest.mark.parametrize(
    "changes",
    [
        {f"{PAGES}/free_hugepages": "7\n"},
        # A balloon that moves some pages.
        {f"{NODE}/meminfo": "Node 1 MemTotal: 4194404 kB\n"},
        {"/sys/devices/system/cpu/cpu3/topology/core_id": "9\n"},
    ],
)
def test_what_changes_all_the_time_does_not(changes: dict[str, str | None]) -> None:
    """Pages in use and a few pages of memory more cost no discovery; what cannot change is not even read."""
    assert read_fingerprint(small_machine().changed(changes)).shape == read_fingerprint(small_machine()).shape


def test_the_free_pages_of_a_fingerprint_are_the_machines() -> None:
    """The machine of an earlier discovery shows the free pages of the latest fingerprint."""
    later = read_fingerprint(small_machine().changed({f"{PAGES}/free_hugepages": "7\n"}))
    machine = with_free_pages(discover(small_machine()), later)
    assert [pool.free for node in machine.numa_nodes.values() for pool in node.hugepages] == [200, 0, 7, 1]


@pytest.mark.parametrize("name", NAMES)
def test_fingerprint_and_discovery_agree(name: str) -> None:
    """On every captured machine both see the same memory and hugepages."""
    machine, fingerprint = discover(captured(name)), read_fingerprint(captured(name))
    for number, node in machine.numa_nodes.items():
        if node.online:
            assert (fingerprint.nodes[number].memory_bytes, fingerprint.nodes[number].hugepages) == (
                node.memory_bytes,
                node.hugepages,
            )


def test_damage_is_told() -> None:
    """A file that cannot be understood is an error, not a machine without pages."""
    with pytest.raises(HostTreeError, match="nr_hugepages"):
        read_fingerprint(small_machine().changed({f"{PAGES}/nr_hugepages": "many\n"}))
