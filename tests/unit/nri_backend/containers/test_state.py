# SPDX-License-Identifier: Apache-2.0
"""The node's state is computed from the claim files, the machine and the containers, and determines entitlements,
overlaps and the pool.
"""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import Reason
from nri_backend.claims.entitlement import HeldClaim
from nri_backend.containers.admission import overlapping
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import ALIVE, Phase
from nri_backend.containers.plan import cpuset_of, misplaced
from nri_backend.containers.pool import claimed_cpus, divide
from nri_backend.containers.state import NodeState, exclusive_use
from nri_backend.frontend_link.reports import MAX_UNKNOWN, report
from nri_backend.limits.runtime import RuntimeLimits
from nri_backend.node.model import Host
from nri_backend.problems import NO_PROBLEM, Problem
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord, Owner

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record
from tests.rigs.containers import config, container, pod
from tests.rigs.cpu_time import cpu_seconds

ONE = cpu_record("c1", "cpus=2-3")
TWO = cpu_record("c2", "cpus=4-5", pods=("p2",))


def node(*records: AllocationRecord, reserved: str = "0", online: str = "0-7") -> NodeState:
    """Returns a node with the given claims."""
    state = NodeState(config(reserved))
    state.set_host(Host(parse_cpu_list(online), (2 * MI,)))
    state.set_claim_files(files_of(*records))
    return state


def started(state: NodeState, id_: str, *env: str, of: str = "p1", name: str = "main", cpus: str = "0-7") -> Tracked:
    """Adds a running container that was last seen on the given CPUs."""
    tracked = state.authorized(tracked_as(pod(of), container(id_, *env, of=of, name=name)))
    tracked = replace(tracked, phase=Phase.RUNNING).with_observation(cpus=parse_cpu_list(cpus))
    state.put(tracked)
    return tracked


def ids(found: list[Tracked]) -> list[str]:
    """Returns the containers' IDs, sorted."""
    return sorted(tracked.id for tracked in found)


def test_a_claims_cpus_are_outside_the_pool_while_its_record_exists() -> None:
    """Only the record matters, since no container uses the claim yet."""
    state = node()
    assert state.pool.shared == set(range(1, 8))
    state.set_claim_files(files_of(ONE, TWO))
    assert state.pool.shared == {1, 6, 7}
    state.set_host(Host(parse_cpu_list("0-4,6")))
    assert state.pool.shared == {1, 6}, "the pool contains online CPUs only"
    state.set_host(Host(parse_cpu_list("0-7")))
    state.set_claim_files(files_of(TWO))
    assert state.pool.shared == {1, 2, 3, 6, 7}


def test_containers_on_held_cpus_are_moved_first() -> None:
    """Containers leave a new claim's CPUs before other containers get CPUs back."""
    state = node()
    started(state, "narrow", cpus="1")
    started(state, "wide", cpus="1-7")
    started(state, "right", cpus="1,4-7")
    state.set_claim_files(files_of(ONE))
    assert [tracked.id for tracked in misplaced(state)] == ["wide", "narrow"]
    started(state, "claim", *env_of(ONE), cpus="0-7")
    assert ids(misplaced(state)) == ["claim", "narrow", "wide"]


def test_a_lazy_pools_member_is_misplaced_only_on_cpus_outside_the_pool() -> None:
    """If the pool grows lazily, a member may have only part of the pool. A claim container must have all of its
    CPUs.
    """
    state = NodeState(config("0", lazy=True))
    state.set_host(Host(parse_cpu_list("0-7")))
    started(state, "narrow", cpus="1")
    started(state, "wide", cpus="1-7")
    state.set_claim_files(files_of(ONE))
    started(state, "claim", *env_of(ONE), cpus="2")
    assert ids(misplaced(state)) == ["claim", "wide"]


