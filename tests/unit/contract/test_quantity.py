# SPDX-License-Identifier: Apache-2.0
"""resource.Quantity: values and canonical strings, compared with test vectors from the Go library."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.errors import MalformedError
from numa_contract.quantity import format_quantity, parse_quantity

from tests.rigs.cpu_time import cpu_seconds

DECIMAL = (
    "1.5=1500m 1000m=1 0.1m=100u 3000=3k 3000k=3M 1024=1024 10.0=10 1e6=1M 5e-1=500m 0=0 -0.1n=-1n 0.1n=1n 1000E=1000E"
)
BINARY = (
    "0.5Gi=512Mi 1.5Gi=1536Mi 1024Mi=1Gi 2048Mi=2Gi 67108864Ki=64Gi 131072Mi=128Gi 0.5Ki=512 1.1Ki=1126400m "
    "100.035Ki=102435840m 0.000000000001Ki=2n 1000Ki=1000Ki 9Ei=9223372036854775807 67375140864=65796036Ki 0Ki=0"
)
CANONICAL = [(pair, False) for pair in DECIMAL.split()] + [(pair, True) for pair in BINARY.split()]


@pytest.mark.parametrize(("pair", "binary"), CANONICAL)
def test_canonical_strings(pair: str, binary: bool) -> None:
    """The canonical string uses the largest suffix that leaves a whole number. Byte amounts use powers of 1024; values
    below 1024 and fractions are decimal.

    1000E is treated like any other value; the Go library prints it as 1, which the driver does not imitate.
    """
    text, canonical = pair.split("=")
    assert format_quantity(parse_quantity(text), binary=binary) == canonical


EQUAL = [
    *(tuple(pair.split("=")) for pair in ["1Gi=1024Mi", "+5=05", "1.=1.0", "1.G=1000M", "01Mi=1048576", ".5=500m"])
]


@pytest.mark.parametrize(
    ("one", "other"), [*EQUAL, ("1E", "1e18"), ("2E3", "2000"), ("1E-3", "1m"), (" 7 ", 7), (0.1, "100m"), (1e3, "1k")]
)
def test_different_spellings_of_an_amount_are_equal(one: str | float, other: str | float) -> None:
    """The server may return the same amount in a different spelling, or as a bare number."""
    assert parse_quantity(one) == parse_quantity(other)


UNKNOWN = "K 1K 1ki 1Kb 1B inf nan 1.1.1 --1 e3 . 1e 1e+ 1e3Ki"


@pytest.mark.parametrize("text", ["", " ", "1 Gi", "\u0661", *UNKNOWN.split()])
def test_strings_that_the_server_rejects_are_rejected(text: str) -> None:
    """Strings with an upper-case K for kilo, inner spaces, words or non-ASCII digits are not quantities."""
    with pytest.raises(MalformedError, match="quantity"):
        parse_quantity(text)


MONSTERS = ["1e999999999", "1e-999999999", "9" * 500, "1" * 300 + "." + "1" * 300, "1" * 10_000 + "x", 10**5000]


@pytest.mark.parametrize("text", MONSTERS, ids=map(str, range(6)))
def test_a_huge_quantity_is_rejected_quickly(text: str | int) -> None:
    """Parsing a huge quantity would otherwise require gigabytes of digits or exponential backtracking."""

    def refuse() -> None:
        with pytest.raises(MalformedError):
            parse_quantity(text)

    assert cpu_seconds(refuse) < 0.05


@given(st.integers(-(10**30), 10**30), st.booleans())
def test_formatting_and_parsing_a_canonical_string_changes_nothing(nano: int, binary: bool) -> None:
    """No precision is lost down to 10^-9, with either decimal or binary suffixes."""
    value = Fraction(nano, 10**9)
    text = format_quantity(value)
    assert parse_quantity(text) == value
    assert format_quantity(parse_quantity(text)) == text
    whole = nano % 2**62
    assert parse_quantity(format_quantity(whole, binary=binary)) == whole


@given(st.fractions(min_value=-(10**12), max_value=10**12))
def test_excess_precision_is_rounded_away_from_zero(value: Fraction) -> None:
    """Formatting never understates an amount: its magnitude is rounded up by less than 10^-9."""
    printed = parse_quantity(format_quantity(value))
    assert 0 <= abs(printed) - abs(value) < Fraction(1, 10**9)
