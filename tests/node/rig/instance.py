# SPDX-License-Identifier: Apache-2.0
"""One pod of the DaemonSet as tests use it: a frontend and a backend, each in a container that can be killed."""

import http.client
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.node.rig.driver_pod import DriverPod
from tests.node.rig.figures import HookTimes
from tests.node.rig.wait import until
from tests.stage.wires import AnsweredError, ask_unix

RUN_DIRECTORY = Path("/run/dra-driver-numa")
STARTING = 90.0  # seconds; two interpreters import gRPC and FastAPI on emulated CPUs, alongside other work
_UNREACHABLE = (AnsweredError, OSError, http.client.HTTPException)


class Instance:
    """Both containers of one pod. The constructor starts nothing."""

    def __init__(self, pod: DriverPod, times: HookTimes) -> None:
        self.pod = pod
        self.pod_uid = pod.uid
        self.backend = pod.backend
        self.frontend = pod.frontend
        self._times = times
        self._killed = ""

    def start(self) -> "Instance":
        """Starts the containers that are not running, in the order in which the pod lists them."""
        for service in self.pod.containers.values():
            if not service.alive:
                service.start()
        return self

    def wait_ready(self, within: float = STARTING) -> "Instance":
        """Waits until the kubelet would consider the pod ready. An instance with a dead process is not ready."""
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
        """Returns the reason why a container's probe fails or a claim would currently not be prepared, or ""."""
        try:
            for container in self.pod.containers.values():
                for kind in ("startup", "readiness"):
                    if why := container.probe(kind):
                        return f"{container.name}: {kind}: {why}"
            return str(self.state("/v1/backend")["problem"])
        except _UNREACHABLE as error:
            return str(error) or type(error).__name__

    def state(self, path: str) -> Any:
        """Sends a GET to the instance's own state socket."""
        return ask_unix(RUN_DIRECTORY / self.pod_uid / "state.sock", path)

    @property
    def status(self) -> dict[str, Any]:
        """Returns the backend's lease as this frontend knows it. Returns an empty one if the lease is missing, has
        expired, or belongs to a killed backend.
        """
        try:
            answer = self.state("/v1/backend")
        except _UNREACHABLE:
            return {}
        lease = dict(answer["status"] or {}) if answer["live"] else {}
        return {} if lease.get("instance") == self._killed else lease

    def lease(self) -> dict[str, Any]:
        """Waits for the backend's lease and returns it; on emulated CPUs a lease may expire between two checks."""
        return until(lambda: self.status, "the backend has a live lease")

    @property
    def active(self) -> bool:
        """Returns True if the instance's backend holds the lock and is enforcing claims."""
        return bool(self.status.get("active"))

    def held(self) -> dict[str, frozenset[int]]:
        """Returns the CPUs of each claim by UID, as the state endpoint shows them."""
        found: dict[str, set[int]] = {}
        for cpu in self.state("/v1/cpus"):
            if uid := cpu.get("claimUid"):
                found.setdefault(uid, set()).add(cpu["cpu"])
        return {uid: frozenset(cpus) for uid, cpus in found.items()}

    def counter(self, name: str) -> float:
        """Returns a counter from the backend's lease, such as repaired_cpus, or 0 before the first lease."""
        return float((self.lease().get("counters") or {}).get(name, 0))

    def wait_audited(self) -> None:
        """Waits for the next full audit; until then, the start of a claim container may be delayed."""
        before = self.counter("audits")
        until(lambda: self.counter("audits") > before, "the backend has audited all containers", every=0.25)

    def kill_backend(self) -> None:
        """Kills the backend with SIGKILL and keeps its measurements. Its lease outlives it by up to ten seconds."""
        self.note_times()
        self._note_killed()
        self.backend.kill()

    def stop_backend(self) -> int:
        """Stops the backend with SIGTERM and returns the exit status. Its lease outlives it, as after a kill."""
        self.note_times()
        self._note_killed()
        return self.backend.stop()

    def _note_killed(self) -> None:
        # The lease of a killed backend is recognized by its instance ID. Waiting for the lease to expire is not
        # sufficient, because a report that is still in transit may renew an expired lease.
        with suppress(*_UNREACHABLE):
            self._killed = str((self.state("/v1/backend")["status"] or {}).get("instance", ""))

    def note_times(self) -> None:
        """Adds the backend's measurements since its start, as last reported to the frontend, to the times of all
        hooks.
        """
        if self.backend.alive:
            with suppress(*_UNREACHABLE):
                self._times.add(self.state("/metrics"))
