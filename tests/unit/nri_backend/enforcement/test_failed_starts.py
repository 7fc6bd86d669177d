# SPDX-License-Identifier: Apache-2.0
"""A start that ends without an answer in time: the runtime may start the container all the same (CRI-O only warns)."""

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
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record
from tests.rigs.containers import pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree

ONE = cpu_record("c1", "cpus=2-3")


class BrokenTree(KernelTree):
    """A tree with faults that nobody expects, at the next look at these cgroups, and with news in the wrong moment."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.broken: set[str] = set()
        self.stays_broken = False
        self.meanwhile: list[Callable[[], Any]] = []
        """What happens in the middle of the next jobs."""

    def leaf(self, path: str) -> str:
        """Raises what nobody catches."""
        if path in self.broken:
            if not self.stays_broken:
                self.broken.remove(path)
            raise RuntimeError("a fault of ours")
        if self.meanwhile:
            self.meanwhile.pop()()
        return super().leaf(path)


@pytest.fixture
async def node(memory: Path) -> AsyncIterator[Node]:
    """An active instance on such a tree, connected to a runtime without containers."""
    async with enforcing(Node(memory, tree=BrokenTree)) as node:
        yield node


def meanwhile(node: Node, change: Callable[[], Awaitable[Any]], times: int = 1) -> None:
    """Lets something happen while the next jobs are at work in their thread."""
    loop = asyncio.get_running_loop()

    async def happens() -> None:
        await change()

    assert isinstance(node.kernel, BrokenTree)
    node.kernel.meanwhile = [lambda: asyncio.run_coroutine_threadsafe(happens(), loop).result(5)] * times


async def changed(node: Node, change: Callable[[], Any]) -> None:
    """Claim files change, and that is seen."""
    change()
    await node.enforcer.inputs.refresh(thorough=True)


async def test_a_claim_that_is_prepared_during_a_start_is_heeded(node: Node) -> None:
    """What is written is what was wanted when the job began; so it is judged, and written, once more."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    meanwhile(node, lambda: changed(node, lambda: node.claim(ONE)))
    node.kernel.written.clear()
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "1,4-7"
    assert [text for where, name, text in node.kernel.written if (where, name) == (path, "cpuset.cpus")] == ["1,4-7"]


async def test_a_record_that_goes_during_a_start_refuses_it(node: Node) -> None:
    """The container has not run, so nothing is its own."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    meanwhile(node, lambda: changed(node, lambda: node.unprepare(ONE)))
    with pytest.raises(RejectedError, match="this node has no record of it"):
        await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.enforcer.state.get("claim") is None


async def test_a_record_that_goes_while_others_are_moved_refuses_the_creation(node: Node) -> None:
    """It was there when the container was judged; so it is judged once more before the answer."""
    plain = await node.run("plain", of="p2")
    env = node.claim(ONE)
    meanwhile(node, lambda: changed(node, lambda: node.unprepare(ONE)))
    with pytest.raises(RejectedError, match="this node has no record of it"):
        await node.create("claim", *env)
    await node.until(lambda: node.cpus(plain) == "1-7")


@pytest.mark.parametrize("hook", ["create", "start"])
async def test_claimed_cpus_that_go_offline_during_a_hook_refuse_it(node: Node, hook: str) -> None:
    """The check at the beginning of the hook found them online; without it the container would run in the pool."""
    await node.run("plain", of="p2")
    env = node.claim(ONE)

    async def offline() -> None:
        node.host = replace(node.host, online=parse_cpu_list("0-1,4-7"))
        await node.enforcer.inputs.refresh_host()

    if hook == "start":
        stored, _ = await node.create("claim", *env)
        path = node.make_cgroups(pod(), stored)
    meanwhile(node, offline)
    with pytest.raises(RejectedError, match="every CPU of its claim is offline"):
        await (node.enforcer.start_container(pod(), stored) if hook == "start" else node.create("claim", *env))
    assert hook == "create" or node.kernel.get(path, "cgroup.kill") == "1"


async def test_news_that_do_not_concern_a_start_do_not_hold_it_up(node: Node) -> None:
    """Another container comes meanwhile."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    meanwhile(node, lambda: node.create("other", of="p2"))
    await node.enforcer.start_container(pod(), stored)
    assert node.cpus(path) == "2-3"
    assert node.reports["claim"].state == "running"


