# SPDX-License-Identifier: Apache-2.0
"""Merges the parts of a kubelet's configuration as the kubelet does. This module does no I/O.

The kubelet reads the ``--config`` file, applies each drop-in in ``--config-dir`` as a JSON merge patch (RFC 7396) in
the order of a directory walk, and finally applies its command line to the result (mergeKubeletConfigurations and
kubeletConfigFlagPrecedence in cmd/kubelet/app/server.go; KEP-3983). So the last part takes precedence, maps are merged,
and lists are replaced. Feature gates on the command line are added to those in the files.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numa_contract.config import ConfigError
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError

from numa_tools.doctor.facts import Document, KubeletConfig
from numa_tools.doctor.kubelet_command import FLAGS
from numa_tools.doctor.model import Unread

API_VERSION: Final = "kubelet.config.k8s.io/v1beta1"
KIND: Final = "KubeletConfiguration"
POLICIES: Final = {"cpu": "cpuManagerPolicy", "memory": "memoryManagerPolicy"}
"""Policy settings of the kubelet's managers that write a state file."""
_GATES: Final = "featureGates"
_RESERVED_CPUS: Final = "reservedSystemCPUs"
_RESERVED_MEMORY: Final = "reservedMemory"
_ENDPOINT: Final = "containerRuntimeEndpoint"
SETTINGS: Final = (*POLICIES.values(), "topologyManagerPolicy", _GATES, _RESERVED_CPUS, _RESERVED_MEMORY, _ENDPOINT)
"""Fields of a KubeletConfiguration that the doctor examines."""


@dataclass(frozen=True, slots=True)
class Part:
    """The settings from one source of the configuration, in the form of a KubeletConfiguration."""

    origin: str
    """The file's path, or the process or unit whose command line sets the fields."""
    settings: Document
    is_command_line: bool = False


@dataclass(frozen=True, slots=True)
class Merged:
    """The effective settings from several parts."""

    settings: Document
    origins: Mapping[str, str]
    """Origin of each setting that a part sets. Feature gates are named ``featureGates.GATE``.

    A command-line setting's origin begins with the flag: ``--cpu-manager-policy in the unit kubelet.service``.
    """


@dataclass(frozen=True, slots=True)
class Reading:
    """The kubelet's configuration as found on the node, without querying the kubelet."""

    parts: tuple[Part, ...] = ()
    """Parts of the configuration, in the order in which the kubelet applies them."""
    running: Mapping[str, str] = field(default_factory=dict)
    """Policy in use for each manager (``cpu``, ``memory``), from the running kubelet's state files."""
    incomplete: str = ""
    """Reason why parts may be missing, or "" if the reading is complete."""


def merge(parts: Iterable[Part]) -> Merged:
    """Applies the parts in order and returns the resulting settings."""
    settings: Any = {}
    origins: dict[str, str] = {}
    for part in parts:
        settings = merge_patch(settings, part.settings)
        for key, value in part.settings.items():
            inner = value if key == _GATES and isinstance(value, dict) else None
            for name, one in {key: value}.items() if inner is None else _named(inner):
                if one is None:
                    origins = {other: origin for other, origin in origins.items() if not _covers(name, other)}
                else:
                    origins[name] = f"{FLAGS[key]} in {part.origin}" if part.is_command_line else part.origin
    return Merged(settings, origins)


def _named(gates: Document) -> Iterable[tuple[str, Any]]:
    return ((f"{_GATES}.{gate}", on) for gate, on in gates.items())


def _covers(name: str, other: str) -> bool:
    return other == name or other.startswith(f"{name}.")


def merge_patch(target: Any, patch: Any) -> Any:
    """Applies a JSON merge patch to a value. The parser has already limited the nesting depth of the patch and the
    value.
    """
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge_patch(merged.get(key), value)
    return merged


def misspelled(settings: Document) -> list[str]:
    """Returns the keys that differ from a known setting only in case.

    The kubelet ignores such keys in the ``--config`` file. In a drop-in, such a key may hide the correctly spelled one,
    because Go's JSON decoder compares names case-insensitively.
    """
    known = {name.lower(): name for name in SETTINGS}
    return sorted(key for key in map(str, settings) if known.get(key.lower(), key) != key)


