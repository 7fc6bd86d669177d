# SPDX-License-Identifier: Apache-2.0
"""What cgroups must say, from the state."""

from collections.abc import Mapping
from dataclasses import replace

from nri_backend.containers.admission import amendment
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.plan import Raises, group_plans, groups_above, plan_at_start, target
from nri_backend.containers.state import NodeState
from nri_backend.limits.claimed import Raise
from nri_backend.limits.difference import Host
from nri_backend.limits.runtime import pod_directory, stated
from nri_backend.nri.model import Resources
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record
from tests.rigs.containers import POD, PODS, TOP, container, pod

TWO = 2 * MI


def node(*records: AllocationRecord) -> NodeState:
    """A node of eight CPUs with pages of 2 MiB and these claims."""
    state = NodeState()
    state.set_host(Host(parse_cpu_list("0-7"), (TWO,)))
    state.set_claim_files(files_of(*records))
    return state


def put(state: NodeState, id_: str, *env: str, of: str = "p1", quota: int | None = None, name: str = "main") -> Tracked:
    """Puts a running container with this CPU quota of the kubelet's."""
    tracked = state.authorized(tracked_as(pod(of), container(id_, *env, of=of, name=name)))
    tracked = replace(tracked, phase=Phase.RUNNING, stated=stated(Resources(cpu_quota=quota)))
    state.put(tracked)
    return tracked


def needed(state: NodeState) -> Raises:
    """Limits that the claims of the pod need, and whether all of its claims are known."""
    found = group_plans(state, groups_above(state))[POD]
    assert found is not None
    return found


def raises(state: NodeState) -> Mapping[str, Raise]:
    """Limits that the claims of the pod need, of which all claims are known."""
    assert needed(state).lower
    return needed(state).files


def test_hugepages_of_a_pod_are_those_of_its_living_containers() -> None:
    """Own sum, pod's sum with the one that is starting, nothing for who is stopped or elsewhere."""
    one, two = memory_record("m1", ("m", 0, 64 * MI, TWO)), memory_record("m2", ("m", 0, TWO, TWO))
    far = memory_record("m3", ("m", 0, 8 * MI, TWO), pods=("p2",))
    state = node(one, two, far)
    first, second = put(state, "a", *env_of(one)), put(state, "b", *env_of(two), name="side")
    put(state, "c", *env_of(far), of="p2")
    assert target(state, first, full=True).claimed == {TWO: 64 * MI}
    assert plan_at_start(state, first).groups == {POD: Raises({"hugetlb.2MB.max": Raise(plus=66 * MI, needed=True)})}
    state.put(replace(second, phase=Phase.STOPPED))
    assert raises(state) == {"hugetlb.2MB.max": Raise(plus=64 * MI, needed=True)}
    state.put(replace(first, phase=Phase.STOPPED))
    assert raises(state) == {}, "it is looked at all the same: the kubelet's value goes back"


def test_a_plain_container_asks_for_nothing() -> None:
    """Neither of itself nor above it."""
    state = node()
    plain = plan_at_start(state, put(state, "plain", quota=50_000))
    assert (plain.groups, plain.claimed, plain.desired.files) == ({}, None, {})
    assert raises(state) == {}


def test_the_pod_of_an_unthrottled_container_has_no_quota() -> None:
    """Until the last such container has gone; one whose limit is above its claim does not count."""
    one, big = cpu_record("c1", "cpus=2-3"), cpu_record("c2", "cpus=4")
    state = node(one, big)
    put(state, "plain", quota=50_000, name="side")
    put(state, "big", *env_of(big), quota=200_000, name="big")
    assert raises(state) == {}
    free = put(state, "free", *env_of(one), quota=200_000)
    assert set(plan_at_start(state, free).desired.files) == {"cpu.max"}
    assert raises(state) == {"cpu.max": Raise(plus=200_000)}
    state.put(replace(free, phase=Phase.STOPPED))
    assert raises(state) == {}


