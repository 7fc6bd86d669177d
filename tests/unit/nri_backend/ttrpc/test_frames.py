# SPDX-License-Identifier: Apache-2.0
"""ttrpc frames: borders, the 4 MiB limit, any pieces of any bytes."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.ttrpc import OversizedError, PeerError
from nri_backend.ttrpc.frames import MAX_DATA, REQUEST, RESPONSE, Frame, FrameReader, OversizedFrame, encode_frame

_FRAMES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=50)), max_size=6)


def _feed(reader: FrameReader, *pieces: bytes) -> list[Frame | OversizedFrame]:
    return [frame for piece in pieces for frame in reader.feed(piece)]


@pytest.mark.fault("protocol trap 1.2")
def test_the_length_does_not_count_the_header() -> None:
    """Four bytes of data are announced as four."""
    assert encode_frame(5, RESPONSE, b"data") == bytes.fromhex("00000004 00000005 02 00") + b"data"


def test_an_empty_frame_is_a_frame() -> None:
    """An empty message is no bytes at all, and still arrives."""
    assert _feed(FrameReader(), encode_frame(1, REQUEST, b"")) == [Frame(1, REQUEST, 0, b"")]


def test_the_limit_is_inclusive() -> None:
    """4194304 bytes of data go both ways."""
    data = bytes(MAX_DATA)
    assert _feed(FrameReader(), encode_frame(1, REQUEST, data)) == [Frame(1, REQUEST, 0, data)]


def test_sending_over_the_limit_is_refused_with_the_numbers() -> None:
    """The caller learns how much too long it was, so that it can send less."""
    with pytest.raises(OversizedError) as caught:
        encode_frame(1, REQUEST, bytes(MAX_DATA + 1))
    assert (caught.value.actual, caught.value.limit) == (4194305, 4194304)


def test_a_frame_over_the_limit_is_thrown_away_and_the_next_one_read() -> None:
    """The connection survives an oversized message."""
    long = struct.pack(">IIBB", MAX_DATA + 3, 9, REQUEST, 0) + bytes(MAX_DATA + 3)
    pieces = [long[:5], long[5:4000], long[4000:] + encode_frame(11, REQUEST, b"next")]
    assert _feed(FrameReader(), *pieces) == [OversizedFrame(9, REQUEST, MAX_DATA + 3), Frame(11, REQUEST, 0, b"next")]


def test_a_length_that_nobody_sends_is_the_peers_fault() -> None:
    """Lost borders are noticed instead of skipping gigabytes."""
    with pytest.raises(PeerError, match="claims 1862270976 bytes"):
        _feed(FrameReader(), bytes.fromhex("6f000000") + bytes(6))


@given(frames=_FRAMES, data=st.data())
def test_any_pieces_give_the_same_frames(frames: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    """Where the byte stream is cut makes no difference."""
    wire = b"".join(encode_frame(*frame) for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    pieces = [wire[start:end] for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert _feed(FrameReader(), *pieces) == [Frame(stream, kind, 0, body) for stream, kind, body in frames]


@given(st.lists(st.binary(max_size=100), max_size=5))
def test_random_bytes_are_read_or_are_the_peers_fault(pieces: list[bytes]) -> None:
    """Whatever comes, nothing but PeerError is raised."""
    with contextlib.suppress(PeerError):
        _feed(FrameReader(), *pieces)
