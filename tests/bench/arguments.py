# SPDX-License-Identifier: Apache-2.0
"""The command line: the drivers to measure, the node's load, and the duration."""

import argparse
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.bench.drivers import Driver, another_driver, earlier_revision, this_driver
from tests.bench.load import CPU_CLAIMS

MODES: Final = {
    "partition": "Kernel with cpuset partitions (Linux 6.7 or later)",
    "pool": "Kernel without cpuset partitions",
}
"""Titles of the emulated kernels, keyed by the value of --exclusivity."""
_BOTH: Final = ("dra.cpu", "dra.memory")
_QUICK: Final[dict[str, Any]] = {
    "exclusivity": ["partition"],
    "turns": 2,
    "rounds": 5,
    "idle": 20.0,
    "pairs": 0,
}


@dataclass(frozen=True, slots=True)
class Loads:
    """The numbers of claims and containers on the node, in the order in which they are measured."""

    pairs: tuple[tuple[int, int], ...]

    def stages(self) -> list[list[tuple[int, int]]]:
        """Groups the loads so that within a group none is smaller than the previous one, because the benchmark only
        ever adds load to a node.
        """
        groups: list[list[tuple[int, int]]] = []
        for claims, containers in self.pairs:
            if groups and claims >= groups[-1][-1][0] and containers >= groups[-1][-1][1]:
                groups[-1].append((claims, containers))
            else:
                groups.append([(claims, containers)])
        return groups


@dataclass(frozen=True, slots=True)
class Plan:
    """The scope of one run: drivers' names, loads, kernels, turns and durations."""

    loads: Loads
    modes: tuple[str, ...]
    registered: tuple[str, ...]
    """Names that the drivers register with the kubelet."""
    turns: int
    rounds: int
    """Number of pods of each kind that are started and removed in each turn."""
    idle: float
    """Number of seconds for which an idle driver is observed."""
    settle: float
    """Seconds to wait before observing the idle driver, so that the driver can finish its work for the last pods."""
    pause: float
    """Pause before each Prepare, in seconds."""
    pairs: int
    """Number of prepares that are simulated in memory."""

    def minutes(self, drivers: int) -> int:
        """Estimates how many minutes the run takes on a quiet machine."""
        turn = self.rounds * (0.25 + self.pause) + 8
        load = self.settle + self.idle + drivers * (self.turns * turn + 8)
        return max(1, round((len(self.modes) * len(self.loads.pairs) * load + self.pairs / 200) / 60))


def _numbers(text: str) -> list[int]:
    try:
        found = [int(item) for item in text.split(",")]
    except ValueError:
        found = [-1]
    if min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,60,250")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _amount(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds between 0 and 3600")
    return value


def _registered(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(_BOTH) or "dra.cpu" not in names:
        raise argparse.ArgumentTypeError(f"{text!r} is neither dra.cpu nor {','.join(_BOTH)}")
    return tuple(name for name in _BOTH if name in names)


def parser() -> argparse.ArgumentParser:
    """Returns the command-line parser."""
    made = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measures what the driver costs a node, alone or compared with another driver, and writes"
        " bench.json and bench.html. Commands of drivers may contain the placeholders {config}, {kubeconfig}, {node},"
        " {pod_uid}, {host_root}, {kubelet_root}, {cdi_dir}, {run_dir}, {nri_socket} and {cgroup_root}.",
    )
    made.add_argument("--quick", action="store_true", help="about three minutes: less load, fewer samples, one kernel")
    _add_drivers(made.add_argument_group("drivers"))
    _add_measurements(made.add_argument_group("measurements"))
    made.add_argument("--strict", action="store_true", help="exit with status 3 if a budget is not met")
    text = "report to write; the page is written next to it as .html (default bench.json)"
    made.add_argument("-o", "--output", type=Path, default=Path("bench.json"), metavar="FILE", help=text)
    text = "write the page for an existing report again, without measuring"
    made.add_argument("--render", type=Path, metavar="FILE", help=text)
    return made


def _add_drivers(group: Any) -> None:
    group.add_argument("--against-revision", metavar="REVISION", help="compare with an earlier revision of this driver")
    group.add_argument("--against", metavar="COMMAND", help="compare with another DRA driver")
    text = "NRI plugin of the other driver, if it runs as a separate process"
    group.add_argument("--against-backend", metavar="COMMAND", default="", help=text)
    group.add_argument("--against-name", metavar="NAME", default="", help="name and revision of the other driver")
    group.add_argument("--frontend", metavar="COMMAND", default="", help="DRA driver to measure instead of this one")
    text = "NRI plugin to measure instead of this one; may be empty"
    group.add_argument("--backend", metavar="COMMAND", default=None, help=text)
    text = "names that the drivers register, dra.cpu or dra.cpu,dra.memory (default both)"
    group.add_argument("--drivers", type=_registered, default=_BOTH, metavar="NAMES", help=text)


