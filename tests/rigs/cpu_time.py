# SPDX-License-Identifier: Apache-2.0
"""How much CPU time something costs."""

import time
from collections.abc import Callable


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of this thread for it, the least of three tries: what others do on the machine does not count."""

    def once() -> float:
        started = time.thread_time()
        work()
        return time.thread_time() - started

    return min(once() for _ in range(3))
