# SPDX-License-Identifier: Apache-2.0
"""Quantities of the Kubernetes API as whole numbers, and as people read them."""

import re
from dataclasses import dataclass
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
"""Units of amounts of memory, the same as in the driver's commands and on the page of a node."""
_MOST: Final = (1 << 63) - 1
"""The largest that the API server stores (apimachinery/pkg/api/resource/quantity.go)."""


def parse_quantity(text: object) -> int:
    """Returns a quantity rounded up; 0 for what is none, since one odd object must not hide the others."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return 0
    number, unit = match.groups(default="")
    scale = Decimal(10) ** int(unit[1:]) if unit[:1] in ("e", "E") and len(unit) > 1 and unit != "Ei" else None
    value = Decimal(number) * (scale or _SCALES.get(unit, Decimal(1)))
    return min(int(value.to_integral_value(ROUND_CEILING)), _MOST)


def format_bytes(size: int) -> str:
    """Returns bytes with at most one decimal, cut and not rounded, as the driver's commands do: ``1.5Gi``."""
    power = min(max(size.bit_length() - 1, 0) // 10, len(UNITS))
    tenths = size * 10 >> (10 * power)
    return f"{tenths // 10}{f'.{tenths % 10}' if tenths % 10 else ''}{('', *UNITS)[power]}"


@dataclass(frozen=True, slots=True)
class Amount:
    """CPUs or bytes, and of how many these are a part: a text in a table, numbers in JSON."""

    number: int
    is_bytes: bool
    total: int | None = None

    def __str__(self) -> str:
        """Returns ``4``, ``1.5Gi`` or ``4 of 8``."""
        numbers = [self.number] if self.total is None else [self.number, self.total]
        return " of ".join(format_bytes(one) if self.is_bytes else str(one) for one in numbers)

    def document(self) -> object:
        """Returns it for JSON."""
        return self.number if self.total is None else {"free": self.number, "total": self.total}
