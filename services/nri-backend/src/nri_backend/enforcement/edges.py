# SPDX-License-Identifier: Apache-2.0
"""What enforcement reads from, writes to and reports to."""

from collections.abc import Callable
from dataclasses import dataclass

from numa_node.claim_directory import ClaimDirectory

from nri_backend.limits.wants import Host
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.proofs import Proofs
from nri_backend.nri.hooks import EnforcementObserver, Leadership, ReportSink


@dataclass(frozen=True, slots=True)
class Edges:
    """Where everything is read from and written to."""

    directory: ClaimDirectory
    tree: CgroupTree
    read_host: Callable[[], Host]
    """Blocks; HostError."""
    proofs: Proofs
    leadership: Callable[[], Leadership]
    sink: ReportSink
    observer: EnforcementObserver
