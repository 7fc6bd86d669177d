# SPDX-License-Identifier: Apache-2.0
"""A parser of untrusted input and its requirements: it raises only its own exceptions and uses bounded CPU time."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import strategies as st

_STUCK = 10
"""A parser is stopped after it has used this many times its permitted CPU time, plus one second."""
_MEASURED = 3
"""Number of times that a slow input is run. The fastest run counts, because a busy machine slows down some runs."""


class FuzzError(Exception):
    """A parser has violated its requirements for an input."""


class _StuckError(BaseException):
    """The parser does not terminate. No parser catches this exception."""


@dataclass(frozen=True, slots=True)
class Target:
    """A parser. Every input is bytes, so one engine can mutate and store all inputs."""

    name: str
    parse: Callable[[bytes], object]
    """Parses an input and uses the result as the product does. Raises AssertionError if the result is wrong."""
    seeds: st.SearchStrategy[bytes]
    """Nearly correct inputs."""
    allowed: tuple[type[Exception], ...] = ()
    """Exceptions that the parser may raise."""
    milliseconds: float = 50.0
    """Permitted CPU time for one input."""
    max_bytes: int = 64 << 10
    """Maximum length of an input, a little more than the parser's own limit."""
    bombs: Sequence[bytes] = ()
    """The worst known inputs, at full length."""
    examples: int = 200
    """Number of inputs that ``make test`` tries."""
    unit: int = 0
    """Number of bytes per event if an input is a trace of events; a failing input is then reduced event by event."""
    head: int = 0
    """Number of bytes before the first event."""


def check(target: Target, data: bytes) -> float:
    """Runs the parser on an input and returns the CPU time in milliseconds. Raises FuzzError."""
    spent = _once(target, data)
    for _ in range(_MEASURED - 1):
        if spent <= target.milliseconds:
            return spent
        spent = min(spent, _once(target, data))
    if spent > target.milliseconds:
        raise FuzzError(
            f"{target.name}: {len(data)} bytes took {spent:.0f} ms of CPU time, {target.milliseconds:g} allowed"
        )
    return spent


def _once(target: Target, data: bytes) -> float:
    began = time.thread_time()
    patience = 1 + target.milliseconds / 1000 * _STUCK
    try:
        with _watched(patience):
            target.parse(data)
    except target.allowed:
        pass
    except _StuckError:
        raise FuzzError(f"{target.name}: {len(data)} bytes took more than {patience:g} s of CPU time") from None
    except Exception as error:
        raise FuzzError(f"{target.name}: {error!r:.300}") from error
    return (time.thread_time() - began) * 1000


@contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Stops the call if it runs for too long. Must be used in the main thread."""

    def stuck(_number: int, _frame: object) -> None:
        raise _StuckError

    before = signal.signal(signal.SIGPROF, stuck)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
