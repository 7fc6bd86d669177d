# SPDX-License-Identifier: Apache-2.0
"""The audit: moves, repairs, synchronization with the runtime, and takeover from another instance."""

import asyncio
import errno
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from nri_backend.budgets import IDLE_SECONDS
from nri_backend.containers.admission import MAX_SYNC_UPDATES
from nri_backend.enforcement.audit import AUDITS_PER_JOB
from nri_backend.node.model import Host
from nri_backend.nri.model import Adjustment, ContainerState, RejectedError, Resources
from nri_backend.telemetry import REPAIR_LINES
from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list
from numa_node.claim_directory import DirectoryReplacedError
from numa_node.ticks import TICK_SECONDS

from tests.fakes.waiting import eventually
from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import POD, PODS, cgroup_of, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.kernel_tree import KernelTree

pytestmark = pytest.mark.usefixtures("no_blocking_calls")

ONE = cpu_record("c1", "cpus=2-3")


async def test_containers_are_moved_when_a_claim_is_prepared_or_deleted(node: Node) -> None:
    """No hook is called. The claim file alone reserves the CPUs, and removing the file returns them to the pool."""
    plain = await node.run("plain")
    node.claim(ONE)
    await node.until(lambda: node.cpus(plain) == "1,4-7")  # an audit tick finds the file
    await node.until(lambda: node.reports["plain"].cpus == parse_cpu_list("1,4-7"))
    node.unprepare(ONE)
    node.enforcer.records_changed()
    await node.until(lambda: node.cpus(plain) == "1-7")
    await node.until(lambda: node.counts.counters["moved"] >= 2)


async def test_the_audit_repairs_changed_files_and_counts_the_repairs(node: Node) -> None:
    """systemd's daemon-reload restores the values that the runtime has stored."""
    env = node.claim(ONE) + node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    claim, plain = await node.run("claim", *env), await node.run("plain", of="p2")
    node.kernel.set(claim, "cpuset.cpus", "0-7")
    node.kernel.set(claim, "cpuset.mems", "0-1")
    node.kernel.set(plain, "cpuset.cpus", "0-7")
    await node.until(lambda: (node.cpus(claim), node.cpus(plain)) == ("2-3", "1,4-7"))
    await node.until(lambda: node.kernel.get(claim, "cpuset.mems.effective") == "1")
    await node.until(lambda: [node.counts.counters[f"repaired_{kind}"] for kind in ("cpus", "mems")] == [2, 1])
    node.kernel.set(claim, "hugetlb.2MB.max", "0")
    node.kernel.set(claim.rpartition("/")[0], "hugetlb.2MB.max", "0")
    node.enforcer._auditor.request_audit()
    await node.until(lambda: node.counts.counters["repaired_hugetlb"] == 2)
    assert node.kernel.get(claim, "hugetlb.2MB.max") == str(64 * MI)


