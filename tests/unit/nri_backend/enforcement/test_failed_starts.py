# SPDX-License-Identifier: Apache-2.0
"""Container starts that fail or that coincide with changes. Some runtimes, such as CRI-O, run the container despite the
error.
"""

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nri_backend.budgets import MAX_TRIES
from nri_backend.containers.container import Identity, Tracked
from nri_backend.enforcement.start import Starter
from nri_backend.nri.model import Container, RejectedError
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record
from tests.rigs.containers import pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree

ONE = cpu_record("c1", "cpus=2-3")


class BrokenTree(KernelTree):
    """A tree in which jobs raise unexpected errors, or run a callback in the middle of a job."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken: set[str] = set()
        """Cgroups for which the next job raises an unexpected error."""
        self.stays_broken = False
        """True if all later jobs for the broken cgroups raise the error as well."""
        self.callbacks: list[Callable[[], Any]] = []
        """Callbacks to run in the middle of the next jobs, one per job."""

    def leaf(self, path: str) -> str:
        """Runs the next callback or raises the error. Every job calls this method once."""
        if path in self.broken:
            if not self.stays_broken:
                self.broken.remove(path)
            raise RuntimeError("unforeseen")
        if self.callbacks:
            self.callbacks.pop()()
        return super().leaf(path)


@pytest.fixture
async def node(memory_dir: Path) -> AsyncIterator[Node]:
    """Yields an active instance on a broken tree, connected to a runtime without containers."""
    async with enforcing(Node(memory_dir, tree=BrokenTree)) as node:
        yield node


def change_during_jobs(node: Node, change: Callable[[], Awaitable[Any]], times: int = 1) -> None:
    """Makes a change on the event loop while the next jobs are running in their thread."""
    loop = asyncio.get_running_loop()

    async def run_change() -> None:
        await change()

    assert isinstance(node.kernel, BrokenTree)
    node.kernel.callbacks = [lambda: asyncio.run_coroutine_threadsafe(run_change(), loop).result(5)] * times


async def change_claims(node: Node, change: Callable[[], Any]) -> None:
    """Changes claim files and has the instance read them."""
    change()
    await node.enforcer.claim_files.refresh(thorough=True)


async def test_a_start_applies_a_claim_that_is_prepared_in_the_meantime(node: Node) -> None:
    """The plan was computed when the job began, so a second job applies the new claim."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpuset.cpus", "2-7")
    change_during_jobs(node, lambda: change_claims(node, lambda: node.claim(ONE)))
    node.kernel.written.clear()
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "1,4-7"
    written = [text for where, name, text in node.kernel.written if (where, name) == (path, "cpuset.cpus")]
    assert written == ["1-7", "1,4-7"]


async def test_a_start_is_rejected_if_the_record_disappears_in_the_meantime(node: Node) -> None:
    """The container has not run yet, so it does not keep the claim."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    change_during_jobs(node, lambda: change_claims(node, lambda: node.unprepare(ONE)))
    with pytest.raises(RejectedError, match="this node has no record of it"):
        await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.enforcer.state.containers.get("claim") is None


async def test_a_creation_is_rejected_if_the_record_disappears_while_others_are_moved(node: Node) -> None:
    """The container is authorized again before the answer is sent."""
    plain = await node.run("plain", of="p2")
    env = node.claim(ONE)
    change_during_jobs(node, lambda: change_claims(node, lambda: node.unprepare(ONE)))
    with pytest.raises(RejectedError, match="this node has no record of it"):
        await node.create("claim", *env)
    await node.until(lambda: node.cpus(plain) == "1-7")


async def test_a_creation_does_not_wait_for_the_cpus_of_a_record_that_has_disappeared(node: Node) -> None:
    """Other containers leave the CPUs only for a prepared claim, so without the record the hook would wait until its
    time limit expired.
    """
    assert isinstance(node.kernel, BrokenTree)
    plain = await node.run("plain", of="p2")
    env = node.claim(ONE)
    node.kernel.broken, node.kernel.stays_broken = {plain}, True
    node.enforcer.starter.clear_seconds = 60
    async with asyncio.timeout(20):
        creation = asyncio.create_task(node.create("claim", *env))
        await node.until(lambda: node.enforcer.problems)
        assert not creation.done()
        await change_claims(node, lambda: node.unprepare(ONE))
        with pytest.raises(RejectedError, match="this node has no record of it"):
            await creation


@pytest.mark.parametrize("hook", ["create", "start"])
async def test_a_container_is_rejected_if_its_claimed_cpus_go_offline_during_the_hook(node: Node, hook: str) -> None:
    """The CPUs were online when the hook began. Without a second check at the end of the hook, the container would run
    in the pool.
    """
    await node.run("plain", of="p2")
    env = node.claim(ONE)

    async def offline() -> None:
        node.host = replace(node.host, online=parse_cpu_list("0-1,4-7"))
        await node.enforcer._auditor.host.refresh()

    if hook == "start":
        stored, _ = await node.create("claim", *env)
        path = node.make_cgroups(pod(), stored)
    change_during_jobs(node, offline)
    with pytest.raises(RejectedError, match="every CPU of its claim is offline"):
        await (node.enforcer.start_container(pod(), stored) if hook == "start" else node.create("claim", *env))
    assert hook == "create" or node.kernel.get(path, "cgroup.kill") == "1"


async def test_a_start_is_not_repeated_when_other_containers_change(node: Node) -> None:
    """Another container is created during the start."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    change_during_jobs(node, lambda: node.create("other", of="p2"))
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "2-3"
    assert node.reports["claim"].state == "running"


