# SPDX-License-Identifier: Apache-2.0
"""Inputs for a target: what its strategy draws, what is worst, and both with faults.

A fault is what a bad disk, a bad peer and a bad person do to the bytes of an input that was nearly right.
"""

from collections.abc import Iterator, Sequence
from random import Random

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.target import Target

_TOKENS = (
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b"-", b"_", b"/", b"..", b" ", b"\n", b"\r\n", b"\0"),
    *(b"null", b"true", b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"18446744073709551616", b"9" * 5000),
    *(b"\\ud800", b"\\u0000", b"\xff", b"\xc3", b"\xed\xa0\x80", "ü".encode(), b"\xe2\x80\xa8", b"\x1b[31m"),
    *(b"0-8191", b"8191", b"0-8191,", b"Ki", b"e99", b"numanode:0,size:1", b"DRA_CPUSET_", b"DRAMEMORY_", b"&a", b"*a"),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 3000, b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"),
)
_FAULTS = ("flip", "cut", "end", "insert", "replace", "repeat", "splice")
SHORT = settings(
    max_examples=200,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
"""What every change is tried with: the same inputs each time, so that a red build is about the change."""


class Shown(bytes):
    """An input of which a report shows the beginning."""

    def __repr__(self) -> str:
        return f"{self[:2000]!r} ({len(self)} bytes)"


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Draws inputs of a target: one half as its strategy makes them, the other with faults in their bytes."""
    spoilt = st.builds(
        lambda data, number: mutate(data, Random(number), target.most_bytes),
        target.seeds,
        st.integers(0, (1 << 32) - 1),
    )
    return st.one_of(target.seeds, spoilt).map(lambda data: Shown(data[: target.most_bytes]))


def _drawn(target: Target, count: int, number: int) -> list[bytes]:
    found: list[bytes] = []

    @seed(number)
    @settings(SHORT, max_examples=count, derandomize=False)
    @given(target.seeds)
    def keep(data: bytes) -> None:
        found.append(data[: target.most_bytes])

    keep()
    return found


def endless(target: Target, number: int, drawn: int = 60, mutants: int = 20) -> Iterator[bytes]:
    """Yields inputs for ever, the same for the same number: the worst that is known, then drawn ones with faults."""
    yield from target.bombs
    random = Random(number)
    while True:
        seeds = _drawn(target, drawn, random.getrandbits(32))
        yield from seeds
        others = [*seeds, *target.bombs]
        for _ in range(mutants * len(seeds)):
            yield mutate(random.choice(seeds), random, target.most_bytes, others)


def _changed(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    """One fault at some place."""
    start = random.randint(0, len(data))
    end = start + random.choice((1, 1, 2, 4, 8, 64, 1024))
    before, part, after = data[:start], data[start:end], data[end:]
    match random.choice(_FAULTS):
        case "flip" if part:
            part = bytes((part[0] ^ 1 << random.randrange(8),)) + part[1:]
        case "cut":
            part = b""
        case "end":
            part = after = b""
        case "insert":
            part = random.choice(_TOKENS) + part
        case "replace":
            part = random.choice(_TOKENS)
        case "repeat":
            part *= random.choice((2, 3, 100, 10_000))
        case "splice":
            other = random.choice(others) if others else data
            part, after = b"", other[random.randint(0, len(other)) :]
    return before + part + after


def mutate(data: bytes, random: Random, most_bytes: int, others: Sequence[bytes] = ()) -> bytes:
    """Returns an input with up to five faults, or with parts of others in it."""
    for _ in range(random.randint(1, 5)):
        data = _changed(data, random, others)[:most_bytes]
    return data
