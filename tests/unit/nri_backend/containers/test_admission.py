# SPDX-License-Identifier: Apache-2.0
"""What a container shall get, and what a runtime has stored against what it should have stored."""

import pytest
from nri_backend.containers.admission import adjustment, amendment, stored_updates
from nri_backend.containers.container import Identity, Tracked, tracked_as
from nri_backend.containers.state import NodeState
from nri_backend.limits.difference import Host
from nri_backend.limits.runtime import CpuLimit, RuntimeLimits
from nri_backend.nri.model import Adjustment, MemoryPolicy, Resources
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import config, container, entitlement_of, pod

TWO = 2 * MI


def node(*, lazy: bool = False, online: int = 2) -> NodeState:
    """A node without claims; its pool are CPUs 0 and 1 unless more are online."""
    state = NodeState(config(lazy=lazy))
    state.set_host(Host(frozenset(range(online))))
    return state


def holder(*records: AllocationRecord, stated: RuntimeLimits | None = None) -> Tracked:
    """A container that holds these."""
    return Tracked(Identity("c", "main", pod()), entitlement=entitlement_of(*records), stated=stated or RuntimeLimits())


PLAIN = memory_record("m", ("x", 1, 64 * MI, 4096), x={"limit": "claim"})
SOFT = memory_record("m", ("x", 1, 64 * MI, 4096), x={"binding": "preferred"})
PAGES = memory_record("m", ("x", 1, 64 * MI, TWO))


@pytest.mark.parametrize(
    ("records", "stated", "answer"),
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
def test_who_is_created_gets_what_it_holds(
    records: tuple[AllocationRecord, ...], stated: RuntimeLimits, answer: Resources
) -> None:
    """A quota that the claim covers goes, a memory limit of the pod's own that is lower stays, plain ones are left.

    A soft binding is a policy and no cpuset: the process may leave the node when it is full.
    """
    policy = MemoryPolicy("preferred", frozenset({1})) if SOFT in records else None
    assert adjustment(holder(*records, stated=stated), node()) == Adjustment(answer, memory_policy=policy)


@pytest.mark.fault("memory peer, nri")
def test_a_claim_container_gets_all_it_holds() -> None:
    """CPUs, mems, the union variable, and of hugepages what the kubelet stated plus what is claimed."""
    records = (
        cpu_record("c", "a=2", "b=4-5"),
        memory_record("m", ("x", 1, 64 * MI, TWO), ("y", 0, 64 * MI, TWO)),
        memory_record("n", ("x", 1, 64 * MI, TWO)),
    )
    answer = adjustment(holder(*records, stated=RuntimeLimits({TWO: 8 * MI, 1 << 30: 0})), node())
    assert answer.env == {"DRA_CPUSET_c": "2,4-5"}
    assert answer.resources == Resources(cpus="2,4-5", mems="0-1", hugepage_limits={"2MB": 200 * MI, "1GB": 0})


def test_nothing_empty_is_ever_sent() -> None:
    """An empty field means "no change"; without a pool nothing is said rather than something empty."""
    assert amendment(holder(), node(online=0)) == Resources()


def test_an_update_mentions_hugepages_only_if_the_kubelet_did() -> None:
    """containerd appends hugepage limits, so an answer repeats them only when it must."""
    held = holder(PAGES, cpu_record("c", "cpus=3"), stated=RuntimeLimits({TWO: 2 * MI}))
    assert amendment(held, node()) == Resources(cpus="3", mems="1")
    assert amendment(held, node(), huge=True).hugepage_limits == {"2MB": 66 * MI}


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
def test_what_a_member_of_the_pool_has_stored(stored: str, eager: str, lazy: str) -> None:
    """The pool; with a lazy one what is stored of it, since the runtime writes what it stores."""
    one = container("c", cpus=stored)
    for is_lazy, update in ((False, eager), (True, lazy)):
        state = NodeState(config("0", lazy=is_lazy))
        state.set_host(Host(frozenset(range(5))))
        assert stored_updates([one], state) == [], "not tracked"
        state.put(tracked_as(pod(), one))
        assert [found.resources.cpus for found in stored_updates([one], state)] == ([update] if update else [])
