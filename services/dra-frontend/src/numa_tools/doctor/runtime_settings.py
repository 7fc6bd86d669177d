# SPDX-License-Identifier: Apache-2.0
"""Extracts the runtime settings that the driver depends on from the runtime's configuration files or output. This
module does no I/O.

A setting has a value only if every release that may be running reads that value from the files. Otherwise the setting
is Unclear, and the results of the checks that need it are unknown. :mod:`numa_node.runtimes.settings` defines the
settings, and :mod:`numa_node.runtimes.containerd` defines containerd's rules. CRI-O has had one rule since 1.30: each
file replaces the keys that it contains (UpdateFromDropInFile in pkg/config).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from numa_contract.errors import shown
from numa_node.runtimes.containerd import (
    CRI_OF_1,
    DUMP_OF_1_7,
    NRI,
    Documents,
    Dump,
    EffectiveConfig,
    Release,
    RuntimeConfigError,
    UndeterminedError,
    read_dump,
    rules_for,
)
from numa_node.runtimes.settings import CONTAINERD, CRI_O, OLDEST, REQUIRE_PLUGIN, SETTINGS, VALIDATOR_SINCE, Setting
from numa_node.toml_text import parse_toml

# Newest CRI-O release for which the rules are known.
_LAST_CRI_O: Final = (1, 37)


@dataclass(frozen=True, slots=True)
class Unclear:
    """Placeholder for a setting that cannot be determined."""

    reason: str


@dataclass(frozen=True, slots=True)
class RuntimeConfig:
    """The settings of the kubelet's runtime."""

    software: str
    """Name of the runtime, CONTAINERD or CRI_O."""
    source: str
    """The settings' source, for messages."""
    command: str
    """Command on the node that prints the settings in use."""
    settings: Mapping[str, Any]
    """The value of each setting by name, or Unclear."""
    release: Release | None = None
    files: tuple[str, ...] = ()
    stray: tuple[str, ...] = ()
    """Drop-ins that mention NRI or CDI but are not imported by any file."""
    incomplete: str = ""
    """Reason why not all of the runtime's files were read, or "" if all of them were."""
    remedy: str = ""
    """Remedy if settings could not be determined, or "" if the output of ``command`` contains them."""

    def value(self, name: str) -> Any:
        """Returns the value of a setting. Raises UndeterminedError if the setting is Unclear."""
        found = self.settings[name]
        if isinstance(found, Unclear):
            raise UndeterminedError(found.reason)
        return found


def settings_report(runtime: RuntimeConfig) -> dict[str, Any]:
    """Returns the settings as plain values for JSON. An unclear setting becomes a map that contains the reason."""
    settings = {
        name: {"unclear": value.reason} if isinstance(value, Unclear) else value
        for name, value in runtime.settings.items()
    }
    release = ".".join(map(str, runtime.release or ()))
    return {
        "software": runtime.software,
        "release": release,
        "source": runtime.source,
        "files": list(runtime.files),
        "settings": settings,
    }


_OPTIONAL: Final = (*REQUIRE_PLUGIN, "hugetlb")
"""Settings that some releases do not print."""


class CriDisabledError(ValueError):
    """Raised for the files of a containerd whose CRI service is disabled, which no kubelet can use."""


def containerd_settings(documents: Documents, release: Release | None) -> dict[str, Any]:
    """Returns the settings from containerd's files, each a value or Unclear. Raises CriDisabledError."""
    outcomes: dict[str, EffectiveConfig] = {}
    refusals: list[str] = []
    for rules in rules_for(release):
        try:
            outcomes[rules.name] = rules.read(documents)
        except UndeterminedError as error:
            refusals.append(str(error))
    if not outcomes:
        number = ".".join(map(str, release or ()))
        return unclear("; ".join(refusals) or f"this command cannot interpret containerd {number}'s files")
    # A release that would read the files as disabling the CRI service cannot be the running release.
    outcomes = {name: one for name, one in outcomes.items() if one.has_cri}
    if not outcomes:
        raise CriDisabledError("disabled_plugins disables the CRI service")
    return {one.name: _agreed({name: _found(one, read) for name, read in outcomes.items()}) for one in SETTINGS}


def unclear(reason: str) -> dict[str, Any]:
    """Returns all settings as Unclear, each with the same reason."""
    return {one.name: Unclear(reason) for one in SETTINGS}


def crio_settings(documents: Documents, release: Release | None) -> dict[str, Any]:
    """Returns the settings from CRI-O's files, each a value or Unclear."""
    if release is not None and not OLDEST[CRI_O][:2] <= release[:2] <= _LAST_CRI_O:
        number = ".".join(map(str, release))
        return unclear(f"this command cannot interpret CRI-O {number}'s files")
    found = {one.name: _in_crio(one, documents, one.default) for one in SETTINGS}
    if release is None or release < VALIDATOR_SINCE[CRI_O]:
        found |= {name: _before_validator(name, found[name], release) for name in REQUIRE_PLUGIN}
    return found