def test_only_other_containers_on_the_claimed_cpus_overlap() -> None:
    """Containers whose CPUs have not been read yet also count as overlapping. The claim container itself, its earlier
    instances, containers that have exited, and containers that share the claim do not.
    """
    state = node(ONE)
    claim = state.authorized(tracked_as(pod(), container("new", *env_of(ONE))))
    started(state, "old-life", *env_of(ONE), cpus="2-3")
    started(state, "on-claimed-cpus", name="other")
    started(state, "elsewhere", name="other", cpus="1,4-7")
    state.put(started(state, "unseen", name="other").with_observation(cpus=None))
    state.put(replace(started(state, "stopped", name="other"), phase=Phase.STOPPED))
    state.put(replace(started(state, "ending", name="other"), phase=Phase.ENDING))
    state.put(tracked_as(pod(), container("created")))
    assert ids(overlapping(state, claim)) == ["ending", "on-claimed-cpus", "unseen"]
    state.drop("on-claimed-cpus")
    assert ids(overlapping(state, claim)) == ["ending", "unseen"]
    assert overlapping(state, started(state, "plain")) == []
    shared = cpu_record("c1", "cpus=2-3", pool=True)
    state = node(shared)
    started(state, "first", *env_of(shared), cpus="2-3")
    second = state.authorized(tracked_as(pod(), container("second", *env_of(shared), name="side")))
    assert (second.rejection, overlapping(state, second)) == (None, []), "containers may share this claim"


@pytest.mark.parametrize("end", ["stopped", "dropped"])
def test_a_rejected_container_gets_the_claim_after_its_owner_has_ended(end: str) -> None:
    """Two more containers started while no instance was connected and the owner was running. The first of them gets the
    claim.
    """
    state = node(ONE)
    owner = started(state, "init", *env_of(ONE), name="init", cpus="2-3")
    main, side = (started(state, name, *env_of(ONE), name=name, cpus="1") for name in ("main", "side"))
    assert (main.kind, side.kind) == ("refused", "refused")
    state.put(replace(owner, phase=Phase.ENDING))
    assert [one.kind for one in state] == ["claim", "refused", "refused"], "a process of the owner may still run"
    state.drop("init") if end == "dropped" else state.put(replace(owner, phase=Phase.STOPPED))
    now = {one.id: (one.kind, one.entitlement.cpus) for one in state if one.phase in ALIVE}
    assert now == {"main": ("claim", {2, 3}), "side": ("refused", set())}
    again = state.authorized(tracked_as(pod(), container("i2", *env_of(ONE), name="init")))
    assert again.rejection is not None, "the claim has a new owner"
    assert again.rejection.reason is Reason.SHARED
    state.drop("main")
    assert {one.id: one.kind for one in state if one.phase in ALIVE} == {"side": "claim"}


def test_a_claims_first_user_owns_it_across_restarts() -> None:
    """The owner is identified by pod and container name, not by the container's ID.

    When the owner exits, the claim does not pass to another pod. Another pod can get the claim only once the claim has
    a new record.
    """
    both = cpu_record("c1", "cpus=2-3", pods=("p1", "p2"))
    state = node(both)
    first = started(state, "a", *env_of(both))
    other = tracked_as(pod("p2"), container("b", *env_of(both), of="p2"))
    side = tracked_as(pod(), container("s", *env_of(both), name="side"))
    assert [(r := state.authorized(k).rejection) and r.reason for k in (other, side)] == [Reason.SHARED] * 2
    state.put(replace(first, phase=Phase.STOPPED))
    state.drop("a")
    rejection = state.authorized(other).rejection
    assert rejection is not None
    assert rejection.reason == Reason.SHARED
    assert state.authorized(tracked_as(pod(), container("c", *env_of(both)))).rejection is None
    state.set_claim_files({})
    state.set_claim_files(files_of(both))
    assert state.authorized(other).rejection is None


