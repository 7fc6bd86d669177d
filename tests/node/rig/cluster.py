# SPDX-License-Identifier: Apache-2.0
"""The cluster components around the node: the API server, the scheduler, the kubelet's DRA part, and the driver's
pods.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from numa_contract.cpuset import format_cpu_list

from tests.fakes.scheduler import allocate, schedule
from tests.node.rig import figures, kernel
from tests.node.rig.claims import ClaimOptions, ClaimPod
from tests.node.rig.driver_pod import DriverPod
from tests.node.rig.figures import HookTimes
from tests.node.rig.instance import Instance
from tests.node.rig.kubelet_pod import Document
from tests.node.rig.node import Node
from tests.node.rig.pod_cgroups import Qos
from tests.node.rig.removal import without
from tests.node.rig.services import Services
from tests.node.rig.wait import until
from tests.stage.wires import ask_http, ask_line

NODE_NAME = "node-a"
RESERVED = frozenset({0, 1})  # a whole core on NUMA node 0
DRIVERS = ("dra.cpu", "dra.memory")
_SOURCE = Path(__file__).parents[3]
_DEVICE_CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_KUBELET_ROOT = Path("/var/lib/kubelet")
_CHECKPOINT = _KUBELET_ROOT / "dra_manager_state"
_ACCESS = Path("/run/node-test")
_KUBECONFIG, _PORT, _CONTROL = (_ACCESS / name for name in ("kubeconfig", "port", "kubelet.sock"))
_ADDRESS = "10.0.2.15"
"""Address at which pods reach the machine from their network."""
_RENDERER = os.environ.get("CHART", "")
"""Address of the server that renders the chart (vm/chart.py); run.sh starts it."""
_USUAL: dict[str, Any] = {
    "kubeconfig": str(_KUBECONFIG),
    "reservedCPUs": format_cpu_list(RESERVED),
    "cpuExclusivity": os.environ.get("EXCLUSIVITY", "auto"),
    # The check for uncorrected errors is disabled, because a page that a test has poisoned is not restored and would
    # cause taints in later tests.
    "hardwareErrors": {"uncorrected": 0},
    # Only ``min`` keeps a working set in memory under any pressure. On a small machine, claims for ``min`` may
    # need nearly all of the memory, so maxFraction does not limit them.
    "memoryProtection": {"allowed": ["low", "min"], "maxFraction": 1.0},
}
"""The driverConfig of tests that do not request another one."""
T = TypeVar("T")


def _unusual(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that differ from the usual ones."""
    return {key: value for key, value in settings.items() if value != _USUAL.get(key)}


