# SPDX-License-Identifier: Apache-2.0
"""``make bench``: measures a driver, ours by default, through the stand-ins; prints a table and writes bench.json.

With ``--against`` another driver is measured in turn with this one on the same stand-ins, and ratios are printed.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.bench import scenarios, simulate
from tests.bench.figures import Figures, Line, columns
from tests.bench.load import Load
from tests.bench.ratios import ratios
from tests.rigs.trees import captured, write_tree
from tests.stage.process import StageError, end_by_interrupt
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND, StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

# 128 CPUs in four NUMA nodes: room for a hundred claims with CPUs of their own.
_MACHINE = "128arm-2pa2n8cluster4co"


def _numbers(text: str) -> list[int]:
    try:
        return sorted({int(item) for item in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers such as 0,250") from None


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    places = StageSettings.__doc__ or ""
    parser.add_argument("--frontend", default=OUR_FRONTEND, help=f"command of the DRA driver. {places}")
    parser.add_argument("--backend", default=OUR_BACKEND, help="command of the NRI plugin; may be empty")
    parser.add_argument("--drivers", default="dra.cpu,dra.memory", help="the drivers that register with the kubelet")
    parser.add_argument("--claims", type=_numbers, default=[0, 250], help="claims on the node (default 0,250)")
    parser.add_argument("--containers", type=_numbers, default=[0, 500], help="running containers (default 0,500)")
    modes = ("pool", "partition")
    text = "who keeps others off claimed CPUs: the shared pool, the kernel (default both)"
    parser.add_argument("--exclusivity", nargs="+", choices=modes, default=modes, metavar="MODE", help=text)
    parser.add_argument("--rounds", type=int, default=40, help="how often each quantity is measured (default 40)")
    text = "seconds before each prepare, for drivers whose client asks the API server a few times a second (default 0)"
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help=text)
    parser.add_argument(
        "--pairs", type=int, default=10_000, help="prepares simulated in memory (default 10000; 0: none)"
    )
    parser.add_argument("--against", metavar="COMMAND", help="another DRA driver, or DRA driver and NRI plugin in one")
    parser.add_argument(
        "--against-backend", metavar="COMMAND", default="", help="its NRI plugin, if that is another process"
    )
    parser.add_argument("--turns", type=int, default=2, help="how often each of the two is measured (default 2)")
    parser.add_argument("--strict", action="store_true", help="end with status 3 when a budget is missed")
    parser.add_argument("-o", "--output", type=Path, default=Path("bench.json"), help="default bench.json")
    return parser.parse_args()


@contextmanager
def _machine() -> Iterator[Path]:
    # In memory, where there is room: what /var/run/cdi and cgroups are on a node.
    with TemporaryDirectory(prefix="dn-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield write_tree(captured(_MACHINE), Path(directory))


def _measure(stage: Stage, given: argparse.Namespace, figures: Figures) -> None:
    def add(*lines: Line) -> None:
        figures.lines += lines
        print(".", end="", flush=True, file=sys.stderr)

    stage.add_instance()
    scenarios.ready(stage)
    load = Load(stage)
    for claims in given.claims:
        load.fill_claims(claims)
        add(*scenarios.prepare_and_unprepare(stage, load, given.rounds, given.pause))
        add(scenarios.exec_to_registered(stage, max(3, given.rounds // 10)))
    add(*scenarios.at_rest(stage, load))
    for containers in given.containers:
        load.fill_containers(containers)
        add(Line("claims forgotten in restarts", f"{containers} containers", "", load.forgotten))
        add(*scenarios.hooks(stage, load, given.rounds))
    add(scenarios.synchronize(stage, load, max(3, given.rounds // 10)))
    add(*scenarios.at_rest(stage, load))


def _measured(given: argparse.Namespace, frontend: str, backend: str) -> Figures:
    """Measures one driver, on a stage of its own for each mode. Raises StageError, AnsweredError or OSError."""
    figures = Figures({"frontend": frontend, "backend": backend})
    with _machine() as root:
        drivers = tuple(given.drivers.split(","))
        settings = StageSettings(host_root=root, frontend=frontend, backend=backend, drivers=drivers, in_memory=True)
        for mode in given.exclusivity:
            measured = Figures({})
            with Stage(replace(settings, partitions=mode == "partition")) as stage:
                _measure(stage, given, measured)
            figures.lines += [replace(line, load=f"{line.load}, {mode}") for line in measured.lines]
    return figures


def _compare(given: argparse.Namespace) -> dict[str, Any]:
    """Measures two drivers in turn, and prints how they compare; returns the content of bench.json."""
    commands = {"ours": (given.frontend, given.backend), "other": (given.against, given.against_backend)}
    turns: dict[str, list[Figures]] = {name: [] for name in commands}
    for turn in range(given.turns):
        for name, (frontend, backend) in commands.items():
            print(f"\n{name}, {turn + 1} of {given.turns} ", end="", flush=True, file=sys.stderr)
            turns[name].append(_measured(given, frontend, backend))
    rows = ratios(*([figures.lines for figures in turns[name]] for name in ("ours", "other")))
    print(f"\n{columns(rows)}")
    return {"version": 1, **{name: [figures.document() for figures in some] for name, some in turns.items()}}


def main() -> int:
    """Runs the benchmark; returns 0, 1 when something failed, 3 when --strict and a budget is missed."""
    given = _arguments()
    end_by_interrupt()
    try:
        if given.against:
            given.output.write_text(json.dumps(_compare(given), indent=1) + "\n")
            return 0
        return _measure_one(given)
    except KeyboardInterrupt:
        print("\nbench: interrupted", file=sys.stderr)
        return 130
    except (StageError, AnsweredError, OSError) as error:
        print(f"\nbench: failed: {error}", file=sys.stderr)
        return 1


def _measure_one(given: argparse.Namespace) -> int:
    about = {"machine": _MACHINE, "python": platform.python_version(), "host_cpus": os.cpu_count()}
    about |= {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    simulated = simulate.lines(given.pairs) if given.pairs else []
    measured = _measured(given, given.frontend, given.backend)
    figures = Figures({**about, **measured.about}, [*simulated, *measured.lines])
    print(f"\n{figures.table()}")
    given.output.write_text(json.dumps(figures.document(), indent=1) + "\n")
    missed = [line.name for line in figures.lines if line.within is False]
    print(f"\n{given.output} written; " + (f"over budget: {', '.join(missed)}" if missed else "every budget is kept"))
    return 3 if missed and given.strict else 0


if __name__ == "__main__":
    sys.exit(main())