def test_a_running_container_keeps_its_cpus_when_its_record_disappears() -> None:
    """The container becomes an orphan, whose CPUs stay allocated until it has exited.

    When the record comes back, the container is a claim container again.
    """
    state = node(ONE)
    claim = started(state, "claim", *env_of(ONE), cpus="2-3")
    state.set_claim_files({})
    lost = next(iter(state))
    assert lost.orphaned_claims
    assert state.pool.shared == {1, 4, 5, 6, 7}
    assert cpuset_of(state, lost).cpus == {2, 3}
    reported = report(lost)
    assert (reported.refused, [(use.uid, use.cpus) for use in reported.unknown_claims]) == ("", [("c1", {2, 3})])
    state.set_claim_files(files_of(ONE))
    back = state.containers.get(claim.id)
    assert back is not None
    assert (back.orphaned_claims, back.entitlement.cpus) == ((), {2, 3})
    state.set_claim_files({})
    state.put(replace(back, phase=Phase.STOPPED))
    assert state.pool.shared == set(range(1, 8))


def test_only_containers_that_name_a_changed_file_are_reauthorized() -> None:
    """The frontend rewrites a record when a container starts."""
    state = node(ONE, TWO)
    one, two = started(state, "one", *env_of(ONE)), started(state, "two", *env_of(TWO), of="p2")
    files = files_of(ONE, TWO)
    state.set_claim_files(files)
    before = state.containers.get("two")
    later = dict(files) | files_of(ONE.model_copy(update={"owner": one.identity.user}))
    state.set_claim_files(later)
    assert state.containers.get("one") != one
    assert state.containers.get("two") is before
    assert before == two


def test_shares_are_recomputed_only_for_changed_files() -> None:
    """A claim's share is computed when the claim's file is read, and is not recomputed when other files or containers
    change.
    """
    state = node(ONE, TWO)
    before = dict(state.claims.known)
    state.set_claim_files({**state.files, **files_of(ONE)})
    assert state.claims.known["dra.cpu", "c2"] is before["dra.cpu", "c2"]
    assert state.claims.known["dra.cpu", "c1"] is not before["dra.cpu", "c1"]
    assert started(state, "one", *env_of(ONE)).entitlement.claims[0] is state.claims.known["dra.cpu", "c1"]


def test_claim_files_are_set_quickly_with_many_orphans() -> None:
    """The claim files in the state are updated often, because the frontend restores lost records one by one and every
    hook reads the claim files.
    """
    state = node()
    for number in range(250):
        enforced = (HeldClaim(cpu_record(f"c{number}", "cpus=2"), ("cpus",)),)
        found = tracked_as(pod(), container(f"x{number}", *env_of(enforced[0].record), name=f"n{number}"))
        state.put(state.authorized(replace(found, phase=Phase.RUNNING, enforced_claims=enforced)))
    state.set_claim_files(files_of(*(cpu_record(f"c{number}", "cpus=2") for number in range(250))))
    state.set_claim_files({})
    assert all(tracked.orphaned_claims for tracked in state)
    assert cpu_seconds(lambda: state.set_claim_files({})) < 0.004


@pytest.mark.parametrize("online", ["0-7", "0-2,4-7", "2"])
def test_a_listed_container_without_a_record_keeps_only_enforced_claims(online: str) -> None:
    """Only the enforcement record entitles the container to the CPUs. The claim variables in its environment do not."""
    found = replace(tracked_as(pod(), container("x", *env_of(ONE))), phase=Phase.RUNNING)
    enforced = (HeldClaim(ONE, ONE.requests),)
    for tracked, held in ((found, ""), (replace(found, enforced_claims=enforced), "2-3")):
        state = node(online=online)
        state.replace_containers([tracked])
        assert state.pool.held == parse_cpu_list(held)
        assert not state.pool.held & state.pool.shared
        reported = report(next(iter(state)))
        assert [(use.uid, use.cpus) for use in reported.unknown_claims] == [("c1", parse_cpu_list(held))]