def test_who_loses_its_record_keeps_what_its_pod_has() -> None:
    """Nothing is taken from a container that runs; one of which nothing is known any more leaves its pod alone.

    Also when the runtime lists the container without its pod.
    """
    one = cpu_record("c1", "cpus=2-3")
    state = node(one)
    orphan = put(state, "free", *env_of(one), quota=200_000)
    state.set_claim_files({})
    assert raises(state) == {"cpu.max": Raise(plus=200_000)}
    nameless = replace(tracked_as(orphan.identity.pod, container("free", *env_of(one))), phase=Phase.RUNNING)
    unlisted = replace(nameless, identity=replace(nameless.identity, pod=replace(nameless.identity.pod, uid="")))
    for now in (nameless, unlisted):
        state.replace_containers([now])
        assert needed(state) == Raises(lower=False)
    state.put(replace(nameless, phase=Phase.STOPPED))
    assert raises(state) == {}


def test_an_unknown_memory_claim_stops_lowering_of_every_cgroup_above_it() -> None:
    """The protection that such a claim needs of the cgroups above its pod is unknown, too."""
    lost, known = memory_record("m1", ("m", 0, TWO, TWO)), memory_record("m2", ("m", 0, TWO, TWO), pods=("p2",))
    state = node(known)
    put(state, "known", *env_of(known), of="p2")
    put(state, "lost", *env_of(lost))
    found = group_plans(state, groups_above(state))
    above = {path: target.lower for path, target in found.items() if target is not None}
    assert above == {POD: False, POD.replace("p1", "p2"): True, PODS: False, TOP: False}


def test_limits_of_a_container_with_an_unknown_memory_claim_are_not_lowered() -> None:
    """Its upper limits and its nodes stay as they are, since they are those of all its claims."""
    known = memory_record("m1", ("m", 0, 8 * MI, 4096), m={"limit": "claim", "protect": "low", "binding": "strict"})
    state, lost = node(known), memory_record("m2", ("m", 1, 8 * MI, 4096))
    desired = target(state, put(state, "alone", *env_of(known)), full=True).desired
    assert (set(desired.files), desired.mems) == ({"memory.max", "memory.low"}, {0})
    both = state.authorized(put(state, "alone", *env_of(known), *env_of(lost)))
    desired = target(state, both, full=True).desired
    assert (set(desired.files), desired.mems) == ({"memory.low"}, set())
    assert amendment(both, state) == Resources(cpus="0-7")


def test_a_pod_that_is_told_under_another_name_since_it_was_listed_is_left_alone() -> None:
    """The audit goes on with its list when the runtime tells its state anew; the next list is right."""
    one = cpu_record("c1", "cpus=2-3")
    state = node(one)
    tracked = put(state, "free", *env_of(one), quota=200_000)
    listed = groups_above(state)
    nameless = replace(tracked.identity, pod=replace(tracked.identity.pod, uid=""))
    state.replace_containers([replace(tracked, identity=nameless)])
    assert group_plans(state, listed)[POD] is None
    state.replace_containers([])
    assert group_plans(state, listed)[POD] is None


def test_every_group_above_containers_is_looked_at_once() -> None:
    """Pods, each with its uid, before what is above all of them."""
    state = node()
    for number in range(120):
        put(state, f"c{number}", of=f"p{number // 2}")
    pods = {pod_directory(pod(f"p{number}").cgroup_parent): f"p{number}" for number in range(60)}
    assert list(groups_above(state).items()) == [*pods.items(), (PODS, None), (TOP, None)]


def test_a_quick_look_has_no_limits() -> None:
    """The audit of every second is about CPUs and nodes."""
    one = memory_record("m1", ("m", 0, 64 * MI, 4096), m={"limit": "claim"})
    state = node(one)
    quick = target(state, put(state, "a", *env_of(one)), full=False)
    assert (quick.desired.files, quick.claimed, quick.desired.mems) == ({}, None, {0})


def test_what_is_protected_in_a_pod_is_passed_on_to_the_next_container_of_it() -> None:
    """A start looks at the cgroup of its pod alone, and must leave it what siblings need; not what others do."""
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
        POD: Raise(plus=64 * MI, needed=True)
    }
