# SPDX-License-Identifier: Apache-2.0
"""ttrpc frames: borders, the 4 MiB limit, any pieces of any bytes."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.ttrpc import MAX_DATA, REQUEST, RESPONSE, Frame, FrameReader, OversizedError, PeerError
from nri_backend.ttrpc import encode_frame as encoded

from tests.strategies.streams import cut

_FRAMES = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=50)), max_size=6)


def _feed(*pieces: bytes) -> list[Frame]:
    reader = FrameReader()
    return [frame for piece in pieces for frame in reader.feed(piece)]


@pytest.mark.fault("protocol trap 1.2")
def test_the_length_does_not_count_the_header() -> None:
    """Four bytes of data are announced as four."""
    assert encoded(5, RESPONSE, b"data") == bytes.fromhex("00000004 00000005 02 00") + b"data"


@given(frames=_FRAMES, data=st.data())
def test_any_pieces_give_the_same_frames(frames: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    """Where the byte stream is cut makes no difference; an empty frame is one, too."""
    pieces = cut(data, b"".join(encoded(*frame) for frame in frames))
    assert _feed(*pieces) == [Frame(stream, kind, len(body), body) for stream, kind, body in frames]


def test_the_limit_is_inclusive() -> None:
    """4194304 bytes of data go both ways; whoever sends more learns how much too long it was."""
    data = bytes(MAX_DATA)
    assert _feed(encoded(1, REQUEST, data)) == [Frame(1, REQUEST, MAX_DATA, data)]
    with pytest.raises(OversizedError, match="a message of 4194305 bytes is longer than the 4194304 bytes of ttrpc"):
        encoded(1, REQUEST, bytes(MAX_DATA + 1))


def test_a_frame_over_the_limit_is_thrown_away_and_the_next_one_read() -> None:
    """The connection survives an oversized message."""
    long = struct.pack(">IIBB", MAX_DATA + 3, 9, REQUEST, 0) + bytes(MAX_DATA + 3)
    pieces = [long[:5], long[5:4000], long[4000:] + encoded(11, REQUEST, b"next")]
    assert _feed(*pieces) == [Frame(9, REQUEST, MAX_DATA + 3, None), Frame(11, REQUEST, 4, b"next")]


def test_a_length_that_nobody_sends_is_the_peers_fault() -> None:
    """Lost borders are noticed instead of skipping gigabytes."""
    with pytest.raises(PeerError, match="claims 1862270976 bytes"):
        _feed(bytes.fromhex("6f000000") + bytes(6))
