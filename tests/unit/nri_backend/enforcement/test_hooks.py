# SPDX-License-Identifier: Apache-2.0
"""The hooks, from the runtime's call to the cgroup files."""

import errno
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.containers.lifecycle import Phase
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.model import Host
from nri_backend.nri.model import Container, RejectedError, Resources
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import POD, cgroup_of, container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import DENIED, SIZES

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

ONE = cpu_record("c1", "cpus=2-3")
GIGA = 1 << 30


async def test_a_claim_container_is_pinned_and_others_leave_its_cpus(node: Node) -> None:
    """Other containers leave the claimed CPUs before the backend answers CreateContainer. The answer contains CPUs and
    mems, and the start applies all settings.
    """
    plain = await node.run("plain", of="p9")
    assert node.cpus(plain) == "1-7"
    parts = ("m", 1, 32 * MI, 2 * MI), ("n", 0, 32 * MI, 2 * MI), ("g", 1, GIGA, GIGA)
    env = node.claim(ONE) + node.claim(memory_record("m1", *parts))
    stored, answer = await node.create("claim", *env)
    assert node.cpus(plain) == "1,4-7", "no container overlaps when the creation is answered"
    assert answer.resources == Resources(cpus="2-3", mems="0-1", hugepage_limits={"2MB": 64 * MI, "1GB": GIGA})
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert (node.cpus(path), node.kernel.get(path, "cpuset.mems.effective")) == ("2-3", "0-1")
    for where in (path, POD):
        for name in ("max", "rsvd.max"):
            assert node.kernel.get(where, f"hugetlb.2MB.{name}") == str(64 * MI)
            assert node.kernel.get(where, f"hugetlb.1GB.{name}") == str(GIGA)
    reported = node.reports["claim"]
    assert [(use.uid, use.requests) for use in reported.claims] == [("c1", ("cpus",)), ("m1", ("m", "n", "g"))]
    assert (reported.state, reported.cpus, reported.mems, reported.cgroup) == ("running", {2, 3}, {0, 1}, path)


async def test_a_start_applies_the_current_pool(node: Node) -> None:
    """The container was created before a claim made the pool smaller."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    node.claim(ONE)
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "1,4-7"


async def test_a_forged_variable_is_rejected(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The message reaches the pod's events.

    The rejection is counted, logged and reported, and the container is not tracked.
    """
    with pytest.raises(RejectedError, match="DRA_CPUSET_zz"):
        await node.create("bad", "DRA_CPUSET_zz=0-3")
    assert node.counts.counters["refused_no_record"] == 1
    reported = node.reports["bad"]
    assert reported.refused
    assert [(use.uid, use.cpus) for use in reported.unknown_claims] == [("zz", frozenset())]
    assert node.enforcer.state.containers.get("bad") is None
    (entry,) = [vars(record) for record in caplog.records if record.getMessage() == "container rejected"]
    assert (entry["container"], entry["pod"], entry["reason"]) == ("main", "ns/p1", "no_record")
    assert "DRA_CPUSET_zz" in entry["error"]


async def test_a_restarted_container_gets_the_same_cpus_and_limits(node: Node) -> None:
    """The container restarts twenty times. Before each restart, another container in the pod is rejected."""
    env = node.claim(ONE) + node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    for life in range(20):
        path = await node.run(f"life-{life}", *env)
        assert node.cpus(path) == "2-3"
        assert node.kernel.get(path.rpartition("/")[0], "hugetlb.2MB.max") == str(64 * MI)
        with pytest.raises(RejectedError, match="belongs to container main"):
            await node.create(f"other-{life}", *env, name="side")
        await node.stop(f"life-{life}")
        await node.enforcer.remove_container(pod(), container(f"life-{life}"))
    assert not list(node.enforcer.state)


async def test_a_container_whose_settings_cannot_be_applied_is_killed_and_rejected(node: Node) -> None:
    """CRI-O runs the container even after an error in StartContainer, so the container is killed first. The message
    names the file.
    """
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), replace(stored, resources=Resources()))
    node.kernel.refused[path, "cpuset.cpus"] = DENIED
    with pytest.raises(RejectedError, match=r"claim\.scope/cpuset\.cpus.*2-3"):
        await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.reports["claim"].refused
    assert node.counts.counters["refused_kernel"] == 1


