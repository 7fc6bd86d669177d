# SPDX-License-Identifier: Apache-2.0
"""containerd's configuration, interpreted by the rules of the release that uses it. This module does no I/O.

The configuration can come from two sources. A dump is the output of ``containerd config dump``: containerd itself has
merged the files, renamed old sections and filled in its defaults. Files are config.toml and its imports, which the
releases read differently:

* 1.7 replaces a whole section with an imported one. The last file with a ``version`` line determines for all files
  whether sections have short names (version 1) or full names (version 2). containerd 1.7 accepts no higher version
  (mergeConfig and ValidateV2 in services/server/config, Decode).
* 2.0 to 2.2 merge key by key; lists are replaced. The last file with a ``version`` line determines for the merged
  result whether the CRI section of 1.7 is used. 2.0.0 and 2.0.1 then replace the whole new section with it, while later
  releases only fill in the keys that the new section lacks. In a file of version 1 or without a ``version`` line, only
  the section names are converted, to full names (mergeConfig in cmd/containerd/server/config, configMigration in
  plugins/cri/runtime).
* 2.3 and 2.4 convert the CRI section of 1.7 in each file before they merge.

In every release, the ``disabled_plugins`` lists of all files are combined. Files are read breadth first: the files that
config.toml imports come before the files that those import, and each file is read only once.
"""

import copy
import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numa_contract.errors import shown

from numa_node.toml_text import parse_toml

NRI: Final = "io.containerd.nri.v1.nri"
CRI_OF_1: Final = "io.containerd.grpc.v1.cri"
"""The CRI plugin in containerd 1. In containerd 2, only the plugin's gRPC service has this name."""
CRI_OF_2: Final = "io.containerd.cri.v1.runtime"
CRI_OF_DUMP: Final = {2: CRI_OF_1, 3: CRI_OF_2, 4: CRI_OF_2}
"""Section that contains the CDI settings, keyed by the dump's version: 2 for containerd 1.7, 3 for 2.0 to 2.2, 4 for
2.3 and later (version/version.go).
"""
DUMP_OF_1_7: Final = 2
NRI_SOCKET: Final = "/var/run/nri/nri.sock"
"""Default socket on which containerd serves NRI."""
CDI_DIRECTORIES: Final = ("/etc/cdi", "/var/run/cdi")
"""Default ``cdi_spec_dirs`` of every release."""

_GRPC_SERVER: Final = "io.containerd.server.v1.grpc"
# Plugin names that 1.7 accepts in a file of version 2.
_FULL_NAME: Final = re.compile(r"io\.containerd\.[^.]*\..*", re.DOTALL)

Table = dict[str, Any]
Release = tuple[int, ...]


class RuntimeConfigError(ValueError):
    """The input is not a usable dump of containerd's configuration. The message contains the remedy."""


class UndeterminedError(ValueError):
    """The setting that containerd uses cannot be determined from the files. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Dump:
    """The configuration that containerd uses, as containerd prints it."""

    version: int
    plugins: Table
    disabled: tuple[str, ...]
    """Plugins that are disabled as a whole; a dump has no section for them. 1.7 may print short names."""
    of_2_0: bool = False
    """True if containerd 2.0 printed the dump. The dumps of 2.0.0 to 2.0.5 omit settings that the files contain under
    the names from 1.7.
    """

    @property
    def cri(self) -> str:
        """The plugin whose section enables CDI."""
        return CRI_OF_DUMP[self.version]

    def value(self, *path: str) -> Any:
        """Returns the value at a path under ``plugins``, or None if there is none."""
        return _at(self.plugins, path)

    def is_disabled(self, plugin: str) -> bool:
        """Returns True if a plugin is disabled as a whole."""
        return plugin in map(full_name, self.disabled)

    @property
    def can_require_plugins(self) -> bool:
        """True if this containerd has NRI's default validator (2.2 and later). NRI's section then contains a table for
        the validator."""
        return isinstance(self.value(NRI, "default_validator"), dict)


def read_dump(text: str) -> Dump:
    """Parses a dump. Raises RuntimeConfigError for any other input."""
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise RuntimeConfigError(f"the dump is not TOML: {error}") from error
    version, plugins = document.get("version"), document.get("plugins", {})
    if type(version) is not int or version not in CRI_OF_DUMP or not isinstance(plugins, dict):
        raise RuntimeConfigError(
            f"the dump has version {shown(version)}; supported versions are {', '.join(map(str, CRI_OF_DUMP))}"
        )
    # The plugin_dir key was removed in 2.1.
    of_2_0 = version > DUMP_OF_1_7 and "plugin_dir" in document
    dump = Dump(version, plugins, tuple(map(str, items(document.get("disabled_plugins")))), of_2_0)
    for plugin in (dump.cri, NRI):
        if not isinstance(dump.value(plugin), dict) and not dump.is_disabled(plugin):
            raise RuntimeConfigError(
                f'the dump has no [plugins."{plugin}"]: use the output of "containerd config dump", not a config.toml'
            )
    return dump


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """Configuration that one release derives from a set of files."""

    plugins: Table
    cri: str
    """Section with the settings for CDI and the hugetlb controller."""
    nri: str
    """NRI's section."""
    disabled: frozenset[str]
    has_cri: bool
    """True if the CRI service is on; a containerd without it cannot be the one that the kubelet uses."""
    on_by_default: bool
    """True if NRI and CDI are on by default."""

    @property
    def has_nri(self) -> bool:
        """True unless disabled_plugins disables NRI."""
        return self.nri not in self.disabled

    def value(self, plugin: str, *path: str) -> Any:
        """Returns the value of a key, or None if there is none.

        Raises UndeterminedError if a name in the path is capitalized differently, or if its parent is not a table.
        """
        found: Any = self.plugins.get(plugin)
        for part in path:
            if found is None:
                return None
            if not isinstance(found, dict):
                raise UndeterminedError(f"{plugin} has a {part} that is not a table")
            if any(key != part and key.casefold() == part for key in found):
                raise UndeterminedError(f"{part} is capitalized differently in {plugin}; containerd may accept it")
            found = found.get(part)
        return found


