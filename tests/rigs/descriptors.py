# SPDX-License-Identifier: Apache-2.0
"""Runs code while the process may open no more files, or only a few."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def descriptors_left(count: int = 0) -> Iterator[None]:
    """Allows the process to open only ``count`` more files inside the block."""
    free = [os.dup(0) for _ in range(count + 1)]
    for one in free:
        os.close(one)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
