# SPDX-License-Identifier: Apache-2.0
"""Counts the wake-ups of an idle driver's real processes on a node without activity."""

import time
from collections import Counter
from pathlib import Path

from tests.stage.process import Process, wait_for
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

SECONDS = 20.0
"""Duration of five quiet ticks in the frontend, or three ticks in the backend."""
SETTLE_SECONDS = 12.0
"""Time after which Events and the first reports have been written, and gRPC's threads have slowed down."""
_OF_GRPC = ("event_engine", "grpc_global_tim", "lifeguard")
"""Names of the threads that gRPC's C core wakes up several times a second (docs/adr/0032-quiet-ticks.md)."""


def wake_ups(process: Process) -> Counter[str]:
    """Returns the number of times that each thread has waited so far: ``voluntary_ctxt_switches`` in
    proc_pid_status(5).
    """
    found: Counter[str] = Counter()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        lines = (task / "status").read_text().splitlines()
        count = next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
        if name not in _OF_GRPC:
            found[f"{process.name} {name} {task.name}"] += count
    return found


def test_an_idle_driver_wakes_up_at_most_twice_a_second() -> None:
    """There are no claims. All threads of both processes are counted, except for gRPC's.

    About one wake-up a second is expected, mostly for the lease and for health reports. Each file that is read in a
    thread every two seconds would add one wake-up a second; when several files were read in this way, the driver woke
    up thirteen times a second. A busy machine does not increase the number: a process that is waiting for a CPU is not
    asleep, so it cannot wake up.
    """
    with Stage(StageSettings(partitions=True)) as stage:
        instance = stage.add_ready_instance()
        wait_for("slices", stage.slices)
        time.sleep(SETTLE_SECONDS)
        before = sum((wake_ups(one) for one in instance.processes), Counter[str]())
        time.sleep(SECONDS)
        after = sum((wake_ups(one) for one in instance.processes), Counter[str]())
    assert (after - before).total() <= 2 * SECONDS, after - before
