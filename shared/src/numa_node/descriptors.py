# SPDX-License-Identifier: Apache-2.0
"""A process's limit on open files."""

import resource
from typing import Final

MAX_OPEN: Final = 65536
"""Highest limit that the process sets for itself. Some runtimes allow a billion open files, a limit that would never
stop a descriptor leak.
"""


def raise_descriptor_limit() -> None:
    """Raises the soft limit on open files to the hard limit, up to MAX_OPEN.

    systemd and containerd set the soft limit to 1024 for programs that still use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
