# SPDX-License-Identifier: Apache-2.0
"""Creates Events for pods whose claims are less effective than intended, once for each affected pod or container."""

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from numa_contract.reports import ContainerReport
from numa_node.log import RateLimitedLog

from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.memory_kills import MAX_NEW_PER_REPORT, pod_of
from dra_frontend.events.event import Observation

BEST_EFFORT: Final = "BestEffortWithClaim"
KEPT_BY_POOL: Final = "CPUsKeptByPool"
_BEST_EFFORT_NOTE: Final = (
    "The pod is evicted and killed first when the node runs short of memory: it has a claim but no requests, so its "
    "QoS class is BestEffort. Set its containers' resources.requests to the claimed CPUs and memory, or to small "
    "amounts if claims are counted against the node (publishNodeAllocatableResourceMapping)."
)
_KEPT_BY_POOL_NOTE: Final = (
    "Container {} has weaker CPU isolation: the driver keeps other containers off its CPUs, but the kernel "
    "does not keep host daemons off them. The kernel refused a cpuset partition: {}. Fix the cause; the driver will "
    "retry every minute."
)
# Matches the cgroup of the BestEffort QoS class for either cgroup driver, including under a custom root cgroup.
_BEST_EFFORT_CGROUP: Final = re.compile(r"(?:^|/)(?:kubepods/besteffort|[^/]*kubepods-besteffort\.slice)/")

_log = logging.getLogger(__name__)


def _observations(report: ContainerReport) -> Iterator[Observation]:
    pod = pod_of(report)
    if _BEST_EFFORT_CGROUP.search(report.cgroup):
        yield Observation(pod, BEST_EFFORT, _BEST_EFFORT_NOTE, source=report.pod_uid, total=1)
    if report.fallback_reason:
        note = _KEPT_BY_POOL_NOTE.format(report.name, report.fallback_reason)
        yield Observation(pod, KEPT_BY_POOL, note, source=report.id, total=1)


@dataclass(slots=True, eq=False)
class PodEvents:
    """Observes pod conditions in the backend's reports."""

    _backend: BackendView
    _observe: Callable[[Observation], None]
    _present: frozenset[Observation] = field(default_factory=frozenset)
    """Conditions in the latest reports."""
    _seen: object = None
    """The reports examined most recently."""
    _omitted_log: RateLimitedLog = field(default_factory=lambda: RateLimitedLog(_log, 1, 600.0))
    _started: bool = False
    """True once reports have been examined. Conditions in the first reports are not observed, because the previous
    instance has already observed them.
    """

    def backend_changed(self) -> None:
        """Observes conditions that have appeared since the last call."""
        if not self._backend.live or self._backend.containers is self._seen:
            return
        self._seen = self._backend.containers
        using = [one for one in self._backend.containers.values() if one.claims and one.alive]
        found = dict.fromkeys(each for one in using for each in _observations(one))
        new = [each for each in found if each not in self._present] if self._started else []
        if len(new) > MAX_NEW_PER_REPORT:
            self._omitted_log.warn(
                "too many pod events at once", {"conditions": len(new), "observed": MAX_NEW_PER_REPORT}
            )
        for observation in new[:MAX_NEW_PER_REPORT]:
            self._observe(observation)
        self._present, self._started = frozenset(found), True
