# SPDX-License-Identifier: Apache-2.0
"""Paths of a node's files, whether the inspected machine is this one or another one."""

from pathlib import Path

from dra_frontend.node.host_tree import BOOT_ID, host_path


def test_a_directory_is_looked_up_on_the_inspected_machine(tmp_path: Path) -> None:
    """On any other machine, a path is always below that machine's root. On this machine, a path that does not exist
    below the root is used as it is.
    """
    host, here = tmp_path / "host", tmp_path / "cdi"
    here.mkdir()
    (host / BOOT_ID[1:]).parent.mkdir(parents=True)
    below = str(host) + str(here)
    assert host_path(str(host), str(here)) == below
    (host / BOOT_ID[1:]).write_text("another\n")
    assert host_path(str(host), str(here)) == below
    (host / BOOT_ID[1:]).write_bytes(Path(BOOT_ID).read_bytes())
    assert host_path(str(host), str(here)) == str(here)
    Path(below).mkdir(parents=True)
    assert host_path(str(host), str(here)) == below
    assert host_path("/", str(here)) == str(here)
