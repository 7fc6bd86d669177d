# SPDX-License-Identifier: Apache-2.0
"""A parser of hostile input, and what is demanded of it: its own errors alone, within so much CPU time."""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hypothesis import strategies as st

_STUCK = 10
"""Times the allowed CPU, and a second: nobody waits longer for the end of a parser."""
_MEASURED = 3
"""Times that a slow input is tried: the quickest counts, since a busy machine spoils caches."""


class FuzzError(Exception):
    """A parser did with an input what it must not do."""


class _StuckError(BaseException):
    """The parser shows no sign of an end. No parser catches it."""


@dataclass(frozen=True, slots=True)
class Target:
    """One parser. Every input is bytes, so that one engine mutates and keeps them all."""

    name: str
    parse: Callable[[bytes], object]
    """Parses an input, and uses what it has read as the product does; AssertionError where that is wrong."""
    seeds: st.SearchStrategy[bytes]
    """Inputs that are nearly right."""
    allowed: tuple[type[Exception], ...] = ()
    """What the parser may raise."""
    milliseconds: float = 50.0
    """CPU time that one input may cost."""
    most_bytes: int = 64 << 10
    """Of an input: the parser's own bound, and a little more."""
    bombs: Sequence[bytes] = ()
    """The worst that is known, at the full length."""
    examples: int = 200
    """Number of inputs that ``make test`` tries."""
    unit: int = 0
    """Bytes of one event, where an input is a trace of events; then a failing input is reduced event by event."""
    head: int = 0
    """Bytes before the first event."""


def check(target: Target, data: bytes) -> float:
    """Gives an input to a parser; returns the milliseconds of CPU that it cost, raises FuzzError."""
    spent = _once(target, data)
    for _ in range(_MEASURED - 1):
        if spent <= target.milliseconds:
            return spent
        spent = min(spent, _once(target, data))
    if spent > target.milliseconds:
        raise FuzzError(f"{target.name}: {len(data)} bytes cost {spent:.0f} ms of CPU, {target.milliseconds:g} allowed")
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
        raise FuzzError(f"{target.name}: {len(data)} bytes cost more than {patience:g} s of CPU") from None
    except Exception as error:
        raise FuzzError(f"{target.name}: {error!r:.300}") from error
    return (time.thread_time() - began) * 1000


@contextmanager
def _watched(seconds: float) -> Iterator[None]:
    """Ends what runs for too long; wants the main thread."""

    def stuck(_number: int, _frame: object) -> None:
        raise _StuckError

    before = signal.signal(signal.SIGPROF, stuck)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
