# SPDX-License-Identifier: Apache-2.0
"""A kernel call that hangs in the cgroup worker delays no other container."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from nri_backend.budgets import MAX_HUNG
from nri_backend.node.worker import CgroupWorker, Step
from nri_backend.nri.model import RejectedError

from tests.fakes.waiting import eventually, patience
from tests.rigs.builders import cpu_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree


class HangingSteps:
    """A source of steps that hang until ``gate`` is set, and of steps that do not hang. ``done`` lists the completed
    steps.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.done: list[str] = []

    def step(self, name: str, *, hangs: bool = False) -> tuple[str, Callable[[], str]]:
        """Returns one step."""

        def work() -> str:
            if hangs:
                assert self.gate.wait(10 * patience())
            self.done.append(name)
            return name

        return name, work


@pytest.fixture
async def hanging() -> AsyncIterator[HangingSteps]:
    found = HangingSteps()
    yield found
    found.gate.set()


async def test_later_jobs_skip_a_step_that_hangs(hanging: HangingSteps) -> None:
    """The next job does the rest of the hung job's work.

    A step with the same name as the hung one starts only after the hung one has ended.
    """
    freed = asyncio.Event()
    worker = CgroupWorker(freed.set)
    plan = [hanging.step("a"), hanging.step("b", hangs=True), hanging.step("c")]
    assert await worker.work(lambda: plan) == ["a"]
    assert list(worker.hung) == ["b"]
    assert await worker.work(lambda: [hanging.step("b"), hanging.step("c")]) == ["c"]
    waiting = asyncio.create_task(worker.finish("b", lambda: hanging.step("b")))
    assert await worker.finish("d", lambda: hanging.step("d")) == "d"
    assert not waiting.done()
    hanging.gate.set()
    assert await waiting == "b"
    assert freed.is_set()
    assert (hanging.done, worker.hung) == (["a", "c", "d", "b", "b"], {})


async def test_the_event_loop_briefly_waits_for_a_hooks_job(hanging: HangingSteps) -> None:
    """The result is available without another iteration of the loop. A hanging job blocks the loop only for
    LOOP_BLOCK_SECONDS.
    """
    worker, loop, turns = CgroupWorker(lambda: None), asyncio.get_running_loop(), list[float]()
    for _ in range(int(10 * patience())):
        loop.call_soon(turns.append, 0.0)
        before = len(turns)
        assert await worker.finish("a", lambda: hanging.step("a")) == "a"
        if len(turns) == before:
            break
        await asyncio.sleep(0.01)
    assert len(turns) == before, "each of these jobs took longer, or the loop did not wait"
    waiting = asyncio.create_task(worker.finish("b", lambda: hanging.step("b", hangs=True)))
    await eventually(lambda: worker.hung.keys() == {"b"})
    hanging.gate.set()
    assert await waiting == "b"


async def test_a_skipped_jobs_caller_gets_the_hung_steps_result_late(
    hanging: HangingSteps,
) -> None:
    worker, late = CgroupWorker(lambda: None), list[list[str]]()
    plan = [hanging.step("a"), hanging.step("b", hangs=True), hanging.step("c")]
    assert await worker.work(lambda: plan, late.append) == ["a"]
    assert await worker.work(lambda: [hanging.step("c")], late.append) == ["c"]
    hanging.gate.set()
    await eventually(lambda: not worker.hung)
    assert late == [["b"]]


async def test_without_a_late_result_the_callback_is_not_called(
    hanging: HangingSteps, caplog: pytest.LogCaptureFixture
) -> None:
    """Either the hung step has failed, or its result arrived in time to be returned to the caller."""
    late = list[list[str]]()
    worker = CgroupWorker(lambda: None)

    def fails() -> str:
        assert hanging.gate.wait(10)
        raise RuntimeError("odd")

    assert await worker.work(lambda: [("a", fails)], late.append) == []
    hanging.gate.set()
    await eventually(lambda: not worker.hung)
    assert late == []
    assert [record.message for record in caplog.records] == ["delayed cgroup write failed"]


async def test_a_hook_gets_the_result_of_its_own_skipped_step(hanging: HangingSteps) -> None:
    """The step is not repeated, since on a slow machine it would take too long every time."""
    worker = CgroupWorker(lambda: None)
    hook = asyncio.create_task(worker.finish("a", lambda: hanging.step("a", hangs=True)))
    await eventually(lambda: "a" in worker.hung)
    hanging.gate.set()
    assert await hook == "a"
    assert (hanging.done, worker.hung) == (["a"], {})


async def test_a_hook_waits_for_a_step_that_begins_to_hang_while_the_hook_is_queued(hanging: HangingSteps) -> None:
    """The previous job is skipped, and its step has the same name as the hook's step."""
    worker = CgroupWorker(lambda: None)
    audit = asyncio.create_task(worker.work(lambda: [hanging.step("a", hangs=True)]))
    await asyncio.sleep(0)
    hook = asyncio.create_task(worker.finish("a", lambda: hanging.step("a")))
    assert await audit == []
    hanging.gate.set()
    assert await hook == "a"


async def test_with_the_maximum_number_of_hung_jobs_no_other_job_begins(hanging: HangingSteps) -> None:
    """Threads that other work needs remain free."""
    worker = CgroupWorker(lambda: None)
    for number in range(MAX_HUNG):
        step = hanging.step(str(number), hangs=True)
        await worker.work(lambda step=step: [step])  # type: ignore[misc]
    later = asyncio.create_task(worker.work(lambda: [hanging.step("later")]))
    await asyncio.sleep(0.05)
    assert not later.done()
    hanging.gate.set()
    assert await later == ["later"]


