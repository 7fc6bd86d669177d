# SPDX-License-Identifier: Apache-2.0
"""Finds the settings that containerd lacks, and generates a drop-in that contains them. Does no I/O.

:mod:`numa_node.runtimes.settings` lists the settings. :mod:`numa_node.runtimes.containerd` parses the dump and
describes how each release merges its files.

A drop-in for containerd 2 contains only the keys to change and no version line, so containerd 2.0.2 and later can
combine it with a config.toml of any version. containerd 1.7 replaces whole sections, so its drop-in repeats the
complete section from the dump.
"""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numa_contract.errors import shown
from numa_node.runtimes.containerd import CRI_OF_DUMP, DUMP_OF_1_7, NRI, NRI_SOCKET, Dump, full_name, resolve_var_run
from numa_node.runtimes.settings import (
    MIN_SECONDS,
    NEEDED_SETTINGS,
    REQUIRE_PLUGIN,
    SETTINGS,
    is_used,
    required_value,
)

_REQUIRED_PLUGINS: Final = frozenset({NRI, *CRI_OF_DUMP.values()})
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?)(h|ms|m|s|us|µs|ns)", re.ASCII)
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


@dataclass(frozen=True, slots=True)
class Change:
    """A key whose value differs from the required one."""

    path: tuple[str, ...]
    """Path of the key: the plugin, optionally the name of a table in the plugin's section, and the key itself."""
    required: Any
    actual: Any
    """Current value, or None if the key is not set."""

    def __str__(self) -> str:
        section = ".".join(map(_key, self.path[:-1]))
        return f"[plugins.{section}] {self.path[-1]} is {_display(self.actual)}, must be {_display(self.required)}"


def missing_settings(dump: Dump, cdi_dir: str, *, require_plugin: bool = False) -> list[Change]:
    """Returns the keys that must be changed, in section order. Disabled plugins are left out."""
    changes = _changes(NEEDED_SETTINGS, dump, cdi_dir)
    for key, seconds in MIN_SECONDS.items():
        found = dump.value(NRI, key)
        changes.append(Change((NRI, key), _at_least(found, seconds), found))
    if require_plugin and dump.can_require_plugins:
        changes += _changes(REQUIRE_PLUGIN, dump, cdi_dir)
    return [one for one in changes if one.actual != one.required and not dump.is_disabled(one.path[0])]


def _changes(names: Sequence[str], dump: Dump, cdi_dir: str) -> list[Change]:
    """Returns a Change for each of the given settings, including those that already have the required value."""
    changes = []
    for setting in (one for one in SETTINGS if one.name in names and is_used(one, dump)):
        path = setting.path(dump.cri)
        actual = dump.value(*path)
        changes.append(Change(path, setting.written(required_value(setting.name, actual, cdi_dir)), actual))
    return changes


def manual_changes(dump: Dump, *, require_plugin: bool = False) -> list[str]:
    """Returns the changes that a drop-in cannot make, each as a sentence for the operator."""
    found = [
        f'disabled_plugins contains "{plugin}": remove it from the file that sets it; drop-ins can only extend the list'
        for plugin in dump.disabled
        if full_name(plugin) in _REQUIRED_PLUGINS
    ]
    if require_plugin and not dump.can_require_plugins and not dump.is_disabled(NRI):
        found.append("this containerd cannot require plugins: update it to 2.2 or later, or omit --require-plugin")
    return found


def warnings(dump: Dump) -> list[str]:
    """Returns warnings for the operator that do not concern required settings."""
    lines = []
    socket = str(dump.value(NRI, "socket_path") or NRI_SOCKET)
    if resolve_var_run(socket) != resolve_var_run(NRI_SOCKET):
        lines.append(
            f"containerd's NRI socket is {shown(socket)}: set nriSocket in this driver's configuration to that path"
        )
    if dump.of_2_0:
        lines.append(
            "the dump of containerd 2.0.0 to 2.0.5 lacks settings from a version 2 config.toml: for these "
            'releases, use the output of "containerd config migrate" instead, or update containerd'
        )
    return lines


def write_drop_in(dump: Dump, settings: Sequence[Change]) -> str:
    """Returns a drop-in that applies the settings to the containerd that printed this dump."""
    tables: dict[str, Any] = {}
    for setting in settings:
        plugin = setting.path[0]
        if dump.version == DUMP_OF_1_7 and plugin not in tables:
            tables[plugin] = copy.deepcopy(dump.plugins[plugin])
        table = tables
        for part in setting.path[:-1]:
            table = table.setdefault(part, {})
        table[setting.path[-1]] = setting.required
    head = "# Written by nri-backend setup-runtime."
    if dump.version == DUMP_OF_1_7:
        head += " containerd 1.7 replaces whole sections: all other keys are copied from the dump.\nversion = 2"
    return "\n".join([head, *_lines(("plugins",), tables)]) + "\n"


def _at_least(found: Any, seconds: int) -> Any:
    parts = _DURATION.findall(str(found))
    configured = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    # A key that is not set has containerd's default, and a value in an unknown format is left unchanged.
    return f"{seconds}s" if parts and configured < seconds else found


def _display(value: object) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else shown(value) if isinstance(value, str) else str(value)


def _lines(path: tuple[str, ...], table: dict[str, Any]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if plain or not table:
        yield f"\n[{'.'.join(map(_key, path))}]"
        yield from (f"{_key(key)} = {_value(value)}" for key, value in plain.items())
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _lines((*path, key), value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # A JSON string is a valid TOML basic string, except that TOML requires DEL to be escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool | float) else str(value)
