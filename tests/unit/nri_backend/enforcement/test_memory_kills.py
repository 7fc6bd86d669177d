# SPDX-License-Identifier: Apache-2.0
"""OOM kills, from the kernel's counters to the report to the frontend."""

import asyncio
import errno
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.enforcement.memory_kills import PodKills, kill_count
from nri_backend.nri.model import ContainerState

from tests.fakes.waiting import patience
from tests.rigs.builders import MI, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node
from tests.rigs.kernel_tree import KernelTree

PLAIN = 4096
ONE, TWO = (memory_record(uid, ("a", 1, 48 * MI, PLAIN)) for uid in ("m1", "m2"))


class SlowTree(KernelTree):
    """A tree in which one read of a kill count returns only after ``gate`` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held = ""
        """The cgroup whose kill count is returned late on the next read, or "" for none."""
        self.began, self.gate = threading.Event(), threading.Event()

    def read(self, path: str, name: str) -> str:
        """Reads the file, but waits before it returns the content."""
        text = super().read(path, name)
        if name == "memory.events" and path == self.held:
            self.held = ""
            self.began.set()
            assert self.gate.wait(5 * patience())
        return text


class RecordingTree(KernelTree):
    """A tree that records the cgroups whose kill counts were read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.counts_read: list[str] = []

    def read(self, path: str, name: str) -> str:
        """Records the cgroup if the file contains its kill count, and reads the file."""
        if name == "memory.events":
            self.counts_read.append(path)
        return super().read(path, name)


@pytest.fixture
async def node(memory_dir: Path) -> Node:
    node = Node(memory_dir)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    return node


def kills(node: Node) -> dict[str, int]:
    """Returns the reported kills by container."""
    return {name: report.memory_kills for name, report in node.reports.items()}


@pytest.mark.parametrize("seen_by", ["event", "audit"])
async def test_a_kill_in_a_claim_container_is_reported_once(node: Node, seen_by: str) -> None:
    """The container's cgroup is removed once its last process has exited. The kill is still in the pod's count, and is
    attributed to the container.
    """
    env = node.claim(ONE)
    await node.run("side", name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    if seen_by == "audit":
        node.kernel.remove(path)
        await node.enforcer.activate()
        assert kills(node) == {"side": 0, "main": 1}
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 1}
    await node.run("again", *env)
    await node.stop("again")
    assert kills(node) == {"side": 0, "main": 1, "again": 0}


async def test_a_kill_is_attributed_even_if_the_audit_has_already_found_the_container_gone(node: Node) -> None:
    """The audit marks the container as stopped before the kills are counted. The next container that exits must not be
    blamed.
    """
    env = node.claim(ONE)
    second = node.claim(TWO)
    await node.run("side", *second, name="side")
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    # Most audits do not count kills.
    await node.enforcer._auditor.audit(full=False)
    assert node.reports["main"].state == "stopped"
    assert kills(node) == {"side": 0, "main": 0}
    await node.stop("main")
    await node.stop("side")
    assert kills(node) == {"side": 0, "main": 1}


async def test_kills_in_containers_without_a_memory_claim_are_not_reported(node: Node) -> None:
    """The claim container is not blamed for its sibling's kills either, whether they precede or follow its start."""
    side = await node.run("side", name="side")
    node.kernel.kill_for_memory(side)
    env = node.claim(ONE)
    await node.run("main", *env)
    node.kernel.kill_for_memory(side)
    await node.stop("side")
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 0}


async def test_earlier_kills_are_not_attributed_to_a_container_whose_record_cannot_be_written(
    node: Node, memory_dir: Path
) -> None:
    """The audit has not run since the container was created, so StartContainer reads the pod's kill counts."""
    (memory_dir / "enforcement-records").write_text("in the way")
    side = await node.run("side", name="side")
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    path = await node.run("main", *node.claim(ONE))
    assert any("cannot be written" in problem for problem in node.enforcer.problems)
    node.kernel.kill_for_memory(path)
    await node.stop("main")
    assert kills(node) == {"side": 0, "main": 1}


