# SPDX-License-Identifier: Apache-2.0
"""The planned cgroup contents, computed from the state."""

from collections.abc import Mapping
from dataclasses import replace

from nri_backend.containers.admission import resources_for
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.plan import (
    Desired,
    LimitIncreases,
    cpuset_of,
    group_plans,
    groups_above,
    plan_at_start,
    plan_of,
)
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import LimitIncrease
from nri_backend.limits.runtime import cgroup_directory, parse_limits
from nri_backend.node.model import Host
from nri_backend.nri.model import Resources
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record
from tests.rigs.containers import POD, PODS, TOP, container, pod

TWO = 2 * MI


def node(*records: AllocationRecord) -> NodeState:
    """Returns a node with eight CPUs, 2 MiB hugepages and the given claims."""
    state = NodeState()
    state.set_host(Host(parse_cpu_list("0-7"), (TWO,)))
    state.set_claim_files(files_of(*records))
    return state


def put(state: NodeState, id_: str, *env: str, of: str = "p1", quota: int | None = None, name: str = "main") -> Tracked:
    """Adds a running container for which the kubelet has set the given CPU quota."""
    tracked = state.authorized(tracked_as(pod(of), container(id_, *env, of=of, name=name)))
    tracked = replace(tracked, phase=Phase.RUNNING, runtime_limits=parse_limits(Resources(cpu_quota=quota)))
    state.put(tracked)
    return tracked


def raises_of_pod(state: NodeState) -> LimitIncreases:
    """Returns the limits that the claims in the default pod raise, and whether limits may be lowered."""
    found = group_plans(state, groups_above(state))[POD]
    assert found is not None
    return found


def raised_files(state: NodeState) -> Mapping[str, LimitIncrease]:
    """Returns the limits that the claims in the default pod raise, by file. All of the pod's claims must be known."""
    assert raises_of_pod(state).lower
    return raises_of_pod(state).files


def test_offline_cpus_are_configured_but_not_expected_to_be_effective() -> None:
    """The kernel adds a configured CPU automatically when the CPU comes online. If none of a claim's CPUs is online,
    the claim's container gets the pool.
    """
    one, two = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=3", pods=["p2"])
    near, far = (
        memory_record(f"m-{uid}", ("m", 1, MI, 4096), pods=[uid], m={"binding": "strict"}) for uid in ("p1", "p2")
    )
    state = node(one, two, near, far)
    state.set_host(Host(frozenset({0, 1, 2})))
    pool, mems = frozenset({0, 1}), frozenset({1})
    first, second = put(state, "a", *env_of(one), *env_of(near)), put(state, "b", *env_of(two), *env_of(far), of="p2")
    assert cpuset_of(state, first) == Desired(frozenset({2, 3}), frozenset({2}), mems=mems)
    assert cpuset_of(state, second) == Desired(pool, pool, shared=True, mems=mems)


def test_a_pods_hugepage_limit_is_the_sum_over_its_running_containers() -> None:
    """Stopped containers and other pods' containers do not count, but a container that is being started does."""
    one, two = memory_record("m1", ("m", 0, 64 * MI, TWO)), memory_record("m2", ("m", 0, TWO, TWO))
    far = memory_record("m3", ("m", 0, 8 * MI, TWO), pods=("p2",))
    state = node(one, two, far)
    first, second = put(state, "a", *env_of(one)), put(state, "b", *env_of(two), name="side")
    put(state, "c", *env_of(far), of="p2")
    assert plan_of(state, first, full=True).claimed == {TWO: 64 * MI}
    assert plan_at_start(state, first).groups == {
        POD: LimitIncreases({"hugetlb.2MB.max": LimitIncrease(amount=66 * MI, needed=True)})
    }
    state.put(replace(second, phase=Phase.STOPPED))
    assert raised_files(state) == {"hugetlb.2MB.max": LimitIncrease(amount=64 * MI, needed=True)}
    state.put(replace(first, phase=Phase.STOPPED))
    assert raised_files(state) == {}, "the pod is audited all the same, so that the kubelet's value is restored"


def test_a_container_without_claims_raises_no_limit() -> None:
    state = node()
    plain = plan_at_start(state, put(state, "plain", quota=50_000))
    assert (plain.groups, plain.claimed, plain.desired.files) == ({}, None, {})
    assert raised_files(state) == {}


def test_a_pods_quota_is_raised_for_unthrottled_containers() -> None:
    """The quota is raised by the unthrottled containers' claimed CPUs until the last of these containers has exited.

    A container whose limit exceeds its claim is throttled and does not count.
    """
    one, big = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4")
    state = node(one, big)
    put(state, "plain", quota=50_000, name="side")
    put(state, "big", *env_of(big), quota=200_000, name="big")
    assert raised_files(state) == {}
    free = put(state, "free", *env_of(one), quota=200_000)
    assert set(plan_at_start(state, free).desired.files) == {"cpu.max"}
    assert raised_files(state) == {"cpu.max": LimitIncrease(amount=200_000)}
    state.put(replace(free, phase=Phase.STOPPED))
    assert raised_files(state) == {}


