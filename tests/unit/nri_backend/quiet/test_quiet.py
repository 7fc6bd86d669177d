# SPDX-License-Identifier: Apache-2.0
"""Which CPUs are left by what, as the state tells it."""

import asyncio
import contextlib
from dataclasses import replace
from pathlib import Path

from nri_backend.containers.container import tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.limits.difference import Host
from nri_backend.quiet.interrupts import DEFAULT
from nri_backend.quiet.quiet import Quiet, vacated
from nri_backend.settings import Settings, load_settings
from numa_contract.cpuset import parse_cpu_list

from tests.fakes.waiting import eventually
from tests.rigs.builders import cpu_record, env_of, files_of
from tests.rigs.containers import config, container, pod
from tests.rigs.irq_tree import IrqTree
from tests.rigs.kernel_tree import KernelTree

ONE = cpu_record("c1", "cpus=2-3")
NIC = cpu_record("c2", "cpus=4-5", pods=("p2",), irqs="keep")


def node() -> NodeState:
    """Both claims are prepared."""
    state = NodeState(config("0"))
    state.set_host(Host(parse_cpu_list("0-7"), ()))
    state.set_claim_files(files_of(ONE, NIC))
    return state


def put(state: NodeState, phase: Phase) -> None:
    """Both claims' containers, in this phase."""
    for id_, record, uid in (("a", ONE, "p1"), ("b", NIC, "p2")):
        tracked = state.assessed(tracked_as(pod(uid), container(id_, *env_of(record), of=uid)))
        state.put(replace(tracked, phase=phase))


def settings(root: Path) -> Settings:
    """Of a node below this directory."""
    arguments = [f"--host-root={root}", f"--kernel-root={root}", f"--run-dir={root}"]
    (root / "backend").mkdir()
    return load_settings(arguments, {"POD_UID": "u", "NODE_NAME": "n"})


def test_interrupts_leave_while_a_container_runs() -> None:
    """From its start until its last process has gone, but for requests that want to keep them."""
    state = node()
    assert vacated(state) == frozenset()
    for phase, cpus in (
        (Phase.CREATED, set[int]()),
        (Phase.RUNNING, {2, 3}),
        (Phase.ENDING, {2, 3}),
        (Phase.STOPPED, set[int]()),
    ):
        put(state, phase)
        assert vacated(state) == cpus
    put(state, Phase.RUNNING)
    state.set_host(Host(parse_cpu_list("0-2,4-7"), ()))
    assert vacated(state) == {2}


async def test_nothing_happens_before_the_runtime_has_told_its_containers(tmp_path: Path) -> None:
    """A standby, or one that has just started, cannot know which claims are in use."""
    tree, state = IrqTree(tmp_path), node()
    tree.add(24, "0-7")
    active: list[bool] = []
    quiet = Quiet(state, lambda: bool(active), KernelTree(tmp_path / "cgroup"), settings(tmp_path))
    task = asyncio.create_task(quiet.run_forever())
    put(state, Phase.RUNNING)
    for _ in range(2):
        quiet.wake()
        await asyncio.sleep(0.05)
        assert tree.says()[DEFAULT] == "0-7"
        active.append(True)
    state.replace_containers(tuple(state))
    quiet.wake()
    await eventually(lambda: quiet.gauges() == {"interrupts_moved": 1, "interrupts_staying": 0})
    assert tree.says()["24"] == tree.says()[DEFAULT] == "0-1,4-7"
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_without_a_root_nothing_is_moved(tmp_path: Path) -> None:
    """Whoever starts the program by hand keeps his interrupts."""
    state = node()
    state.replace_containers(())
    quiet = Quiet(state, lambda: True, KernelTree(tmp_path / "cgroup"), replace(settings(tmp_path), kernel_root=""))
    assert quiet._interrupts_wanted() is None
