# SPDX-License-Identifier: Apache-2.0
"""ttrpc's 10-byte header: data length, stream id, type, flags, all big endian. Bytes in, frames out."""

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from nri_backend.ttrpc.errors import OversizedError, PeerError

_HEADER = Struct(">IIBB")
HEADER_BYTES = _HEADER.size
MAX_DATA = 4 << 20
"""Bytes of data in one frame, header excluded (ttrpc channel.go, messageLengthMax)."""
# No runtime writes more than 16 MiB at once, not even those that do not check the limit (NRI before 0.7). A longer
# length means that we have lost the borders of the frames; skipping up to 4 GiB would not find them again.
_MAX_SKIPPED = 16 << 20

REQUEST = 1
RESPONSE = 2
DATA = 3


@dataclass(frozen=True, slots=True)
class Frame:
    """One whole frame."""

    stream_id: int
    type: int
    flags: int
    data: bytes


@dataclass(frozen=True, slots=True)
class OversizedFrame:
    """A frame over the limit: its data was thrown away and the connection lives on."""

    stream_id: int
    type: int
    length: int


def encode_frame(stream_id: int, frame_type: int, data: bytes) -> bytes:
    """Header and data; raises OversizedError when the peer would refuse to read it."""
    if len(data) > MAX_DATA:
        raise OversizedError(len(data), MAX_DATA)
    return _HEADER.pack(len(data), stream_id, frame_type, 0) + data


class FrameReader:
    """Cuts a byte stream into frames, whatever pieces it comes in."""

    __slots__ = ("_buffer", "_header", "_oversized", "_to_skip")

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._header: tuple[int, int, int, int] | None = None
        self._oversized: OversizedFrame | None = None
        self._to_skip = 0

    def feed(self, data: bytes) -> Iterator[Frame | OversizedFrame]:
        """Takes the next bytes; yields what is complete now. Must be exhausted. Raises PeerError for nonsense."""
        self._buffer += data
        while (event := self._next()) is not None:
            yield event

    def _next(self) -> Frame | OversizedFrame | None:
        if self._oversized is not None:
            return self._skip(self._oversized)
        if self._header is None:
            if len(self._buffer) < HEADER_BYTES:
                return None
            self._header = _HEADER.unpack_from(self._buffer)
            del self._buffer[:HEADER_BYTES]
        length, stream_id, frame_type, flags = self._header
        if length > MAX_DATA:
            return self._refuse(length, stream_id, frame_type)
        if len(self._buffer) < length:
            return None
        body = bytes(memoryview(self._buffer)[:length])
        del self._buffer[:length]
        self._header = None
        return Frame(stream_id, frame_type, flags, body)

    def _refuse(self, length: int, stream_id: int, frame_type: int) -> OversizedFrame | None:
        if length > _MAX_SKIPPED:
            raise PeerError(f"a ttrpc frame claims {length} bytes; the borders between frames are lost")
        self._to_skip = length
        self._oversized = OversizedFrame(stream_id, frame_type, length)
        return self._skip(self._oversized)

    def _skip(self, frame: OversizedFrame) -> OversizedFrame | None:
        skipped = min(self._to_skip, len(self._buffer))
        del self._buffer[:skipped]
        self._to_skip -= skipped
        if self._to_skip:
            return None
        self._oversized = None
        self._header = None
        return frame
