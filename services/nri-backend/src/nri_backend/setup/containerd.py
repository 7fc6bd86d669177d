# SPDX-License-Identifier: Apache-2.0
"""What ``containerd config dump`` must say for this driver to work, and the drop-in that makes it so. Pure.

Claims reach containers through CDI, limits through NRI; containerd 1.7 has both off by default, as well as the hugetlb
controller of its CRI plugin. A dump is what containerd uses: it has merged the imports and migrated the names itself.

containerd 2 merges imported files key by key. A file without a version line may use the newest names there, whatever
the version of the file that imports it (2.0.2 and later, cmd/containerd/server/config). containerd 1.7 puts an imported
section in the place of the whole one (mergeConfig in services/server/config), so a drop-in for it repeats the section
as the dump has it.
"""

import copy
import json
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numa_contract.errors import shown
from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION
from numa_node.toml_text import parse_toml

NRI: Final = "io.containerd.nri.v1.nri"
# Where containerd listens unless it is told otherwise.
_NRI_SOCKET: Final = "/var/run/nri/nri.sock"
# A dump has the newest version that its containerd knows (version/version.go): 2 is 1.7, 3 is 2.0 to 2.2, 4 is 2.3.
_CRI: Final = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}
_NEEDED: Final = frozenset({NRI, *_CRI.values()})
_OLDEST: Final = 2
# containerd's defaults (nri/pkg/adaptation). Hooks are answered within 1.5 s, and registration waits for nothing.
_LEAST_SECONDS: Final = {"plugin_registration_timeout": 5, "plugin_request_timeout": 2}
_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)
_DURATION: Final = re.compile(r"(\d+(?:\.\d*)?)(h|ms|m|s|us|µs|ns)", re.ASCII)
_SECONDS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}


class RuntimeConfigError(ValueError):
    """The text is not a dump of a containerd that can be judged; the message names the remedy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """A key that does not have the value that it must have."""

    path: tuple[str, ...]
    """Plugin, perhaps a table in its section, and key."""
    wanted: Any
    found: Any
    """None: the key is not there."""

    def __str__(self) -> str:
        section = ".".join(map(_key, self.path[:-1]))
        return f"[plugins.{section}] {self.path[-1]} is {_said(self.found)}, must be {_said(self.wanted)}"


@dataclass(frozen=True, slots=True)
class Dump:
    """The configuration that containerd uses."""

    version: int
    plugins: dict[str, Any]
    disabled: tuple[str, ...]
    """Plugins that are switched off as a whole; a dump has no section of theirs."""

    @property
    def cri(self) -> str:
        """The plugin in whose section CDI is switched on."""
        return _CRI[self.version]

    def value(self, *path: str) -> Any:
        """Returns what is said at a place below ``plugins``, None for nothing."""
        found: Any = self.plugins
        for part in path:
            found = found.get(part) if isinstance(found, dict) else None
        return found

    @property
    def can_require_plugins(self) -> bool:
        """Whether this containerd has NRI's default validator (2.2 and later); the section then has its table."""
        return isinstance(self.value(NRI, "default_validator"), dict)


def read_dump(text: str) -> Dump:
    """Returns what a dump says; raises RuntimeConfigError for any other text."""
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise RuntimeConfigError(f"the dump is not TOML: {error}") from error
    version, plugins = document.get("version"), document.get("plugins", {})
    if not isinstance(version, int) or version not in _CRI or not isinstance(plugins, dict):
        raise RuntimeConfigError(f"the dump has version {shown(version)}; known are {', '.join(map(str, _CRI))}")
    dump = Dump(version, plugins, tuple(map(str, _items(document.get("disabled_plugins")))))
    for plugin in (dump.cri, NRI):
        if not isinstance(dump.value(plugin), dict) and plugin not in dump.disabled:
            raise RuntimeConfigError(
                f'it has no [plugins."{plugin}"]: it must be what "containerd config dump" prints, not a config.toml'
            )
    return dump


