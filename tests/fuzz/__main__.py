# SPDX-License-Identifier: Apache-2.0
"""``make fuzz``: runs parsers of untrusted input, and random traces of a node, one after another for a number of
minutes. An input that fails is stored in build/fuzz, and the exit status is 1. A failing trace is first reduced to the
events that the failure requires. ``python -m tests.fuzz --input FILE`` runs a stored input again; the file's name
begins with the target's name.
"""

import argparse
import hashlib
import logging
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import (
    backend_machine,
    backend_targets,
    contract_targets,
    explain_targets,
    frontend_machine,
    frontend_targets,
    selector_targets,
)
from tests.fuzz.corpus import endless
from tests.fuzz.reduce import reduced
from tests.fuzz.target import FuzzError, Target, check

TARGETS = (
    *contract_targets.TARGETS,
    *frontend_targets.TARGETS,
    *selector_targets.TARGETS,
    *explain_targets.TARGETS,
    *backend_targets.TARGETS,
    *frontend_machine.TARGETS,
    *backend_machine.TARGETS,
)
"""All parsers of untrusted input, and the state machines that are tested with traces. To add a parser, add a row to its
service's table.
"""
_TURN_SECONDS = 2.0


@dataclass(slots=True)
class Run:
    """The inputs of one target that have been run so far, and their results."""

    target: Target
    stream: Iterator[bytes]
    inputs: int = 0
    slowest: float = 0.0
    failures: int = 0

    def turn(self, folder: Path, seconds: float = _TURN_SECONDS) -> None:
        """Runs inputs for the given time and stores those that fail."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            data = next(self.stream)
            self.inputs += 1
            try:
                self.slowest = max(self.slowest, check(self.target, data))
            except FuzzError as error:
                self.failures += 1
                path = keep(folder, self.target, reduced(self.target, data))
                print(f"{error}\n  python -m tests.fuzz --input {path}", file=sys.stderr, flush=True)
                return


def keep(folder: Path, target: Target, data: bytes) -> Path:
    """Writes a failing input and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target.name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def fuzz(targets: Sequence[Target], minutes: float, number: int, folder: Path) -> bool:
    """Runs the targets one after another, prints a line for each, and returns True if no input failed."""
    runs = [Run(target, endless(target, number)) for target in targets]
    ends = time.monotonic() + minutes * 60
    while True:
        for run in runs:
            # A target that fails on every other input would fill the disk.
            if run.failures < 5:
                run.turn(folder, min(_TURN_SECONDS, minutes * 60 / len(runs)))
        if time.monotonic() > ends:
            break
    print(f"seed {number}")
    for run in runs:
        failed = f"  {run.failures} FAILED" if run.failures else ""
        print(f"{run.target.name:20} {run.inputs:8} inputs, slowest {run.slowest:7.1f} ms{failed}")
    return not any(run.failures for run in runs)


def rerun(path: Path) -> bool:
    """Runs a stored input once more; returns True if it does not fail."""
    target = next(target for target in TARGETS if path.name.rpartition("-")[0] == target.name)
    try:
        print(f"{target.name}: {check(target, path.read_bytes()):.1f} ms")
    except FuzzError as error:
        print(error, error.__cause__ or "", file=sys.stderr)
        return False
    return True


def main() -> int:
    """Runs the command and returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="seed of the run to repeat")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="directory for failing inputs")
    parser.add_argument("--input", type=Path, help="run only this input")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="targets to run (default: all)")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.input:
        return 0 if rerun(given.input) else 1
    chosen = [target for target in TARGETS if target.name in given.targets or not given.targets]
    return 0 if fuzz(chosen, given.minutes, given.seed, given.folder) else 1


if __name__ == "__main__":
    sys.exit(main())