async def test_a_pods_kill_count_is_read_between_creation_and_start_of_its_first_claim_container(
    memory_dir: Path,
) -> None:
    """The start itself then reads no kill count. Kills that happened before the audit's read are not attributed to the
    container, but later ones are.

    A later kill is attributed even if the container's cgroup is removed before its own count has been read, and the
    runtime does not report the container's exit.
    """
    node = Node(memory_dir, tree=RecordingTree)
    assert isinstance(node.kernel, RecordingTree)
    await node.enforcer.activate()
    side = await node.run("side", name="side")
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    node.enforcer.signals.audit.clear()
    stored, _ = await node.create("main", *node.claim(ONE))
    assert node.enforcer.signals.audit.is_set(), "the creation wakes the audit"
    node.enforcer._auditor._next.tick = math.inf
    await node.enforcer._auditor._round()
    assert POD in node.kernel.counts_read
    node.kernel.counts_read.clear()
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert node.kernel.counts_read == []
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    await node.enforcer._auditor.audit(full=True)
    assert kills(node)["main"] == 1
    await node.stop("main")
    node.enforcer.signals.audit.clear()
    await node.create("again", *node.claim(ONE))
    assert not node.enforcer.signals.audit.is_set(), "the kills in the pod are known"
    node.enforcer._kills.close()


async def test_a_kill_is_counted_once_if_the_count_cannot_be_read_for_a_while(node: Node) -> None:
    """Reading /proc/self/mem at offset 0 fails with EIO, which does not mean that the cgroup was removed."""
    path = await node.run("main", *node.claim(ONE))
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    file = node.kernel.path(path).joinpath("memory.events")
    file.rename(file.with_name("kept"))
    file.symlink_to("/proc/self/mem")
    await node.enforcer.activate()
    file.with_name("kept").rename(file)
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    assert kills(node) == {"main": 2}
    await node.stop("main")
    assert kills(node) == {"main": 2}


async def test_a_kill_in_a_container_whose_count_cannot_be_read_is_not_attributed_to_another(node: Node) -> None:
    """The other container has exited. Once the count can be read again, each kill is reported for its container."""
    path = await node.run("main", *node.claim(ONE))
    side = await node.run("side", *node.claim(TWO), name="side")
    node.kernel.kill_for_memory(path)
    file = node.kernel.path(path).joinpath("memory.events")
    file.rename(file.with_name("kept"))
    file.symlink_to("/proc/self/mem")
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    await node.enforcer.activate()
    assert kills(node) == {"side": 0, "main": 0}
    file.with_name("kept").rename(file)
    await node.enforcer.activate()
    assert kills(node) == {"side": 1, "main": 1}


async def test_a_first_reading_without_a_containers_count_hides_no_later_kill(node: Node) -> None:
    """The container's kills before this reading are in the pod's count. They must not be subtracted twice."""
    path = await node.run("main", *node.claim(ONE))
    side = await node.run("side", *node.claim(TWO), name="side")
    node.kernel.kill_for_memory(path)
    node.enforcer._kills.pods.clear()
    file = node.kernel.path(path).joinpath("memory.events")
    file.rename(file.with_name("kept"))
    file.symlink_to("/proc/self/mem")
    await node.enforcer.activate()
    file.with_name("kept").rename(file)
    await node.enforcer.activate()
    assert kills(node) == {"side": 0, "main": 1}
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    await node.stop("side")
    assert kills(node) == {"side": 1, "main": 1}


async def test_without_the_memory_controller_no_kill_is_reported(node: Node) -> None:
    """The pod's containers still start and stop."""
    env = node.claim(memory_record("m1", ("a", 1, 2 * MI, 2 * MI)))
    path = await node.run("main", *env)
    for group in (path, POD):
        node.kernel.path(group).joinpath("memory.events").unlink()
    await node.stop("main")
    assert kills(node) == {"main": 0}


async def test_reported_kills_survive_a_runtime_reconnection(node: Node) -> None:
    """The runtime lists its containers again, and later kills are added to the reported ones."""
    env = node.claim(ONE)
    path = await node.run("main", *env)
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    assert kills(node) == {"main": 1}
    listed = replace(container("main", *env), state=ContainerState.RUNNING)
    await node.enforcer.synchronize([pod()], [listed])
    assert [report.memory_kills for report in node.reports.values()] == [1]
    node.kernel.kill_for_memory(path)
    await node.enforcer.activate()
    assert kills(node) == {"main": 2}
    (counter,) = [one for one in node.counts.metrics({}, ("pool", "auto")) if one.name == "memory_kills"]
    assert [sample.value for sample in counter.samples] == [2]


