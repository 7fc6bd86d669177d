# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.frontend_link.sse import Event, EventStream, OversizedEventError


def events_of(data: bytes) -> list[Event]:
    return EventStream().feed(data)


@pytest.mark.parametrize("end", ["\n", "\r", "\r\n"])
def test_every_line_end_of_the_standard(end: str) -> None:
    """LF, CR and CRLF all end a line."""
    text = end.join(["id: 7", "event: record", "data: one", "data: two", "", ": a comment", "", ""])
    assert events_of(text.encode()) == [Event("record", "one\ntwo")]


def test_an_event_without_a_name_is_a_message() -> None:
    """The standard's default name is message; one space after the colon belongs to the syntax."""
    assert events_of(b"data:x\n\ndata:  y\n\n") == [Event("message", "x"), Event("message", " y")]


def test_comments_and_unknown_fields_are_no_events() -> None:
    """Keep-alive comments and fields of later versions are ignored."""
    assert events_of(b": hello\n\nretry: 5\n\nnew: thing\n\n") == []


def test_an_unfinished_event_is_kept_back() -> None:
    """An event counts when its empty line has come, not before."""
    stream = EventStream()
    assert stream.feed(b"event: record\ndata: 1\n") == []
    assert stream.feed(b"") == []
    assert stream.feed(b"\n") == [Event("record", "1")]


@given(st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=8, max_size=8), st.integers(1, 7))
def test_the_cut_into_pieces_does_not_matter(ends: list[str], size: int) -> None:
    """However a stream is cut, also between CR and LF, the events are the same."""
    lines = ["event: record", "data: a", "", "data: b", "data: c", "", ": x", ""]
    data = "".join(line + end for line, end in zip(lines, ends, strict=True)).encode()
    stream = EventStream()
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    assert [event for piece in pieces for event in stream.feed(piece)] == events_of(data)


@pytest.mark.parametrize("line", [b"data: " + b"x" * 70_000, b"data: x\n" * 10_000])
def test_an_endless_event_is_an_error(line: bytes) -> None:
    """A peer cannot make this process collect memory."""
    with pytest.raises(OversizedEventError, match="events of the frontend"):
        events_of(line)
