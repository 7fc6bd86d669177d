# SPDX-License-Identifier: Apache-2.0
"""Log format of both containers: ``key=value`` pairs or JSON. A record is one line, whatever its values contain."""

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, TextIO

_STANDARD: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
_MAX_VALUE: Final = 2048
"""Maximum length of a value in characters. An exception's traceback is never truncated."""
_MAX_ERRORS: Final = 256


class _Lines(logging.Formatter):
    """Formats a record as one line: a JSON object or ``key=value`` pairs. The fields in ``extra`` become keys."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self._form = form

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line. In a pair, a value with special characters is written as a JSON string.

        In the ``key=value`` format, fields that are None are omitted, and a mapping is written as
        ``key:value,key:value``.
        """
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
        return " ".join(f"{key}={_quoted(_text(value))}" for key, value in fields.items() if value is not None)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return _cut_text(",".join(f"{key}:{_text(inner)}" for key, inner in value.items()))
    if isinstance(value, list | tuple):
        return _cut_text(", ".join(map(_text, value)))
    return str(value)


def _cut(value: object) -> object:
    return _cut_text(value) if isinstance(value, str) else value


def _cut_text(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[:_MAX_VALUE]}..."


def _quoted(text: str) -> str:
    plain = text.isascii() and text.isprintable() and not any(mark in text for mark in ' "=\\')
    return text if plain and text else json.dumps(text)


class ErrorLog:
    """Logs an item's error once, and again only if the error changes or recurs after it has cleared."""

    def __init__(self, logger: logging.Logger, *expected: type[Exception]) -> None:
        self._logger = logger
        self._expected: tuple[type[Exception], ...] = (OSError, *expected)
        self._logged: dict[Hashable, str] = {}

    def log(self, item: Hashable, message: str, error: BaseException | str) -> None:
        """Logs an item's error, with the traceback if the error's type is not an expected one."""
        text = str(error) or repr(error)
        if self._logged.get(item) != text:
            self._logged = dict([*self._logged.items(), (item, text)][-_MAX_ERRORS:])
            trace = error if isinstance(error, Exception) and not isinstance(error, self._expected) else None
            self._logger.warning(message, extra={"item": str(item), "error": text}, exc_info=trace)

    @contextmanager
    def catch(self, item: Hashable, message: str) -> Iterator[None]:
        """Logs an exception raised in the block as this item's error and suppresses it, so that other items are still
        handled.
        """
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is logged
            self.log(item, message, error)
        else:
            self.clear(item)

    def clear(self, item: Hashable) -> None:
        """Records that the item has no error."""
        self._logged.pop(item, None)


class RateLimitedLog:
    """A log for warnings that untrusted input can trigger. It logs at most ``limit`` warnings in ``seconds``
    seconds.
    """

    def __init__(
        self, logger: logging.Logger, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._limit = limit
        self._seconds = seconds
        self._clock = clock
        self._began = -math.inf
        self._logged = 0
        self._left_out = 0

    def warn(self, message: str, fields: Mapping[str, object], trace: Exception | None = None) -> None:
        """Logs a warning with these fields, or only counts it if the limit has been reached.

        The first warning of the next period contains the number of warnings that were not logged.
        """
        now = self._clock()
        if now - self._began >= self._seconds:
            self._began, self._logged = now, 0
        if self._logged == self._limit:
            self._left_out += 1
            return
        self._logged += 1
        left_out, self._left_out = self._left_out, 0
        more = {"leftOutBefore": left_out} if left_out else {}
        more |= {"nextAfterSeconds": int(self._seconds)} if self._logged == self._limit else {}
        self._logger.warning(message, extra={**fields, **more}, exc_info=trace)


def set_up_logging(level: str, form: str, stream: TextIO | None = None) -> None:
    """Configures logging to ``stream`` (by default standard error) as ``text`` or ``json`` lines."""
    target = logging.StreamHandler(sys.stderr if stream is None else stream)
    target.setFormatter(_Lines(form))
    logging.basicConfig(level=level.upper(), handlers=[target], force=True)
