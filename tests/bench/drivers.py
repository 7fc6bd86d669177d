# SPDX-License-Identifier: Apache-2.0
"""The drivers to measure: this one, one specified by its commands, or an earlier revision of this one."""

import compileall
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.bench.figures import DriverUnderTest
from tests.stage.process import ROOT
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND

_WORKTREES: Final = ROOT / "build/bench"
# This script runs in a worktree of the revision, because the commands that start the driver have changed over time, and
# those of a revision are defined in its own copy of tests/stage.
_COMMANDS_SCRIPT: Final = """
import importlib.util, json
from tests.stage import settings
places = [importlib.util.find_spec(name).origin for name in ("dra_frontend", "nri_backend", "numa_contract")]
print(json.dumps({"commands": [settings.OUR_FRONTEND, settings.OUR_BACKEND], "places": places}))
"""


class DriverError(Exception):
    """Raised if a driver cannot be measured; the message gives the remedy."""


@dataclass(frozen=True, slots=True)
class Driver:
    """A driver and the commands that start its processes."""

    name: str
    revision: str
    frontend: str
    """Command that starts the DRA driver, with the placeholders from StageSettings."""
    backend: str
    """Command that starts the NRI plugin, or empty if the DRA driver contains the plugin."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for both processes, in addition to those of this process."""

    def described(self) -> DriverUnderTest:
        """Returns the driver's entry in a report."""
        commands = (self.frontend.replace(sys.executable, "python"), self.backend.replace(sys.executable, "python"))
        return DriverUnderTest(name=self.name, revision=self.revision, frontend=commands[0], backend=commands[1])


def this_driver(frontend: str = "", backend: str | None = None) -> Driver:
    """Returns the driver in this working tree, or one that is specified by its commands."""
    commands = (frontend or OUR_FRONTEND, OUR_BACKEND if backend is None else backend)
    if frontend:
        return Driver(_program(frontend), "given by --frontend", *commands)
    return Driver("this driver", _revision(ROOT), *commands)


def another_driver(frontend: str, backend: str, name: str) -> Driver:
    """Returns a driver that is specified by its commands. Raises DriverError if a program does not exist."""
    for command in filter(None, (frontend, backend)):
        program = shlex.split(command)[0]
        if not any(os.access(place / program, os.X_OK) for place in _path(program)):
            raise DriverError(f"{program!r} is not an executable program: give its full path")
    return Driver(name or _program(frontend), name or "given by its command", frontend, backend)


def _path(program: str) -> list[Path]:
    return [ROOT] if "/" in program else [Path(place) for place in os.get_exec_path()]


def _program(command: str) -> str:
    return Path(shlex.split(command)[0]).name


def earlier_revision(revision: str, repository: Path = ROOT, below: Path = _WORKTREES) -> Driver:
    """Checks out a revision of this driver under a directory, and returns the driver. Raises DriverError.

    The driver runs with this environment's packages, even though the revision may require different ones.
    """
    tree = check_out(revision, repository, below)
    sources = [tree / "shared/src", *sorted(tree.glob("services/*/src"))]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, (tree, *sources)))}
    asked = subprocess.run(
        [sys.executable, "-c", _COMMANDS_SCRIPT],
        cwd=tree,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode != 0:
        reason = (asked.stderr.strip().splitlines() or ["no output"])[-1]
        raise DriverError(f"revision {revision} cannot be measured: {reason}")
    answer = json.loads(asked.stdout)
    for place in answer["places"]:
        if not Path(place).is_relative_to(tree):
            raise DriverError(f"revision {revision} would run {place}, which is not below {tree}")
    for directory in sources:
        # Start-up time and memory are measured, so the revision needs byte code, as in the images.
        compileall.compile_dir(directory, quiet=2)
    frontend, backend = answer["commands"]
    return Driver(f"revision {revision}", _revision(tree), frontend, backend, environment)


def check_out(revision: str, repository: Path, below: Path) -> Path:
    """Checks out a revision in a separate git worktree and returns its directory. Raises DriverError."""
    found = _git(repository, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    if not found:
        raise DriverError(f"{revision!r} is not a revision of {repository}: give a commit, a tag or a branch")
    tree = below.resolve() / found[:12]
    if _git(tree, "rev-parse", "--show-toplevel", "HEAD").split() == [str(tree), found] and not _changed(tree):
        return tree
    # Forced, because git may still list a worktree that "make clean" has removed.
    done = subprocess.run(
        ["git", "-C", str(repository), "worktree", "add", "--quiet", "--force", "--detach", str(tree), found],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise DriverError(f"git cannot check out {revision}: {done.stderr.strip()}; remove {tree} if it is in the way")
    return tree


def _revision(tree: Path) -> str:
    """Returns the revision of a working tree with its date, and whether the tree has uncommitted changes."""
    commit = _git(tree, "show", "--no-patch", "--format=%h of %cs", "HEAD")
    return (commit + (" with changes" if _changed(tree) else "")) if commit else "unknown"


def _changed(tree: Path) -> bool:
    return bool(_git(tree, "status", "--porcelain", "--untracked-files=no"))


def _git(directory: Path, *arguments: str) -> str:
    """Returns git's output, or an empty string if git fails or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