async def test_a_steps_exception_reaches_only_its_own_caller() -> None:
    """The worker continues with the next caller."""
    worker = CgroupWorker(lambda: None)

    def fails() -> None:
        raise RuntimeError("odd")

    with pytest.raises(RuntimeError):
        await worker.work(lambda: [("x", fails)])
    with pytest.raises(RuntimeError):
        await worker.finish("x", lambda: ("x", fails))
    assert await worker.finish("y", lambda: ("y", lambda: 1)) == 1


class StuckTree(KernelTree):
    """A tree in which writes to one cgroup hang."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate, self.began = threading.Event(), threading.Event()
        self.stuck = ""

    def write(self, path: str, name: str, text: str) -> None:
        """Hangs in the selected cgroup until ``gate`` is set."""
        if path == self.stuck:
            self.began.set()
            assert self.gate.wait(10 * patience())
        super().write(path, name, text)


async def test_a_hung_write_delays_no_other_start(memory_dir: Path) -> None:
    """Containers with and without claims start. Only a claim for the hung container's CPUs would have to wait."""
    async with enforcing(Node(memory_dir, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        path = await node.run("bad", of="p5")
        env = node.claim(cpu_record("c1", "cpus=2-3"))
        await node.run("claim", *env)
        tree.stuck = path
        tree.set(path, "cpuset.cpus", "1,4")
        await node.until(lambda: "bad" in node.enforcer.reconciler.hung)
        assert node.cpus(await node.run("plain", of="p2")) == "1,4-7"
        await node.stop("claim")
        assert node.cpus(await node.run("again", *env)) == "2-3"
        assert "bad" in node.enforcer.reconciler.hung, "nothing has waited for the end of the hung write"
        tree.gate.set()
        await node.until(lambda: node.cpus(path) == "1,4-7")
        assert node.enforcer.state.containers.get("bad") is not None
        await node.enforcer.remove_container(pod("p5"), container("bad", of="p5"))


async def test_a_claim_waits_for_a_hung_write_that_may_move_another_container_to_its_cpus(memory_dir: Path) -> None:
    """A claim is released, and its CPUs return to the pool.

    The next claim gets the same CPUs while the write to a pool member's cpuset hangs.
    """
    async with enforcing(Node(memory_dir, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        node.enforcer.starter.clear_seconds = 0.3
        plain = await node.run("plain", of="p2")
        ended = cpu_record("c1", "cpus=2-3")
        node.claim(ended)
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        tree.stuck = plain
        node.unprepare(ended)
        await node.until(lambda: "plain" in node.enforcer.reconciler.hung)
        env = node.claim(cpu_record("c2", "cpus=2-3", pods=["p3"]))
        with pytest.raises(RejectedError, match="still runs on the claim's CPUs"):
            await node.run("early", *env, of="p3")
        tree.gate.set()
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        assert node.cpus(await node.run("late", *env, of="p3")) == "2-3"


async def test_an_unseen_container_may_be_on_any_cpu_while_its_write_hangs(memory_dir: Path) -> None:
    """The CPUs in the hung write do not show where the container currently is."""
    async with enforcing(Node(memory_dir, tree=StuckTree)) as node:
        tree = node.kernel
        assert isinstance(tree, StuckTree)
        node.enforcer.starter.clear_seconds = 0.3
        plain = await node.run("plain", of="p2")
        env = node.claim(cpu_record("c1", "cpus=2-3"))
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        tree.stuck = plain
        tree.set(plain, "cpuset.cpus", "0-7")
        await node.until(tree.began.is_set)
        node.enforcer.state.forget_observed_cpus()
        await node.until(lambda: "plain" in node.enforcer.reconciler.hung)
        with pytest.raises(RejectedError, match="the claim's CPUs"):
            await node.run("early", *env)
        tree.gate.set()
        await node.until(lambda: node.cpus(plain) == "1,4-7")


async def test_a_job_that_waited_too_long_for_a_thread_is_dropped() -> None:
    """All threads are busy with other work. By the time the job could run, the values that it writes would be out of
    date.
    """
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
    assert (wrote, worker.hung) == (["new"], {})


def _plan(hanging: HangingSteps, name: str) -> list[Step[str]]:
    return [hanging.step(name)]


async def test_hooks_overtake_waiting_audit_jobs(hanging: HangingSteps) -> None:
    worker = CgroupWorker(lambda: None)
    at_work = asyncio.create_task(worker.work(lambda: [hanging.step("first")]))
    audits = [asyncio.create_task(worker.work(partial(_plan, hanging, f"audit {n}"))) for n in range(3)]
    await asyncio.sleep(0)
    hooks = [asyncio.create_task(worker.finish(f"hook {n}", partial(hanging.step, f"hook {n}"))) for n in range(2)]
    await asyncio.gather(at_work, *audits, *hooks)
    assert hanging.done == ["first", "hook 0", "hook 1", "audit 0", "audit 1", "audit 2"]
    assert worker.free


@pytest.mark.parametrize("in_turn", [False, True], ids=["in the queue", "about to begin"])
async def test_a_cancelled_caller_does_not_block_the_worker(hanging: HangingSteps, in_turn: bool) -> None:
    """The caller is cancelled while it waits in the queue, or after its turn has come but before it could begin."""
    worker = CgroupWorker(lambda: None)
    at_work = asyncio.create_task(worker.work(lambda: [hanging.step("first")]))
    cancelled = asyncio.create_task(worker.work(lambda: [hanging.step("never")]))
    await asyncio.sleep(0)
    if in_turn:
        at_work.add_done_callback(lambda _: cancelled.cancel())
        await at_work
    else:
        cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await at_work
    assert await worker.finish("next", lambda: hanging.step("next")) == "next"
    assert worker.free