async def test_a_problem_from_before_the_start_does_not_fail_the_start(node: Node) -> None:
    """The audit read the cgroup while the runtime was still creating it."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    tracked = node.enforcer.state.containers.get("claim")
    assert tracked is not None
    failure = Problem("cpuset.mems does not exist", BackendCode.CONTROLLER_MISSING)
    node.enforcer.state.put(replace(tracked, phase=Phase.RUNNING).with_observation(failure=failure))
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "2-3"


@pytest.mark.parametrize(
    ("controller", "record"),
    [
        ("hugetlb", memory_record("m1", ("m", 1, 64 * MI, 2 * MI))),
        ("memory", memory_record("m1", ("m", 1, 64 * MI, 4096), m={"protect": "min"})),
    ],
)
async def test_only_claims_that_need_a_missing_controller_are_rejected(
    node: Node, controller: str, record: AllocationRecord
) -> None:
    """The error names the controller and cgroup.subtree_control."""
    node.kernel.make(POD, sizes=() if controller == "hugetlb" else SIZES, limits=controller != "memory")
    with pytest.raises(RejectedError, match=rf"{controller} controller is not in .*cgroup\.subtree_control"):
        await node.run("claim", *node.claim(record))
    await node.run("other", *node.claim(memory_record("m2", ("a", 1, 64 * MI, 4096))), name="other")
    plain, _ = await node.create("plain", of="p2")
    node.kernel.make(cgroup_of(plain), sizes=(), cpuset=False)
    await node.enforcer.start_container(pod("p2"), plain)


async def test_a_claim_is_rejected_if_a_container_on_its_cpus_cannot_be_moved(node: Node) -> None:
    """The message names the container and quotes the kernel's error, and does not promise that the container will be
    moved.
    """
    plain = await node.run("plain", of="p9")
    node.kernel.refused[plain, "cpuset.cpus"] = DENIED
    node.enforcer.starter.clear_seconds = 0.05
    env = node.claim(ONE)
    with pytest.raises(RejectedError, match=r"p9 .* the claim.s CPUs \(2-3\) and cannot be moved: .*denied"):
        await node.create("claim", *env)
    node.kernel.refused.clear()
    node.enforcer.starter.clear_seconds = 30.0
    assert node.cpus(await node.run("claim-2", *env)) == "2-3"


async def create_unwritable(node: Node, id_: str) -> Container:
    """Creates a container without claims. Its cpuset is not set and cannot be written."""
    stored, _ = await node.create(id_)
    path = node.make_cgroups(pod(), replace(stored, resources=Resources()))
    node.kernel.refused[path, "cpuset.cpus"] = DENIED
    return stored


async def test_a_container_that_cannot_be_moved_off_claimed_cpus_is_rejected(node: Node) -> None:
    """As long as no CPU is claimed, the container is allowed to run, but its wrong CPUs are reported as a
    problem.
    """
    await node.enforcer.start_container(pod(), await create_unwritable(node, "first"))
    assert any("main of pod ns/p1" in problem for problem in node.enforcer.problems)
    second = await create_unwritable(node, "second")
    node.claim(ONE)
    with pytest.raises(RejectedError, match="cpuset"):
        await node.enforcer.start_container(pod(), second)


async def test_a_claim_without_online_cpus_is_rejected(node: Node) -> None:
    """The kernel would give the claim's container the parent's CPUs."""
    env = node.claim(cpu_record("c1", "cpus=6-7"))
    node.host = Host(parse_cpu_list("0-5"))
    await node.until(lambda: node.enforcer.state.host.online == parse_cpu_list("0-5"))
    with pytest.raises(RejectedError, match=r"every CPU of its claim is offline \(6-7\)"):
        await node.create("claim", *env)


async def test_a_kubelet_update_keeps_the_claimed_resources(node: Node) -> None:
    """Covers a resize by the kubelet and a reconciliation by its CPU manager. The answer contains the claimed CPUs.

    The hugepage limit is the kubelet's new limit plus the claim.
    """
    node.claim(ONE)
    node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    env = env_of(ONE) + env_of(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    await node.run("claim", *env)
    await node.run("plain", of="p2")
    wanted = Resources(cpus="0-7", cpu_quota=100, hugepage_limits={"2MB": 2 * MI})
    (update,) = await node.enforcer.update_container(pod(), container("claim"), wanted)
    kept = Resources("2-3", "1", cpu_quota=-1, hugepage_limits={"2MB": 66 * MI})
    assert (update.container_id, update.resources) == ("claim", kept)
    for cpus in ("", "0-7", "2-3"):  # a static CPU manager repeats its update
        (update,) = await node.enforcer.update_container(pod("p2"), container("plain", of="p2"), Resources(cpus=cpus))
        assert update.resources == Resources(cpus="1,4-7")
    await node.until(lambda: node.kernel.get(f"{cgroup_of(container('claim'))}", "hugetlb.2MB.max") == str(66 * MI))


async def test_another_instance_does_not_add_the_claim_to_limits_that_include_it(node: Node, memory_dir: Path) -> None:
    """On CreateContainer, a standby receives the active instance's answer. A new instance receives the same answer
    during its synchronization.
    """
    env = node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    stored, answer = await node.create("claim", *env)
    assert answer.resources.hugepage_limits == {"2MB": 64 * MI}
    path = node.make_cgroups(pod(), stored)
    for seen_at_creation in (True, False):
        other = Node(memory_dir)
        await other.enforcer.synchronize([pod()], [] if seen_at_creation else [stored])
        if seen_at_creation:
            await other.enforcer.create_container(pod(), stored)
        await other.enforcer.activate()
        await other.enforcer.start_container(pod(), stored)
        for name in ("max", "rsvd.max"):
            assert node.kernel.get(path, f"hugetlb.2MB.{name}") == str(64 * MI)


async def test_a_created_container_owns_its_claim_before_the_owner_is_stored(node: Node, memory_dir: Path) -> None:
    """The frontend stores owners only after the start.

    A backend restart between creation and start does not pass the claim to another container.
    """
    env = node.claim(ONE)
    stored, _ = await node.create("claim", *env)
    node.make_cgroups(pod(), stored)
    restarted = Node(memory_dir)
    await restarted.enforcer.activate()
    await restarted.enforcer.synchronize([pod()], [stored])
    with pytest.raises(RejectedError, match="belongs to container main"):
        await restarted.create("thief", *env, name="side")


async def test_repeated_and_late_events_change_nothing(node: Node) -> None:
    """Stop and remove events may arrive twice, or for a container that never started."""
    env = node.claim(ONE)
    await node.run("claim", *env)
    await node.stop("claim")
    await node.stop("claim")
    stored = container("claim", *env)
    assert await node.enforcer.update_container(pod(), stored, Resources(cpus="0-7")) == []
    assert node.reports["claim"].state == "stopped"
    for _ in range(2):
        await node.enforcer.remove_container(pod(), stored)
    assert "claim" not in node.reports
    await node.enforcer.stop_container(pod(), container("never"))
    assert node.enforcer.state.pool.shared == parse_cpu_list("1,4-7"), "the record of the claim still exists"


async def test_a_failed_attempt_is_forgotten_on_the_next_one(node: Node) -> None:
    """Not every runtime reports that an attempt to start a container has ended. Removing the pod's current sandbox also
    ends the attempt; removing one of its earlier sandboxes does not.
    """
    env = node.claim(ONE)
    await node.create("try-1", *env)
    await node.create("try-2", *env)
    assert {tracked.id for tracked in node.enforcer.state} == {"try-2"}
    await node.enforcer.remove_pod(replace(pod(), id="an earlier sandbox of the pod"))
    assert len(list(node.enforcer.state)) == 1
    await node.enforcer.remove_pod(pod())
    assert not list(node.enforcer.state)
    with pytest.raises(RejectedError, match="not for this pod"):
        await node.create("thief", *env, of="p2")
    assert node.cpus(await node.run("again", *env)) == "2-3", "only the frontend releases claims"


async def test_starting_a_container_after_a_stop_enforces_the_claim(node: Node) -> None:
    """The runtime calls create, stop and start. The settings are applied before the process runs."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), replace(stored, resources=Resources()))
    await node.enforcer.stop_container(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "2-3"
    assert node.reports["claim"].state == "running"


async def test_a_removed_container_keeps_its_cpus_while_one_of_its_processes_runs(node: Node) -> None:
    """The runtime has forgotten the container, and the record is gone. The CPUs return to the pool once the container's
    cgroup is gone.
    """
    path = await node.run("claim", *node.claim(ONE))
    node.unprepare(ONE)
    await node.enforcer.remove_container(pod(), container("claim"))
    await node.enforcer.claim_files.refresh(thorough=True)
    assert node.enforcer.state.pool.shared == parse_cpu_list("1,4-7")
    node.kernel.remove(path)
    await node.until(lambda: node.enforcer.state.pool.shared == parse_cpu_list("1-7"))


@pytest.mark.parametrize(("reserved", "expected"), [("0", "0"), ("", "0-1,4-7")])
async def test_the_drivers_own_pod_is_never_rejected_and_runs_on_unclaimed_cpus(
    memory_dir: Path, reserved: str, expected: str
) -> None:
    """The driver's pod gets the reserved CPUs, or the pool if none are reserved. Claim variables in its environment do
    not count as evidence.
    """
    async with enforcing(Node(memory_dir, reserved=reserved)) as node:
        await node.run("claim", *node.claim(ONE))
        path = await node.run("x", "DRA_CPUSET_z=1", of="own_pod")
        assert node.cpus(path) == expected
        node.claim(cpu_record("c2", "cpus=0-1,4-7"))
        stored, _ = await node.create("y", of="own_pod", name="other")
        await node.enforcer.start_container(pod("own_pod"), stored)
        node.kernel.remove(path)
        await node.enforcer.remove_container(pod("own_pod"), container("x"))
        assert [tracked.kind for tracked in node.enforcer.state].count("driver") == 1


async def test_the_drivers_own_pod_is_moved_off_claimed_cpus_through_the_pods_cgroup(memory_dir: Path) -> None:
    """Because of the nsdelegate mount option, the kernel denies writes to the cgroup of the backend's own container.
    Claim containers still start.
    """
    async with enforcing(Node(memory_dir, reserved="")) as node:
        path = await node.run("backend", of="own_pod")
        above = path.rpartition("/")[0]
        node.kernel.refused[path, "cpuset.cpus"] = errno.EPERM
        assert node.kernel.get(above, "cpuset.cpus") == "", "nothing is written without a claim"
        for number, (cpus, left) in enumerate([("2-3", "0-1,4-7"), ("0-1", "4-7")]):
            env = node.claim(cpu_record(f"c{number}", f"cpus={cpus}", pods=[f"p{number}"]))
            claimed = await node.run(f"claim-{number}", *env, of=f"p{number}")
            assert (node.cpus(claimed), node.cpus(path)) == (cpus, left)
        assert node.enforcer.problems == ()
        await node.stop("claim-0", of="p0")
        node.unprepare(cpu_record("c0", "cpus=2-3"))
        await node.until(lambda: node.kernel.get(above, "cpuset.cpus") == "2-7")


async def test_a_rejection_explains_why_the_drivers_own_pod_cannot_be_moved(memory_dir: Path) -> None:
    """In this test, the pod's cgroup cannot be written to."""
    async with enforcing(Node(memory_dir, reserved="")) as node:
        path = await node.run("backend", of="own_pod")
        node.kernel.refused[path.rpartition("/")[0], "cpuset.cpus"] = errno.EROFS
        node.enforcer.starter.clear_seconds = 0.05
        with pytest.raises(RejectedError, match=r"main of pod ns/own_pod .* cannot be moved: .*Read-only file system"):
            await node.create("claim", *node.claim(ONE))


async def test_waiting_for_a_container_that_cannot_be_moved_pauses_between_attempts(memory_dir: Path) -> None:
    """Without the pause, each failed move would immediately trigger the next one."""
    async with enforcing(Node(memory_dir)) as node:
        plain = await node.run("plain", of="p2")
        node.kernel.refused[plain, "cpuset.cpus"] = errno.EPERM
        node.enforcer.starter.clear_seconds = 2.0
        node.kernel.read_files.clear()
        with pytest.raises(RejectedError, match="cannot be moved"):
            await node.create("claim", *node.claim(ONE))
        assert node.kernel.read_files.count((plain, "cpuset.cpus.effective")) <= 120


UNENFORCED = "no instance of nri-backend has enforced its claims"


@pytest.mark.parametrize(
    "leader", [Leadership(fresh=True, first=True), Leadership(fresh=False, first=True), Leadership(False, False)]
)
async def test_a_standby_rejects_creating_a_claim_container_that_is_not_pinned(
    memory_dir: Path, leader: Leadership
) -> None:
    """Either the runtime called the active instance first and got no answer from it, or there is no active instance."""
    node = Node(memory_dir)
    node.leader = leader
    env = node.claim(ONE)
    with pytest.raises(RejectedError, match=UNENFORCED):
        await node.create("claim", *env)
    await node.enforcer.create_container(pod(), replace(container("c", *env), resources=Resources(cpus="2-3")))
    await node.run("plain", of="p2")


async def test_a_standby_accepts_the_answer_for_a_claim_with_an_offline_cpu(memory_dir: Path) -> None:
    """The answer must contain all of the claim's CPUs and no others."""
    node = Node(memory_dir)
    node.leader = Leadership(fresh=True, first=True)
    env = node.claim(ONE)
    node.host = replace(node.host, online=parse_cpu_list("0-2,4-7"))
    node.enforcer.state.set_host(node.host)
    with pytest.raises(RejectedError, match=UNENFORCED):
        await node.enforcer.create_container(pod(), replace(container("c", *env), resources=Resources(cpus="2-4")))
    await node.enforcer.create_container(pod(), replace(container("c", *env), resources=Resources(cpus="2-3")))


async def test_a_standby_rejects_starting_a_claim_container_that_is_not_pinned(memory_dir: Path) -> None:
    """On CreateContainer, the runtime may call the standby before the active instance. On StartContainer, the cgroup
    already shows the active instance's changes.
    """
    node = Node(memory_dir)
    env = node.claim(ONE)
    stored, _ = await node.create("claim", *env)
    path = node.make_cgroups(pod(), stored)
    with pytest.raises(RejectedError, match=UNENFORCED):
        await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    node.kernel.set(path, "cpuset.cpus", "2-3")
    await node.enforcer.start_container(pod(), stored)
    assert node.reports["claim"].state == "running"


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("claim", ["unpinned", "of another pod"])
async def test_a_lock_holder_rejects_claims_until_it_enforces_them(memory_dir: Path, first: bool, claim: str) -> None:
    """The previous holder of the lock has exited, so no instance that the runtime calls later could pin or reject the
    container.
    """
    node = Node(memory_dir)
    node.leader = Leadership(fresh=True, first=first, is_self=True)
    env = node.claim(ONE if claim == "unpinned" else cpu_record("c1", "cpus=2-3", pods=["p9"]))
    why = UNENFORCED if claim == "unpinned" else "recorded for pod ns/p9 and not for this pod"
    with pytest.raises(RejectedError, match=why):
        await node.create("claim", *env)
    stored = container("late", *env)
    path = node.make_cgroups(pod(), stored)
    with pytest.raises(RejectedError, match=why):
        await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    await node.run("plain", of="p2")


async def test_a_claim_container_without_a_valid_cgroup_path_is_rejected(node: Node) -> None:
    """A container without claims still runs, and the path is reported as a problem."""
    odd = replace(container("odd"), cgroups_path="/../..")
    await node.enforcer.create_container(pod(), odd)
    await node.enforcer.start_container(pod(), odd)
    (problem,) = [one for one in node.enforcer.problems if "leaves the cgroup root" in one]
    assert problem.code is BackendCode.CGROUP_UNKNOWN
    with pytest.raises(RejectedError, match="leaves the cgroup root"):
        await node.enforcer.create_container(pod(), replace(container("c", *node.claim(ONE)), cgroups_path="/../.."))


async def test_a_claim_containers_hooks_write_only_its_own_cgroups(node: Node) -> None:
    """Other containers have already been moved, because that happens when the claim is prepared."""
    others = [await node.run(f"plain-{n}", of=f"q{n}") for n in range(5)]
    env = node.claim(ONE)
    node.enforcer.records_changed()
    await node.until(lambda: {node.cpus(path) for path in others} == {"1,4-7"})
    node.kernel.written.clear()
    for life in ("first", "second"):
        path = await node.run(life, *env)
        await node.stop(life)
        assert {written for written, _, _ in node.kernel.written} <= {path, path.rpartition("/")[0]}
