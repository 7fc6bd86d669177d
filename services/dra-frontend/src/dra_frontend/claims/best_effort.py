# SPDX-License-Identifier: Apache-2.0
"""Events for pods that have a claim and are BestEffort: their author has to ask for the same beside the claim."""

import logging
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from numa_contract.reports import ContainerReport
from numa_node.log import Complaints

from dra_frontend.api_server.errors import ConflictError, KubeError
from dra_frontend.claims.backend import BackendView

REASON: Final = "BestEffortWithClaim"
NOTE: Final = (
    "the pod has a claim and no requests, so its QoS class is BestEffort: it is evicted and killed first when the node "
    "runs short of memory; request the CPUs and the memory of the claim in its containers as well"
)
# As the kubelet names the cgroup of the class, with either driver, in a root cgroup of its own, too.
_BEST_EFFORT: Final = re.compile(r"(?:^|/)(?:kubepods/besteffort|[^/]*kubepods-besteffort\.slice)/")
_AT_ONCE: Final = 2
"""Events in a tick: those that tell of killed containers come first."""
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class BestEffortPods:
    """Creates one Event for each such pod that starts, however many instances see it."""

    _backend: BackendView
    _create_event: Callable[..., Awaitable[None]]
    _known: dict[str, ContainerReport | None] = field(default_factory=dict)
    """By pod UID, one that has no Event yet with a container of it."""
    _started: bool = False
    """Whether the pods are known that were there before this process: an instance before it has told of them."""
    _complaints: Complaints = field(default_factory=partial(Complaints, _log, KubeError))

    def backend_changed(self) -> None:
        """Takes note of such pods, and forgets those that are gone."""
        if not self._backend.live:
            return
        present = {
            one.pod_uid: one
            for one in self._backend.containers.values()
            if one.claims and one.alive and _BEST_EFFORT.search(one.cgroup)
        }
        self._known = {uid: self._known.get(uid, one if self._started else None) for uid, one in present.items()}
        self._started = True

    async def create_due(self) -> None:
        """Creates Events that are due; what the server does not take now is tried at the next tick. Raises nothing."""
        for uid, one in [(uid, one) for uid, one in self._known.items() if one is not None][:_AT_ONCE]:
            pod = {"namespace": one.pod_namespace, "name": one.pod_name, "uid": uid}
            with self._complaints.about("event", "event not created"):
                try:
                    regarding = {"apiVersion": "v1", "kind": "Pod", **pod}
                    # One with the same key is a ConflictError.
                    await self._create_event(one.pod_namespace, regarding, REASON, NOTE, key=f"{uid[:23]}.qos")
                    _log.info("a pod with a claim is BestEffort", extra={"pod": f"{one.pod_namespace}/{one.pod_name}"})
                except ConflictError:
                    pass  # by the other instance
                except KubeError as error:
                    if error.retriable:
                        raise
                    self._complaints.say(uid, "event given up", error)
                if uid in self._known:
                    self._known[uid] = None
