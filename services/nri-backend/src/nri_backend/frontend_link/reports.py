# SPDX-License-Identifier: Apache-2.0
"""What the frontend is to know of every container, kept as the bytes that are sent. Nothing here waits.

A generation counts the changes. The frontend answers which one it has, so that containers that it has already are left
out, and one that has not changed costs nothing but its place in the body.
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

from nri_backend.claims.entitlement import Held, PartitionKind
from nri_backend.claims.judge import Reason
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits.difference import limit_text

MAX_UNKNOWN: Final = 16
"""Most claims reported that a container names without holding them; a pod's author may write any number."""
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
    """The reports of all containers and refused attempts, as of the last refresh()."""

    def __init__(self, state: NodeState) -> None:
        self.generation = 0
        """Changes when a report does; 0 before the runtime has sent its state, when the containers are unknown."""
        self._state = state
        self._kept: dict[str, tuple[Tracked, bytes]] = {}

    def refresh(self) -> int:
        """Reads the state; returns the generation, a higher one if a report has changed."""
        if not self._state.told:
            return 0
        before = self._kept
        # A container whose start was refused and that could not be killed is both; it is reported as refused.
        present = {one.id: one for one in (*self._state, *self._state.refused.values())}
        self._kept = {
            id_: before[id_] if id_ in before and before[id_][0] is one else (one, _bytes(one))
            for id_, one in present.items()
        }
        if not self.generation or [data for _, data in before.values()] != [data for _, data in self._kept.values()]:
            self.generation += 1
        return self.generation

    def containers(self) -> bytes:
        """Returns all reports as a JSON list."""
        return b"[" + b",".join(data for _, data in self._kept.values()) + b"]"

    def body(self, status: BackendStatus, held: int) -> bytes:
        """Returns what is sent: the lease, and the containers unless the frontend has this generation (``held``).

        More than the frontend would read is not sent: it says then that containers are missing.
        """
        lease = status.model_copy(update={"generation": self.generation}).model_dump_json().encode()
        if held == self.generation:
            return lease
        body = lease[:-1] + f",{json.dumps(CONTAINERS)}:".encode() + self.containers() + b"}"
        if len(body) <= MAX_STATE_BYTES:
            return body
        _log.error("the containers are too many to be reported", extra={"bytes": len(body), "most": MAX_STATE_BYTES})
        return lease


def report(tracked: Tracked) -> ContainerReport:
    """Returns the report of a container or of a refused attempt."""
    refusal, refused_now = tracked.refusal, tracked.phase is Phase.ABSENT
    # A container that runs although its record is missing was not refused: the frontend rebuilds the record for it.
    lost = not refused_now and refusal is not None and (bool(tracked.orphaned) or refusal.reason is Reason.NO_RECORD)
    return ContainerReport(
        id=tracked.id,
        name=tracked.identity.name,
        pod_uid=tracked.identity.pod.uid,
        pod_namespace=tracked.identity.pod.namespace,
        pod_name=tracked.identity.pod.name,
        state=_STATES[tracked.phase],
        claims=tuple(_use(held, tracked) for held in tracked.rightful),
        unknown_claims=tracked.orphaned + (_bounded(refusal.unknown) if refusal else ()),
        refused_claims=_identities(refusal.about) if refusal and not lost else (),
        cpus=tracked.observed.cpus or frozenset(),
        exclusivity=_EXCLUSIVITY[tracked.observed.partition] if tracked.own_cpus else "",
        pooled=cut_answer(tracked.fallback_reason),
        pool_requested=cut_answer(tracked.pool_requested),
        mems=tracked.observed.mems or frozenset(),
        limits={file: limit_text(limit) for file, limit in tracked.observed.limits.items()},
        cgroup=tracked.identity.cgroup,
        refused="" if refusal is None or lost else cut_answer(refusal.text),
        memory_kills=tracked.observed.memory_kills,
    )


def _use(held: Held, tracked: Tracked) -> ClaimUse:
    # Most often the claims' CPUs are those of the cgroup, and are not said again.
    cpus = held.record.cpus_of(held.requests) if tracked.entitlement.near else frozenset[int]()
    return ClaimUse(uid=held.record.claim.uid, driver=held.record.driver, requests=held.requests, cpus=cpus)


def _identities(uses: Sequence[ClaimUse]) -> tuple[ClaimIdentity, ...]:
    """Returns at most MAX_UNKNOWN claims: their number is chosen by the author of a pod."""
    return tuple(ClaimIdentity(uid=use.uid, driver=use.driver) for use in uses[:MAX_UNKNOWN])


def _bounded(uses: Sequence[ClaimUse]) -> tuple[ClaimUse, ...]:
    """Returns at most MAX_UNKNOWN claims, with as many requests in all: a pod's author writes these."""
    left, kept = MAX_UNKNOWN, []
    for use in uses[:MAX_UNKNOWN]:
        kept.append(use.model_copy(update={"requests": use.requests[: max(left, 0)]}))
        left -= len(use.requests)
    return tuple(kept)


def _bytes(tracked: Tracked) -> bytes:
    return report(tracked).model_dump_json().encode()
