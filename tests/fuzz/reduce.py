# SPDX-License-Identifier: Apache-2.0
"""Reduces a failing trace to the events that the failure requires."""

import time
from typing import Final

from tests.fuzz.target import FuzzError, Target, check

SECONDS: Final = 30.0
"""Time limit in seconds for the reduction of one input."""


def reduced(target: Target, data: bytes, seconds: float = SECONDS) -> bytes:
    """Removes events, first many at a time and then one by one. Returns the shortest trace that still fails."""
    ends = time.monotonic() + seconds
    count = (len(data) - target.head) // target.unit if target.unit else 0
    size = count // 2
    while size and time.monotonic() < ends:
        start, before = target.head, len(data)
        while start < len(data) and time.monotonic() < ends:
            shorter = data[:start] + data[start + size * target.unit :]
            if _fails(target, shorter):
                data = shorter
            else:
                start += size * target.unit
        # An event may become superfluous only after a later one has been removed.
        size = size if size == 1 and len(data) < before else size // 2
    return data


def _fails(target: Target, data: bytes) -> bool:
    try:
        check(target, data)
    except FuzzError:
        return True
    return False
