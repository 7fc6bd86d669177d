# SPDX-License-Identifier: Apache-2.0
"""Reads the files and processes of a node's container runtimes. Every call blocks.

The driver's containers see neither the files nor the processes unless the node's directories, including /proc, are
mounted, as they are with ``--host-root``. The number and size of the files are limited, since imports may match any
file.
"""

import posixpath
import re
import stat
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from numa_contract.config import ConfigError
from numa_node.files import read_regular
from numa_node.runtimes.containerd import Documents, RuntimeConfigError, UndeterminedError, grpc_address, imports_of
from numa_node.runtimes.settings import CONTAINERD, CRI_O
from numa_node.toml_text import parse_toml

from numa_tools.doctor.model import Unread
from numa_tools.doctor.runtime_in_use import (
    INSTALLATIONS,
    Candidate,
    FoundRuntimes,
    ReportedRuntime,
    RuntimeInstallation,
    given_runtime,
)
from numa_tools.doctor.runtime_settings import RuntimeConfig
from numa_tools.doctor.sources.processes import START_SLACK_SECONDS, Process, find_processes, variables_of

HOST_ROOT_REMEDY: Final = (
    "run the doctor with the node's root file system mounted: kubectl debug node/NODE -it --profile=sysadmin "
    "--image=FRONTEND-IMAGE -- dra-frontend doctor --host-root /host"
)
_MAX_FILES: Final = 64
_MAX_IMPORTS: Final = 256
_MAX_BYTES: Final = 1 << 20
_MAX_GIVEN_BYTES: Final = 4 << 20
_MAX_TOTAL_CHARACTERS: Final = 4 << 20
"""Maximum total number of characters in a runtime's files."""
_DROP_INS: Final = "/etc/containerd/conf.d"
_PROGRAMS: Final = ("containerd", "crio", "kubelet")
_CRIO_DIRECTORY: Final = "/etc/crio/crio.conf.d"
# containerd's options that take a value, and CRI-O's options that override keys in its files (internal/criocli).
_CONTAINERD_VALUES: Final = frozenset({"config", "c", "address", "a", "root", "state", "log-level", "l"})
_CRIO_REPLACES: Final = re.compile(r"enable-nri|nri-.*|cdi-spec-dirs", re.ASCII)
_CRIO_VARIABLES: Final = frozenset({"CONTAINER_CONFIG", "CONTAINER_CONFIG_DIR", "CONTAINER_CDI_SPEC_DIRS"})


def read_runtimes(tree: HostTree) -> FoundRuntimes:
    """Returns the runtimes found in a node's file tree."""
    processes = _processes(tree)
    running = [one for one in (_current(tree, process, _running(tree, process)) for process in processes) if one]
    known = {one.installation.config for one in running}
    others = [_candidate(tree, installation) for installation in INSTALLATIONS if installation.config not in known]
    candidates = (*running, *(one for one in others if one))
    sockets = {installation.socket for installation in (*INSTALLATIONS, *(one.installation for one in candidates))}
    return FoundRuntimes(candidates, frozenset(one for one in sockets if _is_socket(tree, one)), _endpoint(processes))


def read_given_runtime(path: str, reported: ReportedRuntime | None) -> RuntimeConfig | Unread:
    """Reads a runtime's printed settings from a file. The path ``-`` stands for standard input. Raises ConfigError."""
    try:
        # Opening /dev/stdin fails if the runtime passes a socket as standard input.
        data = (
            sys.stdin.buffer.read(_MAX_GIVEN_BYTES + 1)
            if path == "-"
            else read_regular(path, _MAX_GIVEN_BYTES, follow=True)
        )
        if len(data) > _MAX_GIVEN_BYTES:
            raise RuntimeConfigError(f"is larger than {_MAX_GIVEN_BYTES >> 20} MiB")
        return given_runtime(data.decode(errors="replace"), reported)
    except OSError as error:
        raise ConfigError(path, [error.strerror or str(error)]) from error
    except RuntimeConfigError as error:
        raise ConfigError("standard input" if path == "-" else path, [str(error)]) from error


def _candidate(
    tree: HostTree, installation: RuntimeInstallation, *, runs: bool = False, directory: str = _CRIO_DIRECTORY
) -> Candidate | None:
    """Returns a runtime with its files, or None if the runtime has no files and no visible process."""
    read = _Files(tree)
    if installation.software == CRI_O:
        read.crio(installation.config, directory)
    else:
        read.containerd(installation.config)
    if not read.documents and not read.fault and not runs:
        return None
    if installation.software == CONTAINERD and (address := grpc_address(read.documents)):
        installation = replace(installation, socket=address)
    stray = (
        _stray(tree, read.documents) if posixpath.dirname(installation.config) == posixpath.dirname(_DROP_INS) else ()
    )
    return Candidate(installation, tuple(read.documents), read.fault, runs=runs, stray=stray)


