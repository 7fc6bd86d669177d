# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time of an operation."""

import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    """Returns the CPU seconds that this thread uses for the call. It is the minimum of three tries, so the machine's
    load does not matter.
    """

    def once() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return min(once() for _ in range(3))
