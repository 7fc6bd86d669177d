# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' resource.Quantity: exact values and canonical strings. Compare values, not strings: "1Gi" equals
"1024Mi"."""

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from numa_contract.errors import MalformedError

_TEXT = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,9})?", re.ASCII)
_DECIMAL: Final = ("n", "u", "m", "", "k", "M", "G", "T", "P", "E")
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_FINEST: Final = 10**9
_SCALES: Final = {suffix: 1024**power for power, suffix in enumerate(_BINARY)} | {
    suffix: Fraction(1000**power, _FINEST) for power, suffix in enumerate(_DECIMAL)
}
_MAX_BINARY: Final = 2**63 - 1
# Maximum number of characters and bits, and maximum exponent. All of them are far larger than any real amount
# requires. Matching the pattern takes time quadratic in the number of digits, and the exact value of 1e999999999 does
# not fit into memory.
_MAX_LENGTH: Final = 400


def parse_quantity(text: str | float) -> Fraction:
    """Parses an API quantity (a string or a bare number) and returns its exact value. Raises MalformedError.

    As in the API server, values are rounded away from zero to a multiple of 10^-9, and binary amounts are at most 2^63
    - 1.
    """
    if isinstance(text, int) and text.bit_length() > _MAX_LENGTH:
        raise MalformedError("quantity", "number", f"has more than {_MAX_LENGTH} bits")
    text = text.strip() if isinstance(text, str) else repr(text)
    match = _TEXT.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    if match is None:
        raise MalformedError("quantity", text, "is not a number with a suffix such as m, k, Ki, Mi, Gi or e3")
    sign, digits, suffix = match[1], match[2], match[3] or ""
    if suffix in _SCALES:
        value = Fraction(digits) * _SCALES[suffix]
    elif abs(int(suffix[1:])) <= _MAX_LENGTH:
        value = Fraction(digits + suffix)
    else:
        raise MalformedError("quantity", text, f"has an exponent beyond {_MAX_LENGTH}")
    value = Fraction(_nano(value), _FINEST)
    if suffix in _BINARY[1:]:
        value = min(value, Fraction(_MAX_BINARY))
    return -value if sign == "-" else value


def _nano(value: Fraction) -> int:
    """Converts a positive amount to units of 10^-9, rounded up."""
    return -(-value.numerator * _FINEST // value.denominator)


def format_quantity(value: Fraction | int, *, binary: bool = False) -> str:
    """Formats an amount canonically: as bytes (``512Mi``) if ``binary`` is true, else as a decimal count (``16``)."""
    value = Fraction(value)
    if value == 0:
        return "0"
    if binary and value.denominator == 1 and abs(value) >= 1024:
        return _with_suffix(int(value), 1024, _BINARY)
    return _with_suffix(_nano(abs(value)) * (1 if value > 0 else -1), 1000, _DECIMAL)


def _with_suffix(amount: int, base: int, suffixes: Sequence[str]) -> str:
    step = 0
    while amount % base == 0 and step < len(suffixes) - 1:
        amount //= base
        step += 1
    return f"{amount}{suffixes[step]}"
