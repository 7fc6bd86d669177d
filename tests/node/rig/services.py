# SPDX-License-Identifier: Apache-2.0
"""Runs a test's programs as child processes, each with its own log file. The programs are fakes and the driver's
services, of which a test may run several instances.
"""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.fakes.waiting import PATIENCE
from tests.node.rig.wait import until
from tests.stage.process import Process

LOGS = Path("/var/log/numa-node")


class Service(Process):
    """A program that can be started, killed and started again; its log is kept across restarts."""

    _seen = 0
    """Position in the log at which the output since the latest start begins."""

    def start(self) -> Self:
        """Starts the program and returns immediately."""
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        self._seen = self.log_file.stat().st_size if self.log_file.exists() else 0
        return super().start()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGSTOP to suspend the program and SIGCONT to resume it."""
        os.kill(self.pid, number)

    def stop(self, within: float = 30.0) -> int:
        """Stops the program with SIGTERM, even if it is suspended, and returns the exit status. Raises StageError if it
        does not exit in time.
        """
        self.ask_to_stop()
        self.ask_to_stop(signal.SIGCONT)
        return self.wait(within * PATIENCE)

    def log(self) -> str:
        """Returns the program's output since the latest start."""
        with self.log_file.open("rb") as file:
            file.seek(self._seen)
            return file.read().decode(errors="replace")

    def wait_for_log(self, text: str, within: float = 30.0) -> None:
        """Waits until the log since the latest start contains `text`; fails immediately if the process exits
        before that.
        """

        def there() -> bool:
            ended = not self.alive
            if text in self.log():
                return True
            if ended:
                raise AssertionError(f"{self.name} ended without writing {text!r}:\n{self.log()[-2000:]}")
            return False

        until(there, f"{text!r} is in the log of {self.name}", within)


class Services:
    """All programs that one test uses; at the end of the context, those that are still running are killed."""

    def __init__(self, test: str) -> None:
        self._logs = LOGS / test
        self._all: dict[str, Service] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self._all.values()):
            service.kill()

    def add(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Service:
        """Adds a program without starting it; the name must be unique within the test."""
        if name in self._all:
            raise RuntimeError(f"{name} is already a service of this test")
        self._all[name] = Service(name, command, self._logs / f"{name}.log", env or {})
        return self._all[name]

    def module(self, name: str, module: str, *arguments: str, env: Mapping[str, str] | None = None) -> Service:
        """Adds a program that runs a Python module: module("frontend-2", "dra_frontend", "--config", "/etc/x.yaml")."""
        return self.add(name, [sys.executable, "-m", module, *arguments], env)

    def __getitem__(self, name: str) -> Service:
        return self._all[name]

    def logs(self) -> dict[str, str]:
        """Returns the end of every log, for the report on a failed test."""
        return {name: service.log()[-4000:] for name, service in self._all.items() if service.log_file.exists()}