async def test_a_kill_is_counted_once_if_a_hook_and_the_audit_read_concurrently(memory_dir: Path) -> None:
    """The audit reads the count before the kill, but processes the result only after the hook has processed the result
    of a later read.
    """
    node = Node(memory_dir, tree=SlowTree)
    assert isinstance(node.kernel, SlowTree)
    await node.enforcer.activate()
    env = node.claim(ONE)
    second = node.claim(TWO)
    path = await node.run("main", *env)
    node.kernel.held = path
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.enforcer.activate())
        assert await asyncio.to_thread(node.kernel.began.wait, 5 * patience())
        node.kernel.kill_for_memory(path)
        hook = tasks.create_task(node.run("other", *second, name="other"))
        await asyncio.wait({hook}, timeout=0.05)
        node.kernel.gate.set()
    await node.enforcer.activate()
    assert kills(node) == {"main": 1, "other": 0}


async def test_a_container_that_starts_while_its_pod_is_being_read_is_still_counted(memory_dir: Path) -> None:
    """The audit reads the pod before the container's cgroup is created, and processes the result after the start.

    The result does not contain the cgroup, but the cgroup must not be treated as removed.
    """
    node = Node(memory_dir, tree=SlowTree)
    assert isinstance(node.kernel, SlowTree)
    await node.enforcer.activate()
    stored, _ = await node.create("main", *node.claim(ONE))
    later = await node.run("side", name="side")
    await node.enforcer._kills.count_all()
    node.kernel.held = later
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(node.enforcer._kills.count_all())
        assert await asyncio.to_thread(node.kernel.began.wait, 5)
        path = node.make_cgroups(pod(), stored)
        await node.enforcer.start_container(pod(), stored)
        node.kernel.gate.set()
    node.kernel.kill_for_memory(path)
    node.kernel.remove(path)
    await node.enforcer._kills.count_all()
    assert kills(node) == {"main": 1, "side": 0}


async def test_only_pods_whose_count_has_changed_are_read_again(memory_dir: Path) -> None:
    """An audit of all containers still reads every pod, because with memory_localevents a pod's count excludes its
    containers.
    """
    node = Node(memory_dir, tree=RecordingTree)
    assert isinstance(node.kernel, RecordingTree)
    await node.enforcer.activate()
    path = await node.run("main", *node.claim(ONE))
    other = await node.run("other", *node.claim(memory_record("m3", ("a", 1, MI, PLAIN), pods=("p2",))), of="p2")
    watcher = node.enforcer._kills
    await watcher.count_changed()
    await watcher.count_all()
    node.kernel.counts_read.clear()
    await watcher.count_all()
    assert node.kernel.counts_read == []
    node.kernel.kill_for_memory(path)
    await watcher.count_all()
    assert set(node.kernel.counts_read) == {POD, path}
    assert kills(node) == {"main": 1, "other": 0}
    await watcher.count_all()
    node.kernel.set(other, "memory.events", "oom 1\noom_kill 1")
    await watcher.count_all()
    assert kills(node) == {"main": 1, "other": 0}
    await node.enforcer._auditor.audit(full=True, all_containers=True)
    assert kills(node) == {"main": 1, "other": 1}
    watcher.close()


async def test_a_pod_whose_count_could_not_be_read_is_read_again(node: Node) -> None:
    """The backend had no free file descriptor (EMFILE), but the watch's descriptor was still open."""
    path = await node.run("main", *node.claim(ONE))
    watcher = node.enforcer._kills
    await watcher.count_changed()
    for _ in range(2):
        await watcher.count_all()
    node.kernel.kill_for_memory(path)
    node.kernel.unreadable[POD, "memory.events"] = errno.EMFILE
    await watcher.count_all()
    assert kills(node) == {"main": 0}
    node.kernel.unreadable.clear()
    await watcher.count_all()
    assert kills(node) == {"main": 1}


