# SPDX-License-Identifier: Apache-2.0
"""Only the modules listed below write files. With ``enforcement: observe``, those that write the node's files write
nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
SOURCES: Final = {
    "nri_backend": ROOT / "services/nri-backend/src/nri_backend",
    "dra_frontend": ROOT / "services/dra-frontend/src/dra_frontend",
    "numa_tools": ROOT / "services/dra-frontend/src/numa_tools",
    "numa_node": ROOT / "shared/src/numa_node",
}
NODE: Final = {
    "nri_backend.node.node_files": "cgroups, interrupts, slices; ObservedFiles takes its place",
    "dra_frontend.node.hugepage_pools": "pools of hugepages; KernelPools(observes=True) refuses",
}
"""The modules that write the node's files. Each has an implementation that writes nothing."""
OWN: Final = {
    "nri_backend.node.active_lock": "the lock and the heartbeat in runDir",
    "nri_backend.node.preflight": "creates runDir",
    "nri_backend.enforcement.recorder": "enforcement records in runDir, written after enforcement only",
    "nri_backend.host_isolation.originals": "original affinities in runDir; read-only while observing",
    "nri_backend.setup.command": "a command for people, which writes the file that they name",
    "dra_frontend.claims.directory": "claim files in cdiDir",
    "dra_frontend.claims.journal": "the journal in runDir",
    "dra_frontend.claims.metadata": "metadata files of claims in the plugin's directory",
    "dra_frontend.kubelet.plugin": "sockets for the kubelet",
    "dra_frontend.node.leftovers": "removes sockets and directories of killed instances",
    "dra_frontend.node.pool_helper": "the socket of the helper in runDir",
    "dra_frontend.node.run_directory": "runDir",
    "dra_frontend.node.sockets": "sockets for the kubelet and in runDir",
    "numa_tools.bundle.archive": "unpacks an archive into a temporary directory",
    "numa_tools.cli": "opens /dev/null in place of an output that was closed",
    "numa_tools.commands.gather": "a command for people, which writes the archive that they name",
    "numa_node.files": "replaces and locks files of runDir and cdiDir",
}
"""The modules that write the driver's own files, each with the files that it writes or its reason for writing."""
_OS: Final = frozenset(
    [
        "chmod",
        "chown",
        "copy_file_range",
        "fchmod",
        "fchown",
        "ftruncate",
        "lchown",
        "link",
        "makedirs",
        "mkdir",
        "mkfifo",
        "mknod",
        "putenv",
        "pwrite",
        "pwritev",
        "remove",
        "removedirs",
        "removexattr",
        "rename",
        "renames",
        "replace",
        "rmdir",
        "sendfile",
        "setxattr",
        "symlink",
        "truncate",
        "unlink",
        "utime",
        "write",
        "writev",
    ]
)
_PATH: Final = frozenset(
    [
        "chmod",
        "hardlink_to",
        "mkdir",
        "rename",
        "rmdir",
        "symlink_to",
        "touch",
        "unlink",
        "write_bytes",
        "write_text",
        "replace_file",
    ]
)
_SHUTIL: Final = frozenset(
    ["chown", "copy", "copy2", "copyfile", "copyfileobj", "copymode", "copystat", "copytree", "move", "rmtree"]
)
_MODULES: Final = {"os": _OS, "shutil": _SHUTIL}
_FLAGS: Final = frozenset({"O_WRONLY", "O_RDWR", "O_CREAT", "O_TRUNC", "O_APPEND"})


def _opens_for_writing(call: ast.Call) -> bool:
    """Returns True if a call to open() or Path.open() may write. This is the case unless the call uses the default mode
    or a constant read mode.
    """
    mode = next((one.value for one in call.keywords if one.arg == "mode"), None)
    positional = call.args[1 if isinstance(call.func, ast.Name) else 0 :]
    mode = mode or next(iter(positional), None)
    if mode is None:
        return False
    return not (isinstance(mode, ast.Constant) and isinstance(mode.value, str)) or bool(set("wax+") & set(mode.value))


def writes(source: str) -> Iterator[str]:
    """Yields a module's calls that may write a file, with their line numbers."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Attribute(value=ast.Name(id=module), attr=name) if name in _MODULES.get(module, ()):
                yield f"{node.lineno}: {module}.{name}"
            case ast.Attribute(value=ast.Name(id="os"), attr=name) if name in _FLAGS:
                yield f"{node.lineno}: {name}"
            case ast.Attribute(attr=name) if name in _PATH:
                yield f"{node.lineno}: {name}"
            case ast.Name(id="replace_file"):
                yield f"{node.lineno}: replace_file"
            case ast.Call(func=ast.Name(id="open")) if _opens_for_writing(node):
                yield f"{node.lineno}: open"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="fdopen")):
                yield f"{node.lineno}: os.fdopen"
            case ast.ImportFrom(module="os" | "shutil", names=names):
                yield from (f"{node.lineno}: from {node.module} import {one.name}" for one in names)
            case _:
                pass


def _modules() -> Iterator[tuple[str, Path]]:
    for package, directory in SOURCES.items():
        for path in sorted(directory.rglob("*.py")):
            name = ".".join((package, *path.relative_to(directory).with_suffix("").parts))
            yield name.removesuffix(".__init__"), path


def test_only_the_listed_modules_write_files() -> None:
    """A module that is not listed might write even with ``enforcement: observe``."""
    found = {name: list(writes(path.read_text())) for name, path in _modules() if "_pb" not in name}
    unknown = {name: places for name, places in found.items() if places and name not in NODE | OWN}
    assert not unknown
    stale = [name for name in NODE | OWN if not found.get(name)]
    assert not stale, "the list names modules that write nothing"


@pytest.mark.parametrize(
    "source",
    [
        "Path('/sys/x').write_text('1')",
        "os.write(fd, b'1')",
        "open('/sys/x', 'w')",
        "open('/sys/x', mode=mode)",
        "os.open('/sys/x', os.O_RDWR)",
        "os.setxattr('/sys/x', 'a', b'')",
        "from os import write",
        "replace_file('/sys/x', b'', 0o600)",
    ],
)
def test_a_writer_is_found(source: str) -> None:
    """Each of these source snippets may write a file."""
    assert list(writes(source))


@pytest.mark.parametrize(
    "source", ["open('/sys/x')", "open('/sys/x', 'rb')", "os.read(fd, 1)", "text.replace('a', '')"]
)
def test_a_reader_is_not_a_writer(source: str) -> None:
    assert not list(writes(source))