Documents = Sequence[tuple[str, Mapping[str, Any]]]
"""Path and parsed content of each file, in the order in which containerd reads them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How a range of containerd releases reads its configuration files."""

    name: str
    """Name of this range of releases, for messages."""
    first: Release
    last: Release
    """Last release in the range. Without a patch number, every patch release of this minor release is included."""
    read: Callable[[Documents], EffectiveConfig]

    def covers(self, release: Release) -> bool:
        """Returns True if a release reads files by these rules."""
        return self.first <= release and release[: len(self.last)] <= self.last


def rules_for(release: Release | None) -> tuple[Rules, ...]:
    """Returns the rules of a release, or all rules if the release is not known."""
    return RULES if release is None else tuple(one for one in RULES if one.covers(release))


def full_name(plugin: str) -> str:
    """Returns the full name for the short name ``cri`` or ``nri``, and any other name unchanged."""
    return {"cri": CRI_OF_1, "nri": NRI}.get(plugin, plugin)


def items(found: Any) -> list[Any]:
    """Returns the items of a list, or an empty list for any other value."""
    return found if isinstance(found, list) else []


def resolve_var_run(path: str) -> str:
    """Normalizes a path: /var/run is a link to /run on every node."""
    path = posixpath.normpath(path)
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def imports_of(path: str, document: Mapping[str, Any]) -> list[str]:
    """Returns the absolute patterns that a file imports, in order. Raises UndeterminedError."""
    patterns = _names(path, document, "imports")
    clean = [posixpath.normpath(posixpath.join(posixpath.dirname(path), one)) for one in patterns]
    # POSIX gives two leading slashes a special meaning, but Go does not.
    return [f"/{one.lstrip('/')}" for one in clean]


def grpc_address(documents: Documents) -> str:
    """Returns the address of containerd's gRPC server from its files, or "" if they do not set it.

    Up to 2.2 it is in ``[grpc]``; from 2.3 on, it is in the server plugin's section. The last file takes precedence.
    """
    found = ""
    for _, document in documents:
        plugins = document.get("plugins")
        for section in (document.get("grpc"), plugins.get(_GRPC_SERVER) if isinstance(plugins, dict) else None):
            address = section.get("address") if isinstance(section, dict) else None
            found = address if isinstance(address, str) and address else found
    return found


def _read_1_7(documents: Documents) -> EffectiveConfig:
    version, plugins, disabled, required = 1, Table(), set[str](), set[str]()
    for path, document in documents:
        version = _version(path, document) or version
        plugins.update(_plugins(path, document))
        disabled.update(_names(path, document, "disabled_plugins"))
        required.update(_names(path, document, "required_plugins"))
    if version > DUMP_OF_1_7:
        raise UndeterminedError(f"containerd 1.7 does not support configuration version {version}")
    full = version == DUMP_OF_1_7
    odd = [one for one in (*plugins, *disabled, *required) if full and not _FULL_NAME.fullmatch(one)]
    if odd:
        fault = f"uses the plugin name {shown(odd[0])}"
        raise UndeterminedError(f"containerd 1.7 does not start if a version 2 file {fault}")
    cri, nri = (CRI_OF_1, NRI) if full else ("cri", "nri")
    return EffectiveConfig(plugins, cri, nri, frozenset(disabled), cri not in disabled, on_by_default=False)


