# SPDX-License-Identifier: Apache-2.0
"""resource.Quantity for the fakes, independent of the driver's own implementation, so an error in either one is
noticed.
"""

import re
from decimal import Decimal
from fractions import Fraction

_FORM = re.compile(r"([+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:(Ki|Mi|Gi|Ti|Pi|Ei|n|u|m|k|M|G|T|P|E)|[eE]([+-]?\d+))?", re.ASCII)
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}


def parse(value: object) -> Fraction:
    """Returns the exact value of a quantity. Raises ValueError for text that the API server would not parse."""
    match = _FORM.fullmatch(str(value).strip()) if isinstance(value, str | int | float) else None
    if match is None or isinstance(value, bool):
        raise ValueError(f"quantities must match the grammar of resource.Quantity: {value!r}")
    number, suffix, exponent = Fraction(Decimal(match[1])), match[2], match[3]
    if suffix in _BINARY:
        return number * (1 << _BINARY[suffix])
    power = _DECIMAL[suffix] if suffix else int(exponent or 0)
    return number * 10**power if power >= 0 else number / Fraction(10**-power)


def whole(value: object) -> int:
    """Returns the value rounded up to an integer, as ``Value()`` does."""
    return -(-parse(value) // 1)


def is_binary(value: object) -> bool:
    """Returns True for a quantity with a binary suffix."""
    return str(value).strip().endswith("i")


def canonical(value: object) -> str:
    """Returns the server's form: the largest suffix of the same family that leaves no fraction."""
    number = parse(value)
    if is_binary(value) and number.denominator == 1 and abs(number) >= 1024:
        return binary(int(number))
    return _decimal(number)


def binary(number: int) -> str:
    """Formats an integer as a BinarySI quantity, the format of the amounts that the scheduler has rounded."""
    if number == 0 or abs(number) < 1024:
        return str(number)
    best = max((power for power in (0, *_BINARY.values()) if number % 2**power == 0), default=0)
    suffix = next((name for name, power in _BINARY.items() if power == best), "")
    return f"{number // 2**best}{suffix}"


def _decimal(number: Fraction) -> str:
    if number == 0:
        return "0"
    for suffix, power in sorted({**_DECIMAL, "": 0}.items(), key=lambda item: -item[1]):
        scaled = number / Fraction(10) ** power
        if scaled.denominator == 1:
            return f"{int(scaled)}{suffix}"
    return f"{-(-(number * 10**9) // 1)}n"
