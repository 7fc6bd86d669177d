# SPDX-License-Identifier: Apache-2.0
"""What containerd's configuration must say for this driver to work, and the smallest change that makes it say so.

Claims reach containers through CDI, limits through NRI; both are off by default in containerd 1.7, as is the hugetlb
controller of its CRI plugin. A file of version 2 may be read by 1.7, one of version 3 or 4 by containerd 2 alone.
Imported files are read after the file that imports them. In containerd 1.7 they replace a plugin's section as a whole,
in 2.x key by key, which a file of version 2 must both survive; the names of disabled plugins add up (``mergeConfig`` in
containerd's server/config).
"""

import posixpath
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from nri_backend.setup.toml import set_value

_NRI: Final = "io.containerd.nri.v1.nri"
_CRI_2: Final = "io.containerd.grpc.v1.cri"
_CRI_3: Final = "io.containerd.cri.v1.runtime"
_CDI_DEFAULT: Final = ("/etc/cdi", "/var/run/cdi")
_NEEDED: Final = frozenset({_NRI, _CRI_2, _CRI_3, "cri"})
NRI_SOCKET: Final = "/var/run/nri/nri.sock"
"""Where containerd listens unless it is told otherwise."""


class RuntimeConfigError(ValueError):
    """The configuration cannot be used, or not be changed so that the driver works; the text names the remedy."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value that a file has to have."""

    section: str
    key: str
    value: bool

    def __str__(self) -> str:
        return f'[plugins."{self.section}"] {self.key} = {_literal(self.value)}'


@dataclass(frozen=True, slots=True)
class RuntimeFile:
    """A configuration file of containerd that was read."""

    source: str
    text: str
    version: int
    document: Mapping[str, Any]

    @property
    def imports(self) -> tuple[str, ...]:
        """Paths and patterns, as written."""
        return tuple(map(str, self.document.get("imports", ())))

    def section(self, name: str) -> Mapping[str, Any] | None:
        """A plugin's section, if the file has one."""
        found = self.document.get("plugins", {}).get(name)
        return found if isinstance(found, Mapping) else None

    def wanted(self) -> tuple[Setting, ...]:
        """What this file has to say, by the names of its version."""
        cri = _CRI_2 if self.version == 2 else _CRI_3
        hugetlb = (Setting(cri, "disable_hugetlb_controller", False),) if self.version == 2 else ()
        return (
            Setting(cri, "enable_cdi", True),
            *hugetlb,
            Setting(_NRI, "disable", False),
            Setting(_NRI, "disable_connections", False),
        )

    def lacks(self, setting: Setting) -> bool:
        """Whether the file's section does not have the value; containerd 2 has the right ones where nothing is said."""
        value = (self.section(setting.section) or {}).get(setting.key)
        return value is not setting.value and not (value is None and self.version > 2)


def read_runtime_file(source: str, text: str, root: RuntimeFile | None = None) -> RuntimeFile:
    """Raises RuntimeConfigError for what is no configuration of containerd with plugin sections as known here.

    A file that ``root`` imports may say no version: containerd then takes its sections by the names they have.
    """
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RuntimeConfigError(f"{source}: is no TOML: {error}") from error
    version = document.get("version", root.version if root else None)
    if version not in (2, 3, 4) or isinstance(version, bool | float):
        said = f"says version = {version}" if "version" in document else "says no version, which means 1"
        raise RuntimeConfigError(
            f"{source}: {said}; 2, 3 and 4 are known here: a file that is imported needs the version line of the file "
            "that imports it, and of any other 'containerd config migrate' prints a current one"
        )
    if not isinstance(document.get("plugins", {}), Mapping):
        raise RuntimeConfigError(f"{source}: plugins is no table")
    return RuntimeFile(source, text, version, document)


def switch_on(chain: Sequence[RuntimeFile], cdi_dir: str) -> tuple[str, list[str]]:
    """Returns the text of the first file of a chain with CDI and NRI switched on, and what was changed.

    ``chain`` is the file to change and what it imports, in the order in which containerd reads them. Raises
    RuntimeConfigError when no change of the first file can switch them on.
    """
    file = chain[0]
    faults = [*_newer(chain), *_disabled(chain), *_cdi_faults(chain, cdi_dir)]
    text, changes = file.text, []
    for setting in file.wanted():
        last = _deciding(chain, setting)
        if last is not file:
            faults += _override(file, last, setting)
        elif (old := (file.section(setting.section) or {}).get(setting.key)) is not setting.value:
            text = set_value(text, ("plugins", setting.section, setting.key), _literal(setting.value))
            changes.append(f"{setting} ({'was not said' if old is None else f'was {_literal(old)}'})")
    if faults:
        raise RuntimeConfigError("; ".join(dict.fromkeys(faults)))
    _check_meaning(file, text, chain)
    return text, changes