def chart_values(settings: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the chart's values: `settings` contains keys of driverConfig, where None omits a key; `values` contains
    all other values.

    The pod gets a kubeconfig in a volume, since the fake API server is not an in-cluster Service.
    """
    config = {key: value for key, value in {**_USUAL, **settings}.items() if value is not None}
    mount = {"name": "access", "mountPath": str(_ACCESS), "readOnly": True}
    return {
        "driverConfig": config,
        "frontend": {"extraVolumeMounts": [mount]},
        "extraVolumes": [{"name": "access", "hostPath": {"path": str(_ACCESS)}}],
        **values,
    }


class Cluster:
    """Fakes and one instance of the driver, shared by many tests; a test can start more instances."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.services = Services("cluster")
        self.times = HookTimes()
        self.instances: list[Instance] = []
        self._pods: list[ClaimPod] = []
        self._threads = ThreadPoolExecutor(4)
        self._made = 0
        self._server = ""
        self._chart: tuple[dict[str, Any], dict[str, Any], str] = ({}, {}, "")
        self.objects: list[Document] = []
        """Objects that the chart renders with the current values."""
        self._classes: set[str] = set()

    def start(self, settings: Mapping[str, Any], values: Mapping[str, Any], *, lacking: str = "") -> None:
        """Starts everything from scratch and waits until the node can prepare claims; arguments are those of
        configure().
        """
        began = time.monotonic()
        _KUBECONFIG.parent.mkdir(exist_ok=True)
        _KUBELET_ROOT.mkdir(exist_ok=True)
        # If a cluster could not be cleaned up, its kubelet's checkpoint contains claims that no longer exist.
        for left in (_PORT, _CONTROL, _CHECKPOINT):
            left.unlink(missing_ok=True)
        self._render(_unusual(settings), values, lacking)
        access = ("--port-file", str(_PORT), "--kubeconfig-out", str(_KUBECONFIG), "--node", NODE_NAME)
        self._stand_in("apiserver", *access, "--address", _ADDRESS)
        # Polling twenty times a second would take half of an emulated CPU.
        kubelet = ("--root", str(_KUBELET_ROOT), "--control", str(_CONTROL), "--poll-seconds", "0.5")
        self._stand_in("kubelet", *kubelet)
        instance = self.add_instance()
        sandbox = self.in_background(lambda: instance.pod.sandbox)
        self._wait_served("apiserver", _PORT)
        self._server = f"http://{_ADDRESS}:{_PORT.read_text()}"
        self._install_classes()
        self._wait_served("kubelet", _CONTROL)
        sandbox.result()
        self.wait_ready()
        figures.note("start of fakes and services", f"{time.monotonic() - began:.1f} s")

    def configure(
        self, settings: Mapping[str, Any], values: Mapping[str, Any] | None = None, *, lacking: str = ""
    ) -> None:
        """Replaces the driver's pod with one that has these chart values, unless it already has them; arguments are
        those of chart_values().

        The old pod is removed first, as with maxSurge 0. `lacking` names a capability or mount to remove from the
        rendered pod (removal.py).
        """
        if self.replace_pod(settings, values, lacking=lacking):
            self.wait_ready()

    def replace_pod(
        self, settings: Mapping[str, Any], values: Mapping[str, Any] | None = None, *, lacking: str = ""
    ) -> bool:
        """Replaces the pod as configure() does, but without starting the new one. Returns False if the current pod
        already has the values.
        """
        wanted = _unusual(settings)
        if (wanted, dict(values or {}), lacking) == self._chart:
            return False
        former = self.instances.pop(0)
        former.note_times()
        former.frontend.stop()
        former.backend.stop()
        former.pod.remove()
        self._render(wanted, values or {}, lacking)
        self._install_classes()
        self.instances.insert(0, self._make_instance())
        return True

    def _render(self, settings: Mapping[str, Any], values: Mapping[str, Any], lacking: str = "") -> None:
        rendered = ask_http(_RENDERER, "/", "POST", chart_values(settings, values))
        self.objects = without(rendered, lacking) if lacking else rendered
        self._chart = (dict(settings), dict(values), lacking)

    def _install_classes(self) -> None:
        """Replaces the DeviceClasses in the API server with those that the chart renders; other drivers' classes are
        kept.
        """
        rendered = {one["metadata"]["name"]: one for one in self.objects if one["kind"] == "DeviceClass"}
        for name in self._classes - rendered.keys():
            self.api(f"{_DEVICE_CLASSES}/{name}", "DELETE")
        for name in rendered.keys() - self._classes:
            self.api(_DEVICE_CLASSES, "POST", rendered[name])
        self._classes = set(rendered)

    @property
    def server(self) -> str:
        """Returns the API server's base URL."""
        return self._server

    @property
    def exclusivity(self) -> str:
        """Returns the active value of cpuExclusivity."""
        return str(self._chart[0].get("cpuExclusivity", _USUAL["cpuExclusivity"]))

    def _stand_in(self, name: str, *arguments: str) -> None:
        self.services.module(name, f"tests.fakes.{name}", *arguments, env={"PYTHONPATH": str(_SOURCE)}).start()

    def _wait_served(self, name: str, sign: Path) -> None:
        service = self.services[name]
        until(lambda: sign.exists() or not service.alive, f"{name} serves", within=60)
        if not service.alive:
            raise AssertionError(f"{name} has ended:\n{service.log()[-2000:]}")

    def close(self) -> None:
        """Records the measurements and kills everything."""
        try:
            for instance in self.instances:
                instance.note_times()
            self.times.note()
            self._note_calls()
        finally:
            for instance in self.instances:
                instance.pod.remove()
            self._threads.shutdown(cancel_futures=True)
            self.services.__exit__()

    def _note_calls(self) -> None:
        calls = self.kubelet("calls")
        for method in sorted({call["method"] for call in calls}):
            seconds = sorted(call["seconds"] for call in calls if call["method"] == method)
            worst = seconds[min(len(seconds) - 1, int(0.99 * len(seconds)))]
            median = statistics.median(seconds)
            figures.note(method, f"{len(seconds)} calls, median {1000 * median:.0f} ms, p99 {1000 * worst:.0f} ms")

    @property
    def instance(self) -> Instance:
        """Returns the first instance."""
        return self.instances[0]

    def add_instance(self) -> Instance:
        """Creates one more pod of the DaemonSet without starting it."""
        made = self._make_instance()
        self.instances.append(made)
        return made

    def _make_instance(self) -> Instance:
        return Instance(DriverPod(self.node, self.objects, NODE_NAME), self.times)

    def logs(self) -> dict[str, str]:
        """Returns the end of every log, for the report on a failed test."""
        halves = [half for one in self.instances for half in one.pod.containers.values()]
        return self.services.logs() | {f"{half.name} of {half.pod_name}": half.log()[-4000:] for half in halves}

    def wait_ready(self) -> Instance:
        """Starts the missing parts of the first instance, and returns the instance once it is enforcing claims, serving
        requests and registered.
        """
        instance = self.instance.start().wait_ready()
        until(lambda: instance.active and instance.status.get("synchronized"), "the backend enforces", within=60)
        until(lambda: instance.counter("audits") > 0, "the backend has audited all containers", within=60)
        until(lambda: all(map(self._registered, DRIVERS)), "both drivers are registered", within=60)
        return instance

    def _registered(self, driver: str) -> bool:
        endpoints = self.kubelet("status")["endpoints"]
        return any(one["driver"] == driver and one["connected"] for one in endpoints)

    def kubelet_calls(self, instance: Instance) -> bool:
        """Returns True if the kubelet would call this instance to prepare claims for both drivers."""
        newest = {one["driver"]: one for one in self.kubelet("status")["endpoints"] if one["connected"]}
        return newest.keys() == set(DRIVERS) and all(instance.pod_uid in one["path"] for one in newest.values())

    def api(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """Sends a request to the API server. Raises AnsweredError for status 400 and above."""
        return ask_http(self._server, path, method, body)

    def kubelet(self, call: str, **args: Any) -> Any:
        """Calls the fake kubelet (tests/fakes/kubelet.py). Raises AnsweredError."""
        return ask_line(_CONTROL, call, **args)

    def in_background(self, work: Callable[[], T]) -> "Future[T]":
        """Starts a long operation in the background."""
        return self._threads.submit(work)

    def claim(
        self, name: str, options: ClaimOptions, pod: Mapping[str, str], *, overcommit: bool = False
    ) -> dict[str, Any]:
        """Returns a claim that is allocated by the scheduler and reserved for a pod (`name`, `uid`).

        With `overcommit` the scheduler ignores every other claim.
        """
        document = self.api(_CLAIMS, "POST", {"metadata": {"name": name}, "spec": options.spec()})
        if not overcommit:
            return dict(schedule(self._server, "default", name, pods=[dict(pod)], node=NODE_NAME))
        slices = self.api("/apis/resource.k8s.io/v1/resourceslices")["items"]
        classes = {one["metadata"]["name"]: one for one in self.api(_DEVICE_CLASSES)["items"]}
        allocated = allocate(document, slices, classes, pods=[dict(pod)], node=NODE_NAME)
        return dict(self.api(f"{_CLAIMS}/{name}/status", "PUT", allocated))

    def delete_claim(self, name: str) -> None:
        """Deletes a claim as its controller does once the pod is gone."""
        self.api(f"{_CLAIMS}/{name}", "DELETE")

    def pod(
        self,
        *requests: Mapping[str, Any],
        prepare: bool = True,
        overcommit: bool = False,
        qos: Qos = "burstable",
        **options: Any,
    ) -> ClaimPod:
        """Returns a pod with one claim, prepared by default; its sandbox is being created. `wish` contains the fields
        of Wish.
        """
        return self.pod_of(ClaimOptions(requests, **options), prepare=prepare, overcommit=overcommit, qos=qos)

    def pod_of(
        self, *claim_options: ClaimOptions, prepare: bool = True, overcommit: bool = False, qos: Qos = "burstable"
    ) -> ClaimPod:
        """Returns a pod as pod() does, with several claims that are all used by every container."""
        self._made += 1
        pod = ClaimPod(self, f"pod-{self._made}", claim_options, qos=qos, overcommit=overcommit)
        self._pods.append(pod)
        if prepare:
            pod.prepare()
        return pod

    def idle_node(self) -> Node:
        """Waits until no sandbox is being created, and returns the node. Restarting the runtime would interrupt the
        creation of a sandbox.
        """
        for pod in self._pods:
            pod.settle()
        return self.node

    def devices(self) -> dict[str, Any]:
        """Returns the published devices by name."""
        slices = self.api("/apis/resource.k8s.io/v1/resourceslices")["items"]
        return {device["name"]: device for one in slices for device in one["spec"].get("devices") or []}

    def clean(self) -> None:
        """Removes every pod and its claims, as the kubelet does. Afterwards, exactly one of the driver's pods is
        running.
        """
        for extra in self.instances[1:]:
            extra.note_times()
            extra.pod.remove()
        del self.instances[1:]
        self.instance.start()
        list(self._threads.map(ClaimPod.remove_sandbox, self._pods))
        self.node.remove_pods()
        self.wait_ready()
        for pod in self._pods:
            pod.end()
        self._pods.clear()
        # If a partition does not end with its cgroup, its CPUs are lost until a reboot (docs/adr/0029).
        until(
            lambda: kernel.Cgroup("/").cpus() == kernel.online_cpus(),
            "the root's effective set contains all CPUs again",
        )
