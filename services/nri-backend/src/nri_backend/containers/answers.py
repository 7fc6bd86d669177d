# SPDX-License-Identifier: Apache-2.0
"""What the runtime is answered about a container."""

from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import oci_page_size

from nri_backend.claims.entitlement import Entitlement
from nri_backend.containers.container import Tracked
from nri_backend.containers.state import NodeState
from nri_backend.limits.cpu_quota import UNLIMITED, unthrottled
from nri_backend.limits.hugepages import claimed_bytes
from nri_backend.limits.stated import Stated
from nri_backend.nri.model import Adjustment, Resources


def adjustment_of(tracked: Tracked, state: NodeState) -> Adjustment:
    """Returns the answer for a container that is being created."""
    return adjustment(tracked.entitlement, state.shared_by(own_pod=tracked.own_pod), tracked.stated)


def amendment_of(tracked: Tracked, state: NodeState, *, huge: bool = False) -> Resources:
    """Returns the answer to other resources for a container that exists; ``huge`` as in amendment()."""
    return amendment(tracked.entitlement, state.shared_by(own_pod=tracked.own_pod), tracked.asked, huge=huge)


def adjustment(entitlement: Entitlement, pool: frozenset[int], stated: Stated) -> Adjustment:
    """Returns the answer for a container that is being created."""
    resources = amendment(entitlement, pool, stated, huge=True)
    policy = entitlement.memory.policy if entitlement.memory is not None else None
    return Adjustment(resources, dict(entitlement.env), policy)


def amendment(entitlement: Entitlement, pool: frozenset[int], stated: Stated, *, huge: bool = False) -> Resources:
    """Returns the answer to other resources for a container that exists; ``huge``: whether hugepages are among them.

    They are left out otherwise: containerd appends a hugepage limit to its list instead of replacing it.
    """
    maximum = entitlement.memory.maximum if entitlement.memory is not None else None
    lower = maximum is not None and (stated.memory is None or stated.memory > maximum)
    return Resources(
        cpus=format_cpu_list(entitlement.cpus or pool),
        mems=format_cpu_list(entitlement.mems),
        cpu_quota=UNLIMITED if stated.cpu is not None and unthrottled(entitlement, stated.cpu) else None,
        memory_limit=maximum if lower else None,
        hugepage_limits=_hugepage_limits(entitlement, stated) if huge and entitlement.memory is not None else {},
    )


def _hugepage_limits(entitlement: Entitlement, stated: Stated) -> dict[str, int]:
    claimed = claimed_bytes([entitlement])
    sizes = sorted({*stated.hugepages, *claimed})
    return {oci_page_size(size): stated.hugepages.get(size, 0) + claimed.get(size, 0) for size in sizes}
