# SPDX-License-Identifier: Apache-2.0
"""Every key, file, command, volume and check in the doctor's messages exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from numa_contract.config import Config
from numa_contract.names import DRIVERS
from numa_tools import cli
from numa_tools.doctor import table
from numa_tools.doctor.kubelet_config import SETTINGS
from numa_tools.doctor.table import CHECKS
from pydantic import BaseModel

from tests.chart.helm import CHART, only, render

ROOT = CHART.parents[1]
DOCTOR = Path(table.__file__).parent
SOURCES = [*sorted(DOCTOR.rglob("*.py")), DOCTOR.parent / "causes.py"]
GROUPS = {check.group for check in CHECKS}
OF_KUBELET = {*SETTINGS, "kubeReserved", "systemReserved", "featureGates"}
OF_API = {
    "adminAccess",
    "containerRuntimeVersion",
    "hostUsers",
    "kubeletVersion",
    "matchAttribute",
    "nodeInfo",
    "numaNode",
    "reservedFor",
    "resourceSliceCount",
    "apiGroups",
}
"""API fields that messages mention."""


def texts() -> Iterator[str]:
    """Returns every string in the doctor's sources except docstrings; each inserted value is replaced by a space."""
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        skipped = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        skipped |= {id(part) for one in ast.walk(tree) if isinstance(one, ast.JoinedStr) for part in one.values}
        for one in ast.walk(tree):
            if id(one) in skipped:
                continue
            if isinstance(one, ast.Constant) and isinstance(one.value, str):
                yield one.value
            elif isinstance(one, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else " " for part in one.values)


TEXTS = [one for one in texts() if " " in one]


def named(pattern: str) -> set[Any]:
    """Returns the pattern's matches in the messages. There must be at least one."""
    found = {match for text in TEXTS for match in re.findall(pattern, text)}
    assert found, pattern
    return found


def keys_of(model: type[BaseModel]) -> Iterator[str]:
    """Returns the keys in a configuration section and its subsections."""
    for name, field in model.model_fields.items():
        yield field.alias or name
        inner = [field.annotation, *getattr(field.annotation, "__args__", ())]
        for one in inner:
            if isinstance(one, type) and issubclass(one, BaseModel):
                yield from keys_of(one)


def values() -> Any:
    """Returns the chart's values."""
    return yaml.safe_load((CHART / "values.yaml").read_text())


def all_keys(document: Any) -> Iterator[str]:
    """Returns every key in a document."""
    for key, value in document.items() if isinstance(document, dict) else ():
        yield key
        yield from all_keys(value)


def test_pages_in_messages_exist() -> None:
    """Every page that a message names is a file in docs/."""
    assert [page for page in named(r"docs/([a-z-]+\.md)") if not (ROOT / "docs" / page).exists()] == []


def test_checks_in_messages_exist() -> None:
    """Every check that a message names by its id is one of the doctor's checks."""
    pattern = rf"(?<![\w./-])((?:{'|'.join(sorted(GROUPS))})\.[a-z][a-z0-9-]+)(?![\w./])"
    files = (".toml", ".yaml", ".json", ".conf", ".service")
    found = {one for one in named(pattern) if not one.endswith(files)}
    assert found - {check.id for check in CHECKS} == set()


def test_keys_in_messages_exist() -> None:
    """The keys belong to the driver's configuration, the chart's values, the kubelet's configuration or the API."""
    known = {*keys_of(Config), *all_keys(values()), *OF_KUBELET, *OF_API}
    assert named(r"(?<![\w./-])([a-z]+(?:[A-Z][A-Za-z]*)+)(?![\w/-])") - known == set()


def test_chart_values_in_messages_exist() -> None:
    """Each value exists at its path and has the type of the value in the message."""
    tree = values()
    found = [
        one
        for one in named(r"(?<![\w./-])([a-z][A-Za-z]+\.[a-z][A-Za-z]+)(?:: (true|false))?\b")
        if one[0].split(".")[0] in tree
    ]
    assert found
    for path, value in found:
        top, key = path.split(".")
        if path not in {check.id for check in CHECKS}:
            assert key in tree[top], path
            assert not value or isinstance(tree[top][key], bool)


def test_commands_in_messages_exist() -> None:
    """The commands belong to the driver's own programs."""
    assert named(r"dra-frontend ([a-z]+)\b(?! is)") <= {*cli.COMMANDS}
    setup = (ROOT / "services/nri-backend/src/nri_backend/setup/command.py").read_text()
    assert all(f'"{option}"' in setup for option in named(r" (--require-plugin)"))


def test_volumes_in_messages_exist() -> None:
    """The volumes belong to the pod that the chart renders."""
    spec = only(render({"hostInterrupts": {"mount": True}}), "DaemonSet")["spec"]["template"]["spec"]
    known = {one["name"] for one in spec["volumes"]}
    pairs = named(r"(?:the chart's|its) ([a-z-]+)(?: and ([a-z-]+))? volumes?\b")
    assert {name for pair in pairs for name in pair if name} <= known
    assert {*DRIVERS} == {"dra.cpu", "dra.memory"}
