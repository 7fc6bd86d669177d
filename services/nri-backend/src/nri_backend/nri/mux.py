# SPDX-License-Identifier: Apache-2.0
"""NRI's mux: one trunk carries two byte streams. Eight bytes of header, big endian: connection id, payload length.

What we write must suit the Go reader at the other end (NRI pkg/net/multiplex/mux.go): each read hands out one mux
frame, and fails when the buffer it was given is smaller. ttrpc reads through a buffer of 4096 bytes, except that a body
which does not fit is read straight into place. Hence wrap(): a short message is one frame; a longer one is its ttrpc
header, then its body. Many frames instead could overrun the 256 that the reader queues.
"""

from collections.abc import Collection, Iterator
from struct import Struct

from nri_backend.ttrpc.errors import PeerError
from nri_backend.ttrpc.frames import HEADER_BYTES

_HEADER = Struct(">II")
_READER_BUFFER = 4096
# The longest frame that any release writes (NRI before 0.7 splits at 16 MiB). The Go reader checks nothing and would
# allocate what a broken header says.
_MAX_FRAME = (16 << 20) + HEADER_BYTES

PLUGIN_CONNECTION = 1
"""Here the runtime calls the plugin."""
RUNTIME_CONNECTION = 2
"""Here the plugin calls the runtime."""


def wrap(connection: int, message: bytes) -> bytes:
    """One whole ttrpc message, ready to be written to the trunk in one go."""
    if len(message) <= _READER_BUFFER:
        return _HEADER.pack(connection, len(message)) + message
    head, body = message[:HEADER_BYTES], memoryview(message)[HEADER_BYTES:]
    return b"".join((_HEADER.pack(connection, len(head)), head, _HEADER.pack(connection, len(body)), body))


class Trunk:
    """The receiving half: the trunk's bytes in, pieces of the connections' byte streams out.

    Frames are not message borders, so their payload is passed on as it comes and only headers are ever held back.
    """

    __slots__ = ("_connection", "_header", "_left", "_opened")

    def __init__(self, opened: Collection[int] = (PLUGIN_CONNECTION, RUNTIME_CONNECTION)) -> None:
        self._opened = frozenset(opened)
        self._header = bytearray()
        self._connection = 0
        self._left = 0

    def receive_data(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yields (connection id, bytes); what belongs to other ids is dropped. Must be exhausted.

        Raises PeerError when a length makes no sense.
        """
        rest = memoryview(data)
        while rest:
            if not self._left:
                rest = self._take_header(rest)
                continue
            piece, rest = rest[: self._left], rest[self._left :]
            self._left -= len(piece)
            if self._connection in self._opened:
                yield self._connection, bytes(piece)

    def _take_header(self, rest: memoryview) -> memoryview:
        wanted = _HEADER.size - len(self._header)
        self._header += rest[:wanted]
        if len(self._header) == _HEADER.size:
            self._connection, self._left = _HEADER.unpack(self._header)
            self._header.clear()
            if self._left > _MAX_FRAME:
                raise PeerError(f"a mux frame claims {self._left} bytes; the borders between frames are lost")
        return rest[wanted:]