async def test_repairs_are_logged_with_the_container_and_the_file(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """An alert on repairs names only the node. The log also names the container and the changed file. The number of log
    lines is limited.
    """
    claim = await node.run("claim", *node.claim(ONE))
    counters = node.counts.counters
    for _ in range(REPAIR_LINES + 2):
        before = counters["repaired_cpus"]
        node.kernel.set(claim, "cpuset.cpus", "0-7")
        node.enforcer._auditor.request_audit()
        await node.until(partial(lambda count: counters["repaired_cpus"] > count, before))
    lines = [one for one in caplog.records if one.message == "repaired changed cgroup file"]
    assert len(lines) == REPAIR_LINES
    assert (vars(lines[0])["container"], vars(lines[0])["pod"]) == ("main", "ns/p1")
    assert vars(lines[0])["change"] == "cpuset.cpus must be 2-3 but is 0-7 (effective)"


async def test_the_audit_repairs_more_containers_and_pods_than_fit_into_one_job(node: Node) -> None:
    count = AUDITS_PER_JOB + 6
    for number in range(count):
        record = memory_record(f"m{number}", ("m", 0, 2 * MI, 2 * MI), pods=(f"q{number}",))
        await node.run(f"c{number}", *node.claim(record), of=f"q{number}")
    above = node.kernel.path(PODS)
    limits = [file for where in ("*", "*/*") for file in above.glob(f"{where}/hugetlb.2MB.max")]
    assert len(limits) == 2 * count
    for _ in range(2):
        for file in limits:
            file.write_text("0")
        node.enforcer._auditor.request_audit()
        await node.until(lambda: Counter(file.read_text() for file in limits) == {str(2 * MI): 2 * count})
        await node.enforcer._auditor.audit(full=True)


async def test_a_standby_tracks_containers_but_writes_nothing(memory_dir: Path) -> None:
    """The standby answers hooks without changing anything. When it becomes active, its first audit applies
    everything.
    """
    node = Node(memory_dir)
    node.stored = Resources(cpus="2-3")
    env = node.claim(ONE)
    async with auditing(node):
        assert await node.synchronize(("old", "p8")) == []
        node.make_cgroups(pod("p8"), container("old", of="p8"))
        stored, answer = await node.create("claim", *env)
        assert answer == Adjustment()
        _, answer = await node.create("forged", "DRA_CPUSET_zz=1", of="p3")
        assert answer == Adjustment()
        path = node.make_cgroups(pod(), stored)
        await node.enforcer.start_container(pod(), stored)
        assert await node.enforcer.update_container(pod(), stored, Resources(cpus="0")) == []
        assert node.kernel.written == []
        assert not node.enforcer.active
        await node.enforcer.activate()
        assert node.cpus(path) == "2-3"
        assert node.cpus(cgroup_of(container("old", of="p8"))) == "1,4-7"


@pytest.mark.parametrize(("before", "after", "shown"), [(300_000, 200_000, "max"), (200_000, 300_000, "300000")])
async def test_a_standby_uses_the_limit_from_the_last_update(
    memory_dir: Path, before: int, after: int, shown: str
) -> None:
    """While another instance is active, a resize moves the limit above or below the claimed CPUs."""
    node = Node(memory_dir)
    node.stored = Resources(cpus="2-3")
    env = node.claim(ONE)
    async with auditing(node):
        path = await node.run("claim", *env, quota=before)
        assert await node.enforcer.update_container(pod(), container("claim"), Resources(cpu_quota=after)) == []
        for where in (path, POD):
            node.kernel.set(where, "cpu.max", f"{after} 100000")
        await node.enforcer.activate()
        of_pod = after + 200_000 if shown == "max" else after
        assert (node.quota(path), node.quota(POD)) == (shown, str(of_pod))


async def test_an_update_that_arrives_while_an_instance_becomes_active_is_kept(memory_dir: Path) -> None:
    """The enforcement records are read in threads. Meanwhile, the runtime reports a resize to this instance only."""
    node = Node(memory_dir)
    node.stored = Resources(cpus="2-3")
    env = node.claim(ONE)
    async with auditing(node):
        path = await node.run("claim", *env, quota=200_000)
        becoming = asyncio.create_task(node.enforcer.activate())
        await asyncio.sleep(0)
        assert await node.enforcer.update_container(pod(), container("claim"), Resources(cpu_quota=300_000)) == []
        assert not becoming.done()
        for where in (path, POD):
            node.kernel.set(where, "cpu.max", "300000 100000")
        await becoming
        assert (node.quota(path), node.quota(POD)) == ("300000", "300000")


@pytest.mark.parametrize("known_by", ["listed", "started"])
async def test_a_claim_container_without_a_cgroup_is_stopped(memory_dir: Path, known_by: str) -> None:
    """The runtime lists the container as running even though it has exited, or its exit was reported only to another
    instance.
    """
    node = Node(memory_dir)
    node.stored = Resources(cpus="2-3")
    stored = replace(container("claim", *node.claim(ONE)), state=ContainerState.RUNNING)
    async with auditing(node):
        await node.enforcer.synchronize([pod()], [stored] if known_by == "listed" else [])
        if known_by == "started":
            await node.run("claim", *stored.env)
            node.kernel.remove(cgroup_of(stored))
        await node.enforcer.activate()
        await node.until(lambda: node.reports["claim"].state == "stopped")


async def test_a_created_claim_container_without_a_cgroup_is_not_stopped(node: Node) -> None:
    """The container's cgroup is created only when the container starts."""
    stored = replace(container("claim", *node.claim(ONE)), state=ContainerState.CREATED)
    await node.enforcer.synchronize([pod()], [stored])
    await node.enforcer.activate()
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "2-3"
    assert node.reports["claim"].state == "running"


async def test_containers_started_while_no_instance_ran_are_moved_on_synchronization(node: Node) -> None:
    """The returned updates, with claim containers first, correct the values that the runtime has stored."""
    node.claim(ONE)
    env = env_of(ONE)
    wanted = {"c": ("p1", *env), "plain": ("p5",), "f": ("p6", "DRA_CPUSET_zz=1"), "second": ("p1", *env)}
    listed, paths = [], {}
    for id_, (of, *named) in wanted.items():
        one = container(id_, *named, of=of, name="side" if id_ == "second" else "main")
        listed.append(replace(one, state=ContainerState.RUNNING))
        paths[id_] = node.make_cgroups(pod(of), one)
    listed.append(replace(container("orphaned", of="nowhere"), state=ContainerState.CREATED))
    listed.append(replace(container("dead"), state=ContainerState.STOPPED))
    updates = await node.enforcer.synchronize([pod("p5"), pod("p6"), pod()], listed)
    cpus = {"c": "2-3", "plain": "1,4-7", "f": "1,4-7", "second": "1,4-7"}
    assert {u.container_id: u.resources.cpus for u in updates} == {**cpus, "orphaned": "1,4-7"}
    assert updates[0].container_id == "c"
    await node.until(lambda: {id_: node.cpus(path) for id_, path in paths.items()} == cpus)
    assert any("belongs to container main" in problem for problem in node.enforcer.problems)
    assert await node.synchronize(("plain", "p5"), plain="1,4-7") == []
    for id_ in ("c", "f", "second"):
        node.kernel.remove(paths[id_])
    await node.until(lambda: list(node.reports) == ["plain"])


async def test_the_first_claim_after_a_synchronization_waits_for_the_audit(node: Node) -> None:
    """Until the audit has run, the listed containers' CPUs are unknown."""
    listed = [(f"plain-{n}", "p5") for n in range(5)]
    paths = [node.make_cgroups(pod("p5"), container(i, of="p5")) for i, _ in listed]
    env = node.claim(ONE)
    await node.synchronize(*listed)
    await node.create("claim", *env)
    assert {node.cpus(path) for path in paths} == {"1,4-7"}


async def test_a_synchronization_returns_a_limited_number_of_updates(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """containerd applies updates one by one while it holds its lock. The updates that are left out are logged."""
    caplog.set_level("INFO", "nri_backend")
    updates = await node.synchronize(*((f"c{n}", "p5") for n in range(100)))
    assert len(updates) == MAX_SYNC_UPDATES
    assert "some of the resources that the runtime stores were not updated" in caplog.text


@pytest.mark.parametrize("reconnected", [False, True])
async def test_a_stopped_container_keeps_its_cpus_until_its_last_process_has_ended(
    node: Node, reconnected: bool
) -> None:
    """After the backend reconnects, the runtime no longer lists the container."""
    claim = await node.run("claim", *node.claim(ONE))
    await node.enforcer.stop_container(pod(), container("claim"))
    if reconnected:
        assert await node.synchronize() == []
    assert [report.state for report in node.reports.values()] == ["running"]
    node.unprepare(ONE)
    env = node.claim(cpu_record("c2", "cpus=2-3", pods=("p2",)))
    patient, node.enforcer.starter.clear_seconds = node.enforcer.starter.clear_seconds, 0.05
    with pytest.raises(RejectedError, match="still runs"):
        await node.create("next", *env, of="p2")
    node.enforcer.starter.clear_seconds = patient
    node.kernel.remove(claim)
    if reconnected:
        await node.until(lambda: "claim" not in node.reports)
        assert not list(node.enforcer.state)
    else:
        await node.until(lambda: node.reports["claim"].state == "stopped")
    assert node.cpus(await node.run("next-2", *env, of="p2")) == "2-3"


async def test_on_a_full_node_other_containers_get_the_reserved_cpus(memory_dir: Path) -> None:
    """Without reserved CPUs, a container without a claim is rejected."""
    everything = cpu_record("c1", "cpus=1-7")
    (memory_dir / "a").mkdir()
    node = Node(memory_dir / "a")
    await node.enforcer.activate()
    early = await node.run("early", name="early")
    node.claim(everything)
    assert node.cpus(await node.run("plain")) == "0"
    await node.enforcer.activate()
    assert node.cpus(early) == "0"
    (memory_dir / "b").mkdir()
    node = Node(memory_dir / "b", reserved="")
    await node.enforcer.activate()
    node.claim(cpu_record("c1", "cpus=0-7"))
    with pytest.raises(
        RejectedError, match=r"claims hold every CPU on the node and none is reserved.*set reservedCPUs"
    ):
        await node.create("plain")


async def test_an_ending_container_that_cannot_be_read_does_not_stop_the_audit(node: Node) -> None:
    """The backend has no free file descriptor (EMFILE). The container is reported as stopped once the kernel shows that
    it has exited.
    """
    claim = await node.run("claim", *node.claim(ONE))
    node.kernel.unreadable[claim, "cgroup.events"] = errno.EMFILE
    await node.enforcer.stop_container(pod(), container("claim"))
    plain = await node.run("plain", of="p5")
    node.kernel.set(plain, "cpuset.cpus", "0-7")
    node.enforcer._auditor.request_audit()
    await node.until(lambda: node.cpus(plain) == "1,4-7")
    assert node.reports["claim"].state == "running"
    node.kernel.remove(claim)
    node.kernel.unreadable.clear()
    await node.until(lambda: node.reports["claim"].state == "stopped")


async def test_hooks_never_see_a_half_applied_synchronization(node: Node) -> None:
    """Hooks that run concurrently see the state from either before or after the synchronization."""
    web = replace(container("web", of="p9", name="web"), state=ContainerState.RUNNING)
    node.make_cgroups(pod("p9"), web)
    env, other = node.claim(ONE), node.claim(cpu_record("c2", "cpus=4-5", pods=("p2",)))

    async def synchronize() -> None:
        for _ in range(20):
            await node.enforcer.synchronize([pod("p9")], [web])

    async def create_and_remove(id_: str, env: tuple[str, ...], of: str, cpus: str) -> None:
        for attempt in range(20):
            stored, answer = await node.create(f"{id_}-{attempt}", *env, of=of)
            assert answer.resources.cpus == cpus
            await node.enforcer.remove_container(pod(of), stored)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(synchronize())
        tasks.create_task(create_and_remove("one", env, "p1", "2-3"))
        tasks.create_task(create_and_remove("two", other, "p2", "4-5"))
        tasks.create_task(create_and_remove("plain", (), "p3", "1,6-7"))
    assert node.enforcer.state.containers.get("web") is not None


class CountingList(list[Any]):
    """A list that counts how often it is iterated over."""

    iterations = 0

    def __iter__(self) -> Iterator[Any]:
        self.iterations += 1
        return super().__iter__()


async def test_a_synchronization_iterates_over_the_pods_only_once(node: Node) -> None:
    """Its duration must not grow with the number of pods times the number of containers."""
    found = [replace(container(f"c{n}", of=f"p{n}"), state=ContainerState.RUNNING) for n in range(60)]
    pods = CountingList(pod(f"p{n}") for n in range(60))
    await node.enforcer.synchronize(pods, found)
    assert pods.iterations == 1
    assert len(list(node.enforcer.state)) == 60


class FaultyNode(Node):
    """A machine whose reads raise an unexpected exception if ``error`` is set."""

    error: Exception | None = None

    @property
    def host(self) -> Host:
        """Returns the machine, or raises the error."""
        if self.error is not None:
            raise self.error
        return self._host

    @host.setter
    def host(self, host: Host) -> None:
        self._host = host


class FaultyTree(KernelTree):
    """A tree in which reading memory events raises an unexpected exception if ``error`` is set."""

    error: Exception | None = None

    def read(self, path: str, name: str) -> str:
        if self.error is not None and name == "memory.events":
            raise self.error
        return super().read(path, name)


async def test_an_unexpected_error_in_the_first_audit_does_not_end_the_process(memory_dir: Path) -> None:
    """Otherwise the process would exit again after each restart for as long as the cause exists."""
    node = Node(memory_dir, tree=FaultyTree)
    assert isinstance(node.kernel, FaultyTree)
    env = node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI)))
    one = replace(container("claim", *env), state=ContainerState.RUNNING)
    path = node.make_cgroups(pod(), one)
    await node.enforcer.synchronize([pod()], [one])
    node.kernel.error = KeyError("odd")
    await node.enforcer.activate()
    (problem,) = [one for one in node.enforcer.problems if "internal error in the audit" in one]
    assert problem.code is BackendCode.INTERNAL_ERROR
    async with auditing(node):
        node.kernel.error = None
        await node.until(lambda: node.kernel.get(path, "cpuset.mems.effective") == "1")
        await node.until(lambda: not any("internal error" in problem for problem in node.enforcer.problems))


