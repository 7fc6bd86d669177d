# SPDX-License-Identifier: Apache-2.0
"""``dra-frontend provision`` on a file tree, run as an operator or an init container would run it."""

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_frontend.node.hugepage_pools import write_fault
from numa_tools.cli import main

from tests.rigs.trees import MemoryTree, small_machine, write_tree

NODES = "/sys/devices/system/node"


class Host:
    """A host's files, all of them writable. Pages marked as surplus represent pages that the kernel cannot allocate."""

    def __init__(self, path: Path, tree: MemoryTree | None = None) -> None:
        self.root = write_tree(tree or small_machine(), path / "host")
        self.path = path

    def pool(self, node: int, size: str = "2048kB", file: str = "nr_hugepages") -> Path:
        """Returns the path to one of a pool's files."""
        return self.root / f"{NODES[1:]}/node{node}/hugepages/hugepages-{size}/{file}"

    def pages(self, node: int, size: str = "2048kB") -> int:
        """Returns the number of pages in a pool."""
        return int(self.pool(node, size).read_text())

    def provision(self, *pages: dict[str, Any], flags: tuple[str, ...] = ()) -> int:
        """Runs the command with one file and returns its exit code."""
        file = self.path / "pages.yaml"
        file.write_text(yaml.safe_dump({"kind": "HugePageProvision", "spec": {"pages": list(pages)}}))
        return main(["provision", str(file), "--host-root", str(self.root), *flags])


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """Returns the small machine, which has 256 pages of 2 MiB on each of its two nodes and one 1 GiB page on node 1."""
    return Host(tmp_path)