async def test_a_kill_in_a_vanished_sibling_is_not_attributed_to_the_claim_container(node: Node) -> None:
    """An earlier audit has seen the sibling. The runtime is not connected, so it does not report the sibling's exit."""
    await node.run("main", *node.claim(ONE))
    side = await node.run("side", name="side")
    await node.enforcer._auditor.audit(full=True)
    node.kernel.kill_for_memory(side)
    node.kernel.remove(side)
    await node.enforcer._auditor.audit(full=True)
    await node.stop("main")
    assert kills(node)["main"] == 0


async def test_kills_are_found_even_if_a_pods_count_excludes_its_containers(node: Node) -> None:
    """A pod's count excludes its containers if cgroup2 is mounted with memory_localevents."""
    path = await node.run("main", *node.claim(ONE))
    await node.enforcer._auditor.audit(full=True)
    node.kernel.set(path, "memory.events", "oom 1\noom_kill 1")
    await node.enforcer._auditor.audit(full=True)
    assert kills(node) == {"main": 1}


def test_only_oom_kill_is_parsed_from_memory_events() -> None:
    """The oom_kill counter counts killed processes. Counters such as oom and max count other events."""
    assert kill_count("low 0\nhigh 4\nmax 12\noom 3\noom_kill 2\noom_group_kill 1\n") == 2
    assert kill_count("low 0\nhigh 0\n") == kill_count("") == 0


_Reading = tuple[int, dict[str, int | None], str, dict[str, int]]
"""The pod's count, its containers' counts, the container that has just exited, and the expected new kills."""


@pytest.mark.parametrize(
    "readings",
    [
        pytest.param(
            [(0, {"a": 0, "b": 0}, "", {}), (1, {"b": 0}, "a", {"a": 1}), (1, {"b": 0}, "b", {})], id="exited"
        ),
        pytest.param(
            [(1, {"b": 1}, "a", {"b": 1}), (3, {"b": 2}, "c", {"b": 1, "c": 1})], id="sibling of an exited container"
        ),
        pytest.param(
            [
                (0, {"a": 0, "b": 0, "c": 0, "new": None}, "", {}),
                (1, {"a": None, "b": 0, "c": 0, "new": None}, "", {"a": 1}),
                (1, {"a": None, "b": 0, "c": 0}, "a", {}),
                (2, {"b": None, "c": None}, "", {}),
                (2, {"b": None, "c": None}, "c", {"c": 1}),
            ],
            id="gone before the report, alone and with another container",
        ),
        pytest.param(
            [
                (1, {"a": 1, "b": 0}, "a", {"a": 1}),
                (1, {"a": 1, "b": 0}, "a", {}),
                (1, {"a": 1, "b": 0}, "", {}),
                (2, {"a": None, "b": 0}, "a", {"a": 1}),
            ],
            id="a cgroup that outlives its container",
        ),
        pytest.param([(0, {"a": 0, "b": 0}, "", {}), (1, {"b": None}, "", {"b": 1})], id="removed without a report"),
    ],
)
def test_kills_are_attributed_by_the_containers_counts_and_exits(readings: list[_Reading]) -> None:
    """If possible, a kill is attributed on the basis of the containers' own counts. Otherwise it is attributed to the
    container that has just exited or, if none has, to the only container that is gone.
    """
    pod = PodKills(total=0)
    for total, own, ended, expected in readings:
        assert pod.account(total, own, ended) == expected


def test_kills_before_the_first_reading_are_not_attributed() -> None:
    """A container that exits later is not blamed for kills before the first reading."""
    assert PodKills(total=3).account(3, {"a": 0}, ended="a") == {}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=30))
def test_every_kill_is_attributed_exactly_once(steps: list[tuple[str, bool, bool]]) -> None:
    """In whatever order kills, readings and exits happen, each container ends up with exactly the kills that happened
    in it.
    """
    pod, total = PodKills(total=0), 0
    own = dict.fromkeys("abc", 0)
    happened, attributed = dict.fromkeys("abc", 0), dict.fromkeys("abc", 0)
    for name, killed, ends in steps:
        if killed:
            total, own[name], happened[name] = total + 1, own[name] + 1, happened[name] + 1
        others = {other: count for other, count in own.items() if not ends or other != name}
        for container_id, count in pod.account(total, others, ended=name if ends else "").items():
            attributed[container_id] += count
        if ends:
            own[name] = 0
    for container_id, count in pod.account(total, own).items():
        attributed[container_id] += count
    assert attributed == happened