@pytest.mark.parametrize("enforced", [True, False])
def test_a_lost_record_does_not_affect_the_containers_other_claim(enforced: bool) -> None:
    """The CPUs of the claim that still has a record are held.

    The lost memory claim's nodes are kept only if they were enforced.
    """
    memory = memory_record("m1", ("m", 1, MI, 4096))
    found = replace(tracked_as(pod(), container("x", *env_of(ONE), *env_of(memory))), phase=Phase.RUNNING)
    if enforced:
        found = replace(found, enforced_claims=(HeldClaim(ONE, ONE.requests), HeldClaim(memory, memory.requests)))
    state = node(ONE)
    state.replace_containers([found])
    tracked = next(iter(state))
    assert (tracked.entitlement.cpus, tracked.entitlement.mems) == ({2, 3}, {1} if enforced else frozenset())
    assert (tracked.kind, tracked.has_unknown_claims) == ("orphan" if enforced else "refused", not enforced)
    reported = report(tracked)
    assert ([use.uid for use in reported.claims], [use.uid for use in reported.unknown_claims]) == (["c1"], ["m1"])


def test_a_container_that_is_listed_in_two_pods_is_tracked_once() -> None:
    """The container belongs to the pod that is listed last, and no index contains the container after it has been
    dropped.
    """
    state = node(ONE)
    twice = [replace(tracked_as(pod(of), container("c1", of=of)), phase=Phase.RUNNING) for of in ("p1", "p2")]
    state.replace_containers(twice)
    assert [tracked.identity.pod.uid for tracked in state] == ["p2"]
    state.drop("c1")
    assert (state.containers.of_pod("p1"), state.containers.of_pod("p2"), misplaced(state)) == ([], [], [])


def test_an_exited_init_containers_claim_passes_to_the_next_container() -> None:
    """The pod's next container then owns the claim, even if the record still names the init container as its owner."""
    owned = ONE.model_copy(update={"owner": Owner(pod_uid="p1", container="init")})
    for record in (ONE, owned):
        state = node(record)
        init = started(state, "init", *env_of(record), name="init", cpus="2-3")
        main = tracked_as(pod(), container("main", *env_of(record)))
        assert state.authorized(main).rejection is not None
        state.put(replace(init, phase=Phase.STOPPED))
        assert state.authorized(main).rejection is None
        state.put(replace(state.authorized(main), phase=Phase.RUNNING))
        late = state.authorized(tracked_as(pod(), container("late", *env_of(record), name="init")))
        assert late.rejection is not None
        assert "container main" in late.rejection.text


def test_containers_absent_from_a_snapshot_are_kept_until_they_have_exited() -> None:
    """The runtime may have forgotten a container whose process is still running. Such a container keeps its claim."""
    state = node(ONE)
    claim = started(state, "old", *env_of(ONE), cpus="2-3")
    state.put(replace(claim, phase=Phase.ENDING))
    started(state, "plain", cpus="1")
    state.put(tracked_as(pod(), container("created")))
    rival = replace(tracked_as(pod(), container("new", *env_of(ONE), name="side")), phase=Phase.RUNNING)
    state.replace_containers([rival])
    kept, other = state.containers.get("old"), state.containers.get("new")
    assert kept is not None
    assert other is not None
    assert (kept.phase, kept.entitlement.cpus) == (Phase.LINGERING, {2, 3})
    assert other.rejection is not None
    assert other.rejection.reason is Reason.SHARED
    phases = {one.id: one.phase for one in state}
    assert phases == {"old": Phase.LINGERING, "plain": Phase.LINGERING, "new": Phase.RUNNING}
    state.replace_containers([replace(claim, phase=Phase.RUNNING)])
    back = state.containers.get("old")
    assert back is not None
    assert back.phase is Phase.RUNNING


RECORDS = [cpu_record(f"c{n}", f"cpus={2 * n}-{2 * n + 1}", pods=("p1", "p2")) for n in range(4)]
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["start", "plain", "stop", "drop", "records", "sync"]),
        st.integers(0, 3),
        st.sampled_from(["p1", "p2"]),
        st.sets(st.integers(0, 3)),
    ),
    max_size=25,
)


