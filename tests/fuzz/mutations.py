# SPDX-License-Identifier: Apache-2.0
"""Damage to bytes: what a bad disk, a bad peer and a bad person do to an input that was nearly right."""

from collections.abc import Callable, Sequence
from random import Random

_TOKENS = (
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"=", b"-", b"_", b"/", b"..", b" ", b"\n", b"\r\n", b"\0"),
    *(b"null", b"true", b"NaN", b"Infinity", b"1e999", b"-1", b"0", b"18446744073709551616", b"9" * 5000),
    *(b"\\ud800", b"\\u0000", b"\xff", b"\xc3", b"\xed\xa0\x80", "ü".encode(), b"\xe2\x80\xa8", b"\x1b[31m"),
    *(b"0-8191", b"8191", b"0-8191,", b"Ki", b"e99", b"numanode:0,size:1", b"DRA_CPUSET_", b"DRAMEMORY_", b"&a", b"*a"),
    *(b"[" * 3000, b'{"a":' * 3000, b"(" * 3000, b"\x00\x00\x00\x00", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff"),
)
Change = Callable[[bytes, Random, Sequence[bytes]], bytes]


def _place(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randint(0, len(data))
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 8, 64, 1024)))


def _flip(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = random.randrange(len(data))
    return data[:at] + bytes((data[at] ^ 1 << random.randrange(8),)) + data[at + 1 :]


def _cut(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    return data[:start] + data[end:]


def _end(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    return data[: random.randint(0, len(data))]


def _insert(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    at = random.randint(0, len(data))
    return data[:at] + random.choice(_TOKENS) + data[at:]


def _replace(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    return data[:start] + random.choice(_TOKENS) + data[end:]


def _repeat(data: bytes, random: Random, _: Sequence[bytes]) -> bytes:
    start, end = _place(data, random)
    return data[:start] + data[start:end] * random.choice((2, 3, 100, 10_000)) + data[end:]


def _splice(data: bytes, random: Random, others: Sequence[bytes]) -> bytes:
    other = random.choice(others) if others else data
    return data[: random.randint(0, len(data))] + other[random.randint(0, len(other)) :]


_CHANGES: tuple[Change, ...] = (_flip, _cut, _end, _insert, _replace, _repeat, _splice)


def mutate(data: bytes, random: Random, most_bytes: int, others: Sequence[bytes] = ()) -> bytes:
    """Returns an input with up to five faults, or with parts of others in it."""
    for _ in range(random.randint(1, 5)):
        data = random.choice(_CHANGES)(data, random, others)[:most_bytes]
    return data
