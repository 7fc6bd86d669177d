# SPDX-License-Identifier: Apache-2.0
"""Contents laid over a host's file tree: what is refused, what hides what, and which machine comes out."""

import json
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.commands import cli
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import Machine
from dra_frontend.machine.overlay import OverlayTree, parse_overlay
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import ConfigError

from tests.fakes.trees import NAMES, MemoryTree, captured, small_machine, write_tree

CPU, NODE = "/sys/devices/system/cpu", "/sys/devices/system/node"


def peers_example() -> dict[str, str]:
    """An overlay as the CPU peer's users write it: ids in place of masks, 2 nodes of 1 core of 2 threads."""
    files = {f"{CPU}/online": "0-3\n", f"{CPU}/smt/control": "on\n"}
    for cpu in range(4):
        node, first = cpu % 2, cpu % 2
        files |= {
            f"{CPU}/cpu{cpu}/topology/physical_package_id": f"{node}\n",
            f"{CPU}/cpu{cpu}/topology/core_id": "0\n",
            f"{CPU}/cpu{cpu}/topology/cluster_id": "65535\n",
            f"{CPU}/cpu{cpu}/node{node}": "",
            f"{CPU}/cpu{cpu}/cache/index3/level": "3\n",
            f"{CPU}/cpu{cpu}/cache/index3/shared_cpu_list": f"{first},{first + 2}\n",
            f"{CPU}/cpu{cpu}/cache/index3/id": f"{node}\n",
        }
    return files | {f"{NODE}/node0/cpulist": "0,2\n", f"{NODE}/node1/cpulist": "1,3\n"}


def over(base: MemoryTree, **files: str) -> Machine:
    """The machine with a few files changed, named below /sys/devices/system with '.' for '/'."""
    named = {f"/sys/devices/system/{name.replace('.', '/')}": text for name, text in files.items()}
    return discover(OverlayTree(base, parse_overlay(named, "test")))


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ([], "must be a map from paths below /sys to contents"),
        ({"/proc/cpuinfo": ""}, "/proc/cpuinfo: must be a path below /sys"),
        ({"/sys": ""}, "/sys: must be a path below /sys"),
        ({"/sysx/y": ""}, "/sysx/y: must be a path below /sys"),
        ({"/sys/../etc/passwd": ""}, "must be a path below /sys without"),
        ({"/sys/a//b": ""}, "must be a path below /sys without"),
        ({"/sys/a/": ""}, "must be a path below /sys without"),
        ({3: "x"}, "3: must be a path below /sys"),
        ({"/sys/a": 0}, "/sys/a: its content must be a text"),
        ({"/sys/a": None}, "/sys/a: its content must be a text"),
        ({"/sys/a": "é"}, "/sys/a: its content must be ASCII"),
        ({"/sys/a/b/c": "", "/sys/a": ""}, "/sys/a: cannot be a file and the directory of /sys/a/b/c"),
        ({f"{CPU}/cpu0/node0": "", f"{CPU}/cpu0/node1": ""}, "cpu0: has two NUMA nodes"),
    ],
)
def test_a_wrong_overlay_is_refused(document: Any, fault: str) -> None:
    """Every fault names the path and what is wrong with it."""
    with pytest.raises(ConfigError) as caught:
        parse_overlay(document, "overlay.yaml")
    assert str(caught.value).startswith("overlay.yaml: ")
    assert fault in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    """One start is enough to see them."""
    with pytest.raises(ConfigError) as caught:
        parse_overlay({"/a": "", "/sys/b": 1}, "o")
    assert len(caught.value.faults) == 2


def test_an_empty_overlay_changes_nothing() -> None:
    """An empty file or map is the base."""
    assert parse_overlay(None, "o") == parse_overlay({}, "o") == {}
    assert discover(OverlayTree(small_machine(), {})) == discover(small_machine())


