# SPDX-License-Identifier: Apache-2.0
"""Configuration files of others: the kubelet's and containerd's, as far as they are visible. Every call blocks.

A container of the driver sees neither, unless they are mounted. With ``--host-root`` both are there.
"""

import fnmatch
import posixpath
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from numa_contract.config import ConfigError
from numa_contract.cpuset import parse_cpu_list
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_node.config_file import MAX_FILE, parse_yaml, read_yaml
from numa_node.files import read_regular
from numa_node.toml_text import parse_toml

from dra_frontend.doctor.facts import KubeletConfig, RuntimeConfig
from dra_frontend.doctor.model import Unread
from dra_frontend.machine.file_tree import FileTree, HostTreeError

_CONTAINERD: Final = "/etc/containerd/config.toml"
_DROP_INS: Final = "/etc/containerd/conf.d"
_MOST_FILES: Final = 64
_MOST_BYTES: Final = 1 << 20
ELSEWHERE: Final = (
    "run it with the node's root mounted: kubectl debug node/NODE -it --profile=sysadmin --image=FRONTEND-IMAGE -- "
    "dra-frontend doctor --host-root /host"
)


def read_kubelet(path: Path) -> KubeletConfig | Unread | None:
    """Returns the kubelet's configuration file and manager states, or None without a file. Flags are not seen."""
    try:
        if not path.exists():
            return None
        found = kubelet_config(read_yaml(str(path)), str(path))
    except (OSError, ConfigError, MalformedError) as error:
        return Unread(str(error), f"correct {path}, or run the command as root of the node")
    return replace(
        found,
        cpu_manager=_policy(path.with_name("cpu_manager_state"), found.cpu_manager),
        memory_manager=_policy(path.with_name("memory_manager_state"), found.memory_manager),
    )


def read_given_kubelet(path: str) -> KubeletConfig:
    """Returns a KubeletConfiguration or an answer of ``configz``; ``-`` is standard input. Raises ConfigError."""
    # Not by opening /dev/stdin, which fails if the runtime passes a socket to the command.
    document = parse_yaml(sys.stdin.buffer.read(MAX_FILE), "standard input") if path == "-" else read_yaml(path)
    if isinstance(document, dict) and "kubeletconfig" in document:
        document = document["kubeletconfig"]
    try:
        return kubelet_config(document, path)
    except MalformedError as error:
        raise ConfigError(path, [str(error)]) from error


def kubelet_config(document: object, source: str) -> KubeletConfig:
    """Returns a KubeletConfiguration as values. Raises ConfigError and MalformedError."""
    if not isinstance(document, dict):
        raise ConfigError(source, ["is not a map"])
    reserved, gates, memory = (document.get(key) for key in ("reservedSystemCPUs", "featureGates", "reservedMemory"))
    return KubeletConfig(
        source=source,
        cpu_manager=str(document.get("cpuManagerPolicy") or "none"),
        memory_manager=str(document.get("memoryManagerPolicy") or "None"),
        topology_manager=str(document.get("topologyManagerPolicy") or "none"),
        gates={str(name): on is True for name, on in gates.items()} if isinstance(gates, dict) else {},
        # configz reports an empty text if the file has no such key.
        reserved_cpus=parse_cpu_list(str(reserved)) if reserved else None,
        reserved_memory=tuple(one for one in memory if isinstance(one, dict)) if isinstance(memory, list) else (),
    )


def kubelet_of_answer(path: Path, answer: dict[str, Any] | Unread) -> KubeletConfig | Unread:
    """Returns the configuration from the API server's answer, for a node without a visible file at ``path``."""
    if isinstance(answer, Unread):
        here = f"the kubelet's configuration is not visible from here: there is no {path}, and {answer.why}"
        return Unread(here, answer.remedy, answer.on_purpose)
    try:
        return kubelet_config(answer, "configz")
    except (ConfigError, MalformedError) as error:
        return Unread(
            f"the kubelet's configz cannot be read: {error}", f"give its file by --kubelet-config; or {ELSEWHERE}"
        )


def _policy(path: Path, said: str) -> str:
    """Returns the effective policy of a manager, from its state file, which includes flags; else the given one."""
    try:
        state = parse_json(read_regular(str(path), _MOST_BYTES), _MOST_BYTES, "kubelet state", path.name)
        return str(state["policyName"])
    except (OSError, MalformedError, TypeError, KeyError):
        return said


def read_runtime(tree: FileTree) -> RuntimeConfig | Unread:
    """Returns containerd's configuration files, merged as it does; its defaults are not in them."""
    try:
        if tree.read(_CONTAINERD) is None:
            return Unread(
                f"the container runtime's configuration is not visible from here: there is no {_CONTAINERD}",
                f"run nri-backend setup-runtime from its image on the node (docs/runtime.md); or {ELSEWHERE}",
            )
        read: dict[str, dict[str, Any]] = {}
        _read_with_imports(tree, _CONTAINERD, read)
        others = [f"{_DROP_INS}/{name}" for name in tree.names(_DROP_INS) or () if name.endswith(".toml")]
        stray = [one for one in others if one not in read and _is_ours(tree.read(one) or "")]
    except (HostTreeError, ValueError) as error:
        return Unread(f"containerd's configuration cannot be read: {error}", "correct the file that is named")
    plugins: dict[str, Any] = {}
    for document in read.values():
        _merge(plugins, document.get("plugins"))
    version = max((one["version"] for one in read.values() if isinstance(one.get("version"), int)), default=1)
    disabled = [str(name) for one in read.values() for name in _items(one.get("disabled_plugins"))]
    return RuntimeConfig(tuple(read), tuple(stray), version, plugins, tuple(disabled))


def _read_with_imports(tree: FileTree, path: str, read: dict[str, dict[str, Any]]) -> None:
    if path in read or len(read) >= _MOST_FILES or (text := tree.read(path)) is None:
        return
    try:
        read[path] = document = parse_toml(text)
    except ValueError as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    for pattern in map(str, _items(document.get("imports"))):
        for found in _matching(tree, posixpath.join(posixpath.dirname(path), pattern)):
            _read_with_imports(tree, found, read)


def _matching(tree: FileTree, pattern: str) -> Iterator[str]:
    directory, _, name = pattern.rpartition("/")
    for one in tree.names(directory) or ():
        if fnmatch.fnmatchcase(one, name):
            yield f"{directory}/{one}"


def _merge(into: dict[str, Any], more: object) -> None:
    for key, value in more.items() if isinstance(more, dict) else ():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _is_ours(text: str) -> bool:
    return "nri" in text or "cdi" in text


def _items(found: object) -> list[Any]:
    return found if isinstance(found, list) else []
