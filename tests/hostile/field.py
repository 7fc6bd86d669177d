# SPDX-License-Identifier: Apache-2.0
"""One node under attack: both processes between the fakes, their open ports, and the CPU time that they use."""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.fakes.waiting import PATIENCE
from tests.stage.pods import Box, StagePod, claim_pod, cpu_set, cpus
from tests.stage.process import Process, wait_for
from tests.stage.settings import OUR_BACKEND, OUR_FRONTEND, StageSettings
from tests.stage.stage import Instance, Stage
from tests.stage.wires import AnsweredError, ask_http

AGENT = "dra-driver-numa"
"""The driver's User-Agent in requests to the API server."""
_T = TypeVar("_T")
OPEN_FILES = Path(__file__).with_name("open_files.py")
_PATIENCE = 20.0 * PATIENCE
"""Number of seconds for which the simulated kubelet retries; a real one retries indefinitely."""

_INTERVAL = 0.1
"""Number of seconds between two checks that the frontend must answer. Its CPU time counts towards the attack's limit.
"""


def commands(ports: tuple[int, int]) -> tuple[str, str]:
    """Returns the commands for the frontend and the backend, each with an open port and with the lowest limit on open
    files that a container runtime may set.
    """

    def bound(command: str, port: int) -> str:
        at = command.replace("--bind-address=off", f"--bind-address=127.0.0.1:{port}")
        return f"{sys.executable} {OPEN_FILES} 1024 {at}"

    return bound(OUR_FRONTEND, ports[0]), bound(OUR_BACKEND, ports[1])


class Field:
    """The node under attack: a stage with one ready instance of the driver."""

    def __init__(self, settings: StageSettings, stage: Stage, ports: tuple[int, int]) -> None:
        self.settings = settings
        self.stage = stage
        self.ports = ports
        self.instance: Instance = stage.add_ready_instance()
        self.pool = cpu_set(settings.machine_cpus()) - cpu_set(settings.reserved_cpus)
        self._numbers = itertools.count(1)
        self._pids = self._present()
        self.unharmed = True
        """Whether the latest attack failed."""

    @property
    def processes(self) -> list[Process]:
        """Returns the frontend's and the backend's processes."""
        assert len(self.instance.processes) == 2
        return self.instance.processes

    def _present(self) -> list[int]:
        return [process.pid for process in self.processes]

    def spent(self) -> list[float]:
        """Returns the CPU seconds that the frontend and the backend have each used so far, in user and kernel mode."""
        return [process.cpu_seconds() for process in self.processes]

    def name(self, prefix: str) -> str:
        """Returns an unused name."""
        return f"{prefix}-{next(self._numbers)}"

    def pod(self, prefix: str = "evil") -> StagePod:
        """Returns a pod without a claim."""
        return StagePod(self.stage, self.name(prefix))

    def claim_pod(self, *requests: Any, config: Any = ()) -> StagePod:
        """Returns a pod with an allocated claim."""
        return claim_pod(self.stage, self.name("claimed"), *requests, config=config)

    def patiently(self, work: Callable[[], _T]) -> _T:
        """Retries a call as the kubelet does until it succeeds. Raises the last error after _PATIENCE seconds."""
        deadline = time.monotonic() + _PATIENCE
        while True:
            try:
                return work()
            except AnsweredError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def fail_next(self, count: int, answer: int | str, **fault: Any) -> None:
        """Makes the driver's requests to the API server fail, but not those from the fake scheduler and kubelet."""
        wish = {"count": count, "answer": answer, "agent": AGENT, **fault}
        self.stage.api("/fake", "POST", {"fail_next": wish})

    def healthy(self) -> bool:
        """Returns True if both processes answer their liveness probes."""
        return all(ask_http(f"http://127.0.0.1:{port}", "/healthz") == "ok\n" for port in self.ports)

    def ready(self) -> None:
        """Waits until the frontend and the backend are ready again."""
        self.stage.wait_ready_again(self.instance)

    def kill_backend(self) -> None:
        """Kills the backend and returns once the runtime has noticed."""
        self.stage.kill_backend(self.instance)

    def start_backend(self) -> None:
        """Starts the backend again as the kubelet does, and waits until the frontend and the backend are ready."""
        self.instance.backend.start()
        self.ready()
        self._pids = self._present()

    def held(self) -> set[int]:
        """Returns the CPUs that claims hold."""
        return {cpu["cpu"] for cpu in self.stage.state("/v1/cpus") if cpu.get("claimUid")}

    @contextmanager
    def victim(self, count: int = 2, *more: Any) -> Iterator[tuple[StagePod, Box, set[int]]]:
        """Checks that a container of another tenant is running on its claim's CPUs, now and at the end of the block."""
        with self.claim_pod(cpus(count), *more) as pod:
            self.patiently(pod.prepare)
            box = pod.run()
            given = self.stage.held(pod.claim_uid)
            assert len(given) == count
            box.wait_for_cpus(given)
            yield pod, box, given
            box.wait_for_cpus(given)
            assert self.stage.held(pod.claim_uid) == given

    def works(self) -> None:
        """Checks the conditions that must hold during and after every attack: both processes are live, and a new pod
        and a new claim work.
        """
        assert all(process.alive for process in self.processes), self.stage.logs()
        assert self._present() == self._pids
        assert self.healthy()
        with self.pod("plain") as web, self.claim_pod(cpus(4)) as pod:
            plain = self.patiently(web.run)
            self.patiently(pod.prepare)
            given = self.stage.held(pod.claim_uid)
            assert len(given) == 4
            self.patiently(pod.run).wait_for_cpus(given)
            # CPUs of claims that were released earlier may return to the pool with a delay.
            wait_for(
                "the plain container to have the whole pool",
                lambda: plain.cpus() == self.pool - self.held(),
                interval=_INTERVAL,
            )
            uid = pod.claim_uid
        wait_for("the release", lambda: not self.stage.held(uid), interval=_INTERVAL)
