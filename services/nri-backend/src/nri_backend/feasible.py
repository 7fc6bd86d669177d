# SPDX-License-Identifier: Apache-2.0
"""Why a container could not be run as its claims want it, whoever enforced them here."""

from numa_contract.cpuset import format_cpu_list

from nri_backend.holdings import Reason, Refusal
from nri_backend.known import Known
from nri_backend.ports import LinkStatus
from nri_backend.state import NodeState


def impossible(known: Known, state: NodeState, runtime: LinkStatus) -> Refusal | None:
    """Returns why nobody could run the container on this node now; None when it can be run."""
    if known.holding.claims and known.problem:
        return Refusal(Reason.KERNEL, f"its claim cannot be enforced: {known.problem}")
    if known.holding.cpus and not known.holding.cpus & state.host.online:
        cpus = format_cpu_list(known.holding.cpus)
        return Refusal(Reason.OFFLINE, f"every CPU of its claim is offline ({cpus}); bring one back, it is retried")
    if not known.holding.cpus and not state.pool:
        text = "claims hold every CPU of the node and none is reserved; release a claim or set reservedCPUs"
        return Refusal(Reason.NO_POOL, text)
    return _no_policy(known, runtime)


def _no_policy(known: Known, runtime: LinkStatus) -> Refusal | None:
    memory = known.holding.memory
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
