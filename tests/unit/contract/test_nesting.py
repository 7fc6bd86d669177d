# SPDX-License-Identifier: Apache-2.0
"""The nesting limit for documents, which is independent of the interpreter's recursion limit."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.documents import MAX_NESTING, json_too_deep, value_too_deep

from tests.rigs.cpu_time import cpu_seconds

LIMIT = MAX_NESTING
MIB = 1 << 20


@pytest.fixture(autouse=True)
def no_recursion_limit() -> Iterator[None]:
    """Raises the interpreter's recursion limit, so that only the driver's own limit applies."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(100_000)
    yield
    sys.setrecursionlimit(before)


def levels(value: Any) -> int:
    """Counts a value's nesting levels recursively."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, dict | list) + max(map(levels, inner), default=0)


@pytest.mark.parametrize(
    "text",
    [
        "[" * LIMIT + "]" * LIMIT,
        '{"a":' * LIMIT + "1" + "}" * LIMIT,
        '[{"a": ' * (LIMIT // 2) + "1" + "}]" * (LIMIT // 2),
        json.dumps(["[" * 1000, {"{" * 1000: "]"}] * 50),
        json.dumps(['"[', '\\"[', "\\", '\\\\"[[['] * 50),
        json.dumps([[]] * 1000),
    ],
)
def test_documents_up_to_the_limit_are_read(text: str) -> None:
    """Brackets inside strings do not count, and any number of brackets side by side count as one level."""
    assert not json_too_deep(text.encode())
    assert not value_too_deep(json.loads(text))


@pytest.mark.parametrize(
    "text",
    [
        "[" * (LIMIT + 1) + "]" * (LIMIT + 1),
        '{"a":' * (LIMIT + 1) + "1" + "}" * (LIMIT + 1),
        '["\\\\",' * (LIMIT + 1) + "1" + "]" * (LIMIT + 1),
        '["]",' * (LIMIT + 1) + "1" + "]" * (LIMIT + 1),
        "[" * 9000 + "]" * 9000,
    ],
)
def test_one_level_more_is_rejected(text: str) -> None:
    """Closing brackets inside strings do not reduce the depth."""
    assert json_too_deep(text.encode())
    assert value_too_deep(json.loads(text) if len(text) < 2000 else [[json.loads("[" * LIMIT + "]" * LIMIT)]])


_documents = st.recursive(
    st.none() | st.text('[]{}\\"a', max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('[]{}\\"', max_size=3), inner, max_size=2),
    max_leaves=20,
)


@given(_documents, st.integers(LIMIT - 8, LIMIT + 2))
def test_the_json_text_and_the_parsed_value_have_the_same_depth(document: Any, more: int) -> None:
    """For any document, the text and the value parsed from it either both exceed the limit or both respect it."""
    for _ in range(more):
        document = [document]
    assert json_too_deep(json.dumps(document).encode()) == (levels(document) > LIMIT)
    assert value_too_deep(document) == (levels(document) > LIMIT)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * MIB,
        b"[" * (MIB // 2) + b"]" * (MIB // 2),
        b"[]" * (MIB // 2),
        (b"[" * 64 + b"]" * 64) * (MIB // 128),
        b'"' * MIB,
        b'\\"[' * (MIB // 3),
        b"[" * 64 + b"]" * MIB,
    ],
    ids=range(7),
)
def test_measuring_the_depth_takes_linear_time(text: bytes) -> None:
    """The time is linear for any input, valid or not."""
    assert cpu_seconds(lambda: json_too_deep(text)) < 1
