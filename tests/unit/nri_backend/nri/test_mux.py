# SPDX-License-Identifier: Apache-2.0
"""The mux: what is written suits the Go reader, and any pieces of any bytes can be read."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.nri.mux import PLUGIN_CONNECTION, RUNTIME_CONNECTION, Trunk, wrap
from nri_backend.ttrpc import PeerError

_FRAMES = st.lists(st.tuples(st.sampled_from([0, 1, 2, 3, 77]), st.binary(max_size=60)), max_size=8)


def _raw(frames: list[tuple[int, bytes]]) -> bytes:
    return b"".join(struct.pack(">II", number, len(payload)) + payload for number, payload in frames)


def _lengths(wire: bytes) -> list[int]:
    lengths = []
    while wire:
        _, length = struct.unpack_from(">II", wire)
        lengths.append(length)
        wire = wire[8 + length :]
    return lengths


def _read(trunk: Trunk, pieces: list[bytes]) -> dict[int, bytes]:
    streams: dict[int, bytes] = {}
    for piece in pieces:
        for number, data in trunk.receive_data(piece):
            streams[number] = streams.get(number, b"") + data
    return streams


@pytest.mark.parametrize(
    ("total", "frames"),
    [(10, [10]), (4096, [4096]), (4097, [10, 4087]), (8192, [10, 8182]), (10 + (4 << 20), [10, 4 << 20])],
)
@pytest.mark.fault("protocol trap 2.1")
def test_a_message_over_4096_bytes_is_header_and_body_in_two_frames(total: int, frames: list[int]) -> None:
    """One frame that does not fit the reader's 4096 bytes kills the connection, so it is never written."""
    assert _lengths(wrap(PLUGIN_CONNECTION, bytes(total))) == frames


@pytest.mark.fault("protocol trap 2.2")
def test_the_longest_message_needs_no_more_than_two_places_in_the_queue() -> None:
    """The reader queues 256 frames, so a message of 4 MiB must not be cut into a thousand."""
    assert len(_lengths(wrap(RUNTIME_CONNECTION, bytes(10 + (4 << 20))))) == 2


def test_what_is_wrapped_is_what_was_given() -> None:
    """Splitting changes no byte and names the right connection."""
    message = bytes(range(256)) * 40
    assert _read(Trunk(), [wrap(RUNTIME_CONNECTION, message)]) == {RUNTIME_CONNECTION: message}


def test_the_go_style_of_splitting_is_read_as_one_stream() -> None:
    """Go sends its first 4096 bytes and then the rest; frame borders mean nothing."""
    message = bytes(range(256)) * 40
    assert _read(Trunk(), [_raw([(1, message[:4096]), (1, message[4096:])])]) == {1: message}


def test_frames_of_connections_that_are_not_open_are_dropped() -> None:
    """Ids other than 1 and 2, the reserved 0 among them, disappear without a trace."""
    assert _read(Trunk(), [_raw([(0, b"a"), (7, b"b"), (2, b"c"), (1, b"")])]) == {2: b"c"}


def test_a_length_that_no_runtime_writes_is_the_peers_fault() -> None:
    """A header of garbage must not make us wait for gigabytes."""
    with pytest.raises(PeerError, match="mux frame claims 4294967295 bytes"):
        list(Trunk().receive_data(b"\xff" * 8))


@given(frames=_FRAMES, data=st.data())
def test_any_pieces_give_the_same_streams(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    """Where the kernel cuts the byte stream makes no difference."""
    wire = _raw(frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=10)))
    pieces = [wire[start:end] for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
    assert _read(Trunk(), pieces) == _read(Trunk(), [wire])


@given(st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_read_or_are_the_peers_fault(pieces: list[bytes]) -> None:
    """Whatever comes, nothing but PeerError is raised."""
    with contextlib.suppress(PeerError):
        _read(Trunk(), pieces)
