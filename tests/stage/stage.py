# SPDX-License-Identifier: Apache-2.0
"""A node made of processes: fakes of the API server, the kubelet and the runtime, and the services under test.

Nothing here requires root. All files are in one temporary directory, which is always removed at the end of the block.
"""

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.fakes.waiting import PATIENCE
from tests.stage.process import Process, StageError, compile_sources, python, wait_for
from tests.stage.settings import Paths, StageSettings, fill_in
from tests.stage.wires import AnsweredError, ask_http, ask_line, ask_unix

# Maximum length of the base directory's path: the 107 bytes of a socket path minus the longest name under the base,
# which is that of a registration socket with a pod UID.
_MAX_BASE_LENGTH = 25
_READY_SECONDS = 15.0


@dataclass(frozen=True, slots=True)
class Instance:
    """One pod of the DaemonSet: a frontend, a backend or both."""

    pod_uid: str
    state_socket: Path
    programs: Mapping[str, Process] = field(default_factory=dict)
    """The pod's processes, keyed by ``frontend`` and ``backend``. A pod may contain only one of them."""

    @property
    def frontend(self) -> Process:
        """Returns the frontend."""
        return self.programs["frontend"]

    @property
    def backend(self) -> Process:
        """Returns the backend."""
        return self.programs["backend"]

    @property
    def processes(self) -> list[Process]:
        """Returns the pod's processes: the frontend, the backend or both."""
        return list(self.programs.values())


def _make_base(in_memory: bool) -> Path:
    memory = ("/dev/shm",) if in_memory and os.access("/dev/shm", os.W_OK) else ()
    for directory in (*memory, tempfile.gettempdir(), "/tmp"):
        if len(directory) + len("/dn-12345678") <= _MAX_BASE_LENGTH:
            return Path(tempfile.mkdtemp(prefix="dn-", dir=directory))
    raise AssertionError("no temporary directory has a path that is short enough")