def missing_settings(dump: Dump, cdi_dir: str, *, require_plugin: bool = False) -> list[Setting]:
    """Returns the keys that must be changed, in the order of sections; a plugin that is switched off has none."""
    wanted: list[tuple[tuple[str, ...], Any]] = [
        ((dump.cri, "enable_cdi"), True),
        ((dump.cri, "cdi_spec_dirs"), _with_directory(dump.value(dump.cri, "cdi_spec_dirs"), cdi_dir)),
        *([((dump.cri, "disable_hugetlb_controller"), False)] if dump.version == _OLDEST else []),
        ((NRI, "disable"), False),
        ((NRI, "disable_connections"), False),
        *(((NRI, key), _at_least(dump.value(NRI, key), least)) for key, least in _LEAST_SECONDS.items()),
    ]
    if require_plugin and dump.can_require_plugins:
        validator = (NRI, "default_validator")
        required = _items(dump.value(*validator, "required_plugins"))
        wanted += [
            ((*validator, "enable"), True),
            ((*validator, "required_plugins"), required + [NRI_PLUGIN_NAME] * (NRI_PLUGIN_NAME not in required)),
            ((*validator, "tolerate_missing_plugins_annotation"), TOLERATE_MISSING_ANNOTATION),
        ]
    settings = [Setting(path, value, dump.value(*path)) for path, value in wanted if path[0] not in dump.disabled]
    return [one for one in settings if one.found != one.wanted]


def faults(dump: Dump, *, require_plugin: bool = False) -> list[str]:
    """Returns what no drop-in can mend, each with its remedy."""
    found = [
        f'disabled_plugins names "{plugin}": take it out of the file that says so; drop-ins only add to that list'
        for plugin in dump.disabled
        if plugin in _NEEDED
    ]
    if require_plugin and not dump.can_require_plugins and NRI not in dump.disabled:
        found.append("this containerd cannot require plugins: update it to 2.2 or later, or leave out --require-plugin")
    return found


def notes(dump: Dump) -> list[str]:
    """Returns what the operator should know beside that."""
    socket = str(dump.value(NRI, "socket_path") or _NRI_SOCKET)
    if _same_place(socket) == _same_place(_NRI_SOCKET):
        return []
    return [f"containerd's NRI socket is {shown(socket)}: set nriSocket of this driver to it"]


def write_drop_in(dump: Dump, settings: Sequence[Setting]) -> str:
    """Returns the text that gives a containerd with this dump these settings."""
    tables: dict[str, Any] = {}
    for setting in settings:
        plugin = setting.path[0]
        if dump.version == _OLDEST and plugin not in tables:
            tables[plugin] = copy.deepcopy(dump.plugins[plugin])
        table = tables
        for part in setting.path[:-1]:
            table = table.setdefault(part, {})
        table[setting.path[-1]] = setting.wanted
    head = "# Written by nri-backend setup-runtime."
    if dump.version == _OLDEST:
        head += " containerd 1.7 replaces whole sections: all other keys are as they were.\nversion = 2"
    return "\n".join([head, *_lines(("plugins",), tables)]) + "\n"


def _items(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def _with_directory(found: Any, directory: str) -> list[Any]:
    there = _items(found)
    return there if _same_place(directory) in map(_same_place, map(str, there)) else [*there, directory]


def _at_least(found: Any, seconds: int) -> Any:
    parts = _DURATION.findall(str(found))
    given = sum(float(number) * _SECONDS[unit] for number, unit in parts)
    # What is not there, or in a form of a later release, is containerd's default or none of our business.
    return f"{seconds}s" if parts and given < seconds else found


def _same_place(path: str) -> str:
    path = posixpath.normpath(path)
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _said(value: object) -> str:
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
    return name if _BARE.fullmatch(name) else _value(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        # A basic string of TOML is one of JSON, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_value(inner)}" for key, inner in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool | float) else str(value)
