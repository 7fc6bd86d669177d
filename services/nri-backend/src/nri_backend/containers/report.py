# SPDX-License-Identifier: Apache-2.0
"""What the frontend is told about a container."""

from typing import Final, Literal

from numa_contract.errors import cut_answer
from numa_contract.reports import ClaimUse, ContainerReport

from nri_backend.claims.judge import Reason
from nri_backend.containers.container import Known, Phase
from nri_backend.limits.limit import limit_text

MAX_UNKNOWN: Final = 16
"""Claims that a container names without holding them; a pod's author may write any number of them."""
_State = Literal["unknown", "created", "running", "stopped"]
_STATES: Final[dict[Phase, _State]] = {
    Phase.CREATED: "created",
    Phase.STARTED: "running",
    Phase.ENDING: "running",
    Phase.STOPPED: "stopped",
}


def report(known: Known, *, refused_now: bool = False) -> ContainerReport:
    """Returns the report of a container; ``refused_now``: of one that a hook refuses, and that will not come to be."""
    refusal = known.refusal
    # A container that runs although its record is missing was not refused: the frontend rebuilds the record for it.
    lost = not refused_now and refusal is not None and (bool(known.orphan) or refusal.reason is Reason.NO_RECORD)
    return ContainerReport(
        id=known.id,
        name=known.name,
        pod_uid=known.pod.uid,
        pod_namespace=known.pod.namespace,
        pod_name=known.pod.name,
        state="unknown" if refused_now else _STATES[known.phase],
        claims=tuple(
            ClaimUse(uid=held.record.claim.uid, driver=held.record.driver, requests=held.requests)
            for held in known.rightful
        ),
        unknown_claims=known.orphan + (refusal.unknown[:MAX_UNKNOWN] if refusal else ()),
        cpus=known.cpus or frozenset(),
        mems=known.mems or frozenset(),
        limits={file: limit_text(limit) for file, limit in known.limits.items()},
        cgroup=known.cgroup,
        refused="" if refusal is None or lost else cut_answer(refusal.text),
        memory_kills=known.memory_kills,
    )
