# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark: all drivers run at the same time, each on its own stage, and are measured alternately.

The speed of a machine changes from minute to minute, so only figures that were measured alternately can be compared.
While one driver is measured, the others are idle. Their idle periods are observed at the same time.
"""

import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.bench import scenarios, simulate
from tests.bench.arguments import MODES, Plan
from tests.bench.drivers import Driver
from tests.bench.figures import Collector, Report, ThreadRate
from tests.bench.host import facts
from tests.bench.idle import Idle, Observation
from tests.bench.load import Load
from tests.bench.quantities import PROCESSES, SECTIONS
from tests.bench.scenarios import Sample
from tests.rigs.trees import captured, write_tree
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage

# 128 CPUs on four NUMA nodes: enough for a hundred claims with CPUs.
_MACHINE: Final = "128arm-2pa2n8cluster4co"
_MACHINE_TEXT: Final = "128 CPUs in four NUMA nodes (captured from an Arm server)"
# Work that a driver does after the last pod of a turn must not overlap with the other driver's turn.
_PAUSE_SECONDS: Final = 0.5
_WINDOW_SECONDS: Final = 20.0
"""Length in seconds of one part of the idle period. Each part is one sample. This driver checks all claim files every
20 s, so each part includes one such check. Every 60 s, it checks all containers and their resource limits, so the
three parts of the default period together include one such check.
"""


@dataclass(frozen=True, slots=True)
class _Setting:
    """A combination of driver, kernel and load for which samples are taken."""

    mode: str
    load: str


class _Contender:
    """One driver on its stage."""

    def __init__(self, driver: Driver, stage: Stage) -> None:
        self.driver = driver
        self.stage = stage
        stage.add_instance()
        scenarios.ready(stage)
        self.load = Load(stage)


def measure(plan: Plan, drivers: Sequence[Driver]) -> Report:
    """Measures drivers. Raises StageError, AnsweredError or OSError."""
    began, when = time.monotonic(), time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    collector, host = Collector(), facts()
    for quantity, text, samples in simulate.samples(plan.pairs):
        collector.add(quantity, "", text, drivers[0].name, samples)
    for mode in plan.modes:
        for loads in plan.loads.stages():
            with _contenders(plan, drivers, mode) as contenders:
                for load in loads:
                    _measure_load(plan, contenders, _Setting(mode, label(*load)), load, collector)
    return Report(
        when=when,
        seconds=round(time.monotonic() - began),
        host=host | {"Load average at the end": _load_average()},
        settings=_settings(plan),
        modes={mode: MODES[mode] for mode in plan.modes},
        drivers=[driver.described() for driver in drivers],
        quantities=sorted(collector.quantities(), key=lambda one: SECTIONS.index(one.section)),
        figures=collector.figures(),
        threads=collector.threads,
    )


def label(claims: int, containers: int) -> str:
    """Returns the label for a load."""
    if not claims and not containers:
        return "empty node"
    return f"{_counted(claims, 'claim')}, {_counted(containers, 'container')}"


def _counted(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


@contextmanager
def _contenders(plan: Plan, drivers: Sequence[Driver], mode: str) -> Iterator[list[_Contender]]:
    with ExitStack() as stack:
        yield [_contender(stack, plan, driver, mode) for driver in drivers]


def _contender(stack: ExitStack, plan: Plan, driver: Driver, mode: str) -> _Contender:
    settings = StageSettings(
        host_root=stack.enter_context(_machine()),
        frontend=driver.frontend,
        backend=driver.backend,
        environment=driver.environment,
        drivers=plan.registered,
        in_memory=True,
        partitions=mode == "partition",
    )
    return _Contender(driver, stack.enter_context(Stage(settings)))


@contextmanager
def _machine() -> Iterator[Path]:
    # The directory is in memory if possible, as /var/run/cdi and the cgroup tree are on a node.
    with TemporaryDirectory(prefix="dn-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield write_tree(captured(_MACHINE), Path(directory))


def _measure_load(
    plan: Plan, contenders: Sequence[_Contender], setting: _Setting, load: tuple[int, int], collector: Collector
) -> None:
    _say(f"{setting.mode}, {setting.load}: filling the node")
    for one in contenders:
        one.load.fill_claims(load[0])
        one.load.fill_containers(load[1])
    for turn in range(plan.turns):
        _say(f"{setting.mode}, {setting.load}: pods, turn {turn + 1} of {plan.turns}")
        for one in _in_turn(contenders, turn):
            time.sleep(_PAUSE_SECONDS)
            _collect(collector, setting, one, scenarios.pods(one.stage, one.load, plan.rounds, plan.pause))
    _say(f"{setting.mode}, {setting.load}: idle for {plan.settle + plan.idle:.0f} s")
    _observe(plan, contenders, setting, collector)
    for turn in range(plan.turns):
        _say(f"{setting.mode}, {setting.load}: restarts, turn {turn + 1} of {plan.turns}")
        for one in _in_turn(contenders, turn):
            time.sleep(_PAUSE_SECONDS)
            _collect(collector, setting, one, scenarios.restart(one.stage, one.load))


def _in_turn(contenders: Sequence[_Contender], turn: int) -> Sequence[_Contender]:
    """Returns the drivers in the order in which a turn measures them. The order changes, so no driver is always
    first.
    """
    return contenders if turn % 2 == 0 else contenders[::-1]


def _collect(collector: Collector, setting: _Setting, one: _Contender, samples: Iterable[Sample]) -> None:
    for quantity, values in samples:
        collector.add(quantity, setting.mode, setting.load, one.driver.name, values)


def _observe(plan: Plan, contenders: Sequence[_Contender], setting: _Setting, collector: Collector) -> None:
    """Observes all drivers while they are idle."""
    time.sleep(plan.settle)
    whole = [Observation(one.stage) for one in contenders]
    for _ in range(max(1, round(plan.idle / _WINDOW_SECONDS))):
        windows = [Observation(one.stage) for one in contenders]
        time.sleep(min(_WINDOW_SECONDS, max(0.1, plan.idle)))
        for one, window in zip(contenders, windows, strict=True):
            _collect(collector, setting, one, window.end().samples())
            _collect(collector, setting, one, scenarios.memory(one.stage))
    for one, observation in zip(contenders, whole, strict=True):
        collector.threads += _thread_rates(setting, one.driver.name, observation.end())


def _thread_rates(setting: _Setting, driver: str, idle: Idle) -> Iterator[ThreadRate]:
    for process, threads in idle.threads.items():
        for name, rates in sorted(threads.items(), key=lambda item: -item[1].wakeups):
            yield ThreadRate(
                mode=setting.mode,
                load=setting.load,
                driver=driver,
                process=PROCESSES[process] if len(idle.threads) > 1 else "only process",
                name=name + (" (gRPC)" if rates.of_grpc else ""),
                threads=rates.threads,
                wakeups=round(rates.wakeups, 3),
                preemptions=round(rates.preemptions, 3),
            )


def _settings(plan: Plan) -> dict[str, str]:
    return {
        "Imitated machine": _MACHINE_TEXT,
        "Names registered with the kubelet": ", ".join(plan.registered),
        "Turns": str(plan.turns),
        "Pods of each kind in a turn": str(plan.rounds),
        "Seconds observed while idle": f"{plan.idle:g}, after {plan.settle:g} s without any call",
        "Seconds before each Prepare": f"{plan.pause:g}",
    }


def _load_average() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)
