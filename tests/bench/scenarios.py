# SPDX-License-Identifier: Apache-2.0
"""The measurements, each on a stage that is ready; all times are those that kubelet and runtime see."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from tests.bench.figures import Line, timed
from tests.bench.load import Load
from tests.stage.process import wait_for
from tests.stage.stage import Stage

HOOK_BUDGET = 2.0
PREPARE_BUDGET = 5.0
START_BUDGET = 1500.0
MEMORY_BUDGET = 110.0
_MEASURED_CPUS = 2
# A round of the backend's audits, which compare once they have read, and the time in which it looks at everything: a
# shorter time holds either none of the costly looks or one.
_SETTLE_SECONDS, _IDLE_SECONDS = 21.0, 60.0
_MB = 1e6


def ready(stage: Stage) -> None:
    """Waits until the drivers are registered, slices are published and the plugin is active."""
    stage.wait_registered()
    wait_for("the slices", lambda: {one["spec"]["driver"] for one in stage.slices()} >= set(stage.settings.drivers), 15)
    stage.runtime("wait_plugins", count=1)


def exec_to_registered(stage: Stage, rounds: int) -> Line:
    """From exec of the processes to the registration of every driver, with what is on the node."""
    load = f"{len(list(stage.paths.cdi_dir.glob('*.json')))} CDI files"
    seconds = []
    for _ in range(rounds):
        processes = stage.processes
        for process in processes:
            process.stop()
        wait_for("the kubelet to drop the driver", lambda: not stage.kubelet("status")["endpoints"])
        for process in processes:
            process.start()
        stage.wait_registered()
        seconds.append(time.monotonic() - min(process.started_at for process in processes))
        ready(stage)
    return timed("exec to registered", load, seconds, START_BUDGET)


def prepare_and_unprepare(stage: Stage, load: Load, rounds: int, pause: float) -> list[Line]:
    """The kubelet's calls for a claim of CPUs and memory that comes and goes, with so many seconds before each."""
    before = len(stage.kubelet("calls"))
    for _ in range(rounds):
        time.sleep(pause)
        pod = load.pod(_MEASURED_CPUS)
        pod.prepare()
        load.settle(pod)
        pod.unprepare()
        load.gone(pod)
    calls = stage.kubelet("calls")[before:]
    text = f"{load.claims} claims"
    lines = []
    for method, verb in (("NodePrepareResources", "prepare"), ("NodeUnprepareResources", "unprepare")):
        for driver in stage.settings.drivers:
            found = [call["seconds"] for call in calls if (call["driver"], call["method"]) == (driver, method)]
            lines.append(timed(f"{verb} {driver}", text, found, PREPARE_BUDGET))
    return lines


def hooks(stage: Stage, load: Load, rounds: int) -> list[Line]:
    """CreateContainer and StartContainer for containers with and without a claim."""
    text = f"{load.containers} containers"
    hurried, moved = _hooks_of_claims(stage, load, rounds // 4, lambda _: 0.0)
    began = _cpu_seconds(stage)
    settled, moved = _hooks_of_claims(stage, load, rounds, load.settle)
    changed = _cpu_seconds(stage)
    plain = _hooks_of_plain(stage, load, rounds)
    used = {"claim": changed - began, "plain": _cpu_seconds(stage) - changed}
    lines = [Line(f"CPU time of a pod, {kind}", text, "ms", used[kind] / rounds * 1000, None, rounds) for kind in used]
    for method in ("CreateContainer", "StartContainer"):
        for kind, calls in (("claim", settled), ("plain", plain)):
            # A plugin need not subscribe to each hook.
            if found := _seconds(calls, method):
                lines.append(timed(f"{method}, {kind}", text, found, HOOK_BUDGET))
    lines.append(timed("CreateContainer at once after prepare", text, _seconds(hurried, "CreateContainer")))
    return [*lines, timed("others off the claimed CPUs after prepare", text, moved)]


def _cpu_seconds(stage: Stage) -> float:
    """The CPU time of whoever answers the runtime."""
    return stage.processes[-1].cpu_seconds()


def _hooks_of_claims(
    stage: Stage, load: Load, rounds: int, settle: Callable[[Any], float]
) -> tuple[list[dict[str, Any]], list[float]]:
    before = len(stage.runtime("hooks"))
    moved = []
    for _ in range(rounds):
        pod = load.pod(_MEASURED_CPUS)
        pod.run_sandbox()
        pod.prepare()
        moved.append(settle(pod))
        pod.run()
        stage.runtime("remove_pod", pod=pod.sandbox["id"])
        pod.unprepare()
        load.gone(pod)
    return stage.runtime("hooks")[before:], moved


def _hooks_of_plain(stage: Stage, load: Load, rounds: int) -> list[dict[str, Any]]:
    before = len(stage.runtime("hooks"))
    for _ in range(rounds):
        with load.plain_pod() as pod:
            pod.run()
    return list(stage.runtime("hooks")[before:])


def _seconds(calls: Iterable[dict[str, Any]], method: str) -> list[float]:
    return [call["seconds"] for call in calls if call["method"] == method and call["outcome"] == "ok"]


def synchronize(stage: Stage, load: Load, rounds: int) -> Line:
    """The runtime restarts and tells its plugin everything; all parts of a snapshot together."""
    seconds = []
    for _ in range(rounds):
        before = len(stage.runtime("hooks"))
        stage.runtime("restart")
        wait_for("the plugin to come back", lambda: _plugins(stage), 30.0)
        seconds.append(sum(_seconds(stage.runtime("hooks")[before:], "Synchronize")))
        ready(stage)
    return timed("Synchronize", f"{load.containers} containers", seconds, None)


def _plugins(stage: Stage) -> bool:
    """Whether there is a plugin; one that ends with the runtime is started again, as the kubelet does."""
    for process in stage.processes:
        if not process.alive:
            process.start()
    return bool(stage.runtime("plugins")["active"])


def at_rest(stage: Stage, load: Load) -> list[Line]:
    """Resident memory, and CPU time while nothing happens."""
    text = f"{load.claims} claims, {load.containers} containers"
    processes = stage.processes
    time.sleep(_SETTLE_SECONDS)
    used, began = [process.cpu_seconds() for process in processes], time.monotonic()
    time.sleep(_IDLE_SECONDS)
    passed = time.monotonic() - began
    lines = []
    for process, before in zip(processes, used, strict=True):
        name = process.name.partition("-")[0]
        lines.append(Line(f"RSS {name}", text, "MB", process.rss_bytes() / _MB))
        lines.append(Line(f"idle CPU {name}", text, "%", (process.cpu_seconds() - before) / passed * 100))
    total = sum(process.rss_bytes() for process in processes) / _MB
    return [*lines, Line("RSS of all processes", text, "MB", total, budget=MEMORY_BUDGET)]
