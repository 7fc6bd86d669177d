# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, as far as the state endpoint uses them: bytes in, events out.

The format is the one of the HTML standard, section 9.2.6: lines end in LF, CR or CRLF, an empty line ends an event.
"""

from dataclasses import dataclass
from typing import Final

# An event of ours is a name and a UID; a longer line is not our frontend.
_MAX_BUFFER: Final = 1 << 16


class OversizedEventError(ValueError):
    """The stream holds an event that is larger than any of ours."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"an event of more than {size} bytes; events of the frontend are below {_MAX_BUFFER}")


@dataclass(frozen=True, slots=True)
class Event:
    """One event; without a name in the stream it is called ``message``."""

    name: str
    data: str


class EventStream:
    """Puts events together from the pieces in which they arrive."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []
        self._size = 0
        self._after_cr = False

    def feed(self, piece: bytes) -> list[Event]:
        """Takes the next bytes; returns the events that they complete. OversizedEventError for a stream gone mad."""
        if not piece:
            return []
        if self._after_cr:
            # The piece before ended in CR: an LF at the start of this one belongs to the same line end.
            piece = piece.removeprefix(b"\n")
        self._after_cr = piece.endswith(b"\r")
        lines = (self._rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop()
        events = [event for line in lines if (event := self._line(line)) is not None]
        if self._size + len(self._rest) > _MAX_BUFFER:
            raise OversizedEventError(self._size + len(self._rest))
        return events

    def _line(self, line: bytes) -> Event | None:
        if not line:
            event = Event(self._name or "message", "\n".join(self._data)) if self._data or self._name else None
            self._name, self._data, self._size = "", [], 0
            return event
        self._size += len(line)
        field, _, value = line.decode(errors="replace").partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            self._name = value
        elif field == "data":
            self._data.append(value)
        return None
