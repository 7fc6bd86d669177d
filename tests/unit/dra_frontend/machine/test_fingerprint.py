# SPDX-License-Identifier: Apache-2.0
"""Which changes of the machine a fingerprint shows, and which it must not."""

import pytest
from dra_frontend.machine.discovery import discover, read_fingerprint, with_free_pages
from dra_frontend.machine.file_tree import HostTreeError

from tests.rigs.trees import small_machine

NODE = "/sys/devices/system/node/node1"
PAGES = f"{NODE}/hugepages/hugepages-2048kB"


@pytest.mark.parametrize(
    ("changes", "seen"),
    [
        ({"/sys/devices/system/cpu/online": "0-6\n"}, True),
        ({"/sys/devices/system/cpu/isolated": "3\n"}, True),
        ({f"{PAGES}/nr_hugepages": "255\n"}, True),
        ({f"{PAGES}/surplus_hugepages": "1\n"}, True),
        ({f"{NODE}/meminfo": "Node 1 MemTotal: 8388608 kB\n"}, True),
        ({NODE: None}, True),
        ({f"{PAGES}/free_hugepages": "7\n"}, False),
        # A balloon that moves some pages.
        ({f"{NODE}/meminfo": "Node 1 MemTotal: 4194404 kB\n"}, False),
        # What cannot change is not even read.
        ({"/sys/devices/system/cpu/cpu3/topology/core_id": "9\n"}, False),
    ],
)
def test_what_changes_the_offer_changes_the_shape(changes: dict[str, str | None], seen: bool) -> None:
    """CPUs, nodes, pages and memory that come or go call for a discovery; what changes all the time does not."""
    changed = read_fingerprint(small_machine().changed(changes)).shape != read_fingerprint(small_machine()).shape
    assert changed == seen


def test_the_free_pages_of_a_fingerprint_are_the_machines() -> None:
    """The machine of an earlier discovery shows the free pages of the latest fingerprint; damage is an error."""
    later = read_fingerprint(small_machine().changed({f"{PAGES}/free_hugepages": "7\n"}))
    machine = with_free_pages(discover(small_machine()), later)
    assert [pool.free for node in machine.numa_nodes.values() for pool in node.hugepages] == [200, 0, 7, 1]
    with pytest.raises(HostTreeError, match="nr_hugepages"):
        read_fingerprint(small_machine().changed({f"{PAGES}/nr_hugepages": "many\n"}))
