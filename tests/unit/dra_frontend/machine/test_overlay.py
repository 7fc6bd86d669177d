# SPDX-License-Identifier: Apache-2.0
"""Overlays of file contents on a host's sysfs: rejected overlays, precedence, and the resulting machine."""

import json
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import Machine
from dra_frontend.machine.overlay import OverlayTree, parse_overlay
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import ConfigError
from numa_tools import cli

from tests.rigs.trees import MemoryTree, small_machine, write_tree

CPU = "/sys/devices/system/cpu"


def over(base: MemoryTree, **files: str) -> Machine:
    """Returns the machine with some files changed. Their names are relative to /sys/devices/system and contain '.'
    instead of '/'.
    """
    named = {f"/sys/devices/system/{name.replace('.', '/')}": text for name, text in files.items()}
    return discover(OverlayTree(base, parse_overlay(named, "test")))


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"/a": "", "/sys/b": 1}, "doubled or trailing '/'; /sys/b: its content must be a string"),
        ([], "must be a map from paths under /sys to contents"),
        ({"/proc/cpuinfo": ""}, "'/proc/cpuinfo': must be a path under /sys"),
        ({"/sys": ""}, "'/sys': must be a path under /sys"),
        ({"/sysx/y": ""}, "'/sysx/y': must be a path under /sys"),
        ({"/sys/../etc/passwd": ""}, "must be a path under /sys without"),
        ({"/sys/a//b": ""}, "must be a path under /sys without"),
        ({"/sys/a/": ""}, "must be a path under /sys without"),
        ({3: "x"}, "'3': must be a path under /sys"),
        ({"/sys/a": 0}, "/sys/a: its content must be a string"),
        ({"/sys/a": None}, "/sys/a: its content must be a string"),
        ({"/sys/a": "é"}, "/sys/a: its content must be ASCII"),
        ({"/sys/a/b/c": "", "/sys/a": ""}, "/sys/a: cannot be both a file and the directory of /sys/a/b/c"),
    ],
)
def test_an_invalid_overlay_is_rejected(document: Any, fault: str) -> None:
    """Each error gives the path and the reason."""
    with pytest.raises(ConfigError) as caught:
        parse_overlay(document, "overlay.yaml")
    assert str(caught.value).startswith("overlay.yaml: ")
    assert fault in str(caught.value)


def test_overlay_files_hide_base_files_and_directories_merge() -> None:
    """Overlay files hide files in the base, directory listings are merged, and base files that conflict with overlay
    directories are ignored.
    """
    base = MemoryTree({"/sys/a/x": b"old", "/sys/a/z": b"old", "/sys/f": b"a file", "/sys/d/inner": b"1"})
    tree = OverlayTree(base, {"/sys/a/x": "new", "/sys/a/y": "new", "/sys/f/g": "deep", "/sys/d": "a file now"})
    assert [tree.read(f"/sys/a/{name}") for name in "xyz"] == ["new", "new", "old"]
    assert tree.names("/sys/a") == ["x", "y", "z"]
    assert (tree.read("/sys/f"), tree.names("/sys/f"), tree.read("/sys/f/g")) == (None, ["g"], "deep")
    assert (tree.read("/sys/d"), tree.names("/sys/d")) == ("a file now", None)
    assert tree.names("/sys/nothing") is None


def test_an_overlaid_path_hides_only_that_path() -> None:
    """If the kernel exposes a value in two files, both files must be overlaid. If only one of them is overlaid,
    discovery reports inconsistent sysfs content.
    """
    pages = {"node.node1.hugepages.hugepages-2048kB.nr_hugepages": "300\n"}
    assert over(small_machine(), **pages).numa_nodes[1].hugepages[0].total == 300
    found = over(small_machine(), **{"cpu.online": "0-2,4-7\n", "cpu.cpu3.online": "0\n"})
    assert (found.offline, found.cpus[2].core) == ({3}, 2)
    for name, text in (("node.node0.cpulist", "0-1\n"), ("cpu.online", "some\n")):
        with pytest.raises(HostTreeError, match=f"/sys/devices/system/{name.replace('.', '/')}: "):
            over(small_machine(), **{name: text})


@given(st.data())
def test_overlaying_the_same_content_changes_nothing(data: st.DataObject) -> None:
    """Overlaying any part of the base with its own content changes nothing, and neither does an empty overlay."""
    assert parse_overlay(None, "o") == {}
    base = small_machine()
    paths = data.draw(st.sets(st.sampled_from(sorted(base.files))))
    files = {path: text for path in paths if (text := base.read(path)) is not None}
    assert discover(OverlayTree(base, parse_overlay(files, "o"))) == discover(base)


def test_commands_use_the_overlay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--config`` with sysfsOverlay shows the other machine. For an invalid overlay, the command names the file and
    the path and exits with status 2.
    """
    host = write_tree(small_machine(), tmp_path / "host")
    overlay = tmp_path / "overlay.yaml"
    (tmp_path / "config.yaml").write_text(f"sysfsOverlay: {overlay}\n")
    arguments = ["inspect", "--host-root", str(host), "--config", str(tmp_path / "config.yaml"), "-o", "json"]
    overlay.write_text(json.dumps({f"{CPU}/online": "0-5\n", f"{CPU}/cpu6/online": "0", f"{CPU}/cpu7/online": "0"}))
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["offline"] == [6, 7]
    for text, fault in (("/sys/a: 1\n", "/sys/a: its content"), ('/sys/a: "1"\n/sys/a: "2"\n', "given twice")):
        overlay.write_text(text)
        assert cli.main(arguments) == 2
        message = capsys.readouterr().err
        assert f"{overlay}: " in message
        assert fault in message