def test_pools_are_written_and_reported(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has one row per page size and node, and the exit code is 0."""
    assert host.provision({"size": "2M", "count": 301}, {"size": "1G", "count": 2, "node": 1}) == 0
    assert [host.pages(0), host.pages(1), host.pages(0, "1048576kB"), host.pages(1, "1048576kB")] == [151, 150, 0, 2]
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["SIZE", "NODE", "ASKED", "BEFORE", "GOT"],
        ["2Mi", "0", "151", "256", "151"],
        ["2Mi", "1", "150", "256", "150"],
        ["1Gi", "1", "2", "1", "2"],
    ]


def test_a_dry_run_writes_nothing(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """A dry run compares the current pages with the targets, without reporting shortages. An impossible plan is
    rejected as usual.
    """
    assert host.provision({"size": "2M", "count": 600}, flags=("--dry-run", "-o", "json")) == 0
    assert [host.pages(0), host.pages(1)] == [256, 256]
    told = json.loads(capsys.readouterr().out)
    row = {"pageSize": "2Mi", "node": 0, "asked": 300, "before": 256, "got": None, "short": None}
    assert told == {"pages": [row, row | {"node": 1}], "short": None}
    assert host.provision({"size": "3M", "count": 300}, flags=("--dry-run",)) == 2


def test_missing_pages_make_the_command_fail(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Surplus pages do not count, because they disappear when they are freed. The report is complete, and the exit code
    is 1.
    """
    host.pool(0, file="surplus_hugepages").write_text("40\n")
    assert host.provision({"size": "2M", "count": 600}, flags=("-o", "json", "--timeout", "1")) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["short"] == 40
    assert [(row["node"], row["got"], row["short"]) for row in told["pages"]] == [(0, 260, 40), (1, 300, 0)]


@pytest.mark.parametrize("files", [["compact"], ["compact", "all"], ["all"], []])
def test_a_node_short_of_pages_is_compacted(tmp_path: Path, files: list[str]) -> None:
    """The node is compacted through its own file or, without such a file, through the global one, which a container
    cannot write to. If neither works, the command continues.
    """
    paths = {"compact": f"{NODES}/node0/compact", "all": "/proc/sys/vm/compact_memory"}
    host = Host(tmp_path, small_machine().changed({paths[name]: "" for name in files}))
    host.pool(0, file="surplus_hugepages").write_text("1\n")
    assert host.provision({"size": "2M", "count": 300, "node": 0}, flags=("--timeout", "1")) == 1
    told = {
        name: (host.root / path[1:]).exists() and (host.root / path[1:]).read_text() for name, path in paths.items()
    }
    assert [name for name in paths if told[name] == "1\n"] == files[:1]
    assert {name for name in paths if told[name] is not False} == set(files)


def test_kernels_without_numa_have_one_pool_per_size(tmp_path: Path) -> None:
    """The pool's files are in another directory, and the whole machine counts as node 0."""
    pool = "/sys/kernel/mm/hugepages/hugepages-2048kB"
    files = {f"{pool}/nr_hugepages": "0\n", f"{pool}/free_hugepages": "0\n", "/proc/meminfo": "MemTotal: 4194304 kB\n"}
    host = Host(tmp_path, small_machine().changed({NODES: None, **files}))
    assert host.provision({"size": "2M", "count": 3}) == 0
    assert (host.root / f"{pool[1:]}/nr_hugepages").read_text() == "3\n"


def test_pools_may_be_mounted_elsewhere(host: Host, tmp_path: Path) -> None:
    """The machine is discovered under --host-root, while files are written and read back under --pool-root."""
    nodes = host.root / NODES[1:]
    mounted = tmp_path / "mounted"
    shutil.copytree(nodes, mounted / NODES[1:])
    assert host.provision({"size": "2M", "count": 301, "node": 0}, flags=("--pool-root", str(mounted))) == 0
    assert host.pages(0) == 256
    pool = mounted / NODES[1:] / "node0/hugepages/hugepages-2048kB/nr_hugepages"
    assert pool.read_text() == "301\n"


@pytest.mark.parametrize("flags", [(), ("--dry-run",)])
def test_a_pool_error_names_the_pool_root(
    host: Host, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    """The same file exists under --host-root, so a message that contained only the path would be misleading."""
    missing = tmp_path / "missing"
    assert host.provision({"size": "2M", "count": 301}, flags=("--pool-root", str(missing), *flags)) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"dra-frontend: --pool-root {missing}: /sys/")
    assert str(host.root) not in text


def test_several_files_form_one_plan(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """Contradictions between the files are reported in a single clear line, and nothing is written."""
    files = [host.path / name for name in ("a.yaml", "b.yaml")]
    for file, count in zip(files, (100, 120), strict=True):
        file.write_text(f"kind: HugePageProvision\nspec: {{pages: [{{size: 2M, count: {count}, node: 0}}]}}\n")
    assert main(["provision", *map(str, files), "--host-root", str(host.root)]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), host.pages(0)) == ("", 1, 256)
    assert "120 pages of 2Mi on node 0, but " in printed.err


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EROFS, "Read-only file system; run as root with the host's /sys/devices/system/node mounted read-write"),
        (errno.EACCES, "Permission denied; run as root with the host's"),
        (errno.EINVAL, "this kernel allocates 1Gi pages only at boot (hugepagesz= and hugepages=)"),
        (errno.EIO, "cannot be written: Input/output error"),
    ],
)
def test_the_error_for_an_unwritable_pool_contains_a_remedy(number: int, remedy: str) -> None:
    """In a container, sysfs is read-only unless it is explicitly mounted read-write, and some page sizes can be
    allocated only at boot.
    """
    assert remedy in write_fault(OSError(number, os.strerror(number)), 1 << 30)


def test_a_pool_that_is_not_a_file_is_an_error(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    """If the kernel does not provide the pool's file, the command does not create one."""
    host.pool(0).unlink()
    assert host.provision({"size": "2M", "count": 300, "node": 0}) == 2
    assert "node0/hugepages/hugepages-2048kB/nr_hugepages" in capsys.readouterr().err
    assert not host.pool(0).exists()