def kubelet_config(settings: object, source: str) -> KubeletConfig:
    """Parses a KubeletConfiguration. Raises ConfigError and MalformedError."""
    if not isinstance(settings, dict):
        raise ConfigError(source, ["is not a map"])
    reserved, gates, memory = (settings.get(key) for key in (_RESERVED_CPUS, _GATES, _RESERVED_MEMORY))
    cpu, memory_manager = (
        str(settings.get("cpuManagerPolicy") or "none"),
        str(settings.get("memoryManagerPolicy") or "None"),
    )
    return KubeletConfig(
        source=source,
        cpu_manager=cpu,
        memory_manager=memory_manager,
        topology_manager=str(settings.get("topologyManagerPolicy") or "none"),
        gates={str(name): on is True for name, on in gates.items()} if isinstance(gates, dict) else {},
        # configz reports an empty string if reservedSystemCPUs is not set.
        reserved_cpus=parse_cpu_list(str(reserved)) if reserved else None,
        reserved_memory=tuple(one for one in memory if isinstance(one, dict)) if isinstance(memory, list) else (),
        configured={"cpu": cpu, "memory": memory_manager},
        runtime_endpoint=str(settings.get(_ENDPOINT) or ""),
    )


def kubelet_of_reading(reading: Reading, remedy: str) -> KubeletConfig | None:
    """Returns the configuration from a reading, or None if there is no trace of a kubelet on the node.

    ``remedy`` is the remedy for checks that cannot be decided because the reading is incomplete. A value that the
    kubelet would reject also makes the reading incomplete.
    """
    if not reading.parts and not reading.running:
        return None
    merged, incomplete = merge(reading.parts), reading.incomplete
    source = ", ".join(dict.fromkeys(part.origin for part in reading.parts)) or "the managers' state files"
    try:
        found = kubelet_config(merged.settings, source)
    except MalformedError as error:
        origin = merged.origins.get(_RESERVED_CPUS, source)
        incomplete = f"{origin}: {_RESERVED_CPUS}: {error}"
        found = kubelet_config({**merged.settings, _RESERVED_CPUS: None}, source)
    configured = {
        manager: policy
        for manager, policy in found.configured.items()
        if POLICIES[manager] in merged.origins or not incomplete
    }
    return replace(
        found,
        cpu_manager=reading.running.get("cpu", found.cpu_manager),
        memory_manager=reading.running.get("memory", found.memory_manager),
        origins=merged.origins,
        running=reading.running,
        configured=configured,
        # A part that could not be read may set a different endpoint.
        runtime_endpoint="" if incomplete else found.runtime_endpoint,
        incomplete=Unread(f"part of the kubelet's configuration is not visible: {incomplete}", remedy)
        if incomplete
        else None,
    )


def archived(kubelet: KubeletConfig) -> Document:
    """Returns a kubelet's configuration as a document for an archive, omitting fields that may contain secrets."""
    settings = {
        **{POLICIES[manager]: policy for manager, policy in kubelet.configured.items()},
        "topologyManagerPolicy": kubelet.topology_manager,
        _GATES: dict(kubelet.gates),
        _RESERVED_CPUS: format_cpu_list(kubelet.reserved_cpus or frozenset()),
        _RESERVED_MEMORY: list(kubelet.reserved_memory),
        _ENDPOINT: kubelet.runtime_endpoint,
    }
    incomplete = kubelet.incomplete
    return {
        "source": kubelet.source,
        "settings": settings,
        "origins": dict(kubelet.origins),
        "running": dict(kubelet.running),
        "unseen": None if incomplete is None else {"why": incomplete.why, "remedy": incomplete.remedy},
    }


def unarchived(document: object) -> KubeletConfig:
    """Parses the configuration from a document in an archive. Raises ConfigError or MalformedError."""
    if not isinstance(document, dict) or not isinstance(document.get("settings"), dict):
        raise ConfigError("kubelet.json", ["was not written by gather"])
    settings, running = document["settings"], _texts(document.get("running"))
    found = kubelet_config(settings, str(document.get("source")))
    incomplete = _texts(document.get("unseen"))
    configured = {manager: str(settings[key]) for manager, key in POLICIES.items() if settings.get(key)}
    return replace(
        found,
        cpu_manager=running.get("cpu", found.cpu_manager),
        memory_manager=running.get("memory", found.memory_manager),
        origins=_texts(document.get("origins")),
        running=running,
        configured=configured,
        incomplete=Unread(incomplete.get("why", ""), incomplete.get("remedy", "")) if document.get("unseen") else None,
    )


def _texts(found: object) -> dict[str, str]:
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}