def _read_2(documents: Documents, take_over: Callable[[Table], None]) -> EffectiveConfig:
    """Returns the configuration that 2.0 to 2.2 derive from files, which they merge first and then convert."""
    newest = 3
    version, plugins, disabled = newest, Table(), set[str]()
    for path, document in documents:
        own, more, off = _version(path, document), _plugins(path, document), _names(path, document, "disabled_plugins")
        if own <= 1:
            own, more, off = version, _full_names(path, more), list(map(_full_name, off))
        version = own
        _merge(plugins, more)
        disabled.update(off)
    if version > newest:
        raise UndeterminedError(f"containerd 2.0 to 2.2 do not support configuration version {version}")
    if version < newest:
        take_over(plugins)
    return _effective_2(plugins, disabled)


def _read_2_0_0(documents: Documents) -> EffectiveConfig:
    return _read_2(documents, _replace_with_former_cri)


def _read_2_0_2(documents: Documents) -> EffectiveConfig:
    return _read_2(documents, _fill_from_former_cri)


def _read_2_3(documents: Documents) -> EffectiveConfig:
    """Returns the configuration that 2.3 and later derive from files, which they convert first and then merge."""
    newest = 4
    plugins, disabled = Table(), set[str]()
    for path, document in documents:
        version, more, off = (
            _version(path, document),
            _plugins(path, document),
            _names(path, document, "disabled_plugins"),
        )
        if version > newest:
            raise UndeterminedError(f"containerd 2.3 and 2.4 do not support {path}'s configuration version {version}")
        if version <= 1:
            more, off = _full_names(path, more), list(map(_full_name, off))
        if version < newest:
            _fill_from_former_cri(more)
        _merge(plugins, more)
        disabled.update(off)
    return _effective_2(plugins, disabled)


RULES: Final = (
    Rules("containerd 1.7", (1, 7), (1, 7), _read_1_7),
    Rules("containerd 2.0.0 and 2.0.1", (2, 0, 0), (2, 0, 1), _read_2_0_0),
    Rules("containerd 2.0.2 to 2.2", (2, 0, 2), (2, 2), _read_2_0_2),
    Rules("containerd 2.3 and 2.4", (2, 3), (2, 4), _read_2_3),
)
"""Rules of all known releases, oldest first."""


def _effective_2(plugins: Table, disabled: set[str]) -> EffectiveConfig:
    for one in disabled:
        if "." not in one:
            raise UndeterminedError(f"containerd 2 does not start if disabled_plugins contains {shown(one)}")
    parts = {CRI_OF_1, CRI_OF_2, "io.containerd.cri.v1.images"}
    return EffectiveConfig(plugins, CRI_OF_2, NRI, frozenset(disabled), parts.isdisjoint(disabled), on_by_default=True)


def _fill_from_former_cri(plugins: Table) -> None:
    """Adds the keys from 1.7's section that the new section lacks. Keys for other plugins are copied but not used."""
    former, now = plugins.get(CRI_OF_1), plugins.get(CRI_OF_2)
    if isinstance(former, dict):
        plugins[CRI_OF_2] = former | (now if isinstance(now, dict) else {})


def _replace_with_former_cri(plugins: Table) -> None:
    if CRI_OF_1 in plugins:
        plugins[CRI_OF_2] = plugins[CRI_OF_1]


def _merge(into: Table, more: Table) -> None:
    """Merges tables key by key. Any other value, including a list, is replaced."""
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _full_names(path: str, plugins: Table) -> Table:
    named: Table = {}
    for name, section in plugins.items():
        full = _full_name(name)
        if full in named:
            raise UndeterminedError(f"{path} has {full} under two names, and containerd picks one at random")
        named[full] = section
    return named


def _full_name(name: str) -> str:
    """Expands the short name of the CRI section. No other short name expands to a relevant section."""
    return name if "." in name else CRI_OF_1 if name == "cri" else f"io.containerd.other.v1.{name}"


def _version(path: str, document: Mapping[str, Any]) -> int:
    version = _top(path, document, "version", int, 0)
    if version < 0:
        raise UndeterminedError(f"{path} has version {version}")
    return int(version)


def _plugins(path: str, document: Mapping[str, Any]) -> Table:
    # The tables are copied, since merging changes them in place.
    return copy.deepcopy(dict(_top(path, document, "plugins", dict, {})))


def _names(path: str, document: Mapping[str, Any], key: str) -> list[str]:
    found = _top(path, document, key, list, [])
    if not all(isinstance(one, str) for one in found):
        raise UndeterminedError(f"{key} in {path} contains a value that is not a string")
    return list(found)


def _top(path: str, document: Mapping[str, Any], key: str, kind: type, missing: Any) -> Any:
    if any(one != key and one.casefold() == key for one in document):
        raise UndeterminedError(f"{key} is capitalized differently in {path}; containerd may accept it")
    found = document.get(key, missing)
    if type(found) is not kind:
        raise UndeterminedError(f"{key} in {path} is {shown(found)}, and containerd does not start with that value")
    return found


def _at(found: Any, path: Sequence[str]) -> Any:
    for part in path:
        found = found.get(part) if isinstance(found, dict) else None
    return found