def _add_measurements(group: Any) -> None:
    text = f"claims on the node (default 0,60,250; 0,250 with --quick; at most {CPU_CLAIMS} without dra.memory)"
    group.add_argument("--claims", type=_numbers, metavar="LIST", help=text)
    text = "containers on the node, one number for each of --claims (default 0,200,500; 0,500 with --quick)"
    group.add_argument("--containers", type=_numbers, metavar="LIST", help=text)
    group.add_argument("--grid", action="store_true", help="measure every combination of --claims and --containers")
    text = "whether the emulated kernel supports cpuset partitions (default: first with, then without)"
    group.add_argument("--exclusivity", nargs="+", choices=list(MODES), default=list(MODES), metavar="MODE", help=text)
    group.add_argument("--turns", type=_count, default=5, help="how often each driver is measured (default 5)")
    group.add_argument("--rounds", type=_count, default=8, help="pods of each kind in a turn (default 8)")
    text = "how long an idle driver is observed, in parts of 20 s (default 60)"
    group.add_argument("--idle", type=_seconds, default=60.0, metavar="SECONDS", help=text)
    text = "how long to wait before that (default 21, so that the audit after the last pod is over)"
    group.add_argument("--settle", type=_seconds, default=21.0, metavar="SECONDS", help=text)
    text = "wait before each Prepare, for drivers whose client limits its requests per second (default 0)"
    group.add_argument("--pause", type=_seconds, default=0.0, metavar="SECONDS", help=text)
    group.add_argument("--pairs", type=_amount, default=10_000, help="prepares to simulate in memory (default 10000)")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the command line. Exits with status 2 and a message if it is invalid."""
    made = parser()
    if "--quick" in arguments:
        made.set_defaults(**_QUICK)
    given = made.parse_args(arguments)
    if problem := _problem(given):
        made.error(problem)
    return given


def _problem(given: argparse.Namespace) -> str:
    """Returns a message about arguments that are valid individually but not in combination, or an empty string."""
    if given.against and given.against_revision:
        return "--against and --against-revision are mutually exclusive: a run compares two drivers"
    if (given.against_backend or given.against_name) and not given.against:
        return "--against-backend and --against-name describe the driver that --against names, but it is not given"
    if given.output.suffix == ".html":
        return f"--output {given.output}: the page is written next to the report, so give a name that ends in .json"
    if not os.access(given.output.absolute().parent, os.W_OK):
        return f"--output {given.output}: its directory does not exist or cannot be written"
    claims, containers = _loads(given)
    if not given.grid and len(claims) != len(containers):
        return (
            f"--claims has {len(claims)} numbers and --containers has {len(containers)}: give equally many, or use"
            " --grid for every combination"
        )
    if max(claims) > CPU_CLAIMS and "dra.memory" not in given.drivers:
        return f"--claims: the emulated machine has CPUs for {CPU_CLAIMS} claims; for more, add dra.memory to --drivers"
    return ""


def _loads(given: argparse.Namespace) -> tuple[list[int], list[int]]:
    full = 250 if "dra.memory" in given.drivers else CPU_CLAIMS
    middle = [] if given.quick else [60]
    claims = given.claims or [0, *middle, full]
    return claims, given.containers or [0, *(200 for _ in middle), 500]


def plan(given: argparse.Namespace) -> Plan:
    """Returns the plan for arguments that have already been validated."""
    claims, containers = _loads(given)
    pairs = itertools.product(claims, containers) if given.grid else zip(claims, containers, strict=True)
    return Plan(
        loads=Loads(tuple(dict.fromkeys(pairs))),
        modes=tuple(dict.fromkeys(given.exclusivity)),
        registered=given.drivers,
        turns=given.turns,
        rounds=given.rounds,
        idle=given.idle,
        settle=given.settle,
        pause=given.pause,
        pairs=given.pairs,
    )


def drivers(given: argparse.Namespace) -> list[Driver]:
    """Returns the driver to measure and the one to compare it with, if any. Raises DriverError."""
    found = [this_driver(given.frontend, given.backend)]
    if given.against_revision:
        found.append(earlier_revision(given.against_revision))
    if given.against:
        found.append(another_driver(given.against, given.against_backend, given.against_name))
    return found
