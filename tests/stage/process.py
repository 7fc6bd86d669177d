# SPDX-License-Identifier: Apache-2.0
"""A process on the stage: started in its own process group, watched, measured through /proc, and ended with the
group.
"""

import compileall
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

from tests.fakes.waiting import patience

ROOT = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_T = TypeVar("_T")


class StageError(Exception):
    """An expected event did not happen in time, or a process exited; the message contains the end of the log."""


def wait_for(what: str, condition: Callable[[], _T], seconds: float = 10.0, *, interval: float = 0.01) -> _T:
    """Waits until the condition returns a true value, and returns that value. Raises StageError after the timeout. The
    error message contains ``what``, a description of the condition. ``interval`` is the number of seconds between two
    checks.

    The timeout is multiplied by ``patience()``, which is called again at each check because the load may rise during
    the wait.
    """
    began = time.monotonic()
    while True:
        value = condition()
        if value:
            return value
        if (waited := time.monotonic() - began) > seconds * patience():
            raise StageError(f"timed out after {waited:.0f} s waiting for {what}")
        time.sleep(interval)


class Process:
    """A command that may be started again after it has exited."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.name = name
        self.command = list(command)
        self.log_file = log
        # Many developers set PYTHONDONTWRITEBYTECODE. It is removed here because the images contain bytecode, and the
        # tests measure start-up time and memory.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        # The images contain no CA certificates, so none are loaded here. Loading this machine's certificates would take
        # OpenSSL 90 ms at each start.
        self._environment = {**inherited, "SSL_CERT_FILE": os.devnull, **environment}
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ours = False
        """Whether the stage itself is ending the process."""
        self.started_at = 0.0
        """Monotonic time of the last start."""

    @property
    def pid(self) -> int:
        """Returns the process ID. Raises StageError if the process has never been started."""
        if self._child is None:
            raise StageError(f"{self.name} was not started")
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Returns True if the process is running."""
        return self._child is not None and self._child.poll() is None

    def start(self) -> Self:
        """Starts the process; its output is appended to its log."""
        with self.log_file.open("ab") as log:
            self.started_at = time.monotonic()
            self._is_ours = False
            # The process has its own session: Ctrl-C at the terminal stops the stage, which then stops this process in
            # the right order.
            self._child = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def kill(self) -> None:
        """Kills the process as ``kill -9`` does and waits until it has exited."""
        self.ask_to_stop(signal.SIGKILL)
        self.wait()

    def ask_to_stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Sends a signal to the process group if the process is still running."""
        # The process has not been reaped yet, so its PID cannot have been reused.
        if self.alive and self._child is not None:
            self._is_ours |= number in (signal.SIGTERM, signal.SIGKILL)
            with suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def wait(self, seconds: float = 10.0) -> int:
        """Waits until the process has exited and returns the exit status. Kills the process and raises StageError after
        the timeout.
        """
        if self._child is None:
            return 0
        try:
            return self._child.wait(seconds * patience())
        except subprocess.TimeoutExpired:
            self.kill()
            raise StageError(f"{self.name} did not end within {seconds * patience():.0f} s\n{self.tail()}") from None

    def stop(self, within: float = 10.0) -> int:
        """Asks the process to exit and returns its exit status."""
        self.ask_to_stop()
        return self.wait(within)

    def check(self) -> None:
        """Raises StageError with the end of the log if the process has exited on its own."""
        if self._child is not None and not self.alive and not self._is_ours:
            raise StageError(f"{self.name} ended with status {self._child.returncode}\n{self.tail()}")

    def tail(self, lines: int = 15) -> str:
        """Returns the last lines of the process's log."""
        text = self.log_file.read_text(errors="replace") if self.log_file.exists() else ""
        return "\n".join(f"  {self.name}: {line}" for line in text.splitlines()[-lines:])

    def rss_bytes(self) -> int:
        """Returns the resident memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * _PAGE

    def cpu_seconds(self) -> float:
        """Returns the CPU time used so far in user and kernel mode."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


def compile_sources() -> None:
    """Compiles the services' sources, as the images do; takes a few milliseconds if nothing has changed."""
    for directory in (ROOT / "shared/src", *sorted((ROOT / "services").glob("*/src"))):
        compileall.compile_dir(directory, quiet=2)


def end_by_interrupt() -> None:
    """Makes SIGINT and SIGTERM raise KeyboardInterrupt once; a second signal must not interrupt the clean-up."""

    def interrupted(number: int, _frame: object) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, interrupted)


def python(*arguments: str) -> list[str]:
    """Returns a command that runs this interpreter."""
    return [sys.executable, *arguments]
