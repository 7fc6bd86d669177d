# SPDX-License-Identifier: Apache-2.0
"""The kubelet's configuration, as far as it is visible. Every call blocks.

A container of the driver does not see its files, unless they are mounted. With ``--host-root`` they are there.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from numa_contract.config import ConfigError
from numa_contract.cpuset import parse_cpu_list
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_node.config_file import MAX_FILE, parse_yaml, read_yaml
from numa_node.files import read_regular

from dra_frontend.doctor.facts import KubeletConfig
from dra_frontend.doctor.model import Unread

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
