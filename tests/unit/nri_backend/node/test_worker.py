# SPDX-License-Identifier: Apache-2.0
"""A job that hangs in the kernel keeps nobody else waiting."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from nri_backend.budgets import MAX_STUCK
from nri_backend.node.worker import CgroupWorker, Step
from nri_backend.nri.model import RejectedError

from tests.rigs.builders import cpu_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree


class Hanging:
    """Steps that wait for a gate, and steps that do not."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.done: list[str] = []

    def step(self, name: str, *, hangs: bool = False) -> tuple[str, Callable[[], str]]:
        """One step."""

        def work() -> str:
            if hangs:
                assert self.gate.wait(10)
            self.done.append(name)
            return name

        return name, work


@pytest.fixture
async def hanging() -> AsyncIterator[Hanging]:
    found = Hanging()
    yield found
    found.gate.set()


async def test_who_comes_later_passes_by(hanging: Hanging) -> None:
    """What comes after the hanging step in its own job is left to the next one, and no second job works at it."""
    freed = asyncio.Event()
    worker = CgroupWorker(freed.set)
    plan = [hanging.step("a"), hanging.step("b", hangs=True), hanging.step("c")]
    assert await worker.work(lambda: plan) == ["a"]
    assert list(worker.stuck) == ["b"]
    assert await worker.work(lambda: [hanging.step("b"), hanging.step("c")]) == ["c"]
    waiting = asyncio.create_task(worker.finish("b", lambda: hanging.step("b")))
    assert await worker.finish("d", lambda: hanging.step("d")) == "d"
    assert not waiting.done()
    hanging.gate.set()
    assert await waiting == "b"
    assert freed.is_set()
    assert (hanging.done, worker.stuck) == (["a", "c", "d", "b", "b"], {})


async def test_who_waits_for_his_turn_waits_for_what_hangs_then(hanging: Hanging) -> None:
    """The job before his own is passed by, and hangs at the same thing."""
    worker = CgroupWorker(lambda: None)
    audit = asyncio.create_task(worker.work(lambda: [hanging.step("a", hangs=True)]))
    await asyncio.sleep(0)
    hook = asyncio.create_task(worker.finish("a", lambda: hanging.step("a")))
    assert await audit == []
    hanging.gate.set()
    assert await hook == "a"


async def test_no_more_jobs_hang_than_there_are_threads_for(hanging: Hanging) -> None:
    """The threads of other work stay free."""
    worker = CgroupWorker(lambda: None)
    for number in range(MAX_STUCK):
        step = hanging.step(str(number), hangs=True)
        await worker.work(lambda step=step: [step])  # type: ignore[misc]
    later = asyncio.create_task(worker.work(lambda: [hanging.step("later")]))
    await asyncio.sleep(0.05)
    assert not later.done()
    hanging.gate.set()
    assert await later == ["later"]


async def test_a_fault_of_a_step_reaches_who_asked() -> None:
    """And the turn goes on."""
    worker = CgroupWorker(lambda: None)

    def fails() -> None:
        raise RuntimeError("odd")

    with pytest.raises(RuntimeError):
        await worker.work(lambda: [("x", fails)])
    with pytest.raises(RuntimeError):
        await worker.finish("x", lambda: ("x", fails))
    assert await worker.finish("y", lambda: ("y", lambda: 1)) == 1


