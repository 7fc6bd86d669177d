# SPDX-License-Identifier: Apache-2.0
"""Values that describe the node, without I/O: the machine, and the names of cpuset files."""

from dataclasses import dataclass
from typing import Final

from nri_backend.problems import NO_PROBLEM, Problem

CPUS: Final = "cpuset.cpus"
EFFECTIVE: Final = "cpuset.cpus.effective"
MEMS: Final = "cpuset.mems"


@dataclass(frozen=True, slots=True)
class Host:
    """Current state of the machine, as far as enforcement depends on it."""

    online: frozenset[int] = frozenset()
    """Online CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""
    partitions: bool = False
    """True if the kernel can make any cgroup a cpuset partition (``cpuset.cpus.exclusive``, Linux 6.7)."""
    obstacle: Problem = NO_PROBLEM
    """Reason why the backend creates no partitions, with the remedy; empty if it creates them. Existing partitions may
    remain.
    """
