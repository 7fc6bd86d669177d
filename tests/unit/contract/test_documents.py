# SPDX-License-Identifier: Apache-2.0
"""JSON documents from files and peers, and untrusted strings in responses."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError, cut_answer, printable, shown

from tests.rigs.cpu_time import cpu_seconds

MIB = 1 << 20
HOSTILE = {
    "deep": b"[" * 900_000,
    "one level too deep": b"[" * 65 + b"]" * 65,
    "deep object": b'{"a":' * 150_000,
    "huge number": b"[" + b"9" * 900_000 + b"]",
    "huge exponent": b"[1e999]",
    "infinite": b"[Infinity]",
    "not a number": b"[NaN]",
    "lone surrogate": b'["\\ud800"]',
    "lone surrogate in a key": b'{"\\udfff": 1}',
    "not UTF-8": b'["\xff' + b"x" * 900_000 + b'"]',
    "too long": b" " * (MIB + 1),
    "cut off": b'{"a": ',
    "empty": b"",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents_are_rejected(name: str) -> None:
    """Every hostile document raises an error that names the document. The error's length is bounded, and so is the time
    until it is raised.
    """

    def refuse() -> None:
        with pytest.raises(MalformedError, match="record 'c1'") as caught:
            parse_json(HOSTILE[name], MIB, "record", "c1")
        assert len(str(caught.value)) < 400

    assert cpu_seconds(refuse) < 0.1


@given(st.recursive(st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(), st.lists, max_leaves=20))
def test_every_json_value_survives_being_written_and_parsed(value: object) -> None:
    """Any value that json can write parses back to the same value, whether or not its strings are escaped."""
    for ascii_only in (True, False):
        try:
            data = json.dumps(value, ensure_ascii=ascii_only).encode()
        except UnicodeEncodeError:
            continue
        try:
            assert parse_json(data, MIB, "record", "c1") == value
        except MalformedError:
            with pytest.raises(UnicodeEncodeError):
                json.dumps(value, ensure_ascii=False).encode()


@given(st.text(max_size=300))
def test_an_untrusted_string_becomes_one_short_line(text: str) -> None:
    """The string can neither forge a log line nor flood the log."""
    line = shown(text)
    assert line.isprintable()
    assert len(line) < 10 * 80 + 40
    cut_answer(line).encode()


@given(st.text(max_size=300))
def test_an_untrusted_string_on_a_terminal_is_complete_and_on_one_line(text: str) -> None:
    """Control characters are escaped, so the terminal does not interpret them. Printable characters are unchanged."""
    line = printable(text)
    assert line.isprintable()
    assert line == text or not text.isprintable()
    assert printable("a\x1b[2J\n\u202eü\ud800") == r"a\x1b[2J\n\u202eü\ud800"


def test_a_response_has_at_most_a_kilobyte() -> None:
    """The kubelet copies the response into an Event. A response is never truncated in the middle of a character."""
    assert cut_answer("short") == "short"
    cut = cut_answer("ä" * 1000)
    assert len(cut.encode()) <= 1024
    assert cut.endswith("ä...")
    assert cut_answer("\ud800") == "\\ud800"