class _Files:
    """Reads a runtime's files in the runtime's own order, and stops at the first file that is unusable."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self.documents: list[tuple[str, dict[str, Any]]] = []
        self.fault = ""
        self._left = _MAX_TOTAL_CHARACTERS

    def containerd(self, config: str) -> None:
        """Reads config.toml and its imports, breadth first."""
        pending, imported = [config], {config: ""}
        try:
            while pending:
                path = pending.pop(0)
                document = self._document(path)
                if document is None and path == config:
                    return
                if document is None:
                    raise UndeterminedError(f"{imported[path]} imports {path}, which does not exist")
                if len(patterns := imports_of(path, document)) > _MAX_IMPORTS:
                    raise UndeterminedError(f"{path} imports more than {_MAX_IMPORTS} patterns")
                for pattern in patterns:
                    new = [one for one in _matching(self._tree, pattern) if one not in imported]
                    pending += new
                    imported |= dict.fromkeys(new, path)
                if len(imported) > _MAX_IMPORTS:
                    raise UndeterminedError(f"{config} imports more than {_MAX_IMPORTS} files")
        except (UndeterminedError, HostTreeError) as error:
            self.fault = str(error)

    def crio(self, config: str, directory: str) -> None:
        """Reads crio.conf, then every file under the drop-in directory in name order."""
        try:
            self._document(config)
            for path in _below(self._tree, directory):
                self._document(path)
        except (UndeterminedError, HostTreeError) as error:
            self.fault = str(error)

    def _document(self, path: str) -> dict[str, Any] | None:
        if len(self.documents) >= _MAX_FILES:
            raise UndeterminedError(f"there are more than {_MAX_FILES} files; {path} was not read")
        if (text := _text(self._tree, path)) is None:
            return None
        self._left -= len(text)
        if self._left < 0:
            raise UndeterminedError(
                f"the files are larger than {_MAX_TOTAL_CHARACTERS >> 20} MiB in total; {path} was not read"
            )
        try:
            document = parse_toml(text)
        except ValueError as error:
            raise UndeterminedError(f"{path} is not TOML: {error}") from error
        self.documents.append((path, document))
        return document


def _text(tree: HostTree, path: str) -> str | None:
    """Returns a file's text, or None if the file does not exist. Raises UndeterminedError."""
    try:
        return read_regular(tree.real(path), _MAX_BYTES, follow=True).decode()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UndeterminedError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise UndeterminedError(f"{path} is not UTF-8 text or not a valid path: {error}") from error


def _matching(tree: HostTree, pattern: str) -> list[str]:
    """Returns the files that match a pattern in imports, in the order of Go's filepath.Glob.

    As in containerd (resolveImports), only a path with a star is a pattern. Any other path must exist. Raises
    UndeterminedError and HostTreeError.
    """
    if "*" not in pattern:
        return [pattern]
    if "[" in pattern or "\\" in pattern:
        raise UndeterminedError(
            f"the pattern {pattern} in imports has special characters that this command does not expand"
        )
    found, is_literal = ["/"], True
    for part in pattern.strip("/").split("/"):
        is_literal = is_literal and not set(part) & set("*?")
        if is_literal:
            found = [posixpath.join(one, part) for one in found]
            continue
        expression = re.compile(re.escape(part).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)
        found = [f"{one}/{name}" for one in found for name in tree.names(one) or () if expression.fullmatch(name)]
        if len(found) > _MAX_IMPORTS:
            raise UndeterminedError(f"the pattern {pattern} in imports matches more than {_MAX_IMPORTS} files")
    return found


def _below(tree: HostTree, directory: str) -> Iterator[str]:
    """Yields the files under a directory in the order of filepath.Walk. Raises UndeterminedError and HostTreeError."""
    pending, seen = [directory], 0
    while pending:
        path = pending.pop()
        names = tree.names(path) if path == directory or _is_directory(tree, path) else None
        if names is None:
            if path != directory:
                yield path
            continue
        seen += len(names)
        if seen > _MAX_IMPORTS:
            raise UndeterminedError(f"{directory} has more than {_MAX_IMPORTS} files")
        pending += [f"{path}/{name}" for name in reversed(names)]


def _is_directory(tree: HostTree, path: str) -> bool:
    """Returns True for a directory, but not for a link to one.

    filepath.Walk reports such a link as a file, and CRI-O then fails to start.
    """
    try:
        parent, _, name = path.rpartition("/")
        return stat.S_ISDIR(Path(tree.real(parent), name).lstat().st_mode)
    except OSError:
        return False


def _is_socket(tree: HostTree, path: str) -> bool:
    try:
        return Path(tree.real(path)).is_socket()
    except (OSError, HostTreeError):
        return False


