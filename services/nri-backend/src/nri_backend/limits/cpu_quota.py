# SPDX-License-Identifier: Apache-2.0
"""Who is not to be throttled: containers whose claimed CPUs cover their CPU limit.

The limit of their pod is raised by the CPUs that they have, so that they are not throttled by what others use; a pod's
author cannot lift it, unless the operator lets him (docs/adr/0007-cpu-quota.md).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from nri_backend.claims.entitlement import Entitlement
from nri_backend.limits.limit import CPU_MAX, Raise, Wanted
from nri_backend.nri.model import Resources

UNLIMITED: Final = -1
"""The quota by which a runtime is told that there is none."""
_PERIOD: Final = 100_000


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """CPU time in microseconds, and the period in which it may be used."""

    quota: int
    period: int = _PERIOD


def stated_cpu_limit(resources: Resources) -> CpuLimit | None:
    """Returns the CPU limit that runtime or kubelet state, if any."""
    if resources.cpu_quota is None or resources.cpu_quota < 0:
        return None
    return CpuLimit(resources.cpu_quota, resources.cpu_period or _PERIOD)


def unthrottled(entitlement: Entitlement, limit: CpuLimit | None) -> bool:
    """Tells whether a container is to have no quota: its claims say so, and cover its limit if it has one."""
    return entitlement.quota_off and (limit is None or limit.quota <= len(entitlement.cpus) * limit.period)


def container_limit() -> dict[str, Wanted]:
    """Returns what the files of an unthrottled container must say."""
    return {CPU_MAX: Wanted(None)}


def pod_raise(
    choice: Literal["raise", "lift", "keep"], unthrottled: Iterable[tuple[Entitlement, CpuLimit | None]]
) -> dict[str, Raise]:
    """Returns what a pod needs for its unthrottled containers, each with what it holds and the limit it has stated."""
    found = tuple(unthrottled)
    if choice == "keep" or not found:
        return {}
    cpus = frozenset[int]().union(*(entitlement.cpus for entitlement, _ in found))
    # The kubelet gives pod and containers the same period.
    period = max((limit.period for _, limit in found if limit is not None), default=_PERIOD)
    return {CPU_MAX: Raise(plus=len(cpus) * period, lifted=choice == "lift")}
