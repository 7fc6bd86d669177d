# SPDX-License-Identifier: Apache-2.0
"""Parses the flags on the kubelet's command line that determine settings the doctor examines. This module does
no I/O.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from numa_tools.doctor.facts import Document

_TEXTS: Final = {
    "cpu-manager-policy": "cpuManagerPolicy",
    "memory-manager-policy": "memoryManagerPolicy",
    "topology-manager-policy": "topologyManagerPolicy",
    "reserved-cpus": "reservedSystemCPUs",
    "container-runtime-endpoint": "containerRuntimeEndpoint",
}
FLAGS: Final = {
    **{setting: f"--{flag}" for flag, setting in _TEXTS.items()},
    "featureGates": "--feature-gates",
    "reservedMemory": "--reserved-memory",
}
"""The flag that corresponds to each setting."""
_PLACES: Final = ("config", "config-dir", "root-dir")
_KNOWN: Final = frozenset((*_TEXTS, *_PLACES, "feature-gates", "reserved-memory"))
"""Flags that this module parses. Each of them requires a value."""
# Spellings accepted by Go's strconv.ParseBool.
_BOOLS: Final = {
    **dict.fromkeys(("1", "t", "T", "true", "TRUE", "True"), True),
    **dict.fromkeys(("0", "f", "F", "false", "FALSE", "False"), False),
}
_RESERVATION: Final = re.compile(r"\s*(\d{1,5})\s*:(.+)", re.ASCII)


class FlagError(Exception):
    """Raised if a flag has a value that the kubelet rejects at startup."""


@dataclass(frozen=True, slots=True)
class Command:
    """The kubelet's command line."""

    config: str = ""
    config_dir: str = ""
    root_dir: str = ""
    settings: Document = field(default_factory=dict)
    """Settings from flags, in the form of a KubeletConfiguration."""


def parse_command(arguments: Sequence[str]) -> Command:
    """Parses a command line, given without the program's name. Raises FlagError."""
    flags = _flags(arguments)
    settings: Document = {key: flags[flag][-1] for flag, key in _TEXTS.items() if flag in flags}
    if "feature-gates" in flags:
        settings["featureGates"] = {gate: on for text in flags["feature-gates"] for gate, on in _gates(text)}
    if "reserved-memory" in flags:
        settings["reservedMemory"] = [one for text in flags["reserved-memory"] for one in _reservations(text)]
    config, config_dir, root_dir = (flags.get(name, [""])[-1] for name in _PLACES)
    return Command(config, config_dir, root_dir, settings)


def _flags(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Returns the values of each known flag, in order.

    pflag accepts ``--name=value`` and ``--name value``, and the kubelet treats ``_`` in a name as ``-``.
    """
    found: dict[str, list[str]] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            break
        name, has_value, value = argument.removeprefix("--").partition("=")
        name = name.replace("_", "-")
        if not argument.startswith("--") or name not in _KNOWN:
            continue
        if not has_value and (value := next(rest, "")) == "":
            raise FlagError(f"--{name} has no value")
        found.setdefault(name, []).append(value)
    return found


def _gates(text: str) -> list[tuple[str, bool]]:
    gates = []
    for one in filter(None, text.split(",")):
        gate, equals, on = (part.strip() for part in one.partition("="))
        if not equals or on not in _BOOLS:
            raise FlagError(f"--feature-gates has {one[:80]!r}")
        gates.append((gate, _BOOLS[on]))
    return gates


def _reservations(text: str) -> list[dict[str, Any]]:
    found = []
    for one in filter(None, text.split(";")):
        match = _RESERVATION.fullmatch(one)
        limits = [part.partition("=") for part in match[2].split(",")] if match else []
        if not match or not all(equals for _, equals, _ in limits):
            raise FlagError(f"--reserved-memory has {one[:80]!r}")
        found.append({"numaNode": int(match[1]), "limits": {name: size for name, _, size in limits}})
    return found