def _stray(tree: HostTree, documents: Documents) -> tuple[str, ...]:
    """Returns the drop-ins that mention NRI or CDI but are not among the files that containerd reads."""
    read = {path for path, _ in documents}
    try:
        others = [f"{_DROP_INS}/{name}" for name in tree.names(_DROP_INS) or () if name.endswith(".toml")]
        return tuple(one for one in others[:_MAX_FILES] if one not in read and _is_ours(_text(tree, one) or ""))
    except (UndeterminedError, HostTreeError):
        return ()


def _is_ours(text: str) -> bool:
    return "nri" in text or "cdi" in text


def _processes(tree: HostTree) -> list[Process]:
    """Returns the runtimes and kubelets that run on the node itself, not in containers.

    The result is empty if /proc is not readable.
    """
    try:
        return [one for one in find_processes(tree, _PROGRAMS) if one.command and one.namespaces in (None, 1)]
    except HostTreeError:
        return []


def _arguments(process: Process) -> tuple[str, ...]:
    return tuple(filter(None, process.command[1:]))


def _current(tree: HostTree, process: Process, found: Candidate | None) -> Candidate | None:
    """Returns a running candidate, with a fault if any of its files is newer than its process."""
    if found is None or found.fault or process.started is None:
        return found
    for path, _ in found.documents:
        if _changed_at(tree, path) > process.started + START_SLACK_SECONDS:
            why = f"{path} was changed after the runtime started, and the change takes effect only after a restart"
            return replace(found, fault=why, remedy=f"restart the runtime that uses {found.installation.config}")
    return found


def _changed_at(tree: HostTree, path: str) -> float:
    try:
        return Path(tree.real(path)).stat().st_mtime
    except (OSError, ValueError, HostTreeError):
        return 0.0


def _running(tree: HostTree, process: Process) -> Candidate | None:
    """Returns the runtime that a process runs, or None if the process runs another program, or a command such as
    ``containerd config dump``.
    """
    arguments = _arguments(process)
    if process.program == "crio":
        return None if arguments and not arguments[0].startswith("-") else _running_crio(tree, process)
    if process.program != "containerd" or _has_command(arguments):
        return None
    config = _option(arguments, "config", "c") or INSTALLATIONS[0].config
    address = _option(arguments, "address", "a")
    known = next((one for one in INSTALLATIONS if one.software == CONTAINERD and one.config == config), None)
    found = _candidate(
        tree, known or RuntimeInstallation(CONTAINERD, CONTAINERD, config, INSTALLATIONS[0].socket), runs=True
    )
    if found and address:
        found = replace(found, installation=replace(found.installation, socket=address))
    if found and not config.startswith("/"):
        return replace(found, fault=f"containerd was started with the relative path {config}")
    return found


def _running_crio(tree: HostTree, process: Process) -> Candidate | None:
    arguments = _arguments(process)
    crio = next(one for one in INSTALLATIONS if one.software == CRI_O)
    installation = replace(crio, config=_option(arguments, "config", "c") or crio.config)
    found = _candidate(
        tree, installation, runs=True, directory=_option(arguments, "config-dir", "d") or _CRIO_DIRECTORY
    )
    options = [name for name in map(_name, arguments) if _CRIO_REPLACES.fullmatch(name)]
    variables = variables_of(tree, process) & _CRIO_VARIABLES
    if found and (options or variables):
        what = ", ".join([*(f"--{one}" for one in options), *sorted(variables)])
        return replace(found, fault=f"CRI-O was started with {what}, which overrides its files")
    return found


def _has_command(arguments: Sequence[str]) -> bool:
    """Returns True if containerd was started with a command such as ``config dump``, not as the service."""
    takes_value = False
    for one in arguments:
        if not one.startswith("-") and not takes_value:
            return True
        takes_value = one.startswith("-") and "=" not in one and _name(one) in _CONTAINERD_VALUES
    return False


def _option(arguments: Sequence[str], *names: str) -> str:
    """Returns an option's last value, given as ``--name=value`` or ``--name value``, or "" if it is absent."""
    found = ""
    for one, following in zip(arguments, (*arguments[1:], ""), strict=False):
        if one.startswith("-") and _name(one) in names:
            found = one.partition("=")[2] if "=" in one else following
    return found


def _name(argument: str) -> str:
    return argument.partition("=")[0].lstrip("-") if argument.startswith("-") else ""


def _endpoint(processes: Sequence[Process]) -> str:
    """Returns the runtime endpoint from the kubelet's command line, or "" if the command line has none."""
    kubelets = [one for one in processes if one.program == "kubelet"]
    given = [_option(_arguments(one), "container-runtime-endpoint") for one in kubelets]
    return next(filter(None, given), "")