def test_a_pods_limits_are_not_lowered_while_a_claim_record_is_lost() -> None:
    """While the backend remembers which claim the container uses, the pod's limit stays raised by that claim.

    Once the runtime has listed the container again, the backend no longer knows the claim. It then lowers no limit,
    even if the runtime lists the container without its pod.
    """
    one = cpu_record("c1", "cpus=2-3")
    state = node(one)
    orphan = put(state, "free", *env_of(one), quota=200_000)
    state.set_claim_files({})
    assert raised_files(state) == {"cpu.max": LimitIncrease(amount=200_000)}
    nameless = replace(tracked_as(orphan.identity.pod, container("free", *env_of(one))), phase=Phase.RUNNING)
    without_pod = replace(nameless, identity=replace(nameless.identity, pod=replace(nameless.identity.pod, uid="")))
    for now in (nameless, without_pod):
        state.replace_containers([now])
        assert raises_of_pod(state) == LimitIncreases(lower=False)
    state.put(replace(nameless, phase=Phase.STOPPED))
    assert raised_files(state) == {}


def test_limits_above_a_container_with_an_unknown_memory_claim_are_not_lowered() -> None:
    """The protection that the claim needs in the cgroups above the pod's is unknown too."""
    lost, known = memory_record("m1", ("m", 0, TWO, TWO)), memory_record("m2", ("m", 0, TWO, TWO), pods=("p2",))
    state = node(known)
    put(state, "known", *env_of(known), of="p2")
    put(state, "lost", *env_of(lost))
    found = group_plans(state, groups_above(state))
    above = {path: plan_of.lower for path, plan_of in found.items() if plan_of is not None}
    assert above == {POD: False, POD.replace("p1", "p2"): True, PODS: False, TOP: False}


def test_nodes_and_upper_limits_are_not_set_while_a_memory_claim_is_unknown() -> None:
    """Nodes and upper limits depend on all of the container's claims. Protection is set, because additional claims can
    only increase it.
    """
    known = memory_record("m1", ("m", 0, 8 * MI, 4096), m={"limit": "claim", "protect": "low", "binding": "strict"})
    state, lost = node(known), memory_record("m2", ("m", 1, 8 * MI, 4096))
    desired = plan_of(state, put(state, "alone", *env_of(known)), full=True).desired
    assert (set(desired.files), desired.mems) == ({"memory.max", "memory.low"}, {0})
    both = state.authorized(put(state, "alone", *env_of(known), *env_of(lost)))
    desired = plan_of(state, both, full=True).desired
    assert (set(desired.files), desired.mems) == ({"memory.low"}, set())
    assert resources_for(both, state) == Resources(cpus="0-7")


def test_a_pod_that_changed_during_the_audit_is_skipped() -> None:
    """The runtime has since sent a new container list, in which the pod has a different UID or does not appear.

    The next audit uses the new list.
    """
    one = cpu_record("c1", "cpus=2-3")
    state = node(one)
    tracked = put(state, "free", *env_of(one), quota=200_000)
    listed = groups_above(state)
    nameless = replace(tracked.identity, pod=replace(tracked.identity.pod, uid=""))
    state.replace_containers([replace(tracked, identity=nameless)])
    assert group_plans(state, listed)[POD] is None
    state.replace_containers([])
    assert group_plans(state, listed)[POD] is None


def test_each_cgroup_above_containers_is_audited_once() -> None:
    """The pods come first, each with its UID, followed by the cgroups above all pods."""
    state = node()
    for number in range(120):
        put(state, f"c{number}", of=f"p{number // 2}")
    pods = {cgroup_directory(pod(f"p{number}").cgroup_parent): f"p{number}" for number in range(60)}
    assert list(groups_above(state).items()) == [*pods.items(), (PODS, None), (TOP, None)]


def test_a_quick_audits_plan_contains_no_limits() -> None:
    """The audit on every tick compares only CPUs and nodes."""
    one = memory_record("m1", ("m", 0, 64 * MI, 4096), m={"limit": "claim"})
    state = node(one)
    quick = plan_of(state, put(state, "a", *env_of(one)), full=False)
    assert (quick.desired.files, quick.claimed, quick.desired.mems) == ({}, None, {0})


def test_a_start_keeps_the_protection_for_other_containers_in_the_pod() -> None:
    """Starting a container writes to its pod's cgroup. The protection includes the siblings' claims, but not other
    pods' claims.
    """
    one, far = (
        memory_record(uid, ("m", 0, 64 * MI, 4096), pods=(of,), m={"protect": "min"})
        for uid, of in (("m1", "p1"), ("m2", "p2"))
    )
    two = cpu_record("c1", "cpus=2-3")
    state = node(one, two, far)
    put(state, "a", *env_of(one))
    put(state, "far", *env_of(far), of="p2")
    second = put(state, "b", *env_of(two), name="side")
    groups = plan_at_start(state, second).groups
    assert {path: raises and raises.files.get("memory.min") for path, raises in groups.items()} == {
        POD: LimitIncrease(amount=64 * MI, needed=True)
    }
