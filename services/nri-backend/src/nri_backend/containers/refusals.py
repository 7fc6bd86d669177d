# SPDX-License-Identifier: Apache-2.0
"""Why a container could not be run as its claims want it, whoever enforced them here."""

from collections.abc import Sequence

from numa_contract.cpuset import format_cpu_list

from nri_backend.claims.judge import Reason, Refusal
from nri_backend.containers.container import Tracked
from nri_backend.containers.state import NodeState
from nri_backend.limits.diff import Seen
from nri_backend.limits.wants import Host
from nri_backend.nri.model import Leadership, LinkStatus


def impossible(tracked: Tracked, state: NodeState, runtime: LinkStatus) -> Refusal | None:
    """Returns why nobody could run the container on this node now; None when it can be run."""
    if tracked.entitlement.claims and not (tracked.cgroup and tracked.pod_cgroup):
        return Refusal(Reason.KERNEL, f"its claim cannot be enforced: {tracked.problem}")
    if tracked.entitlement.cpus and not tracked.entitlement.cpus & state.host.online:
        cpus = format_cpu_list(tracked.entitlement.cpus)
        return Refusal(Reason.OFFLINE, f"every CPU of its claim is offline ({cpus}); bring one back, it is retried")
    if not tracked.entitlement.cpus and not state.pool:
        text = "claims hold every CPU of the node and none is reserved; release a claim or set reservedCPUs"
        return Refusal(Reason.NO_POOL, text)
    return _no_policy(tracked, runtime)


def crowded(tracked: Tracked, strangers: Sequence[Tracked]) -> Refusal | None:
    """Returns that these are on the container's CPUs and could not be moved in time; None when there are none."""
    if not strangers:
        return None
    names = ", ".join(f"{k.name} of pod {k.pod.namespace}/{k.pod.name}" for k in strangers[:3])
    more = f" and {len(strangers) - 3} more" if len(strangers) > 3 else ""
    why = next((f" ({stranger.problem})" for stranger in strangers if stranger.problem), "")
    text = f"container {names}{more} still runs on CPUs of its claim ({format_cpu_list(tracked.entitlement.cpus)}){why}"
    return Refusal(Reason.OVERLAP, f"{text}; it is being moved, and the kubelet retries")


def untrue(left: Sequence[str]) -> Refusal:
    """Returns that the kernel's files could not be made true; ``left`` as in apply.Outcome."""
    return Refusal(Reason.KERNEL, f"its cgroup cannot be made as it must be: {'; '.join(left)}; the kubelet retries")


def unenforced(
    tracked: Tracked, seen: Seen | None, leader: Leadership, host: Host, *, starting: bool = False
) -> Refusal | None:
    """Returns that nobody has done for a claim container what its claims need; for a standby, which does nothing.

    ``seen``: the CPUs and nodes that it would run with. At the creation an active instance may be asked later than this
    one; before the first instruction (``starting``) it must be done.
    """
    if not tracked.evidence.claims or (not starting and leader.fresh and not leader.first):
        return None
    if tracked.refusal is not None:
        # The active instance refuses it with the same words, if there is one.
        return None if leader.fresh else tracked.refusal
    cpus, mems = tracked.entitlement.cpus & host.online, tracked.entitlement.mems
    true = seen is not None and cpus in (frozenset(), seen.cpus) and mems in (frozenset(), seen.mems)
    if true and tracked.entitlement.claims:
        return None
    text = f"no instance of nri-backend has enforced its claims; {'' if leader.fresh else 'none is active, and '}"
    return Refusal(Reason.UNENFORCED, f"{text}the kubelet retries")


def _no_policy(tracked: Tracked, runtime: LinkStatus) -> Refusal | None:
    memory = tracked.entitlement.memory
    if memory is None:
        return None
    if memory.fault:
        return Refusal(Reason.UNSUPPORTED, f"its memory claim cannot be enforced: {memory.fault}")
    # Runtimes tell their NRI version since 0.12, the release that brought memory policies.
    if memory.policy is not None and not runtime.nri_version:
        name = " ".join(filter(None, (runtime.runtime_name, runtime.runtime_version))) or "this container runtime"
        text = f"binding: {memory.policy.mode} is a memory policy, and {name} has no NRI 0.12, which can set one \
(containerd 2.3 has); use binding: strict or upgrade the runtime"
        return Refusal(Reason.UNSUPPORTED, text)
    return None
