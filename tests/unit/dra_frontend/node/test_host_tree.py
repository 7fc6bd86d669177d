# SPDX-License-Identifier: Apache-2.0
"""Reading a host's files under a root directory."""

import os
from pathlib import Path

import pytest
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree


def test_files_are_strings_and_missing_files_are_none(tmp_path: Path) -> None:
    """The NUL byte that some kernels append is removed, and directory entries are sorted. For a file that does not
    exist, the result is None, and no error is raised.
    """
    for name in ("b", "a", "c"):
        (tmp_path / name).write_bytes(b"0-3\n\0")
    tree = HostTree(tmp_path)
    assert tree.read("/a") == "0-3\n"
    assert tree.names("/") == ["a", "b", "c"]
    for path in ("/proc/meminfo", "/a/devices"):
        assert tree.read(path) is None
        assert tree.names(path) is None


@pytest.mark.parametrize("target", ["/outside/secret", "../../../../outside/secret", "../outside/secret"])
def test_links_never_leave_the_root(tmp_path: Path, target: str) -> None:
    """Absolute links, and links with too many `..` components, are resolved under the root, as with chroot."""
    root = tmp_path / "root"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("of the machine that looks")
    (root / "outside").mkdir(parents=True)
    (root / "outside" / "secret").write_text("of the captured machine")
    (root / "dir").mkdir()
    (root / "dir" / "link").symlink_to(target)
    (root / "dir" / "up").symlink_to(Path(target).parent)
    tree = HostTree(root)
    assert tree.read("/dir/link") == "of the captured machine"
    assert tree.read("/dir/up/secret") == "of the captured machine"
    assert tree.names("/dir/up") == ["secret"]


def test_links_inside_the_root_are_followed(tmp_path: Path) -> None:
    """Chains of links resolve as they do on the host. A dangling link is treated as a missing file, and a loop is an
    error.
    """
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("text")
    for name, target in (("one", "a/b"), ("two", "./one/../b/file"), ("gone", "nowhere"), ("x", "y"), ("y", "x")):
        (tmp_path / name).symlink_to(target)
    tree = HostTree(tmp_path)
    assert [tree.read(path) for path in ("/one/file", "/two", "/gone")] == ["text", "text", None]
    with pytest.raises(HostTreeError, match=r"loop"):
        tree.read("/x")


def test_a_directory_without_links_is_resolved_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle frontend reads files from only a few directories. Once a file in a directory has been read, no links are
    resolved for further reads from that directory.
    """
    directory = tmp_path / "sys" / "node"
    directory.mkdir(parents=True)
    (directory / "one").write_text("1")
    (directory / "two").write_text("2")
    tree, resolved = HostTree(tmp_path), list[str]()
    readlink = os.readlink

    def counted(path: str) -> str:
        resolved.append(path)
        return readlink(path)

    monkeypatch.setattr(os, "readlink", counted)
    assert (tree.read("/sys/node/one"), len(resolved)) == ("1", 3)
    assert [tree.read("/sys/node/two"), tree.read("/sys/node/gone"), tree.names("/sys/node")] == [
        "2",
        None,
        ["one", "two"],
    ]
    assert len(resolved) == 3


def test_a_link_in_a_known_directory_never_leaves_the_root(tmp_path: Path) -> None:
    """The link may have replaced a file, or it may take the place of a directory that did not exist on
    the first read.
    """
    root = tmp_path / "root"
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("of the machine that looks")
    (root / "dir").mkdir(parents=True)
    (root / "dir" / "file").write_text("of the captured machine")
    tree = HostTree(root)
    assert tree.read("/dir/file") == "of the captured machine"
    assert tree.read("/later/file") is None
    (root / "dir" / "file").unlink()
    (root / "dir" / "file").symlink_to(tmp_path / "outside" / "file")
    (root / "later").symlink_to(tmp_path / "outside")
    assert [tree.read("/dir/file"), tree.read("/later/file"), tree.names("/later")] == [None, None, None]


def test_the_number_of_known_directories_is_bounded(tmp_path: Path) -> None:
    """Discovery reads thousands of directories, each of them only once."""
    for number in range(600):
        (tmp_path / f"{number}").mkdir()
        (tmp_path / f"{number}" / "file").write_text(f"{number}")
    tree = HostTree(tmp_path)
    assert [tree.read(f"/{number}/file") for number in range(600)] == [f"{number}" for number in range(600)]
    assert len(tree._plain) <= 256


def test_the_link_limit_applies_to_the_whole_path(tmp_path: Path) -> None:
    """As in the kernel, at most forty links are followed for one path. Otherwise, links that double at each step could
    be resolved 2**40 times.
    """
    for number in range(39):
        (tmp_path / f"l{number}").symlink_to(f"l{number + 1}/../l{number + 1}")
    (tmp_path / "l39").mkdir()
    with pytest.raises(HostTreeError, match="more than 40 symbolic links"):
        HostTree(tmp_path).read("/l0")


def test_the_error_for_an_unreadable_file_contains_its_name(tmp_path: Path) -> None:
    """Binary data, directories, FIFOs, huge files and invalid paths are rejected, and none of them blocks."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    with (tmp_path / "flood").open("wb") as file:
        file.truncate(1 << 30)
    tree = HostTree(tmp_path)
    for name in ("bytes", "directory", "fifo", "flood"):
        with pytest.raises(HostTreeError) as caught:
            tree.read(f"/{name}")
        assert caught.value.path == f"/{name}"
    assert tree.names("/bytes") is None
    for path in ("/a\0b", "/\ud800"):
        for read in (tree.read, tree.names):
            with pytest.raises(HostTreeError, match="is not a path"):
                read(path)


def test_only_the_running_machine_reports_a_page_size(tmp_path: Path) -> None:
    """This process's page size does not apply to a captured tree."""
    (tmp_path / "live").symlink_to("/")
    assert HostTree("/").live_page_bytes() == os.sysconf("SC_PAGE_SIZE")
    assert HostTree(tmp_path / "live").live_page_bytes() == os.sysconf("SC_PAGE_SIZE")
    assert HostTree(tmp_path).live_page_bytes() is None
    assert HostTree("/").read("/proc/self/stat") is not None
