# SPDX-License-Identifier: Apache-2.0
"""Serializes the reports of all containers for the frontend, and numbers their changes with a generation. No I/O.

The serialized report of each container is cached: one whose state has not changed costs only its bytes in the body.
client.py describes the protocol.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from numa_contract.errors import cut_answer
from numa_contract.reports import (
    CONTAINERS,
    MAX_STATE_BYTES,
    BackendStatus,
    ClaimIdentity,
    ClaimUse,
    ContainerReport,
    ContainerState,
)

from nri_backend.claims.authorization import Reason
from nri_backend.claims.entitlement import Held, PartitionKind
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import limit_text
from nri_backend.problems import NO_PROBLEM

MAX_UNKNOWN: Final = 16
"""Maximum number of claims in a report that a container names but does not hold. The author of a pod controls these."""
_STATES: Final[dict[Phase, ContainerState]] = {
    Phase.ABSENT: "unknown",
    Phase.CREATED: "created",
    Phase.STARTING: "created",
    Phase.LISTED: "running",
    Phase.RUNNING: "running",
    Phase.ENDING: "running",
    Phase.LINGERING: "running",
    Phase.VANISHED: "stopped",
    Phase.STOPPED: "stopped",
}
_EXCLUSIVITY: Final[Mapping[PartitionKind, str]] = {"": "pool", "root": "partition", "isolated": "isolated"}
_log = logging.getLogger(__name__)


class Reports:
    """The reports of all containers and rejected attempts as of the last refresh()."""

    def __init__(self, state: NodeState) -> None:
        self.generation = 0
        """Incremented whenever a report changes. 0 until the runtime has sent its containers."""
        self._state = state
        self._cache: dict[str, tuple[Tracked, bytes]] = {}
        """Container state and its serialized report, by container id."""

    def refresh(self) -> int:
        """Serializes containers whose state has changed. Returns the generation, incremented if a report differs."""
        if not self._state.told:
            return 0
        before = self._cache
        # A container whose start was rejected and that could not be killed is in both; it is reported as rejected.
        present = {one.id: one for one in (*self._state, *self._state.rejected.values())}
        self._cache = {
            id_: before[id_] if id_ in before and before[id_][0] is one else (one, _serialize(one))
            for id_, one in present.items()
        }
        if not self.generation or [data for _, data in before.values()] != [data for _, data in self._cache.values()]:
            self.generation += 1
        return self.generation

    def containers(self) -> bytes:
        """Returns all reports as a JSON array."""
        return b"[" + b",".join(data for _, data in self._cache.values()) + b"]"

    def body(self, status: BackendStatus, acked: int) -> bytes:
        """Returns a request body with the status, and the containers unless ``acked`` is the current generation.

        If the containers exceed the frontend's limit they are omitted; the generation shows that they are missing.
        """
        lease = status.model_copy(update={"generation": self.generation}).model_dump_json().encode()
        if acked == self.generation:
            return lease
        body = lease[:-1] + f",{json.dumps(CONTAINERS)}:".encode() + self.containers() + b"}"
        if len(body) <= MAX_STATE_BYTES:
            return body
        _log.error("too many containers to report", extra={"bytes": len(body), "maximum": MAX_STATE_BYTES})
        return lease


def report(tracked: Tracked) -> ContainerReport:
    """Returns the report of a container or of a rejected attempt."""
    rejection, refused_now = tracked.rejection, tracked.phase is Phase.ABSENT
    # A running container without a record was not rejected: the frontend rebuilds the record for it.
    lost = (
        not refused_now and rejection is not None and (bool(tracked.orphaned) or rejection.reason is Reason.NO_RECORD)
    )
    refusal = NO_PROBLEM if rejection is None or lost else rejection.problem
    return ContainerReport(
        id=tracked.id,
        name=tracked.identity.name,
        pod_uid=tracked.identity.pod.uid,
        pod_namespace=tracked.identity.pod.namespace,
        pod_name=tracked.identity.pod.name,
        state=_STATES[tracked.phase],
        claims=tuple(_claim_use(held, tracked) for held in tracked.rightful),
        unknown_claims=tracked.orphaned + (_truncated(rejection.unknown) if rejection else ()),
        refused_claims=_identities(rejection.about) if rejection and not lost else (),
        cpus=tracked.observed.cpus or frozenset(),
        exclusivity=_EXCLUSIVITY[tracked.observed.partition] if tracked.entitlement.cpus else "",
        pooled=cut_answer(tracked.fallback_reason),
        pooled_code=tracked.fallback_reason.word,
        pool_requested=cut_answer(tracked.pool_requested),
        mems=tracked.observed.mems or frozenset(),
        limits={file: limit_text(limit) for file, limit in tracked.observed.limits.items()},
        cgroup=tracked.identity.cgroup,
        refused=cut_answer(refusal),
        refused_code=refusal.word,
        memory_kills=tracked.observed.memory_kills,
    )


def _claim_use(held: Held, tracked: Tracked) -> ClaimUse:
    # Usually the CPUs of the claims are those of the cgroup; then they are not repeated.
    cpus = held.record.cpus_of(held.requests) if tracked.entitlement.near else frozenset[int]()
    return ClaimUse(uid=held.record.claim.uid, driver=held.record.driver, requests=held.requests, cpus=cpus)


def _identities(uses: Sequence[ClaimUse]) -> tuple[ClaimIdentity, ...]:
    """Returns the first MAX_UNKNOWN claims."""
    return tuple(ClaimIdentity(uid=use.uid, driver=use.driver) for use in uses[:MAX_UNKNOWN])


def _truncated(uses: Sequence[ClaimUse]) -> tuple[ClaimUse, ...]:
    """Returns the first MAX_UNKNOWN claims, with at most MAX_UNKNOWN requests in total."""
    left, result = MAX_UNKNOWN, []
    for use in uses[:MAX_UNKNOWN]:
        result.append(use.model_copy(update={"requests": use.requests[: max(left, 0)]}))
        left -= len(use.requests)
    return tuple(result)


def _serialize(tracked: Tracked) -> bytes:
    return report(tracked).model_dump_json().encode()
