# SPDX-License-Identifier: Apache-2.0
"""Waits for a condition, with a deadline that suits an emulated machine."""

import time
from collections.abc import Callable
from typing import TypeVar

from tests.fakes.waiting import PATIENCE

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, within: float = 30.0, every: float = 0.1) -> T:
    """Repeats the call until its result is true and returns the result. After `within` seconds, raises a TimeoutError
    whose message contains `what`.
    """
    within *= PATIENCE
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if answer:
            return answer
        if time.monotonic() > deadline:
            raise TimeoutError(f"timed out after {within} s waiting until {what}")
        time.sleep(every)
