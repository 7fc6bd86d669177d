# SPDX-License-Identifier: Apache-2.0
"""One log format for both containers: ``key=value`` pairs or JSON, a record a line, whatever its values contain."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TextIO

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_LONGEST_VALUE: Final = 2048
"""Characters. An exception's traceback is never cut."""
_MOST_COMPLAINTS: Final = 256


class _Lines(logging.Formatter):
    """One record a line, as a JSON object or as ``key=value`` pairs; what is given as ``extra`` are keys of it."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line. In pairs, a value with anything but plain characters is a JSON string."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": record.getMessage(),
        }
        fields |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        fields = {key: _cut(value) for key, value in fields.items()}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        if self._form == "json":
            return json.dumps(fields, default=str)
        return " ".join(f"{key}={_quoted(str(value))}" for key, value in fields.items())


def _cut(value: object) -> object:
    return value if not isinstance(value, str) or len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}..."


def _quoted(text: str) -> str:
    plain = text.isascii() and text.isprintable() and not any(mark in text for mark in ' "=\\')
    return text if plain and text else json.dumps(text)


class Complaints:
    """Says what is wrong with an item once, until it is well or something else is wrong with it."""

    def __init__(self, logger: logging.Logger, *foreseen: type[Exception]) -> None:
        self._logger = logger
        self._foreseen: tuple[type[Exception], ...] = (OSError, *foreseen)
        self._told: dict[Hashable, str] = {}

    def say(self, item: Hashable, message: str, error: BaseException | str) -> None:
        """Logs what is wrong with an item; of an error that nobody foresaw with its traceback."""
        text = str(error) or repr(error)
        if self._told.get(item) != text:
            self._told = dict([*self._told.items(), (item, text)][-_MOST_COMPLAINTS:])
            trace = error if isinstance(error, Exception) and not isinstance(error, self._foreseen) else None
            self._logger.warning(message, extra={"item": str(item), "error": text}, exc_info=trace)

    @contextmanager
    def about(self, item: Hashable, message: str) -> Iterator[None]:
        """Logs any exception of the block as the fault of this item, and does not raise it: other items go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - said
            self.say(item, message, error)
        else:
            self.well(item)

    def well(self, item: Hashable) -> None:
        """Nothing is wrong with the item any more."""
        self._told.pop(item, None)


class LimitedLog:
    """Logs warnings whose number other people decide about: at most ``most`` in a period of ``seconds``."""

    def __init__(
        self, logger: logging.Logger, most: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._began = -math.inf
        self._logged = 0
        self._left_out = 0

    def warn(self, message: str, fields: Mapping[str, object], trace: Exception | None = None) -> None:
        """Logs a warning with these fields, or counts it; the first one of the next period contains the number."""
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._logged = now, 0
        if self._logged == self._most:
            self._left_out += 1
            return
        self._logged += 1
        left_out, self._left_out = self._left_out, 0
        more = {"leftOutBefore": left_out} if left_out else {}
        more |= {"nextAfterSeconds": int(self._seconds)} if self._logged == self._most else {}
        self._logger.warning(message, extra={**fields, **more}, exc_info=trace)


def set_up_logging(level: str, form: str, stream: TextIO | None = None) -> None:
    """Sends the log to ``stream`` (standard error by default), as ``text`` or as ``json`` lines."""
    target = logging.StreamHandler(sys.stderr if stream is None else stream)
    target.setFormatter(_Lines(form))
    logging.basicConfig(level=level.upper(), handlers=[target], force=True)