def notes(chain: Sequence[RuntimeFile]) -> list[str]:
    """What the operator should know beside the changes."""
    sockets = {str(_said(chain, _NRI, "socket_path", by_key)[1] or NRI_SOCKET) for by_key in _ways(chain)}
    others = sorted(one for one in sockets if _same_place(one) != _same_place(NRI_SOCKET))
    return [f"containerd's NRI socket is {one}: set nriSocket of this driver to it" for one in others]


def _literal(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)


def _same_place(path: str) -> str:
    path = posixpath.normpath(path)
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _twin(section: str, version: int) -> str:
    return section if section == _NRI else _CRI_2 if version == 2 else _CRI_3


def _ways(chain: Sequence[RuntimeFile]) -> tuple[bool, ...]:
    """Whether sections are merged key by key: a file of version 2 may be read by containerd 1.7, or by 2.x."""
    return (False, True) if chain[0].version == 2 else (True,)


def _last_word(chain: Sequence[RuntimeFile], section: str, key: str, by_key: bool) -> RuntimeFile:
    """Returns the file whose section containerd uses for a key; the first one where none says it."""
    found = chain[0]
    for one in chain:
        its = one.section(_twin(section, one.version))
        if its is not None and (key in its or not by_key):
            found = one
    return found


def _deciding(chain: Sequence[RuntimeFile], setting: Setting) -> RuntimeFile:
    # Whole sections, where that is a way: the last one must then say every setting, so key by key it decides, too.
    return _last_word(chain, setting.section, setting.key, by_key=_ways(chain)[0])


def _said(chain: Sequence[RuntimeFile], section: str, key: str, by_key: bool) -> tuple[RuntimeFile, Any]:
    last = _last_word(chain, section, key, by_key)
    return last, (last.section(_twin(section, last.version)) or {}).get(key)


def _override(file: RuntimeFile, last: RuntimeFile, setting: Setting) -> list[str]:
    section = _twin(setting.section, last.version)
    if not any((one.section, one.key) == (section, setting.key) and last.lacks(one) for one in last.wanted()):
        return []
    line = "" if "version" in last.document else f"give it the line 'version = {last.version}' and "
    its = f'{last.source}, imported by {file.source}, has the last word on [plugins."{section}"]'
    return [f"{its}: {line}run this command on {last.source} too"]


def _newer(chain: Sequence[RuntimeFile]) -> list[str]:
    # containerd 1.7 cannot read the newer file, and 2.x then passes over the CRI section of the older one.
    newer = [one for one in chain if one.version > 2] if chain[0].version == 2 else []
    its = f"is imported by {chain[0].source} of version 2"
    return [f"{one.source}: is of version {one.version} and {its}: give both the same" for one in newer]


def _disabled(chain: Sequence[RuntimeFile]) -> list[str]:
    return [
        f"{file.source}: disabled_plugins names {name}: take it out"
        for file in chain
        for name in file.document.get("disabled_plugins", ())
        if name in _NEEDED
    ]


def _cdi_faults(chain: Sequence[RuntimeFile], cdi_dir: str) -> list[str]:
    faults = []
    for by_key in _ways(chain):
        last, said = _said(chain, _CRI_3, "cdi_spec_dirs", by_key)
        said = _CDI_DEFAULT if said is None else said
        directories = list(map(str, said)) if isinstance(said, list | tuple) else []
        if _same_place(cdi_dir) not in map(_same_place, directories):
            its = f"{last.source}: cdi_spec_dirs lacks {cdi_dir}, where the claims' files are"
            faults.append(f"{its}: add it to {directories}")
    return faults


def _check_meaning(file: RuntimeFile, text: str, chain: Sequence[RuntimeFile]) -> None:
    expected = tomllib.loads(file.text)
    mine = [one for one in file.wanted() if _deciding(chain, one) is file]
    try:
        for setting in mine:
            expected.setdefault("plugins", {}).setdefault(setting.section, {})[setting.key] = setting.value
        same = tomllib.loads(text) == expected
    except (tomllib.TOMLDecodeError, AttributeError, TypeError):
        same = False
    if not same:
        raise RuntimeConfigError(
            f"{file.source}: is laid out in a way that is not understood here; say by hand: "
            + ", ".join(map(str, mine))
        )
