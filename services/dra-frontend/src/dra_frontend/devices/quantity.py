# SPDX-License-Identifier: Apache-2.0
"""Kubernetes' resource.Quantity: exact values, canonical text. Compare values, never texts: "1Gi" equals "1024Mi"."""

import re
from fractions import Fraction
from typing import Final

from numa_contract.errors import MalformedError

_TEXT = re.compile(r"([+-]?)(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d{1,9})?", re.ASCII)
_DECIMAL: Final = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_BINARY: Final = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}
_HIGHEST_BINARY: Final = 2**63 - 1
_FINEST: Final = 10**9
# Characters, and highest exponent: far beyond every amount. The pattern tries all ways to split a run of digits, and
# 1e999999999 would fill the memory.
_LONGEST: Final = 400


def parse_quantity(text: str | float) -> Fraction:
    """Returns the exact value of a quantity as the API carries it, a string or a bare number; MalformedError otherwise.

    As in the server, finer than 10^-9 is rounded away from zero, and binary amounts end at 2^63 - 1.
    """
    if isinstance(text, int) and text.bit_length() > _LONGEST:
        raise MalformedError("quantity", "number", f"has more than {_LONGEST} bits")
    text = text.strip() if isinstance(text, str) else repr(text)
    match = _TEXT.fullmatch(text) if len(text) <= _LONGEST else None
    if match is None:
        raise MalformedError("quantity", text, "is not a number with a suffix such as m, k, Ki, Mi, Gi or e3")
    sign, digits, suffix = match[1], match[2], match[3] or ""
    value = _digits(digits) * _scale(text, suffix)
    value = Fraction(-(-value.numerator * _FINEST // value.denominator), _FINEST)
    if suffix in _BINARY:
        value = min(value, Fraction(_HIGHEST_BINARY))
    return -value if sign == "-" else value


def _digits(digits: str) -> Fraction:
    whole, _, fraction = digits.partition(".")
    return Fraction(int(whole + fraction or "0"), 10 ** len(fraction))


def _scale(text: str, suffix: str) -> Fraction:
    if suffix in _BINARY:
        return Fraction(1024 ** _BINARY[suffix])
    if suffix in _DECIMAL:
        return Fraction(1000) ** _DECIMAL[suffix]
    exponent = int(suffix[1:])
    if abs(exponent) > _LONGEST:
        raise MalformedError("quantity", text, f"has an exponent beyond {_LONGEST}")
    return Fraction(10) ** exponent


def format_quantity(value: Fraction | int, *, binary: bool = False) -> str:
    """Returns the canonical text of an amount: ``binary`` for bytes (``512Mi``), else decimal for counts (``16``)."""
    value = Fraction(value)
    if value == 0:
        return "0"
    if binary and value.denominator == 1 and abs(value) >= 1024:
        return _with_suffix(int(value), 1024, ["", *_BINARY])
    nano = -(-abs(value.numerator) * _FINEST // value.denominator)
    return _with_suffix(nano if value > 0 else -nano, 1000, [*_DECIMAL])


def _with_suffix(amount: int, base: int, suffixes: list[str]) -> str:
    step = 0
    while amount % base == 0 and step < len(suffixes) - 1:
        amount //= base
        step += 1
    return f"{amount}{suffixes[step]}"
