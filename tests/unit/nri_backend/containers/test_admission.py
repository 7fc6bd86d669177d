# SPDX-License-Identifier: Apache-2.0
"""The responses to creating or updating a container, and corrections to the resources that the runtime has stored."""

import pytest
from nri_backend.containers.admission import adjustment, resources_for, sync_updates
from nri_backend.containers.container import Identity, Tracked, tracked_as
from nri_backend.containers.state import NodeState
from nri_backend.limits.runtime import CpuLimit, RuntimeLimits
from nri_backend.node.model import Host
from nri_backend.nri.model import Adjustment, MemoryPolicy, Resources
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import config, container, entitlement_of, pod

TWO = 2 * MI


def node(*, lazy: bool = False, online: int = 2) -> NodeState:
    """Returns a node without claims. The CPUs with numbers below ``online`` are online, and all of them are in the
    shared pool.
    """
    state = NodeState(config(lazy=lazy))
    state.set_host(Host(frozenset(range(online))))
    return state


def container_with(*records: AllocationRecord, runtime_limits: RuntimeLimits | None = None) -> Tracked:
    """Returns a container with the given claims and the given limits from the runtime."""
    return Tracked(
        Identity("c", "main", pod()),
        entitlement=entitlement_of(*records),
        runtime_limits=runtime_limits or RuntimeLimits(),
    )


PLAIN = memory_record("m", ("x", 1, 64 * MI, 4096), x={"limit": "claim"})
SOFT = memory_record("m", ("x", 1, 64 * MI, 4096), x={"binding": "preferred"})
PAGES = memory_record("m", ("x", 1, 64 * MI, TWO))


@pytest.mark.parametrize(
    ("records", "runtime_limits", "answer"),
    [
        ((), RuntimeLimits({TWO: 4 * MI}, CpuLimit(50_000), 1 << 30), Resources(cpus="0-1")),
        ((PAGES,), RuntimeLimits(), Resources(cpus="0-1", mems="1", hugepage_limits={"2MB": 64 * MI})),
        ((cpu_record("c", "a=2-3"),), RuntimeLimits(cpu=CpuLimit(200_000)), Resources(cpus="2-3", cpu_quota=-1)),
        ((cpu_record("c", "a=2-3"),), RuntimeLimits(cpu=CpuLimit(200_001)), Resources(cpus="2-3")),
        ((cpu_record("c", "a=2-3"),), RuntimeLimits(), Resources(cpus="2-3")),
        ((PLAIN,), RuntimeLimits(), Resources(cpus="0-1", mems="1", memory_limit=64 * MI)),
        ((PLAIN,), RuntimeLimits(memory=65 * MI), Resources(cpus="0-1", mems="1", memory_limit=64 * MI)),
        ((PLAIN,), RuntimeLimits(memory=64 * MI), Resources(cpus="0-1", mems="1")),
        ((SOFT,), RuntimeLimits(), Resources(cpus="0-1")),
    ],
)
def test_a_created_container_gets_its_claims_resources(
    records: tuple[AllocationRecord, ...], runtime_limits: RuntimeLimits, answer: Resources
) -> None:
    """The answer removes a quota that the claim covers, and keeps a lower memory limit from the pod. A claim with soft
    binding results in a memory policy instead of a cpuset, so the process may use other nodes when its own node is
    full. A container without claims gets only the shared pool.
    """
    policy = MemoryPolicy("preferred", frozenset({1})) if SOFT in records else None
    assert adjustment(container_with(*records, runtime_limits=runtime_limits), node()) == Adjustment(
        answer, memory_policy=policy
    )


def test_a_created_container_gets_the_sum_of_its_claims() -> None:
    """The container gets CPUs, mems and DRA_CPUSET_<uid>, and its hugepage limits are the kubelet's limits plus the
    claimed bytes.
    """
    records = (
        cpu_record("c", "a=2", "b=4-5"),
        memory_record("m", ("x", 1, 64 * MI, TWO), ("y", 0, 64 * MI, TWO)),
        memory_record("n", ("x", 1, 64 * MI, TWO)),
    )
    answer = adjustment(container_with(*records, runtime_limits=RuntimeLimits({TWO: 8 * MI, 1 << 30: 0})), node())
    assert answer.env == {"DRA_CPUSET_c": "2,4-5"}
    assert answer.resources == Resources(cpus="2,4-5", mems="0-1", hugepage_limits={"2MB": 200 * MI, "1GB": 0})


def test_an_empty_pool_is_not_sent_to_the_runtime() -> None:
    """To the runtime, an empty field means "no change"."""
    assert resources_for(container_with(), node(online=0)) == Resources()


def test_the_answer_to_an_update_has_hugepages_only_if_the_update_had_them() -> None:
    """containerd appends hugepage limits to its list instead of replacing the limits."""
    tracked = container_with(PAGES, cpu_record("c", "cpus=3"), runtime_limits=RuntimeLimits({TWO: 2 * MI}))
    assert resources_for(tracked, node()) == Resources(cpus="3", mems="1")
    assert resources_for(tracked, node(), huge=True).hugepage_limits == {"2MB": 66 * MI}


@pytest.mark.parametrize(
    ("stored", "eager", "lazy"),
    [
        ("1-4", "", ""),
        ("2", "1-4", ""),
        ("0-2", "1-4", "1-2"),
        ("6-7", "1-4", "1-4"),
        ("", "1-4", "1-4"),
        ("odd", "1-4", "1-4"),
    ],
)
def test_a_pool_members_stored_cpus_are_corrected_to_the_pool(stored: str, eager: str, lazy: str) -> None:
    """The runtime also writes each update to the container's cgroup. If the pool grows lazily, an update therefore
    contains only those stored CPUs that are in the pool, or the whole pool if none of them are.
    """
    one = container("c", cpus=stored)
    for is_lazy, update in ((False, eager), (True, lazy)):
        state = NodeState(config("0", lazy=is_lazy))
        state.set_host(Host(frozenset(range(5))))
        assert sync_updates([one], state) == [], "not tracked"
        state.put(tracked_as(pod(), one))
        assert [found.resources.cpus for found in sync_updates([one], state)] == ([update] if update else [])
