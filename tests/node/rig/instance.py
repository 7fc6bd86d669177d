# SPDX-License-Identifier: Apache-2.0
"""One pod of the DaemonSet as tests use it: a frontend and a backend, each a container that can be killed."""

import http.client
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.node.rig.driver_pod import DriverPod
from tests.node.rig.figures import HookTimes
from tests.node.rig.wait import until
from tests.stage.wires import AnsweredError, ask_unix

RUN_DIRECTORY = Path("/run/dra-driver-numa")
STARTING = 90.0  # seconds: two interpreters that import gRPC and FastAPI on emulated CPUs, with neighbours
_UNREACHABLE = (AnsweredError, OSError, http.client.HTTPException)


class Instance:
    """Both containers of one pod; building it starts nothing."""

    def __init__(self, pod: DriverPod, times: HookTimes) -> None:
        self.pod = pod
        self.pod_uid = pod.uid
        self.backend = pod.backend
        self.frontend = pod.frontend
        self._times = times
        self._killed = ""

    def start(self) -> "Instance":
        """Starts what does not run, in the order of the pod."""
        for service in self.pod.containers.values():
            if not service.alive:
                service.start()
        return self

    def wait_ready(self, within: float = STARTING) -> "Instance":
        """Until the kubelet would call it ready; an instance of which something has died is none."""
        why = ""

        def ready() -> bool:
            nonlocal why
            why = self.unready()
            for service in (self.backend, self.frontend):
                if not service.alive:
                    raise AssertionError(f"{service.name} has ended:\n{service.log()[-2000:]}")
            return not why

        try:
            until(ready, "the instance is ready", within, every=0.5)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {why}") from None
        return self

    def unready(self) -> str:
        """Why a probe of a container fails, or a claim would not be prepared now; "" if neither is the case."""
        try:
            for container in self.pod.containers.values():
                for kind in ("startup", "readiness"):
                    if why := container.probe(kind):
                        return f"{container.name}: {kind}: {why}"
            return str(self.state("/v1/backend")["problem"])
        except _UNREACHABLE as error:
            return str(error) or type(error).__name__

    def state(self, path: str) -> Any:
        """A GET on its own state socket."""
        return ask_unix(RUN_DIRECTORY / self.pod_uid / "state.sock", path)

    @property
    def status(self) -> dict[str, Any]:
        """The backend's lease as this frontend has it; empty without one, or if it is that of a backend we killed."""
        try:
            answer = self.state("/v1/backend")
        except _UNREACHABLE:
            return {}
        lease = dict(answer["status"] or {}) if answer["live"] else {}
        return {} if lease.get("instance") == self._killed else lease

    def lease(self) -> dict[str, Any]:
        """The backend's lease, waited for: on emulated CPUs one may end between two looks."""
        return until(lambda: self.status, "a live lease")

    @property
    def active(self) -> bool:
        """Whether its backend holds the lock and enforces."""
        return bool(self.status.get("active"))

    def held(self) -> dict[str, frozenset[int]]:
        """The CPUs of each claim, by its UID, as the state endpoint shows them."""
        found: dict[str, set[int]] = {}
        for cpu in self.state("/v1/cpus"):
            if uid := cpu.get("claimUid"):
                found.setdefault(uid, set()).add(cpu["cpu"])
        return {uid: frozenset(cpus) for uid, cpus in found.items()}

    def counter(self, name: str) -> float:
        """One of the counters in the backend's lease, e.g. repaired_cpus; 0 before the first."""
        return float((self.lease().get("counters") or {}).get(name, 0))

    def wait_audited(self) -> None:
        """Until it has looked at everybody once more; before that a claim's start may be put off."""
        before = self.counter("audits")
        until(lambda: self.counter("audits") > before, "an audit", every=0.25)

    def kill_backend(self) -> None:
        """SIGKILL; what it has measured is kept. Its lease outlives it by up to ten seconds."""
        self.note_times()
        self._note_killed()
        self.backend.kill()

    def stop_backend(self) -> int:
        """SIGTERM; the exit status. Its lease outlives it as that of one that was killed."""
        self.note_times()
        self._note_killed()
        return self.backend.stop()

    def _note_killed(self) -> None:
        # Of the lease itself: one that is not live just now may be, by a report on its way.
        with suppress(*_UNREACHABLE):
            self._killed = str((self.state("/v1/backend")["status"] or {}).get("instance", ""))

    def note_times(self) -> None:
        """Adds what the backend has measured since its start, as told two seconds ago, to the times of all hooks."""
        if self.backend.alive:
            with suppress(*_UNREACHABLE):
                self._times.add(self.state("/metrics"))
