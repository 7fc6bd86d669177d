# SPDX-License-Identifier: Apache-2.0
"""The benchmark's measurements. Each one requires a stage that is ready. All times are measured as the kubelet and the
runtime see them.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from tests.bench import procfs, quantities
from tests.bench.figures import Quantity
from tests.bench.load import Load
from tests.stage.process import Process, wait_for
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

Sample = tuple[Quantity, Sequence[float]]
_MEASURED_CPUS: Final = 2
_HURRIED_PART: Final = 4
"""One in this many pods starts its container immediately after its claim has been prepared."""
_MB: Final = 1e6


def ready(stage: Stage) -> None:
    """Waits until the drivers are registered, slices are published and the plugin is active."""
    stage.wait_registered()
    wait_for("the slices", lambda: {one["spec"]["driver"] for one in stage.slices()} >= set(stage.settings.drivers), 15)
    stage.runtime("wait_plugins", count=1)


def pods(stage: Stage, load: Load, rounds: int, pause: float) -> Iterator[Sample]:
    """Starts and removes pods with a claim, then pods without one. ``pause`` is the wait before each Prepare, in
    seconds.
    """
    with _recording(stage) as hurried:
        for _ in range(max(1, rounds // _HURRIED_PART)):
            _claim_pod(stage, load, pause, lambda _: 0.0)
    with _recording(stage) as claimed:
        moved = [_claim_pod(stage, load, pause, load.settle) for _ in range(rounds)]
    with _recording(stage) as plain:
        for _ in range(rounds):
            with load.plain_pod() as pod:
                pod.run()
    for driver in stage.settings.drivers:
        yield quantities.prepare(driver), claimed.kubelet(driver, "NodePrepareResources")
        yield quantities.unprepare(driver), claimed.kubelet(driver, "NodeUnprepareResources")
    for method in ("CreateContainer", "StartContainer"):
        # A plugin need not subscribe to every hook; without a subscription there are no samples.
        yield quantities.hook(method, claimed=True), claimed.runtime(method)
        yield quantities.hook(method, claimed=False), plain.runtime(method)
    yield quantities.HURRIED_CREATE, hurried.runtime("CreateContainer")
    if load.plain and not stage.settings.partitions:
        yield quantities.OTHERS_OFF, [seconds * 1000 for seconds in moved]
    yield quantities.cpu_of_pod(claimed=True), [sum(claimed.cpu.values()) / rounds * 1000]
    if len(claimed.cpu) > 1:
        for name, seconds in claimed.cpu.items():
            quantity = quantities.of_process(quantities.cpu_of_pod(claimed=True), name, plotted=True)
            yield quantity, [seconds / rounds * 1000]
    yield quantities.cpu_of_pod(claimed=False), [sum(plain.cpu.values()) / rounds * 1000]


def _claim_pod(stage: Stage, load: Load, pause: float, settle: Callable[[Any], float]) -> float:
    """Starts and removes a pod with a claim; returns how many seconds other containers took to leave its CPUs."""
    pod = load.pod(_MEASURED_CPUS)
    pod.run_sandbox()
    time.sleep(pause)
    pod.prepare()
    moved = settle(pod)
    pod.run()
    stage.runtime("remove_pod", pod=pod.sandbox["id"])
    pod.unprepare()
    load.delete_claim(pod)
    return moved


@dataclass(slots=True)
class _Record:
    """Calls that the kubelet and the runtime made while the record was open, and the CPU time that the driver used."""

    cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds that each process used."""
    hooks: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def runtime(self, method: str) -> list[float]:
        """Returns the durations, in milliseconds, of the runtime's successful calls to a method."""
        return [call["seconds"] * 1000 for call in self.hooks if (call["method"], call["outcome"]) == (method, "ok")]

    def kubelet(self, driver: str, method: str) -> list[float]:
        """Returns the durations, in milliseconds, of the kubelet's calls to a driver's method."""
        return [call["seconds"] * 1000 for call in self.calls if (call["driver"], call["method"]) == (driver, method)]


@contextmanager
def _recording(stage: Stage) -> Iterator[_Record]:
    """Opens a record, which is complete when the block ends."""
    record = _Record()
    hooks, calls = len(stage.runtime("hooks")), len(stage.kubelet("calls"))
    before = {name: procfs.cpu_seconds(process.pid) for name, process in programs(stage).items()}
    yield record
    record.cpu = {name: procfs.cpu_seconds(programs(stage)[name].pid) - used for name, used in before.items()}
    record.hooks, record.calls = stage.runtime("hooks")[hooks:], stage.kubelet("calls")[calls:]


def programs(stage: Stage) -> dict[str, Process]:
    """Returns the driver's processes by name, ``frontend`` and ``backend``."""
    return {name: process for instance in stage.instances for name, process in instance.programs.items()}


def restart(stage: Stage, load: Load) -> Iterator[Sample]:
    """Adds a claim without a container, then restarts first the driver and then the runtime."""
    pod = load.pod(_MEASURED_CPUS)
    pod.prepare()
    load.settle(pod)
    for process in stage.processes:
        process.stop()
    wait_for("the kubelet to drop the driver", lambda: not stage.kubelet("status")["endpoints"])
    for process in stage.processes:
        process.start()
    stage.wait_registered()
    yield quantities.EXEC, [(time.monotonic() - min(process.started_at for process in stage.processes)) * 1000]
    ready(stage)
    forgotten = 0.0
    try:
        pod.run()
    except AnsweredError:
        forgotten = 1.0
    yield quantities.FORGOTTEN, [forgotten]
    stage.runtime("remove_pod", pod=pod.sandbox["id"])
    pod.unprepare()
    load.delete_claim(pod)
    yield quantities.SYNCHRONIZE, [_synchronize(stage)]


def _synchronize(stage: Stage) -> float:
    """Restarts the runtime and returns the duration of Synchronize across all parts of the snapshot."""
    before = len(stage.runtime("hooks"))
    stage.runtime("restart")
    wait_for("the plugin to reconnect", lambda: _has_plugin(stage), 30.0)
    ready(stage)
    return sum(_Record(hooks=stage.runtime("hooks")[before:]).runtime("Synchronize"))


def _has_plugin(stage: Stage) -> bool:
    """Returns True if a plugin is active. Like the kubelet, restarts the plugin if it exited along with the runtime."""
    for process in stage.processes:
        if not process.alive:
            process.start()
    return bool(stage.runtime("plugins")["active"])


def memory(stage: Stage) -> Iterator[Sample]:
    """Reads the memory of the driver's processes."""
    found = {name: procfs.memory(process.pid) for name, process in programs(stage).items()}
    sizes = {
        quantities.RSS: [one.rss / _MB for one in found.values()],
        quantities.PSS: [one / _MB for one in procfs.pss_together(found.values())],
        quantities.KERNEL_PSS: [one.kernel_pss / _MB for one in found.values()],
    }
    for quantity, each in sizes.items():
        yield quantity, [sum(each)]
        if len(found) > 1:
            for name, size in zip(found, each, strict=True):
                yield quantities.of_process(quantity, name), [size]
