# SPDX-License-Identifier: Apache-2.0
"""Discovery of whole machines: its agreement with hwloc, its errors for damaged files, and the changes that a machine's
fingerprint detects.
"""

from functools import cache

import pytest
from dra_frontend.machine.discovery import discover, read_fingerprint, with_free_pages
from dra_frontend.machine.file_tree import HostTreeError
from hypothesis import given, settings
from hypothesis import strategies as st
from numa_tools.commands.inspect import report

from tests.rigs.trees import NAMES, MemoryTree, captured, expected, small_machine

CPU = "/sys/devices/system/cpu"


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_hwloc(name: str) -> None:
    """For each of the eight captured machines, discovery gives the same result as hwloc."""
    assert len(NAMES) == 8
    found = report(discover(captured(name)))
    assert {key: found[key] for key in expected(name)} == expected(name)


def test_groups_are_named_even_if_ids_are_missing_or_repeated() -> None:
    """Arm kernels do not assign cache IDs, so the lowest CPU number is used instead. Two CPUs that have the same
    core_id on different sockets belong to different cores.
    """
    machine = discover(captured("128arm-2pa2n8cluster4co"))
    assert {cpu.l3_id for cpu in machine.cpus.values()} == {0, 32, 64, 96}
    machine = discover(captured("16em64t-4s2c2t-offlines"))
    assert machine.cpus[0].core_id == machine.cpus[1].core_id
    assert machine.cpus[0].core != machine.cpus[1].core


def _damaged(content: bytes, data: st.DataObject) -> bytes | None:
    """Returns a file's content after an incomplete copy, a full disk or a flipped bit."""
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    flipped = bytes([data.draw(st.sampled_from(b"0123456789abcdef,- \n"))])
    cuts = [
        content[:at],
        content + content,
        content[:at] + flipped + content[at + 1 :],
        content[:at] + content[at + 1 :],
    ]
    others = [None, b"", b"garbage\n", b"-1\n", b"99999999999999999999999\n"]
    damaged: bytes | None = data.draw(st.sampled_from([*cuts, *others]) | st.binary(min_size=1, max_size=20))
    return damaged


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_named_in_an_error_or_all_cpus_are_found(name: str, data: st.DataObject) -> None:
    """If a single file is damaged or missing, either all online CPUs are found or an error that names a file is raised.
    No other exception is raised.
    """
    files = {path: content for path, content in captured(name).files.items() if isinstance(content, bytes)}
    path = data.draw(st.sampled_from(sorted(files)))
    _assert_whole_or_named(_online(name), captured(name).changed({path: _damaged(files[path], data)}))


@cache
def _online(name: str) -> frozenset[int]:
    return discover(captured(name)).online


def _assert_whole_or_named(online: frozenset[int], damaged: MemoryTree) -> None:
    try:
        found = discover(damaged).online
    except HostTreeError as error:
        fault = error
    else:
        assert found == online
        return
    assert fault.path.startswith(("/sys/", "/proc/"))
    assert str(fault).startswith(fault.path)
    assert "\n" not in str(fault)


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_file_may_be_missing_for_one_cpu(name: str) -> None:
    """No CPU is dropped because one of its files or directories is missing."""
    tree = captured(name)
    cpu = max(_online(name))
    prefix = f"{CPU}/cpu{cpu}/"
    paths = [path for path in tree.files if path.startswith(prefix)]
    for path in {*paths, *(path.rpartition("/")[0] for path in paths), f"{prefix}topology", f"{prefix}cache"}:
        _assert_whole_or_named(_online(name), tree.changed({path: None}))


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
        # A balloon driver has taken or returned a few pages.
        ({f"{NODE}/meminfo": "Node 1 MemTotal: 4194404 kB\n"}, False),
        # Files that cannot change are not even read.
        ({"/sys/devices/system/cpu/cpu3/topology/core_id": "9\n"}, False),
    ],
)
def test_changes_that_affect_the_offer_change_the_fingerprint(changes: dict[str, str | None], seen: bool) -> None:
    """CPUs, nodes, pages or memory that appear or disappear require a new discovery. Values that change all the time do
    not.
    """
    changed = read_fingerprint(small_machine().changed(changes)).shape != read_fingerprint(small_machine()).shape
    assert changed == seen


def test_a_machine_can_be_updated_with_a_fingerprints_free_pages() -> None:
    """A machine that was discovered earlier gets the free page counts from the latest fingerprint. A damaged file
    raises an error.
    """
    later = read_fingerprint(small_machine().changed({f"{PAGES}/free_hugepages": "7\n"}))
    machine = with_free_pages(discover(small_machine()), later)
    assert [pool.free for node in machine.numa_nodes.values() for pool in node.hugepages] == [200, 0, 7, 1]
    with pytest.raises(HostTreeError, match="nr_hugepages"):
        read_fingerprint(small_machine().changed({f"{PAGES}/nr_hugepages": "many\n"}))