class Stage:
    """A stage, used as a context manager. Entering the block starts the fakes; :meth:`add_instance` starts a driver."""

    def __init__(self, settings: StageSettings | None = None) -> None:
        self.settings = settings or StageSettings()
        self.instances: list[Instance] = []
        self.stand_ins: list[Process] = []
        self._killed: set[str] = set()
        self.server = ""
        """Base URL of the API server."""

    def __enter__(self) -> Self:
        compile_sources()
        self.paths = self._make_paths()
        try:
            self._start_stand_ins()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            _end(self.processes)
            _end(self.stand_ins)
        finally:
            for process in (*self.processes, *self.stand_ins):
                process.kill()
            shutil.rmtree(self.paths.base, ignore_errors=True)

    @property
    def processes(self) -> list[Process]:
        """Returns the processes under test, from all instances."""
        return [process for instance in self.instances for process in instance.processes]

    def _make_paths(self) -> Paths:
        return Paths.below(_make_base(self.settings.in_memory))

    def _start_stand_ins(self) -> None:
        paths, settings = self.paths, self.settings
        for directory in (paths.logs, paths.cdi_dir, paths.kubelet_root):
            directory.mkdir(exist_ok=True)
        gates = [word for gate in settings.gates_off for word in ("--gate-off", gate)]
        gates += [word for gate in settings.gates_on for word in ("--gate-on", gate)]
        self._stand_in(
            "apiserver",
            *("--port-file", paths.port, "--kubeconfig-out", paths.kubeconfig, "--node", settings.node, *gates),
            *("--version", settings.kubernetes, "--node-socket", paths.node_socket),
        )
        self._stand_in("kubelet", "--root", paths.kubelet_root, "--control", paths.kubelet_control)
        self._stand_in(
            "runtime",
            *("--socket", paths.nri_socket, "--control", paths.runtime_control, "--level", settings.nri_level),
            *("--cdi-dirs", paths.cdi_dir, "--cgroup-root", paths.cgroup_root),
            *("--cgroup-driver", settings.cgroup_driver, "--request-seconds", settings.request_seconds * PATIENCE),
            *(("--partitions",) if settings.partitions else ()),
            *(("--hugepage-sizes", *sizes) if (sizes := settings.hugepage_sizes()) else ()),
            *("--machine-cpus", settings.machine_cpus(), "--machine-mems", settings.machine_mems()),
        )
        for process, sign in zip(
            self.stand_ins, (paths.port, paths.kubelet_control, paths.runtime_control), strict=True
        ):
            self._wait_alive(f"{process.name} to serve", [process], sign.exists)
        self.server = f"http://127.0.0.1:{paths.port.read_text()}"
        for name, expression in settings.classes.items():
            document = {"metadata": {"name": name}, "spec": {"selectors": [{"cel": {"expression": expression}}]}}
            self.api("/apis/resource.k8s.io/v1/deviceclasses", "POST", document)
        self._write_config()

    def _stand_in(self, name: str, *arguments: object) -> None:
        command = python("-m", f"tests.fakes.{name}", *map(str, arguments))
        self.stand_ins.append(Process(name, command, self.paths.logs / name, {}))
        self.stand_ins[-1].start()

    def _write_config(self) -> None:
        paths = self.paths
        values = {
            "kubeconfig": paths.kubeconfig,
            "cdiDir": paths.cdi_dir,
            "runDir": paths.run_dir,
            "kubeletRootDir": paths.kubelet_root,
            "nriSocket": paths.nri_socket,
            "cgroupRoot": paths.cgroup_root,
            "reservedCPUs": self.settings.reserved_cpus,
        }
        # JSON is valid YAML.
        document = {key: str(value) for key, value in values.items()} | dict(self.settings.config)
        paths.config.write_text(json.dumps(document, indent=1) + "\n")

    def add_instance(self) -> Instance:
        """Starts one more pod of the DaemonSet without waiting for it."""
        uid = str(uuid.uuid4())
        environment = {"NODE_NAME": self.settings.node, "POD_UID": uid, "KUBECONFIG": str(self.paths.kubeconfig)}
        environment |= self.settings.environment
        made = {}
        for name, template in (("frontend", self.settings.frontend), ("backend", self.settings.backend)):
            log = self.paths.logs / f"{name}-{len(self.instances)}"
            if template:
                command = fill_in(template, self.settings, self.paths, uid)
                made[name] = Process(log.name, command, log, environment)
        instance = Instance(uid, self.paths.run_dir / uid / "state.sock", made)
        self.instances.append(instance)
        for process in instance.processes:
            process.start()
        return instance

    def add_ready_instance(self) -> Instance:
        """Starts one more pod of the DaemonSet and waits until the kubelet has registered it and it is ready."""
        instance = self.add_instance()
        self.wait_registered()
        self.wait_ready(instance)
        return instance

    def wait_registered(self) -> None:
        """Waits until every driver is registered and connected."""
        for driver in self.settings.drivers:
            self._wait_alive(f"{driver} to register", self.processes, lambda driver=driver: self._registered(driver))

    def wait_ready_again(self, instance: Instance) -> None:
        """Waits until the only instance is registered, connected and ready again."""
        self.wait_registered()
        self.runtime("wait_plugins", count=1)
        self.wait_ready(instance)

    def wait_ready(self, instance: Instance) -> None:
        """Waits until an instance reports on its state socket that it is ready."""
        try:
            self._wait_alive("readiness", instance.processes, lambda: not self.unready(instance))
        except StageError as error:
            raise StageError(f"{error}\nnot ready: {self.unready(instance)}") from error

    def unready(self, instance: Instance) -> str:
        """Returns the reason why an instance is not ready, or '' if the instance is ready."""
        try:
            ask_unix(instance.state_socket, "/readyz")
            # The pod stays ready for a while despite a problem, whereas the backend's state shows the problem
            # immediately.
            backend = self.state("/v1/backend", instance)
        except (AnsweredError, OSError) as error:
            return str(error)
        if backend["status"] and backend["status"]["instance"] in self._killed:
            return "the lease belongs to a killed backend"
        return str(backend["problem"])

    def kill_backend(self, instance: Instance) -> None:
        """Kills the backend and returns once the runtime has dropped the plugin.

        The killed backend's lease remains valid for up to 10 s but is ignored, so the instance counts as ready again
        only after the next backend has reported.
        """
        with suppress(AnsweredError, OSError):
            self._killed.add(self._lessee(instance))
        before = len(self.runtime("plugins")["active"])
        instance.backend.kill()
        wait_for("the runtime to drop the plugin", lambda: len(self.runtime("plugins")["active"]) < max(before, 1))

    def _lessee(self, instance: Instance) -> str:
        lease = self.state("/v1/backend", instance)["status"]
        return str(lease["instance"]) if lease else ""

    def _registered(self, driver: str) -> bool:
        return any(one["driver"] == driver and one["connected"] for one in self.kubelet("status")["endpoints"])

    def _wait_alive(self, what: str, processes: Sequence[Process], condition: Any) -> None:
        def happened() -> bool:
            for process in processes:
                process.check()
            return bool(condition())

        try:
            wait_for(what, happened, _READY_SECONDS)
        except StageError as error:
            raise StageError("\n".join([str(error), *(process.tail() for process in processes)])) from None

    def api(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """Sends a request to the API server. Raises AnsweredError for status 400 and above."""
        return ask_http(self.server, path, method, body)

    def slices(self) -> list[dict[str, Any]]:
        """Returns the published slices."""
        found: list[dict[str, Any]] = self.api("/apis/resource.k8s.io/v1/resourceslices")["items"]
        return found

    def events(self, reason: str = "") -> list[dict[str, Any]]:
        """Returns the Events created so far, optionally only those with a given reason. The Events about pods and those
        about the node are in the same namespace.
        """
        events = self.api("/apis/events.k8s.io/v1/namespaces/default/events")["items"]
        return [event for event in events if reason in ("", event["reason"])]

    def kubelet(self, call: str, **args: Any) -> Any:
        """Calls the kubelet; see tests/fakes/kubelet.py."""
        return ask_line(self.paths.kubelet_control, call, **args)

    def runtime(self, call: str, **args: Any) -> Any:
        """Calls the runtime; see tests/fakes/runtime_control.py."""
        return ask_line(self.paths.runtime_control, call, **args)

    def logs(self) -> str:
        """Returns the last lines of all logs."""
        return "\n".join(process.tail() for process in (*self.stand_ins, *self.processes))

    def state(self, path: str, instance: Instance | None = None) -> Any:
        """Sends a GET to the state socket of an instance, by default the active one."""
        return ask_unix(instance.state_socket if instance else self.paths.run_dir / "state.sock", path)

    def held(self, claim_uid: str) -> set[int]:
        """Returns the CPUs that the state endpoint shows as held by a claim."""
        return {cpu["cpu"] for cpu in self.state("/v1/cpus") if cpu.get("claimUid") == claim_uid}


OpenStage = Callable[..., Stage]
"""Type of the fixtures that open a stage with the given fields of StageSettings. The fixture closes the stage at the
end of the test or the module.
"""


def _end(processes: Sequence[Process]) -> None:
    """Ends processes: asks all of them to stop before it waits for any, then kills those that do not exit."""
    for process in processes:
        process.ask_to_stop()
    for process in processes:
        with suppress(StageError):
            process.wait()
