# SPDX-License-Identifier: Apache-2.0
"""How many files a process may have open."""

import resource
from typing import Final

MOST: Final = 65536
"""Some runtimes allow a billion; then nothing stops a leak."""


def raise_descriptor_limit() -> None:
    """Raises the soft limit to the hard one, up to MOST.

    A soft limit of 1024 is what systemd and containerd leave to programs that might still use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
