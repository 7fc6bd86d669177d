# SPDX-License-Identifier: Apache-2.0
"""What enforcement reads from, writes to and reports to."""

from collections.abc import Callable
from dataclasses import dataclass

from numa_node.claim_directory import ClaimDirectory

from nri_backend.frontend_link.reports import Reports
from nri_backend.limits.wants import Host
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.proofs import Proofs
from nri_backend.nri.model import Leadership
from nri_backend.telemetry import Telemetry


@dataclass(frozen=True, slots=True)
class Edges:
    """Where everything is read from and written to."""

    directory: ClaimDirectory
    tree: CgroupTree
    read_host: Callable[[], Host]
    """Blocks; HostError."""
    proofs: Proofs
    leadership: Callable[[], Leadership]
    sink: Reports
    observer: Telemetry
