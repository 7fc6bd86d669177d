# SPDX-License-Identifier: Apache-2.0
"""The command blocks in docs/runtime.md, run in a scratch directory for several node states.

tests/node runs the same blocks on a node with containerd. Here ctr, systemctl and containerd are scripts, and ctr runs
the real setup-runtime.
"""

import os
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.rigs import command_blocks as documented

COMPLETE = """version = 3
[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]
[plugins."io.containerd.nri.v1.nri"]
disable = false
disable_connections = false
"""
WITHOUT_NRI = COMPLETE.replace("disable = false\ndisable_c", "disable = true\ndisable_c")
CONFIG, DROP_INS, FOUND = "etc/containerd/config.toml", "etc/containerd/conf.d", "run/numa.toml"
PATTERN = "/etc/containerd/conf.d/*.toml"
CONTAINERD = """#!/bin/sh
if [ "$2" = dump ] && [ ! -e "$HOME/etc/containerd/config.toml" ]; then
  echo "containerd: failed to load TOML: no such file or directory" >&2
  exit 1
fi
cat "$HOME/dump"
"""
"""A script that behaves like containerd 1.7, which cannot dump its configuration if there is no configuration file."""
CTR = """#!/bin/sh
dump=$HOME/run/containerd-dump.toml
stat -c %a "$dump" >"$HOME/mode"
flag= last=
for last; do [ "$last" != --require-plugin ] || flag=$last; done
[ "$last" = /dump.toml ] || exit 9
exec "$PYTHON" -m nri_backend setup-runtime $flag "$dump"
"""


class Node:
    """A scratch directory that replaces the node's root, and in which the page's command blocks run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "run").mkdir()
        (root / "bin").mkdir()
        programs = {"containerd": CONTAINERD, "ctr": CTR, "systemctl": '#!/bin/sh\necho "$*" >>"$HOME/restarts"\n'}
        for name, text in programs.items():
            (root / "bin" / name).write_text(text)
            (root / "bin" / name).chmod(0o755)
        self.check, self.install, self.require = (
            block.script({"IMAGE": "image"}) for block in documented.blocks("runtime", documented.NODE)
        )

    def typed(self, script: str, dump: str = COMPLETE) -> subprocess.CompletedProcess[str]:
        """Runs a block in a shell with umask 022."""
        (self.root / "dump").write_text(dump)
        for place in ("/run/", "/etc/containerd"):
            script = script.replace(f" {place}", f" {self.root}{place}").replace(f'"{place}', f'"{self.root}{place}')
            script = script.replace(f">{place}", f">{self.root}{place}").replace(f"={place}", f"={self.root}{place}")
        # Paths are redirected to the scratch directory, except the pattern in imports, which is part of the file's
        # content.
        script = script.replace(f"{self.root}{PATTERN}", PATTERN)
        return subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", f"umask 022\n{script}"],
            env=os.environ
            | {"HOME": str(self.root), "PATH": f"{self.root}/bin:{os.environ['PATH']}", "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def read(self, path: str) -> str:
        """Returns a file's content, or "" if the file does not exist."""
        file = self.root / path
        return file.read_text() if file.exists() else ""

    def drop_ins(self) -> list[str]:
        """Returns the names of the installed drop-ins."""
        return sorted(file.name for file in (self.root / DROP_INS).glob("*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Returns a node without a containerd configuration file."""
    return Node(tmp_path)


def test_a_complete_configuration_is_left_alone(node: Node) -> None:
    """Since nothing is missing, no drop-in is installed and containerd is not restarted."""
    checked = node.typed(node.check)
    assert (checked.returncode, checked.stderr) == (0, "nri-backend setup-runtime: nothing is missing\n")
    installed = node.typed(node.install)
    assert (installed.returncode, installed.stderr) == (0, "")
    assert (node.drop_ins(), node.read("restarts"), node.read(CONFIG)) == ([], "", "")


@pytest.mark.parametrize("outcome", [COMPLETE, WITHOUT_NRI, "nonsense"])
def test_no_other_user_can_read_the_dump(node: Node, outcome: str) -> None:
    """The dump and the drop-in may contain passwords. Both files get mode 0600, even if older files with these names
    were readable by other users, and the dump is removed afterwards.
    """
    for name in ("containerd-dump.toml", "numa.toml"):
        (node.root / "run" / name).write_text("old")
    node.typed(node.check, outcome)
    assert node.read("mode") == "600\n"
    assert not (node.root / "run/containerd-dump.toml").exists()
    assert stat.S_IMODE((node.root / FOUND).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, {"version": 3, "imports": [PATTERN]}),
        ("", {"version": 3, "imports": [PATTERN]}),
        ("version = 2\nroot = '/x'\n", {"version": 2, "root": "/x", "imports": [PATTERN]}),
        ("imports = []\n", {"imports": [PATTERN]}),
        ('version = 3\nimports = ["/a.toml"]\n', {"version": 3, "imports": [PATTERN, "/a.toml"]}),
        ('imports = [\n  "/a.toml",\n]\n', {"imports": [PATTERN, "/a.toml"]}),
        (f'imports = ["/a.toml", "{PATTERN}"]\n', {"imports": ["/a.toml", PATTERN]}),
        (f'# imports = ["{PATTERN}"]\nversion = 3\n', {"version": 3, "imports": [PATTERN]}),
    ],
)
def test_containerd_imports_the_drop_in_whatever_its_configuration_was(
    node: Node, config: str | None, expected: dict[str, object]
) -> None:
    """A missing or empty configuration file is replaced by one that contains only the format version. In every case,
    imports then contains the pattern, and nothing else has changed.
    """
    if config is not None:
        (node.root / CONFIG).parent.mkdir(parents=True)
        (node.root / CONFIG).write_text(config)
    assert node.typed(node.check, WITHOUT_NRI).returncode == 1
    installed = node.typed(node.install)
    assert (installed.returncode, installed.stderr) == (0, "")
    assert tomllib.loads(node.read(CONFIG)) == expected
    assert node.drop_ins() == ["50-numa.toml"]
    assert "disable = false" in node.read(f"{DROP_INS}/50-numa.toml")
    assert node.read("restarts") == "restart containerd\n"


def test_requiring_the_plugin_adds_a_second_drop_in(node: Node) -> None:
    """The same commands install the second drop-in under the next name. Running the commands again changes nothing."""
    node.typed(node.check, WITHOUT_NRI)
    node.typed(node.install)
    newer = COMPLETE + '[plugins."io.containerd.nri.v1.nri".default_validator]\nenable = false\n'
    assert node.typed(node.require, newer).returncode == 1
    for _ in range(2):
        assert node.typed(node.install).returncode == 0
    assert node.drop_ins() == ["50-numa.toml", "51-numa.toml"]
    assert "required_plugins" in node.read(f"{DROP_INS}/51-numa.toml")
    assert node.read("restarts") == "restart containerd\n" * 2
    assert tomllib.loads(node.read(CONFIG))["imports"] == [PATTERN]
