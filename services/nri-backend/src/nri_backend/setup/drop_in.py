# SPDX-License-Identifier: Apache-2.0
"""A drop-in for containerd: the text that sets what is missing. Pure; the standard library reads TOML and writes none.

containerd 2 merges imported files key by key. A file without a version line may use the newest names there, whatever
the version of the file that imports it (2.0.2 and later, cmd/containerd/server/config). containerd 1.7 puts an imported
section in the place of the whole one (mergeConfig in services/server/config), so a drop-in for it repeats the section
as the dump has it.
"""

import copy
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from nri_backend.setup.containerd import OLDEST, Dump, Setting

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+", re.ASCII)


def write_drop_in(dump: Dump, settings: Sequence[Setting]) -> str:
    """Returns the text that gives a containerd with this dump these settings."""
    tables: dict[str, Any] = {}
    for setting in settings:
        plugin = setting.path[0]
        if dump.version == OLDEST and plugin not in tables:
            tables[plugin] = copy.deepcopy(dump.plugins[plugin])
        table = tables
        for part in setting.path[:-1]:
            table = table.setdefault(part, {})
        table[setting.path[-1]] = setting.wanted
    head = "# Written by nri-backend setup-runtime."
    if dump.version == OLDEST:
        head += " containerd 1.7 replaces whole sections: all other keys are as they were.\nversion = 2"
    return "\n".join([head, *_lines(("plugins",), tables)]) + "\n"


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
