# SPDX-License-Identifier: Apache-2.0
"""Values that describe the node: its CPUs and hugepage sizes, and the names of cpuset files. No I/O."""

from dataclasses import dataclass
from typing import Final

from nri_backend.problems import NO_PROBLEM, Problem

CPUS: Final = "cpuset.cpus"
EFFECTIVE: Final = "cpuset.cpus.effective"
MEMS: Final = "cpuset.mems"


@dataclass(frozen=True, slots=True)
class Host:
    """The part of the machine's current state that enforcement depends on."""

    online: frozenset[int] = frozenset()
    """Online CPUs."""
    page_sizes: tuple[int, ...] = ()
    """Hugepage sizes in bytes."""
    partitions: bool = False
    """True if the kernel can turn any cgroup into a cpuset partition (``cpuset.cpus.exclusive``, Linux 6.7)."""
    obstacle: Problem = NO_PROBLEM
    """Reason why the backend creates no partitions, with the remedy; empty if it creates them. Partitions that already
    exist may remain even if there is such a reason.
    """