def printed_settings(text: str) -> tuple[str, dict[str, Any], Dump | None]:
    """Parses the output of ``containerd config dump`` or ``crio status config``.

    Returns the runtime, its settings, and the dump if it is containerd's. Raises RuntimeConfigError.
    """
    try:
        document = parse_toml(text)
    except ValueError as error:
        raise RuntimeConfigError(f"it is not TOML: {error}") from error
    if isinstance(document.get("crio"), dict):
        absent = Unclear("the key is missing: the given text must be the output of crio status config")
        known = {one.name: one.default if not one.crio or one.name in _OPTIONAL else absent for one in SETTINGS}
        return CRI_O, {one.name: _in_crio(one, [("it", document)], known[one.name]) for one in SETTINGS}, None
    dump = read_dump(text)
    return CONTAINERD, _settings_of(dump), dump


def _settings_of(dump: Dump) -> dict[str, Any]:
    off = frozenset(one for one in (dump.cri, CRI_OF_1, NRI) if dump.is_disabled(one))
    on_by_default = dump.version != DUMP_OF_1_7
    read = EffectiveConfig(dump.plugins, dump.cri, NRI, off, off <= {NRI}, on_by_default)
    found = {one.name: _found(one, read) for one in SETTINGS}
    for one in SETTINGS:
        section = dump.cri if one.cri else NRI
        if one.name not in _OPTIONAL and section not in off and dump.value(section, *one.key) is None:
            found[one.name] = Unclear(f"the dump has no {'.'.join(one.key)}")
    return found


def _found(setting: Setting, read: EffectiveConfig) -> Any:
    """Returns a setting's value under one release's rules, or Unclear."""
    if setting.name == "nri" and not read.has_nri:
        return False
    if setting.name == "hugetlb" and read.on_by_default:
        return True  # the key matters only in containerd 1.7
    default = setting.default if read.on_by_default else setting.former
    section = read.cri if setting.cri else read.nri
    return _checked(setting, lambda: read.value(section, *setting.key), default, negative=setting.is_negative)


def _checked(setting: Setting, read: Callable[[], Any], absent: Any, *, negative: bool) -> Any:
    try:
        found = read()
    except UndeterminedError as error:
        return Unclear(str(error))
    if found is None:
        return absent
    if setting.name == "socket" and found == "":
        return setting.default  # every release replaces an empty path with its default (ToOptions)
    parts = found if isinstance(found, list) else []
    if type(found) is not setting.kind or not all(isinstance(one, str) for one in parts):
        return Unclear(f"{'.'.join(setting.key)} is {shown(found)}, which the runtime does not accept")
    return not found if negative else found


def _agreed(found: Mapping[str, Any]) -> Any:
    """Returns the value on which all releases agree, or Unclear."""
    values = list(found.values())
    faults = [one for one in values if isinstance(one, Unclear)]
    if faults:
        return faults[0]
    if all(one == values[0] for one in values):
        return values[0]
    return Unclear(f"the runtime's release is unknown, and the value is {' and '.join(_differing(found))}")


def _differing(found: Mapping[str, Any]) -> Iterator[str]:
    """Yields each distinct value, with the releases that read that value."""
    values = list(found.values())
    for value in (one for number, one in enumerate(values) if one not in values[:number]):
        text = str(value).lower() if isinstance(value, bool) else shown(value)
        yield f"{text} for {', '.join(name for name, other in found.items() if other == value)}"


def _in_crio(setting: Setting, documents: Documents, default: Any) -> Any:
    if not setting.crio:
        return default
    value = default
    for path, document in documents:
        value = _checked(
            setting,
            lambda path=path, document=document: _key(path, document, ("crio", *setting.crio)),  # type: ignore[misc]
            value,
            negative=setting.is_negative_in_crio,
        )
        if isinstance(value, Unclear) and value is not default:
            return value
    return value


def _key(path: str, found: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        if not isinstance(found, dict):
            raise UndeterminedError(f"{path} has a {key} that is not a table")
        if any(one != key and one.casefold() == key for one in found):
            raise UndeterminedError(f"{path} spells {key} with different capitalization, which CRI-O also accepts")
        if (found := found.get(key)) is None:
            return None
    return found


def _before_validator(name: str, found: Any, release: Release | None) -> Any:
    """Returns the value of a default-validator setting for a release that lacks the validator or is unknown.

    A release without the validator ignores the setting in the files, so the default applies. For an unknown release,
    the setting is Unclear if its value in the files differs from the default.
    """
    default = next(one.default for one in SETTINGS if one.name == name)
    if release is not None or found == default or isinstance(found, Unclear):
        return default if release is not None else found
    return Unclear("CRI-O's release is unknown, and releases before 1.34 ignore [crio.nri.default_validator]")
