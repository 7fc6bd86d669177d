# SPDX-License-Identifier: Apache-2.0
"""Whole machines: discovery against hwloc, and against damage."""

import random
from functools import cache

import pytest
from dra_frontend.commands.inspect import report
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rigs.trees import NAMES, MemoryTree, captured, expected

CPU = "/sys/devices/system/cpu"


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_hwloc(name: str) -> None:
    """Of each of the eight captured machines, discovery finds what hwloc finds."""
    assert len(NAMES) == 8
    found = report(discover(captured(name)))
    assert {key: found[key] for key in expected(name)} == expected(name)


@pytest.mark.parametrize("name", NAMES)
def test_the_order_of_a_directory_does_not_matter(name: str) -> None:
    """Two reads of the same machine give equal values, ordered by id, in whatever order the file system lists."""
    machine = discover(captured(name))
    files = list(captured(name).files.items())
    random.Random(name).shuffle(files)
    again = discover(MemoryTree(dict(files)))
    assert again == machine
    assert repr(again) == repr(machine)
    assert list(machine.cpus) == sorted(machine.cpus)
    assert list(machine.numa_nodes) == sorted(machine.numa_nodes)


def test_groups_are_named_though_ids_are_missing_or_repeat() -> None:
    """Arm kernels number no caches: the lowest CPU does. Two CPUs with one core_id on two sockets are two cores."""
    machine = discover(captured("128arm-2pa2n8cluster4co"))
    assert {cpu.l3_id for cpu in machine.cpus.values()} == {0, 32, 64, 96}
    machine = discover(captured("16em64t-4s2c2t-offlines"))
    assert machine.cpus[0].core_id == machine.cpus[1].core_id
    assert machine.cpus[0].core != machine.cpus[1].core


def _damaged(content: bytes, data: st.DataObject) -> bytes | None:
    """What a broken copy, a full disk or a bad bit makes of a file."""
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
def test_damage_is_named_and_never_loses_a_cpu(name: str, data: st.DataObject) -> None:
    """With any one file broken or gone, all online CPUs are found, or an error names a file; nothing else happens."""
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
def test_every_kind_of_file_may_vanish_from_one_cpu(name: str) -> None:
    """Whatever single file or directory of one CPU is missing, no CPU is."""
    tree = captured(name)
    cpu = max(_online(name))
    prefix = f"{CPU}/cpu{cpu}/"
    paths = [path for path in tree.files if path.startswith(prefix)]
    for path in {*paths, *(path.rpartition("/")[0] for path in paths), f"{prefix}topology", f"{prefix}cache"}:
        _assert_whole_or_named(_online(name), tree.changed({path: None}))