def test_files_hide_and_directories_merge() -> None:
    """Files of the overlay win, listings have both, and what stands in the way in the base is ignored."""
    base = MemoryTree({"/sys/a/x": b"old", "/sys/a/z": b"old", "/sys/f": b"a file", "/sys/d/inner": b"1"})
    tree = OverlayTree(base, {"/sys/a/x": "new", "/sys/a/y": "new", "/sys/f/g": "deep", "/sys/d": "a file now"})
    assert [tree.read(f"/sys/a/{name}") for name in "xyz"] == ["new", "new", "old"]
    assert tree.names("/sys/a") == ["x", "y", "z"]
    assert (tree.read("/sys/f"), tree.names("/sys/f"), tree.read("/sys/f/g")) == (None, ["g"], "deep")
    assert (tree.read("/sys/d"), tree.names("/sys/d")) == ("a file now", None)
    assert tree.names("/sys/nothing") is None


def test_a_node_of_a_cpu_hides_the_others_from_listings() -> None:
    """A CPU is listed in one node; the base's entry can still be read by its name, as with the peer."""
    base = MemoryTree({f"{CPU}/cpu0/node0": b"here", f"{CPU}/cpu1/node0": b"here"})
    tree = OverlayTree(base, {f"{CPU}/cpu0/node7": ""})
    assert tree.names(f"{CPU}/cpu0") == ["node7"]
    assert tree.names(f"{CPU}/cpu1") == ["node0"]
    assert tree.read(f"{CPU}/cpu0/node0") == "here"


@pytest.mark.parametrize("name", ["small", *NAMES])
def test_an_overlay_of_the_peers_kind_is_the_machine(name: str) -> None:
    """Ids, lists and links make the same four CPUs on every base, whatever masks and siblings that has."""
    base = small_machine() if name == "small" else captured(name)
    files = peers_example()
    if any("cpu_atom" in path for path in base.files):
        files |= {"/sys/devices/cpu_atom/cpus": "", "/sys/devices/cpu_core/cpus": "0-3"}
    machine = discover(OverlayTree(base, parse_overlay(files, "o")))
    assert machine.online == {0, 1, 2, 3}
    assert [(cpu.core, cpu.package, cpu.numa_node, cpu.l3, cpu.l3_id) for cpu in machine.cpus.values()] == [
        (0, 0, 0, 0, 0),
        (1, 1, 1, 1, 1),
        (0, 0, 0, 0, 0),
        (1, 1, 1, 1, 1),
    ]
    assert machine.smt
    assert {node: machine.numa_nodes[node].cpus for node in (0, 1)} == {0: {0, 2}, 1: {1, 3}}


def test_one_line_is_enough() -> None:
    """A list hides the mask beside it, older and newer names included, and an offline CPU loses all that it had."""
    base = small_machine()
    assert over(base, **{"cpu.online": "0-3\n"}).offline == {4, 5, 6, 7}
    siblings = {f"cpu.cpu{cpu}.topology.thread_siblings_list": f"{cpu % 2},{cpu % 2 + 2}\n" for cpu in range(4)}
    assert [cpu.core for cpu in over(base, **siblings).cpus.values()] == [0, 1, 0, 1, 4, 4, 6, 6]
    caches = {f"cpu.cpu{cpu}.cache.index3.shared_cpu_list": "0-7\n" for cpu in range(8)}
    assert {cpu.l3 for cpu in over(base, **caches).cpus.values()} == {0}
    moved = {name.replace("index3", "index4"): text for name, text in caches.items()}
    levels = {f"cpu.cpu{cpu}.cache.index4.level": "3\n" for cpu in range(8)}
    assert {cpu.l3 for cpu in over(base, **moved, **levels).cpus.values()} == {0}
    nodes = {"node.node0.cpulist": "0-1\n", "node.node1.cpulist": "2-7\n"}
    assert [cpu.numa_node for cpu in over(base, **nodes).cpus.values()] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert over(base, **{"cpu.cpu3.node1": ""}).numa_nodes[1].cpus == {3, 4, 5, 6, 7}
    pages = {"node.node1.hugepages.hugepages-2048kB.nr_hugepages": "300\n"}
    assert over(base, **pages).numa_nodes[1].hugepages[0].total == 300


