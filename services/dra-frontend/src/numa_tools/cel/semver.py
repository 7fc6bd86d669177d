# SPDX-License-Identifier: Apache-2.0
"""Semantic versions as parsed and compared by CEL's ``semver()``."""

import re
from functools import total_ordering
from typing import Final

from numa_contract.errors import shown

from numa_tools.cel.tokens import UINT_END
from numa_tools.cel.values import CelError

_MAX_VERSION: Final = 256
_VERSION = re.compile(
    r"(0|[1-9]\d{0,19})\.(0|[1-9]\d{0,19})\.(0|[1-9]\d{0,19})(?:-([0-9A-Za-z.-]+))?(?:\+([0-9A-Za-z.-]+))?", re.ASCII
)


@total_ordering
class Semver:
    """A semantic version. Equality and ordering ignore the build metadata after ``+``."""

    __slots__ = ("key", "text")

    def __init__(self, text: str) -> None:
        match = _VERSION.fullmatch(text) if len(text) <= _MAX_VERSION else None
        numbers = [int(part) for part in match.groups()[:3]] if match else []
        if match is None or max(numbers) >= UINT_END:
            raise CelError(f"{shown(text)} is not a semantic version")
        pre = match[4].split(".") if match[4] else []
        parts = [*pre, *(match[5].split(".") if match[5] else [])]
        if not all(parts) or any(part.isdigit() and part[0] == "0" and part != "0" for part in pre):
            raise CelError(f"{shown(text)} is not a semantic version")
        order = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in pre)
        self.text, self.key = text, (numbers, not pre, order)

    def __eq__(self, other: object) -> bool:
        """Returns True if both versions have the same precedence."""
        return isinstance(other, Semver) and self.key == other.key

    def __lt__(self, other: "Semver") -> bool:
        """Returns True if this version has lower precedence than the other."""
        return self.key < other.key

    def __hash__(self) -> int:
        """Hashes the version without its build metadata, in which equal versions may differ."""
        return hash(tuple(self.key[0]))


def normalized(text: str) -> str:
    """Pads a version to three numbers, using 0 for missing numbers, and removes leading zeros."""
    parts = text.removeprefix("v").split(".", 2)
    for index, part in enumerate(parts):
        if len(part) > 1:
            bare = part.lstrip("0")
            parts[index] = bare if bare[:1].isdigit() else f"0{bare}"
    if len(parts) < 3 and {*parts[-1]} & {"+", "-"}:
        raise CelError(f"{shown(text)} is not a semantic version")
    return ".".join([*parts, "0", "0"][:3])