class StuckTree(KernelTree):
    """Writes to some cgroups hang."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.began = threading.Event(), threading.Event()
        self.stuck = ""

    def write(self, path: str, name: str, text: str) -> None:
        """Hangs where it is told to."""
        if path == self.stuck:
            self.began.set()
            assert self.gate.wait(10)
        super().write(path, name, text)


@pytest.mark.fault("backend A15")
async def test_a_write_that_hangs_stops_no_other_start(memory: Path) -> None:
    """Neither of plain containers nor of claims; one on CPUs where it was seen last would have to wait."""
    async with enforcing(Node(memory, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        path = await node.run("bad", of="p5")
        env = node.claim(cpu_record("c1", "cpus=2-3"))
        await node.run("claim", *env)
        tree.stuck = path
        tree.set(path, "cpuset.cpus", "1,4")
        await node.until(lambda: "bad" in node.enforcer.reconciler.stuck)
        async with asyncio.timeout(1):
            assert node.cpus(await node.run("plain", of="p2")) == "1,4-7"
            await node.stop("claim")
            assert node.cpus(await node.run("again", *env)) == "2-3"
        tree.gate.set()
        await node.until(lambda: node.cpus(path) == "1,4-7")
        assert node.enforcer.state.get("bad") is not None
        await node.enforcer.remove_container(pod("p5"), container("bad", of="p5"))


async def test_nobody_starts_where_a_write_that_hangs_may_put_another(memory: Path) -> None:
    """A claim ends, its CPUs go back to all, and the next claim gets them before that write has returned."""
    async with enforcing(Node(memory, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        node.enforcer.starter.clear_seconds = 0.3
        plain = await node.run("plain", of="p2")
        ended = cpu_record("c1", "cpus=2-3")
        node.claim(ended)
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        tree.stuck = plain
        node.unprepare(ended)
        await node.until(lambda: "plain" in node.enforcer.reconciler.stuck)
        env = node.claim(cpu_record("c2", "cpus=2-3", pods=["p3"]))
        with pytest.raises(RejectedError, match="still runs on CPUs of its claim"):
            await node.run("early", *env, of="p3")
        tree.gate.set()
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        assert node.cpus(await node.run("late", *env, of="p3")) == "2-3"


async def test_one_that_was_never_seen_may_be_anywhere_while_it_hangs(memory: Path) -> None:
    """What the write that hangs would give to it says nothing of where it is."""
    async with enforcing(Node(memory, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        node.enforcer.starter.clear_seconds = 0.3
        plain = await node.run("plain", of="p2")
        env = node.claim(cpu_record("c1", "cpus=2-3"))
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        tree.stuck = plain
        tree.set(plain, "cpuset.cpus", "0-7")
        await node.until(tree.began.is_set)
        node.enforcer.state.forget_views()
        await node.until(lambda: "plain" in node.enforcer.reconciler.stuck)
        with pytest.raises(RejectedError, match="CPUs of its claim"):
            await node.run("early", *env)
        tree.gate.set()
        await node.until(lambda: node.cpus(plain) == "1,4-7")


async def test_a_job_that_has_not_begun_in_time_is_never_begun() -> None:
    """Every thread hangs elsewhere: what it would write later is out of date."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(2))
    go = threading.Event()
    busy = [loop.run_in_executor(None, go.wait, 10) for _ in range(2)]
    worker, wanted, wrote = CgroupWorker(lambda: None), ["old"], list[str]()

    def plan() -> list[Step[None]]:
        text = wanted[0]
        return [("web", lambda: wrote.append(text))]

    assert await worker.work(plan) == []
    wanted[0] = "new"
    job = asyncio.create_task(worker.finish("web", lambda: plan()[0]))
    await asyncio.sleep(0.05)
    go.set()
    await job
    await asyncio.gather(*busy)
    assert (wrote, worker.stuck) == (["new"], {})


def _plan(hanging: Hanging, name: str) -> list[Step[str]]:
    return [hanging.step(name)]


async def test_hooks_overtake_jobs_of_the_audit_that_wait(hanging: Hanging) -> None:
    worker = CgroupWorker(lambda: None)
    at_work = asyncio.create_task(worker.work(lambda: [hanging.step("first")]))
    audits = [asyncio.create_task(worker.work(partial(_plan, hanging, f"audit {n}"))) for n in range(3)]
    await asyncio.sleep(0)
    hooks = [asyncio.create_task(worker.finish(f"hook {n}", partial(hanging.step, f"hook {n}"))) for n in range(2)]
    await asyncio.gather(at_work, *audits, *hooks)
    assert hanging.done == ["first", "hook 0", "hook 1", "audit 0", "audit 1", "audit 2"]
    assert worker.free


@pytest.mark.parametrize("given", [False, True], ids=["while-waiting", "with-the-turn"])
async def test_a_caller_that_is_cancelled_keeps_no_turn(hanging: Hanging, given: bool) -> None:
    """Cancelled while it waits, and after it was given the turn but before it could take it."""
    worker = CgroupWorker(lambda: None)
    at_work = asyncio.create_task(worker.work(lambda: [hanging.step("first")]))
    cancelled = asyncio.create_task(worker.work(lambda: [hanging.step("never")]))
    await asyncio.sleep(0)
    if given:
        at_work.add_done_callback(lambda _: cancelled.cancel())
        await at_work
    else:
        cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await at_work
    assert await worker.finish("next", lambda: hanging.step("next")) == "next"
    assert worker.free
