# SPDX-License-Identifier: Apache-2.0
"""Events for pods with a claim, of which their author should know: once for each pod, or container, that starts."""

import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from numa_contract.reports import ContainerReport
from numa_node.log import Complaints

from dra_frontend.api_server.errors import ConflictError, KubeError
from dra_frontend.claims.backend import BackendView

BEST_EFFORT: Final = "BestEffortWithClaim"
KEPT_BY_POOL: Final = "CPUsKeptByPool"
_BEST_EFFORT_NOTE: Final = (
    "the pod has a claim and no requests, so its QoS class is BestEffort: it is evicted and killed first when the node "
    "runs short of memory; request the CPUs and the memory of the claim in its containers as well, or a little of each "
    "where claims are counted against the node (KEP-5517)"
)
# As the kubelet names the cgroup of the class, with either driver, in a root cgroup of its own, too.
_BEST_EFFORT_CGROUP: Final = re.compile(r"(?:^|/)(?:kubepods/besteffort|[^/]*kubepods-besteffort\.slice)/")
_AT_ONCE: Final = 2
"""Events in a tick: those that tell of killed containers come first."""
_log = logging.getLogger(__name__)


class _Notice(NamedTuple):
    key: str
    """Of the Event: one with the same key exists once."""
    reason: str
    note: str
    about: ContainerReport


def _notices(report: ContainerReport) -> Iterator[_Notice]:
    if _BEST_EFFORT_CGROUP.search(report.cgroup):
        yield _Notice(f"{report.pod_uid[:23]}.qos", BEST_EFFORT, _BEST_EFFORT_NOTE, report)
    if report.pooled:
        note = (
            f"container {report.name}: the shared pool keeps others off its CPUs, and not the kernel: {report.pooled}"
        )
        yield _Notice(f"{report.id[:23]}.pool", KEPT_BY_POOL, note, report)


@dataclass(slots=True, eq=False)
class PodEvents:
    """Creates one Event for each notice, however many instances see it."""

    _backend: BackendView
    _create_event: Callable[..., Awaitable[None]]
    _known: dict[str, _Notice | None] = field(default_factory=dict)
    """By key, one that has no Event yet with what it says."""
    _seen: object = None
    """The reports that were looked at last."""
    _started: bool = False
    """Whether the containers are known that were there before this process: an instance before it has told of them."""
    _complaints: Complaints = field(default_factory=partial(Complaints, _log, KubeError))

    def backend_changed(self) -> None:
        """Takes note of what there is to tell, and forgets what is gone."""
        if not self._backend.live or self._backend.containers is self._seen:
            return
        self._seen = self._backend.containers
        using = [one for one in self._backend.containers.values() if one.claims and one.alive]
        present = {notice.key: notice for one in using for notice in _notices(one)}
        self._known = {key: self._known.get(key, one if self._started else None) for key, one in present.items()}
        self._started = True

    async def create_due(self) -> None:
        """Creates Events that are due; what the server does not take now is tried at the next tick. Raises nothing."""
        for notice in [one for one in self._known.values() if one is not None][:_AT_ONCE]:
            about = notice.about
            pod = {"namespace": about.pod_namespace, "name": about.pod_name, "uid": about.pod_uid}
            with self._complaints.about("event", "event not created"):
                try:
                    regarding = {"apiVersion": "v1", "kind": "Pod", **pod}
                    # One with the same key is a ConflictError.
                    await self._create_event(pod["namespace"], regarding, notice.reason, notice.note, key=notice.key)
                    _log.info(notice.reason, extra={"pod": f"{about.pod_namespace}/{about.pod_name}"})
                except ConflictError:
                    pass  # by the other instance
                except KubeError as error:
                    if error.retriable:
                        raise
                    self._complaints.say(notice.key, "event given up", error)
                if notice.key in self._known:
                    self._known[notice.key] = None
