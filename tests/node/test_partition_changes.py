# SPDX-License-Identifier: Apache-2.0
"""Delays in other containers while a partition is created and removed (docs/adr/0015-partition-changes.md)."""

import os
import signal
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from numa_contract.cpuset import format_cpu_list

from tests.node.rig import figures, kernel
from tests.node.rig.delays import Delays, cyclictest, inside
from tests.node.rig.kernel import Cgroup
from tests.node.rig.node import Node

ROUNDS = 3
CHANGES = 50  # two changes in each round
PROBED = 2  # CPUs
CLAIM = Cgroup("/exp/class/pod/claim")
OTHER = Cgroup("/exp/class/other/plain")


@contextmanager
def tree(others: int) -> Iterator[None]:
    """Creates a claim container's cgroup that may use the upper half of the CPUs, and other cgroups next to it, with a
    process in each.
    """
    claimed = format_cpu_list(sorted(kernel.online_cpus())[len(kernel.online_cpus()) // 2 :])
    groups = [CLAIM, OTHER, *(Cgroup(f"/exp/class/other/{number}") for number in range(others))]
    for group in groups:
        group.directory.mkdir(parents=True)
        for parent in reversed(Path(group.path).parents):
            Cgroup(str(parent)).write("cgroup.subtree_control", "+cpuset")
    for name in ("/exp", "/exp/class", "/exp/class/pod", CLAIM.path):
        Cgroup(name).write("cpuset.cpus.exclusive", claimed)
    try:
        with ExitStack() as stack:
            for group in groups:
                stack.enter_context(inside(group, ["sleep", "infinity"]))
            yield
    finally:
        for directory in sorted((p for p in Path(kernel.CGROUPS, "exp").rglob("*") if p.is_dir()), reverse=True):
            directory.rmdir()
        Cgroup("/exp").directory.rmdir()


def change(state: str) -> float:
    """Sets the partition type of the claim's cgroup and returns the duration in seconds."""
    began = time.monotonic()
    CLAIM.write("cpuset.cpus.partition", state)
    took = time.monotonic() - began
    assert CLAIM.read("cpuset.cpus.partition") == state
    time.sleep(0.01)
    return took


def measure(state: str, priority: int) -> tuple[Delays, list[float]]:
    """Returns the delays in a container on other CPUs while the cgroup repeatedly becomes a partition and a member
    again.
    """
    online = sorted(kernel.online_cpus())
    probe = cyclictest(online[:PROBED], every=500, priority=priority)
    with inside(OTHER, probe) as process:
        time.sleep(0.5)
        # This process runs on separate CPUs, just as the backend runs on the reserved ones.
        os.sched_setaffinity(0, online[PROBED : len(online) // 2])
        took = [change(one) for _ in range(CHANGES) for one in (state, "member")]
        os.sched_setaffinity(0, online)
        process.send_signal(signal.SIGINT)
        return Delays.read(process.communicate()[0]), took


@pytest.mark.profile("noise")
@pytest.mark.parametrize("others", [0, 250])
@pytest.mark.parametrize("priority", [0, 80], ids=["ordinary", "fifo"])
def test_measure_delays_of_other_containers(node: Node, others: int, priority: int) -> None:
    """This test only measures. It fails only if changing the partition type is rejected."""
    size = f"{len(kernel.online_cpus())} CPUs, {others} containers, {'FIFO' if priority else 'ordinary'}"
    with tree(others):
        for state in ("member", "root", "isolated"):
            rounds = [measure(state, priority) for _ in range(ROUNDS)]
            times = sorted(1000 * one for _, took in rounds for one in took)
            cost = f"a change {statistics.median(times):.1f} ms, at most {times[-1]:.1f} ms"
            figures.note(f"{size}, {state}", f"{Delays.medians(one for one, _ in rounds)}; {cost}")