async def test_a_pool_that_changes_with_every_try_is_left_to_the_audit(node: Node) -> None:
    """A start is not tried for ever."""
    stored, _ = await node.create("plain")
    node.make_cgroups(pod(), stored)
    records = iter([cpu_record(f"d{cpu}", f"cpus={cpu}") for cpu in range(2, 2 + MAX_TRIES)])
    meanwhile(node, lambda: changed(node, lambda: node.claim(next(records))), MAX_TRIES)
    await node.enforcer.start_container(pod(), stored)
    assert next(records, None) is None
    await node.until(lambda: node.reports["plain"].cpus == {1, 5, 6, 7})


async def out_of_time(node: Node, one: Container) -> None:
    """The deadline of the hook ends in its first look."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await node.enforcer.start_container(pod(), one)


async def test_a_plain_container_whose_start_ran_out_of_time_is_audited(node: Node) -> None:
    """It runs on CPUs of a claim; the audit moves it, and the claim waits for that."""
    stored, _ = await node.create("plain")
    path = node.make_cgroups(pod(), stored)
    env = node.claim(ONE)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    await out_of_time(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == ""
    await node.create("claim", *env, name="claim")
    assert node.cpus(path) == "1,4-7"
    assert node.reports["plain"].state == "running"


async def test_a_claim_container_whose_start_ran_out_of_time_is_killed(node: Node) -> None:
    """Its limits are not verified; it is over when its last process is gone, though nobody tells of its end."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await out_of_time(node, stored)
    assert node.kernel.get(path, "cgroup.kill") == "1"
    assert node.reports["claim"].state == "running"
    node.kernel.remove(path)
    await node.until(lambda: node.reports["claim"].state == "stopped")


async def test_one_that_was_cut_off_and_does_not_die_keeps_only_its_own_cpus(node: Node) -> None:
    """A process in an uninterruptible wait outlives its kill: what the kernel shows of it counts."""
    stored, _ = await node.create("slow", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    await out_of_time(node, stored)
    await node.until(lambda: node.reports["slow"].cpus == {2, 3})
    other = cpu_record("c2", "cpus=4", pods=("p2",))
    assert node.cpus(await node.run("other", *node.claim(other), of="p2")) == "4"
    assert node.kernel.populated(path)


async def test_a_fault_of_ours_is_no_way_around_the_audit(node: Node) -> None:
    """What no handler expects reaches the caller, and the container is looked after as after a deadline."""
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


async def test_a_fault_about_one_container_does_not_end_the_audit_of_others(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a problem of that container, logged once, until it has passed."""
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


async def test_a_refused_container_that_cannot_be_killed_is_audited(node: Node) -> None:
    """It may run, so it is not forgotten: claims wait until it is off their CPUs."""
    stored, _ = await node.create("claim", *node.claim(ONE))
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpuset.cpus", "0-7")
    node.kernel.refused = {(path, "cpuset.cpus"): errno.EACCES, (path, "cgroup.kill"): errno.EACCES}
    with pytest.raises(RejectedError, match="cpuset"):
        await node.enforcer.start_container(pod(), stored)
    node.kernel.refused.clear()
    await node.until(lambda: node.cpus(path) == "2-3")


async def test_a_container_without_a_cgroup_cannot_be_killed(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """The rejection must reach the pod's events, so the kill that is not possible is logged and raises nothing."""
    starter = Starter(node.enforcer.state, node.enforcer.reconciler, node.enforcer.inputs, node.kernel)
    assert not await starter.kill(Tracked(Identity("c", "main", pod(), cgroup_error="its cgroup path makes no sense")))
    assert "cannot be killed" in caplog.text
    assert node.kernel.written == []
