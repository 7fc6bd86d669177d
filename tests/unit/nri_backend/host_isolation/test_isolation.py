# SPDX-License-Identifier: Apache-2.0
"""The CPUs that interrupts must vacate, computed from the node's state."""

import asyncio
import contextlib
import os
from dataclasses import replace
from pathlib import Path

from nri_backend.containers.container import tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.host_isolation.evictor import CONTESTED_PASSES
from nri_backend.host_isolation.interrupts import DEFAULT_AFFINITY
from nri_backend.host_isolation.isolation import HostIsolation, cpus_without_interrupts
from nri_backend.node.active_lock import ActiveLock
from nri_backend.node.heartbeat import STALE_SECONDS
from nri_backend.node.model import Host
from nri_backend.settings import Settings, load_settings
from numa_contract.backend_codes import BackendCode
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import eventually
from tests.rigs.builders import cpu_record, env_of, files_of
from tests.rigs.containers import config, container, pod
from tests.rigs.irq_tree import IrqTree
from tests.rigs.kernel_tree import KernelTree

ONE = cpu_record("c1", "cpus=2-3")
NIC = cpu_record("c2", "cpus=4-5", pods=("p2",), irqs="keep")


def node() -> NodeState:
    """Returns the state of a node on which both of the tests' claims are prepared."""
    state = NodeState(config("0"))
    state.set_host(Host(parse_cpu_list("0-7"), ()))
    state.set_claim_files(files_of(ONE, NIC))
    return state


def put(state: NodeState, phase: Phase) -> None:
    """Stores one container per claim, in the given phase."""
    for id_, record, uid in (("a", ONE, "p1"), ("b", NIC, "p2")):
        tracked = state.authorized(tracked_as(pod(uid), container(id_, *env_of(record), of=uid)))
        state.put(replace(tracked, phase=phase))


def settings(root: Path) -> Settings:
    """Returns settings with all directories under the given root."""
    arguments = [f"--host-root={root}", f"--kernel-root={root}", f"--run-dir={root}"]
    (root / "backend").mkdir()
    return load_settings(arguments, {"POD_UID": "u", "NODE_NAME": "n"})


def test_interrupts_vacate_the_cpus_of_running_containers() -> None:
    """Interrupts leave the CPUs when the container starts and stay away until its last process has exited. Claims that
    keep interrupts are an exception.
    """
    state = node()
    assert cpus_without_interrupts(state) == frozenset()
    for phase, cpus in (
        (Phase.CREATED, set[int]()),
        (Phase.RUNNING, {2, 3}),
        (Phase.ENDING, {2, 3}),
        (Phase.STOPPED, set[int]()),
    ):
        put(state, phase)
        assert cpus_without_interrupts(state) == cpus
    put(state, Phase.RUNNING)
    state.set_host(Host(parse_cpu_list("0-2,4-7"), ()))
    assert cpus_without_interrupts(state) == {2}


async def test_nothing_is_moved_before_the_instance_is_active_and_has_the_containers(tmp_path: Path) -> None:
    tree, state = IrqTree(tmp_path), node()
    tree.add(24, "0-7")
    active: list[bool] = []
    isolation = HostIsolation(state, lambda: bool(active), KernelTree(tmp_path / "cgroup"), settings(tmp_path))
    task = asyncio.create_task(isolation.run_forever())
    put(state, Phase.RUNNING)
    for _ in range(2):
        isolation.wake()
        await asyncio.sleep(0.05)
        assert tree.all_affinities()[DEFAULT_AFFINITY] == "0-7"
        active.append(True)
    state.replace_containers(tuple(state))
    isolation.wake()
    await eventually(lambda: isolation.gauges() == {"moved_interrupts": 1, "immovable_interrupts": 0})
    assert tree.all_affinities()["24"] == tree.all_affinities()[DEFAULT_AFFINITY] == "0-1,4-7"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_a_pass_that_continues_after_a_takeover_writes_nothing(tmp_path: Path) -> None:
    """The instance hangs while it reads a FIFO, in a pass that restores an interrupt. Its successor still needs the
    stored original.
    """
    tree, state, now = IrqTree(tmp_path), node(), [1000.0]
    tree.add(25, "2-3")
    file, stored = tmp_path / "proc/irq/25/smp_affinity_list", tmp_path / "backend/interrupts.json"
    put(state, Phase.RUNNING)
    state.replace_containers(tuple(state))
    cgroups, paths = KernelTree(tmp_path / "cgroup"), settings(tmp_path)
    with contextlib.ExitStack() as stack:
        one, two = (ActiveLock(paths.backend_dir, name, lambda: now[0]) for name in ("one", "two"))
        for lock in (one, two):
            stack.callback(lock.close)
            lock.set_serving(serving=True)
        assert one.try_acquire()
        isolation = HostIsolation(state, lambda: one.active, cgroups, paths)
        task = asyncio.create_task(isolation.run_forever())
        isolation.wake()
        await eventually(lambda: isolation.gauges()["moved_interrupts"] == 1)
        file.rename(file.with_name("moved"))
        os.mkfifo(file)
        put(state, Phase.STOPPED)
        isolation.wake()
        with await asyncio.to_thread(file.open, "w") as hanging:
            file.with_name("moved").rename(file)
            before = tree.all_affinities(), stored.read_text()
            now[0] += STALE_SECONDS + 1
            assert two.try_acquire()
            hanging.write("0-1,4-7")
        await eventually(lambda: isolation.problems or tree.all_affinities() != before[0])
        assert (tree.all_affinities(), stored.read_text()) == before
        assert [problem.code for problem in isolation.problems] == [BackendCode.INTERRUPTS_NOT_MOVED]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def test_without_a_kernel_root_no_interrupt_is_moved(tmp_path: Path) -> None:
    """By default, --kernel-root is not set, so a backend that is started by hand does not move interrupts."""
    state = node()
    state.replace_containers(())
    tree = KernelTree(tmp_path / "cgroup")
    isolation = HostIsolation(state, lambda: True, tree, replace(settings(tmp_path), kernel_root=""))
    assert isolation._desired_for_interrupts() is None


async def test_problems_with_interrupts_and_host_daemons_have_codes(tmp_path: Path) -> None:
    """Covers a slice that allows only claimed CPUs, a damaged originals file, and a program that moves interrupts
    back.
    """
    tree, state = KernelTree(tmp_path / "cgroup"), NodeState(Config(host_slices=True, reserved_cpus=frozenset({0})))
    state.set_host(Host(parse_cpu_list("0-7"), ()))
    state.set_claim_files(files_of(ONE, NIC))
    put(state, Phase.RUNNING)
    state.replace_containers(tuple(state))
    tree.make("system.slice")
    tree.set("system.slice", "cpuset.cpus", "2-3")
    IrqTree(tmp_path)
    isolation = HostIsolation(state, lambda: True, tree, settings(tmp_path))
    task = asyncio.create_task(isolation.run_forever())
    isolation.wake()
    await eventually(lambda: BackendCode.HOST_DAEMONS_STAY in {problem.code for problem in isolation.problems})
    (tmp_path / "backend/host-slices.json").write_text("{")
    state.set_host(Host(parse_cpu_list("0-6"), ()))
    isolation.wake()
    await eventually(lambda: BackendCode.HOST_DAEMONS_NOT_MOVED in {problem.code for problem in isolation.problems})
    isolation._interrupts._contested_passes = CONTESTED_PASSES
    assert BackendCode.INTERRUPTS_MOVED_BACK in {problem.code for problem in isolation.problems}
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
