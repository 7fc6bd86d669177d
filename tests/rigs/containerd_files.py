# SPDX-License-Identifier: Apache-2.0
"""Random containerd configuration files, and the recorded results that real releases produced from such files."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from numa_node.runtimes.containerd import CRI_OF_1, CRI_OF_2, NRI

RECORDED = Path(__file__).parents[1] / "data/containerd/dumps.json"
Files = dict[str, str]
"""Content by path relative to the directory of config.toml."""
_CRI_KEYS: dict[str, list[Any]] = {
    "enable_cdi": [True, False],
    "cdi_spec_dirs": [["/etc/cdi"], ["/var/run/cdi", "/srv/cdi"], []],
    "disable_hugetlb_controller": [True, False],
}
_NRI_KEYS: dict[str, list[Any]] = {
    "disable": [True, False],
    "disable_connections": [True, False],
    "socket_path": ["/run/a.sock", "/run/b.sock", ""],
}
_OFF = [["cri"], [CRI_OF_1], [CRI_OF_2], [NRI], ["nri"], ["io.containerd.snapshotter.v1.zfs"]]


def random_files(source: random.Random) -> Files:
    """Returns config.toml and up to three files that it imports, directly or through another one."""
    usual = source.choice([1, 2, 2, 3, 3])
    names = source.sample(["conf.d/10-a.toml", "conf.d/20-b.toml", "more.toml"], source.randint(0, 3))
    imports = (["conf.d/*.toml"] if any(name.startswith("conf.d") for name in names) else []) + (
        ["more.toml"] if "more.toml" in names else []
    )
    nested = {"conf.d/10-a.toml": ["../more.toml"]} if source.random() < 0.3 and len(names) == 3 else {}
    if nested:
        imports.remove("more.toml")
    else:
        source.shuffle(imports)
    documents = {"config.toml": _document(source, usual, imports)}
    documents |= {name: _document(source, usual, nested.get(name, [])) for name in names}
    return {name: toml_text(one) for name, one in documents.items()}


def _document(source: random.Random, usual: int, imports: list[str]) -> dict[str, Any]:
    version = source.choice([usual] * 6 + [None, None, 2, 3])
    top: dict[str, Any] = {} if version is None else {"version": version}
    if imports:
        top["imports"] = imports
    if source.random() < 0.1:
        top["disabled_plugins"] = source.choice(_OFF)
    short = {"cri", "nri"} if (version or 1) == 1 else set()
    plugins = {}
    for name in source.sample(sorted({CRI_OF_1, CRI_OF_2, NRI} | short), source.randint(0, 3)):
        keys = _NRI_KEYS if "nri" in name else _CRI_KEYS
        plugins[name] = {key: source.choice(keys[key]) for key in source.sample(sorted(keys), source.randint(0, 3))}
        if keys is _CRI_KEYS and source.random() < 0.2:
            plugins[name]["containerd"] = {"default_runtime_name": "runc"}
    return {**top, "plugins": plugins}


def toml_text(document: Mapping[str, Any]) -> str:
    """Returns a document as TOML. The document may contain only JSON values."""
    return "".join(_lines((), document))


def _lines(path: tuple[str, ...], table: Mapping[str, Any]) -> list[str]:
    lines = [f"[{'.'.join(map(json.dumps, path))}]\n"] if path else []
    lines += [f"{key} = {json.dumps(value)}\n" for key, value in table.items() if not isinstance(value, dict)]
    for key, value in table.items():
        lines += _lines((*path, key), value) if isinstance(value, dict) else []
    return lines


def recorded() -> list[dict[str, Any]]:
    """Returns the recorded cases. Each contains ``files`` and, for each release of containerd, the settings in the dump
    of that release, or null if the release rejected the files.
    """
    cases: list[dict[str, Any]] = json.loads(RECORDED.read_text())["cases"]
    return cases


def settings_in(dump: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a dump that matter to the driver, by section and key."""
    plugins = dump.get("plugins", {})
    cri = CRI_OF_1 if dump["version"] == 2 else CRI_OF_2
    kept = {NRI: _NRI_KEYS, cri: _CRI_KEYS}
    found = {
        section: {key: plugins[section].get(key) for key in keys}
        for section, keys in kept.items()
        if section in plugins
    }
    return {**found, "disabled_plugins": sorted(dump.get("disabled_plugins", []))}
