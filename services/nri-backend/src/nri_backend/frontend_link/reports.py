# SPDX-License-Identifier: Apache-2.0
"""Serializes the reports of all containers for the frontend, and increments a generation when a report changes.

This module does no I/O. The serialized report of each container is cached, and is serialized again only if the
container has changed. A body with all containers is assembled from the cached reports; a body with changes contains
only the reports that differ. client.py describes the protocol.

The node's ``ChangeLog`` (containers/state.py) counts the changes to individual containers and rejected attempts, and
stores the ids of those that changed most recently. ``refresh`` looks only at the ids that were added since its last
call, so its cost depends on the number of changes rather than on the number of containers; on a quiet node it costs
nothing. Since most of a container's state is not in its report, a change may leave the report unchanged. So the
generation is incremented only if the serialized reports differ. If more changes have been made than the log stores,
``refresh`` looks at all containers.

Containers are reported in a stable order. A container keeps its place as long as it is reported, and a new one is added
at the end. So a reader that merges changes ends up with the same order as one that reads all containers.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from numa_contract.errors import cut_answer
from numa_contract.reports import (
    CHANGES,
    CONTAINERS,
    MAX_STATE_BYTES,
    MEASUREMENTS,
    BackendStatus,
    ClaimIdentity,
    ClaimUse,
    ContainerReport,
    ContainerState,
)

from nri_backend.claims.authorization import Reason
from nri_backend.claims.entitlement import HeldClaim, PartitionKind
from nri_backend.containers.container import Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import limit_text
from nri_backend.problems import NO_PROBLEM

MAX_UNKNOWN: Final = 16
"""Maximum number of claims that a rejection adds to each of the lists ``unknown_claims`` and ``refused_claims`` of a
container's report. The lists are limited because the pod's author controls how many claims a container names.
"""
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
_ENVELOPE_BYTES: Final = 64
"""Maximum size in bytes of everything in a body except the status and the containers."""
_Serialized = Mapping[str, tuple[Tracked, bytes]]
"""Containers and their serialized reports, by container id."""
_log = logging.getLogger(__name__)


class Reports:
    """The reports of all containers and rejected attempts as of the last refresh()."""

    def __init__(self, state: NodeState) -> None:
        self.generation = 0
        """Number that is incremented whenever a report changes. 0 until the runtime has sent its list of containers."""
        self._state = state
        self._cache: _Serialized = {}
        """The containers as of the last refresh()."""
        self._as_of = -1
        """``ChangeLog.count`` at the last refresh(). -1 before the first one, which looks at all containers."""
        self._sent: tuple[int, _Serialized] = (0, {})
        """Generation and containers of the last body with containers or changes. The next changes are relative to
        these.
        """

    def refresh(self) -> int:
        """Serializes containers whose state has changed. Returns the generation, incremented if a report differs."""
        if not self._state.containers_listed:
            return 0
        state = self._state
        if self._as_of == state.change_log.count:
            # On a quiet node, even copying the reports would take up most of the time spent in each tick.
            return self.generation
        cache = dict(self._cache)
        changed = state.change_log.since(self._as_of)
        differs, self._as_of = not self.generation, state.change_log.count
        # A container that could not be killed after its start was rejected is both a tracked container and a rejected
        # attempt. It is reported as rejected.
        rejected = {one.id: one for one in state.rejected.values()}
        if changed is None:
            changed = list(dict.fromkeys((*state.containers.by_id, *rejected, *cache)))
        for id_ in changed:
            now, before = rejected.get(id_) or state.containers.get(id_), cache.get(id_)
            if now is None:
                differs |= cache.pop(id_, None) is not None
            elif before is None or before[0] is not now:
                cache[id_] = now, _serialize(now)
                differs |= before is None or before[1] != cache[id_][1]
        self._cache = cache
        self.generation += differs
        return self.generation

    def containers(self) -> bytes:
        """Returns all reports as a JSON array."""
        return _array(data for _, data in self._cache.values())

    def body(self, status: BackendStatus, acked: int, *, reads_changes: bool = False) -> bytes:
        """Returns a request body with the status, and the containers unless ``acked`` is the current generation.

        ``acked`` is the generation of the containers that the frontend has. If the last body with containers had this
        generation, and the frontend can merge changes, the body contains only the changes. It contains all containers
        anyway if merging would result in a different order, or if the list of all containers is shorter than the
        changes. If that list exceeds the frontend's limit, neither the list nor the changes are sent; the frontend can
        tell from the generation that containers are missing.
        """
        left_out = {*MEASUREMENTS} - status.model_fields_set
        document = status.model_copy(update={"generation": self.generation})
        lease = document.model_dump_json(exclude=left_out).encode()
        if acked == self.generation:
            return lease
        size = sum(len(data) + 1 for _, data in self._cache.values())
        if len(lease) + size + _ENVELOPE_BYTES > MAX_STATE_BYTES:
            _log.error("report too large", extra={"bytes": size, "maximum": MAX_STATE_BYTES})
            return lease
        (base, before), self._sent = self._sent, (self.generation, self._cache)
        if reads_changes and 0 < acked == base and _merged_order(before, self._cache) == [*self._cache]:
            changes = _changes(base, before, self._cache)
            if len(changes) < size:
                return _with_field(lease, CHANGES, changes)
        return _with_field(lease, CONTAINERS, self.containers())


def _merged_order(before: Iterable[str], now: Mapping[str, object]) -> list[str]:
    """Returns the ids in ``now`` in the order that results from merging: first those that are also in ``before``, then
    the new ones.
    """
    return [id_ for id_ in dict.fromkeys((*before, *now)) if id_ in now]


def _changes(base: int, before: _Serialized, now: _Serialized) -> bytes:
    """Returns the ContainerChanges that turn ``before`` into ``now``. ``base`` is the generation of ``before``."""
    removed = [id_ for id_ in before if id_ not in now]
    changed = _array(data for id_, (_, data) in now.items() if id_ not in before or before[id_][1] != data)
    head = json.dumps({"since": base, "total": len(now), "removed": removed})
    return _with_field(head.encode(), CONTAINERS, changed)


def _with_field(document: bytes, key: str, value: bytes) -> bytes:
    """Adds a field to a serialized object and returns the result. The object must not be empty."""
    return document[:-1] + f",{json.dumps(key)}:".encode() + value + b"}"


def _array(documents: Iterable[bytes]) -> bytes:
    return b"[" + b",".join(documents) + b"]"


def report(tracked: Tracked) -> ContainerReport:
    """Returns the report of a container or of a rejected attempt."""
    rejection, refused_now = tracked.rejection, tracked.phase is Phase.ABSENT
    # A container that is already running is not reported as rejected if its claim's record is missing: the frontend
    # rebuilds the record.
    lost = (
        not refused_now
        and rejection is not None
        and (bool(tracked.orphaned_claims) or rejection.reason is Reason.NO_RECORD)
    )
    refusal = NO_PROBLEM if rejection is None or lost else rejection.problem()
    return ContainerReport(
        id=tracked.id,
        name=tracked.identity.name,
        pod_uid=tracked.identity.pod.uid,
        pod_namespace=tracked.identity.pod.namespace,
        pod_name=tracked.identity.pod.name,
        state=_STATES[tracked.phase],
        claims=tuple(_claim_use(held, tracked) for held in tracked.authorized_claims),
        unknown_claims=tracked.orphaned_claims + (_truncated(rejection.unknown_claims) if rejection else ()),
        refused_claims=_identities(rejection.claims) if rejection and not lost else (),
        cpus=tracked.observed.cpus or frozenset(),
        exclusivity=_EXCLUSIVITY[tracked.observed.partition] if tracked.entitlement.cpus else "",
        fallback_reason=cut_answer(tracked.fallback_reason),
        fallback_code=tracked.fallback_reason.code_text,
        pool_requested_by=cut_answer(tracked.pool_requested_by),
        mems=tracked.observed.mems or frozenset(),
        limits={file: limit_text(limit) for file, limit in tracked.observed.limits.items()},
        cgroup=tracked.identity.cgroup,
        refused=cut_answer(refusal),
        refused_code=refusal.code_text,
        memory_kills=tracked.observed.memory_kills,
    )


def _claim_use(held: HeldClaim, tracked: Tracked) -> ClaimUse:
    # Usually the claims' CPUs are those of the cgroup, which are reported as ``cpus``. In that case they are not
    # repeated here.
    cpus = held.record.cpus_of(held.requests) if tracked.entitlement.near else frozenset[int]()
    return ClaimUse(uid=held.record.claim.uid, driver=held.record.driver, requests=held.requests, cpus=cpus)


def _identities(uses: Sequence[ClaimUse]) -> tuple[ClaimIdentity, ...]:
    """Returns the identities of the first MAX_UNKNOWN claims."""
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