def test_a_node_that_only_the_overlay_knows_has_no_memory() -> None:
    """It has what the overlay says of it; the base's rows of distances do not fit any more."""
    machine = over(small_machine(), **{"node.node2.cpulist": "6-7\n", "node.node1.cpulist": "4-5\n"})
    assert (machine.numa_nodes[2].memory_bytes, machine.numa_nodes[2].cpus) == (0, {6, 7})
    assert machine.numa_nodes[0].distances == {}


def test_damage_in_the_overlay_is_told_by_its_path() -> None:
    """A content that the kernel would never print is an error of discovery."""
    with pytest.raises(HostTreeError, match="/sys/devices/system/cpu/online"):
        over(small_machine(), **{"cpu.online": "some\n"})


@given(st.data())
def test_whatever_is_laid_over_itself_is_the_same_machine(data: st.DataObject) -> None:
    """Saying again what the base says changes nothing, for any part of what the base says."""
    base = small_machine()
    paths = data.draw(st.sets(st.sampled_from(sorted(base.files))))
    files = {path: text for path in paths if (text := base.read(path)) is not None}
    # Ids hide siblings: where some are given, all must be.
    for name in ("core_id", "physical_package_id"):
        if any(path.endswith(name) for path in files):
            files |= {path: str(base.read(path)) for path in base.files if path.endswith(name)}
    assert discover(OverlayTree(base, parse_overlay(files, "o"))) == discover(base)


@pytest.mark.parametrize("command", ["inspect", "simulate", "slices", "classes"])
def test_every_command_honours_it(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--config`` with sysfsOverlay shows the other machine."""
    host = write_tree(small_machine(), tmp_path / "host")
    (tmp_path / "overlay.yaml").write_text(json.dumps({f"{NODE}/node1/hugepages/hugepages-64kB/nr_hugepages": "9"}))
    free = f"{NODE}/node1/hugepages/hugepages-64kB/free_hugepages"
    files = {f"{CPU}/online": "0-5\n", free: "9\n", free.replace("free", "nr"): "9\n"}
    (tmp_path / "overlay.yaml").write_text(json.dumps(files))
    (tmp_path / "config.yaml").write_text(f"sysfsOverlay: {tmp_path}/overlay.yaml\n")
    (tmp_path / "claims.yaml").write_text("operations: []\n")
    arguments = [command, "--host-root", str(host), "--config", str(tmp_path / "config.yaml"), "-o", "json"]
    more = {"simulate": ["--claims", str(tmp_path / "claims.yaml")], "slices": ["--node", "n"]}
    assert cli.main([*arguments, *more.get(command, [])]) == 0
    printed = capsys.readouterr().out
    signs = {"inspect": '"cpus": [', "simulate": '"pool": "0-5"', "slices": "n-hugepages-64k", "classes": "64k"}
    assert signs[command] in printed
    if command == "inspect":
        assert json.loads(printed)["offline"] == [6, 7]


def test_a_wrong_overlay_stops_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names file and path, exit status 2; a key given twice is no valid file."""
    (tmp_path / "config.yaml").write_text(f"sysfsOverlay: {tmp_path}/overlay.yaml\n")
    for text, fault in (("/sys/a: 1\n", "/sys/a: its content"), ('/sys/a: "1"\n/sys/a: "2"\n', "given twice")):
        (tmp_path / "overlay.yaml").write_text(text)
        assert cli.main(["inspect", "--config", str(tmp_path / "config.yaml")]) == 2
        message = capsys.readouterr().err
        assert f"{tmp_path}/overlay.yaml" in message
        assert fault in message