async def test_a_full_audit_with_an_unexpected_error_is_repeated_on_the_next_tick(memory_dir: Path) -> None:
    """Otherwise, limits would not be compared again for 60 seconds."""
    async with enforcing(Node(memory_dir, tree=FaultyTree)) as node:
        assert isinstance(node.kernel, FaultyTree)
        path = await node.run("claim", *node.claim(memory_record("m1", ("m", 1, 64 * MI, 2 * MI))))
        node.kernel.set(path, "hugetlb.2MB.max", "0")
        node.kernel.error = KeyError("odd")
        node.enforcer._auditor.request_audit()
        await node.until(lambda: any("internal error" in problem for problem in node.enforcer.problems))
        node.kernel.error = None
        started = node.ahead
        await node.until(lambda: node.kernel.get(path, "hugetlb.2MB.max") == str(64 * MI))
        assert node.ahead - started <= 10


async def test_an_unexpected_error_in_the_audit_is_reported_and_logged_once(
    memory_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The audit continues after the error. If the process exited instead, no hook would be answered."""
    async with enforcing(FaultyNode(memory_dir)) as node:
        assert isinstance(node, FaultyNode)
        plain = await node.run("plain")
        node.error = KeyError("odd")
        await node.until(
            lambda: any("internal error in the audit (KeyError: \"'odd'\")" in p for p in node.enforcer.problems)
        )
        # After 0 seconds no tick is due, so the round does not read ``host`` and succeeds.
        for seconds in (2, 0, 2, 0, 2):
            node.ahead += seconds
            node.enforcer.signals.audit.set()
            await asyncio.sleep(0.01)
        assert len([one for one in caplog.records if one.message == "audit failed, repeating it"]) == 1
        node.error = None
        node.claim(ONE)
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        await node.until(lambda: not any("internal error" in p for p in node.enforcer.problems))


async def test_a_replaced_claim_directory_ends_the_process(memory_dir: Path) -> None:
    """Only a new container mounts the new directory. In the current container, claims would never appear or disappear
    again.
    """
    (memory_dir / "mounted").mkdir()
    held = os.open(
        memory_dir / "mounted", os.O_RDONLY | os.O_DIRECTORY
    )  # keeps a removed directory alive, as a mount does
    (memory_dir / "cdi").symlink_to(f"/proc/self/fd/{held}")
    try:
        with pytest.RaisesGroup(DirectoryReplacedError, flatten_subgroups=True):
            async with enforcing(Node(memory_dir)) as node:
                path = await node.run("claim", *node.claim(ONE))
                shutil.rmtree(memory_dir / "mounted")
                (memory_dir / "mounted").mkdir()
                await node.until(lambda: not node.enforcer.state.pool.held)
        assert node.cpus(path) == "2-3"
        assert any("restarts" in problem for problem in node.enforcer.problems)
    finally:
        os.close(held)


async def idle_node(node: Node) -> list[bool]:
    """Waits until the audit has switched to the idle interval. Returns a list to which each later switch is appended:
    True for a switch to the idle interval, False for a switch to the normal one.
    """
    changes: list[bool] = []
    node.enforcer.on_idle_changed(lambda *, idle: changes.append(idle))
    await node.until(lambda: node.enforcer._auditor._next.idle)
    changes.clear()
    return changes


def next_tick(node: Node) -> float:
    """Returns the number of seconds until the audit's next tick."""
    auditor = node.enforcer._auditor
    return auditor._next.tick - auditor._deps.clock()


async def test_without_claims_there_is_a_tick_every_six_seconds(memory_dir: Path) -> None:
    """As soon as a claim is prepared or a container is created, the next tick follows within two seconds."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("plain")
        changes = await idle_node(node)
        assert next_tick(node) <= IDLE_SECONDS
        node.claim(ONE)
        node.enforcer.records_changed()
        await eventually(lambda: changes == [False])
        assert next_tick(node) <= TICK_SECONDS
        for _ in range(5):
            node.ahead += TICK_SECONDS
            node.enforcer.signals.audit.set()
            await asyncio.sleep(0.02)
            assert next_tick(node) <= TICK_SECONDS
        node.unprepare(ONE)
        node.enforcer.records_changed()
        changes = await idle_node(node)
        await node.create("another", of="p2")
        assert changes == [False]
        assert next_tick(node) <= TICK_SECONDS


async def test_the_ticks_stay_frequent_while_a_claim_in_use_has_no_record(memory_dir: Path) -> None:
    """The claim's container uses the CPUs until it exits, so until then the audit must keep moving other containers off
    them.
    """
    async with enforcing(Node(memory_dir)) as node:
        env = node.claim(ONE)
        await node.run("claim", *env)
        node.unprepare(ONE)
        node.enforcer.records_changed()
        await node.until(lambda: not node.enforcer.state.files)
        for _ in range(5):
            node.ahead += TICK_SECONDS
            node.enforcer.signals.audit.set()
            await asyncio.sleep(0.02)
            assert next_tick(node) <= TICK_SECONDS
        assert not node.enforcer._auditor._next.idle


async def test_a_requested_audit_is_not_delayed_by_an_idle_round(memory_dir: Path) -> None:
    """A hook may request an audit while a round without work is still running."""
    async with enforcing(Node(memory_dir)) as node:
        await node.run("plain")
        await idle_node(node)
        node.enforcer._auditor.request_audit()
        audits = node.counts.counters["audits"]
        await eventually(lambda: node.counts.counters["audits"] > audits)
