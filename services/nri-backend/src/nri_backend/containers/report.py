# SPDX-License-Identifier: Apache-2.0
"""What the frontend is told about a container."""

from typing import Final, Literal

from numa_contract.errors import cut_answer
from numa_contract.reports import ClaimUse, ContainerReport

from nri_backend.claims.judge import Reason
from nri_backend.containers.container import Phase, Tracked
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


def report(tracked: Tracked, *, refused_now: bool = False) -> ContainerReport:
    """Returns the report of a container; ``refused_now``: of one that a hook refuses, and that will not come to be."""
    refusal = tracked.refusal
    # A container that runs although its record is missing was not refused: the frontend rebuilds the record for it.
    lost = not refused_now and refusal is not None and (bool(tracked.orphan) or refusal.reason is Reason.NO_RECORD)
    return ContainerReport(
        id=tracked.id,
        name=tracked.name,
        pod_uid=tracked.pod.uid,
        pod_namespace=tracked.pod.namespace,
        pod_name=tracked.pod.name,
        state="unknown" if refused_now else _STATES[tracked.phase],
        claims=tuple(
            ClaimUse(uid=held.record.claim.uid, driver=held.record.driver, requests=held.requests)
            for held in tracked.rightful
        ),
        unknown_claims=tracked.orphan + (refusal.unknown[:MAX_UNKNOWN] if refusal else ()),
        cpus=tracked.cpus or frozenset(),
        mems=tracked.mems or frozenset(),
        limits={file: limit_text(limit) for file, limit in tracked.limits.items()},
        cgroup=tracked.cgroup,
        refused="" if refusal is None or lost else cut_answer(refusal.text),
        memory_kills=tracked.memory_kills,
    )


def problem_of(tracked: Tracked) -> str:
    """Returns what somebody should look at, for people; "" where all is well."""
    if not tracked.alive or not (text := tracked.problem or (tracked.refusal.text if tracked.refusal else "")):
        return ""
    return f"container {tracked.name} of pod {tracked.pod.namespace}/{tracked.pod.name}: {text}"