def test_a_restored_record_belongs_to_the_first_container_that_names_it() -> None:
    """Several containers name a claim whose record was missing. The container that was created first gets the claim."""
    state = node()
    for number in range(8):
        state.put(tracked_as(pod(), container(f"c{number}", *env_of(ONE), name=f"n{number}")))
    state.set_claim_files(files_of(ONE))
    assert [tracked.id for tracked in state if tracked.rejection is None] == ["c0"]


@given(EVENTS, st.sampled_from(["", "0", "0-7"]))
def test_no_sequence_of_events_assigns_a_cpu_twice(events: list[tuple[str, int, str, set[int]]], reserved: str) -> None:
    """The pool contains no held CPU, and no two running claim containers share a CPU.

    Each running container has its own CPUs, or the pool if it has none of its own. The incrementally updated pool
    equals one computed from scratch.
    """
    state = node(reserved=reserved)
    for event, number, of, chosen in events:
        record, id_ = RECORDS[number], f"{number}-{of}"
        if event == "records":
            state.set_claim_files(files_of(*(RECORDS[n] for n in chosen)))
        elif event == "plain":
            started(state, f"plain-{id_}", of=of)
        elif event == "start":
            tracked = state.authorized(tracked_as(pod(of), container(id_, *env_of(record), of=of)))
            if tracked.rejection is None and not overlapping(state, tracked):
                state.put(replace(tracked, phase=Phase.RUNNING).with_observation(cpus=tracked.entitlement.cpus))
        elif event == "stop" and (found := state.containers.get(id_)) is not None:
            state.put(replace(found, phase=Phase.STOPPED))
        elif event == "drop":
            state.drop(id_)
        elif event == "sync":
            state.replace_containers([tracked for tracked in state if tracked.phase in ALIVE])
        running = [tracked for tracked in state if tracked.phase in ALIVE]
        own = [tracked.entitlement.cpus for tracked in running if tracked.entitlement.cpus]
        assert sum(map(len, own)) == len(frozenset().union(*own))
        assert not state.pool.shared & state.pool.held
        claims = claimed_cpus(state.files.values())
        assert state.pool == divide(state.config, state.host, claims, filter(None, map(exclusive_use, state)))
        assert frozenset().union(*own) <= state.pool.held
        for tracked in running:
            desired = cpuset_of(state, tracked)
            assert desired.cpus == desired.effective
            assert desired.cpus == (tracked.entitlement.cpus or state.pool.shared)


def test_a_report_contains_a_limited_number_of_unknown_requests() -> None:
    """The report from a node full of containers that name made-up requests fits into one message."""
    env = tuple(f"DRA_CPUSET_u{n % 2}_r{n}=0" for n in range(200))
    tracked = NodeState().authorized(tracked_as(pod(), container("c", *env)))
    reported = report(tracked).unknown_claims
    assert [use.uid for use in reported] == ["u0", "u1"]
    assert sum(len(use.requests) for use in reported) == MAX_UNKNOWN


def test_container_problems_and_pins_follow_container_changes() -> None:
    """The result depends only on the current containers and their insertion order, not on earlier changes."""
    state = NodeState()
    pinned = RuntimeLimits(kubelet_pins=frozenset({"cpu"}))
    for id_ in ("a", "b", "c"):
        one = started(state, id_, of=f"p-{id_}")
        state.put(replace(one, runtime_limits=pinned).with_observation(failure=Problem(f"failure of {id_}", None)))
    assert [problem.rpartition(" ")[2] for problem in state.problems] == ["a", "b", "c"]
    assert state.kubelet_pins == {"cpu"}
    state.put(state.containers.by_id["b"].with_observation(failure=NO_PROBLEM))
    state.drop("c")
    assert [problem.rpartition(" ")[2] for problem in state.problems] == ["a"]
    state.put(replace(state.containers.by_id["a"], phase=Phase.STOPPED))
    assert (state.problems, state.kubelet_pins) == ([], {"cpu"})
    state.replace_containers([])
    assert state.kubelet_pins == {"cpu"}, "a process of an unlisted container may be left"
    state.drop("b")
    assert (state.problems, state.kubelet_pins) == ([], set())
