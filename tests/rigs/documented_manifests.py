# SPDX-License-Identifier: Apache-2.0
"""Claims, templates and classes from the documentation, as the text that a reader would type.

They are the objects in examples/, the YAML blocks on pages that show such an object or a part of one, and one claim for
each value in the parameter tables. Nothing is parsed here, because the tests check how that text is parsed.
"""

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KINDS: Final = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass")
TABLES: Final = {"docs/strategies.md": "cpuConfig", "docs/memory.md": "memoryConfig"}
"""Pages with a parameter table, and the configuration key of these parameters."""
ALSO_TYPED: Final = (
    *(("cpuConfig", "quota", word) for word in ("off", '"off"', "Off", "no", "n", "false")),
    *(("cpuConfig", "isolated", word) for word in ("ignore", "only", "never")),
    *(("cpuConfig", "shared", word) for word in ("none", "pool", "numa")),
    *(("cpuConfig", "fullPhysicalCores", word) for word in ("on", "yes", "y", "off")),
    *(("cpuConfig", "cpuset", word) for word in ("2-3", "2,3", '"2-3"')),
    *(("memoryConfig", "high", word) for word in ("1", ".5", "5e-1")),
)
"""Spellings that users type even though no table contains them, as section, field and value."""

_HEADER: Final = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: documented}\nspec:\n"
_FENCE: Final = re.compile(r"^( *)```yaml\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_ROW: Final = re.compile(r"^\| `(\w+)` \| ((?:`[^`]+`(?:, )?)+) \|", re.MULTILINE)
_SEPARATOR: Final = re.compile(r"^---$", re.MULTILINE)
_KIND: Final = re.compile(rf"^kind: ({'|'.join(KINDS)})$", re.MULTILINE)
_REQUESTS: Final = {
    "cpuConfig": ("dra.cpu", 'dra.cpu, capacity: {requests: {dra.cpu/cpu: "2"}}'),
    "memoryConfig": ("dra.memory", "dra.memory, capacity: {requests: {size: 64Mi}}"),
}


@dataclass(frozen=True, slots=True)
class Manifest:
    """One object as text."""

    source: str
    """File and line, or the parameter."""
    text: str

    def __str__(self) -> str:
        return self.source


def objects() -> list[Manifest]:
    """Returns the objects in the examples and on the pages."""
    examples = [path for path in sorted((ROOT / "examples").rglob("*.yaml")) if "values" not in path.parts]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [one for path in examples for one in _of_example(path)] + [one for path in pages for one in _of_page(path)]


def words() -> list[Manifest]:
    """Returns a claim for each value in the parameter tables, and for each spelling in ALSO_TYPED."""
    typed = [*documented_words(), *ALSO_TYPED]
    return [Manifest(f"{field}: {word}", parameter(key, field, word)) for key, field, word in typed]


def documented_words() -> list[tuple[str, str, str]]:
    """Returns section, field and value for each value in the parameter tables."""
    rows = [(key, *row) for page, key in TABLES.items() for row in _ROW.findall((ROOT / page).read_text())]
    return [(key, field, word) for key, field, cell in rows for word in re.findall("`([^`]+)`", cell)]


def parameter(section: str, field: str, value: str) -> str:
    """Returns a claim with one parameter whose value is written as typed."""
    driver, request = _REQUESTS[section]
    return (
        f"{_HEADER}  devices:\n    requests:\n      - name: one\n        exactly: {{deviceClassName: {request}}}\n"
        f"    config:\n      - opaque:\n          driver: {driver}\n          parameters:\n"
        f"            apiVersion: v1alpha1\n            {section}:\n              {field}: {value}\n"
    )


def _of_example(path: Path) -> Iterator[Manifest]:
    for number, text in enumerate(_SEPARATOR.split(path.read_text()), 1):
        if _KIND.search(text):
            yield Manifest(f"{path.relative_to(ROOT)} ({number})", text)
            head, comment, rest = text.partition("# config:\n")
            if comment:  # an alternative that the example offers
                uncommented = re.sub(r"^( +)# ", r"\1", f"{comment[2:]}{rest}", flags=re.MULTILINE)
                yield Manifest(f"{path.relative_to(ROOT)} ({number}, comment)", head + uncommented)


def _of_page(path: Path) -> Iterator[Manifest]:
    source = path.read_text()
    for match in _FENCE.finditer(source):
        text = textwrap.dedent(match[2])
        name = f"{path.relative_to(ROOT)}:{source.count(chr(10), 0, match.start()) + 1}"
        if _KIND.search(text):
            parts = enumerate(_SEPARATOR.split(text), 1)
            yield from (Manifest(f"{name} ({number})", part) for number, part in parts if _KIND.search(part))
        elif text.startswith("devices:"):
            yield Manifest(name, _HEADER + textwrap.indent(text, "  "))
        elif text.startswith("config:"):
            request = "  devices:\n    requests:\n      - name: one\n        exactly: {deviceClassName: dra.cpu}\n"
            yield Manifest(name, _HEADER + request + textwrap.indent(text, "    "))