async def test_after_the_maximum_number_of_retries_the_audit_applies_the_changed_pool(node: Node) -> None:
    """The pool changes during each of the start's jobs."""
    stored, _ = await node.create("plain")
    node.kernel.set(node.make_cgroups(pod(), stored), "cpuset.cpus", "2-7")
    records = iter([cpu_record(f"d{cpu}", f"cpus={cpu}") for cpu in range(2, 2 + MAX_TRIES)])
    change_during_jobs(node, lambda: change_claims(node, lambda: node.claim(next(records))), MAX_TRIES)
    await node.enforcer.start_container(pod(), stored)
    assert next(records, None) is None
    await node.until(lambda: node.reports["plain"].cpus == {1, 5, 6, 7})


async def start_until_deadline(node: Node, one: Container) -> None:
    """Starts a container with a deadline that expires while the claim files are being read.

    A file is added to the CDI directory so that the instance reads the directory again.
    """
    (node.cdi / "unrelated.json").write_text("{}")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.enforcer.start_container(pod(), one)


async def test_a_container_without_claims_whose_start_timed_out_is_moved_by_the_audit(node: Node) -> None:
    """The claim's container waits until this container, which may be running on claimed CPUs, has been moved."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    env = node.claim(ONE)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    await start_until_deadline(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == ""
    await node.create("claim", *env, name="claim")
    assert node.cpus(path) == "1,4-7"
    assert node.reports["plain"].state == "running"


async def test_a_claim_container_whose_start_timed_out_is_killed(node: Node) -> None:
    """The container's settings have not been verified.

    The container counts as stopped once its last process has exited, even though the runtime does not report that.
    """
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await start_until_deadline(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.reports["claim"].state == "running"
    node.kernel.remove(path)
    await node.until(lambda: node.reports["claim"].state == "stopped")


async def test_a_container_that_survives_a_kill_occupies_only_its_effective_cpus(node: Node) -> None:
    """The container's start timed out, and a process in uninterruptible sleep survives the kill."""
    stored, _ = await node.create("slow", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await start_until_deadline(node, stored)
    await node.until(lambda: node.reports["slow"].cpus == {2, 3})
    other = cpu_record("c2", "cpus=4", pods=("p2",))
    assert node.cpus(await node.run("other", *node.claim(other), of="p2")) == "4"
    assert node.kernel.populated(path)


async def test_after_an_unexpected_error_a_start_is_handled_like_a_timeout(node: Node) -> None:
    """The error propagates to the caller. A claim container is killed, and a container without claims is audited."""
    plain, _ = await node.create("plain")
    claim, _ = await node.create("claim", *node.claim(ONE), name="claim")
    paths = [node.make_cgroups(pod(), one) for one in (plain, claim)]
    node.kernel.set(paths[0], "cpuset.cpus", "0-7")
    assert isinstance(node.kernel, BrokenTree)
    node.kernel.broken = set(paths)
    for one in (plain, claim):
        with pytest.raises(RuntimeError):
            await node.enforcer.start_container(pod(), one)
    await node.until(lambda: node.cpus(paths[0]) == "1,4-7")
    assert [node.kernel.get(path, "cgroup.kill") for path in paths] == ["", "1"]


async def test_an_unexpected_error_with_one_container_does_not_stop_the_audit_of_others(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The error is reported as a problem with the affected container, and is logged only once while it persists."""
    broken, fine = await node.run("broken", *node.claim(ONE)), await node.run("fine", of="p2")
    assert isinstance(node.kernel, BrokenTree)
    node.kernel.broken, node.kernel.stays_broken = {broken}, True
    node.kernel.set(fine, "cpuset.cpus", "0-7")
    await node.until(lambda: any("internal error (RuntimeError" in problem for problem in node.enforcer.problems))
    await node.until(lambda: node.cpus(fine) == "1,4-7")
    audits = node.counts.counters["audits"]
    await node.until(lambda: node.counts.counters["audits"] > audits + 3)
    assert sum(record.exc_info is not None for record in caplog.records) == 1
    assert node.enforcer.state.pool.held == {2, 3}
    node.kernel.broken.clear()
    await node.until(lambda: not node.enforcer.problems)


async def test_a_rejected_container_that_cannot_be_killed_is_audited(node: Node) -> None:
    """The container may be running, so it stays tracked and is moved to its CPUs."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    node.kernel.refused = {(path, "cpuset.cpus"): errno.EACCES, (path, "cgroup.kill"): errno.EACCES}
    with pytest.raises(RejectedError, match="cpuset"):
        await node.enforcer.start_container(pod(), stored)
    node.kernel.refused.clear()
    await node.until(lambda: node.cpus(path) == "2-3")


async def test_a_kill_without_a_cgroup_is_logged_and_raises_nothing(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The rejection must still reach the pod's events."""
    starter = Starter(node.enforcer.state, node.enforcer.reconciler, node.enforcer._auditor.host, node.kernel)
    error = Problem("its cgroup path makes no sense", BackendCode.CGROUP_UNKNOWN)
    assert not await starter.kill(Tracked(Identity("c", "main", pod(), cgroup_error=error)))
    assert "cannot kill rejected container" in caplog.text
    assert node.kernel.written == []
