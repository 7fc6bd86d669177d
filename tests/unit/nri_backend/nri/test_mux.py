# SPDX-License-Identifier: Apache-2.0
"""NRI's multiplexer: written frames respect the limits of the runtime's Go library, and received bytes may be split
anywhere.
"""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.nri.wire import RUNTIME_CONNECTION, Demultiplexer, PeerError, frame_message

from tests.strategies.streams import cut

_FRAMES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 77]), st.binary(max_size=60)), max_size=8)


def _lengths(wire: bytes) -> list[int]:
    lengths = []
    while wire:
        _, length = struct.unpack_from(">II", wire)
        lengths.append(length)
        wire = wire[8 + length :]
    return lengths


def _read(*pieces: bytes) -> dict[int, bytes]:
    demultiplexer, streams = Demultiplexer(), dict[int, bytes]()
    for piece in pieces:
        for number, data in demultiplexer.receive_data(piece):
            streams[number] = streams.get(number, b"") + data
    return streams


@pytest.mark.parametrize(
    ("total", "frames"),
    [(10, [10]), (4096, [4096]), (4097, [10, 4087]), (8192, [10, 8182]), (10 + (4 << 20), [10, 4 << 20])],
)
def test_a_message_over_4096_bytes_is_sent_as_header_and_body_in_two_frames(total: int, frames: list[int]) -> None:
    """The Go library closes the connection if a frame exceeds its 4096-byte buffer, or if 257 frames are unread."""
    message = bytes(range(256)) * (total // 256) + bytes(total % 256)
    wire = frame_message(RUNTIME_CONNECTION, message)
    assert _lengths(wire) == frames
    assert _read(wire) == {RUNTIME_CONNECTION: message}


@given(frames=_FRAMES, data=st.data())
def test_the_streams_do_not_depend_on_where_the_bytes_are_split(
    frames: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    """Frames for connections other than 1 and 2 are dropped."""
    wire = b"".join(struct.pack(">II", number, len(payload)) + payload for number, payload in frames)
    streams = {number: b"".join(payload for other, payload in frames if other == number) for number in (1, 2)}
    assert _read(*cut(data, wire)) == {number: stream for number, stream in streams.items() if stream}


def test_a_frame_length_that_no_runtime_writes_is_a_peer_error() -> None:
    """If the length were accepted, the reader would wait for 4 GiB of data."""
    with pytest.raises(PeerError, match="mux frame header: 4294967295 bytes"):
        list(Demultiplexer().receive_data(b"\xff" * 8))
