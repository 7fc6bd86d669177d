# SPDX-License-Identifier: Apache-2.0
"""Parses and formats Kubernetes quantities and CPU lists."""

import re
from collections.abc import Sequence
from decimal import ROUND_CEILING, Decimal
from typing import Final

_QUANTITY: Final = re.compile(r"(\d{1,20}(?:\.\d{0,9})?)([eE]\d{1,2}|m|k|[KMGTPE]i?)?", re.ASCII)
_SCALES: Final = {
    "m": Decimal("0.001"),
    "k": Decimal(10**3),
    **{letter: Decimal(10 ** (3 * power)) for power, letter in enumerate("MGTPE", 2)},
    **{f"{letter}i": Decimal(1 << (10 * power)) for power, letter in enumerate("KMGTPE", 1)},
}

UNITS: Final = ("Ki", "Mi", "Gi", "Ti", "Pi")
"""Units for amounts of memory. The driver's commands and a node's page use the same units."""
_MAX_QUANTITY: Final = (1 << 63) - 1
"""Largest quantity that the API server stores (apimachinery/pkg/api/resource/quantity.go)."""
_RANGE: Final = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
_MAX_CPUS: Final = 8192
"""Maximum number of CPUs for which a kernel can be built (NR_CPUS on x86)."""
_MAX_LIST_LENGTH: Final = 65536
"""Maximum length of a CPU list, in characters."""


def parse_quantity(text: object) -> int:
    """Parses a quantity and rounds it up.

    Returns 0 for a string that is not a quantity, since an exception would prevent the other objects from being shown.
    """
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return 0
    number, unit = match.groups(default="")
    scale = Decimal(10) ** int(unit[1:]) if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei" else None
    value = Decimal(number) * (scale or _SCALES.get(unit, Decimal(1)))
    return min(int(value.to_integral_value(ROUND_CEILING)), _MAX_QUANTITY)


def format_bytes(size: int) -> str:
    """Formats bytes with at most one decimal place, such as ``1.5Gi``. Further decimal places are truncated, not
    rounded.
    """
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS))
    tenths = size * 10 >> (10 * power)
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{('', *UNITS)[power]}"


def parse_cpus(text: str) -> list[int]:
    """Parses a CPU list in the kernel's format, ``0-3,8``. Returns [] for an invalid or overlong list."""
    found: list[int] = []
    for part in text.split(",") if len(text) <= _MAX_LIST_LENGTH else ():
        match = _RANGE.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < _MAX_CPUS:
            return []
        found += range(first, last + 1)
        if len(found) > _MAX_CPUS:
            return []
    return found


def format_cpus(cpus: Sequence[int]) -> str:
    """Formats CPUs in ascending order in the kernel's format: ``0-3,8``."""
    ranges: list[list[int]] = []
    for cpu in cpus:
        if ranges and cpu == ranges[-1][1] + 1:
            ranges[-1][1] = cpu
        else:
            ranges.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
