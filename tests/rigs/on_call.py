# SPDX-License-Identifier: Apache-2.0
"""Nodes with the faults in docs/symptoms.md, and the real output of the commands that the page shows for each.

``python -m tests.rigs.on_call`` prints all of it, to be copied into the page.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.fakes.waiting import PATIENCE
from tests.rigs.trees import captured, write_tree
from tests.stage.machine import HostDirectory
from tests.stage.pods import StagePod, claim_pod, cpus, delete_claim, memory, opaque
from tests.stage.process import ROOT, wait_for
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError

_CLAIMS: Final = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_PODS: Final = "/api/v1/namespaces/default/pods"
_MACHINE: Final = "32intel64-2p8co2t+8ve"
_UNSCHEDULABLE: Final = "0/1 nodes are available: 1 cannot allocate all claims."
_PAGES: Final = "total=0 N0=0 N1=0\n"
_NUMA: Final = "import sys; from kubectl_numa.cli import run; sys.exit(run(sys.argv[2:], sys.argv[1]))"
_EITHER: Final = {
    "dra.memory claim": "dra.cpu claim",
    "DRAMEMORY_UID_NUMANodes": "DRA_CPUSET_UID",
    "names dra.memory": "names dra.cpu",
}
"""Messages about a memory claim that may appear instead of those about a CPU claim."""
_UID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def plain(text: str) -> str:
    """Normalizes output for comparison: joins folded lines, and replaces UIDs and ages with placeholders.

    Messages about a memory claim are replaced with those about a CPU claim, because the order of files in a directory
    determines which of the two a command reports first.
    """
    text = re.sub(r"not reported for \d+ s", "not reported for N s", _UID.sub("UID", text))
    for named, equivalent in _EITHER.items():
        text = text.replace(named, equivalent)
    return " ".join(text.split())


@dataclass(slots=True)
class Outputs:
    """The outputs of commands that an operator runs on nodes with faults."""

    directory: Path
    shown: dict[str, str] = field(default_factory=dict)
    """Outputs, keyed by ``fault: command``."""

    def run(self) -> None:
        """Causes each fault and stores the outputs."""
        root = write_tree(captured(_MACHINE), self.directory / "machine")
        HostDirectory(root).copy_boot_id()
        kubectl = self.directory / "kubectl"
        kubectl.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m tests.fakes.kubectl "$@"\n')
        kubectl.chmod(0o755)
        with Stage(StageSettings(host_root=root, partitions=True, reserved_cpus="0,16")) as stage:
            self._claims(_Node(stage, kubectl, self.shown))
        with Stage(StageSettings(host_root=root, reserved_cpus="0,16")) as stage:
            self._node(_Node(stage, kubectl, self.shown))

    def _claims(self, node: "_Node") -> None:
        """Causes faults in claims and pods, on a healthy node."""
        node.start()
        db = node.healthy()
        node.pending()
        node.second_pod(db)
        node.static_manager()
        node.damaged_file()
        node.still_running(db)
        node.no_whole_cores()
        node.no_cpus_left()

    def _node(self, node: "_Node") -> None:
        """Causes faults on the node, one after another. An earlier fault need not be repaired, because a later one
        hides it.
        """
        node.start()
        node.no_partitions()
        node.gate_off()
        node.no_runtime()
        node.no_backend()
        node.no_service()


@dataclass(slots=True)
class _Node:
    """A node whose components run as processes, and the commands that are run on it."""

    stage: Stage
    kubectl: Path
    shown: dict[str, str]

    def start(self) -> None:
        """Starts the driver. The pods' cgroup has the files that a kernel would create there."""
        group = self.stage.paths.cgroup_root / "kubepods.slice"
        group.mkdir(parents=True, exist_ok=True)
        for size in self.stage.settings.hugepage_sizes():
            (group / f"hugetlb.{size}.numa_stat").write_text(_PAGES)
        self.stage.add_ready_instance()
        wait_for("no warning", lambda: "HostHugepagesUnknown" not in self._codes(), 30.0)

    def healthy(self) -> StagePod:
        """Prepares a claim for CPUs and memory, and starts a container that uses it."""
        db = claim_pod(self.stage, "db", cpus(4), memory(512 << 20))
        db.prepare()
        self._create(db)
        db.run().wait_for_cpus(self.stage.held(db.claim_uid))
        claim = f"{_CLAIMS}/db-claim"
        wait_for("the status", lambda: "Exclusive" in str(self.stage.api(claim)["status"].get("devices")), 40.0)
        self._driver("healthy", "status")
        for command in ("free", "claims", "explain db"):
            self._numa("healthy", command)
        return db

    def pending(self) -> None:
        """Creates a claim for more CPUs than any device has."""
        document = {"metadata": {"name": "greedy"}, "spec": {"devices": {"requests": [cpus(20)]}}}
        pod = StagePod(self.stage, "greedy", self.stage.api(_CLAIMS, "POST", document))
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": _UNSCHEDULABLE}
        self._create(pod, {"conditions": [condition]}, node="")
        self._numa("pending", "explain greedy")

    def second_pod(self, first: StagePod) -> None:
        """Starts a pod that uses another pod's claim."""
        second = StagePod(self.stage, "web", self._reserve(first))
        second.claim = self._reserve(first, second)
        second.prepare()
        text = wait_for("a refusal", lambda: _after(_error(second.create), "belongs to"), 30.0)
        message = f"failed to create: NRI: rpc error: {text.partition('plugin 00-dra-driver-numa: ')[2]}"
        failed = {"reason": "CreateContainerError", "message": message}
        self._create(second, {"containerStatuses": [{"name": "app", "state": {"waiting": failed}}]})
        self._has("ContainerRefused")
        self._driver("second pod", "status")
        self._numa("second pod", "explain web")
        self.stage.runtime("remove_pod", pod=second.sandbox["id"])
        second.unprepare()
        self._reserve(first)

    def static_manager(self) -> None:
        """Configures the kubelet to pin CPUs as well, in the configuration file that ``doctor`` reads."""
        file = self.stage.paths.kubelet_root / "config.yaml"
        file.write_text("cpuManagerPolicy: static\n")
        self._driver("static manager", "doctor")
        file.unlink()

    def damaged_file(self) -> None:
        """Creates an empty claim file for a claim that no longer exists."""
        uid = "f649aad3-8b18-425d-98fc-18129856ecfb"
        file = self.stage.paths.cdi_dir / f"dra.k8s.io-cpu_claim-{uid}.json"
        file.write_text("")
        self._has("ClaimFileUnusable")
        self._driver("damaged file", "status")
        file.unlink()

    def still_running(self, pod: StagePod) -> None:
        """Releases a claim while a container still uses it."""
        pod.unprepare()
        wait_for("held CPUs", lambda: any(one["use"] == "held" for one in self._cpus()), 30.0)
        self._driver("still running", "status")
        self.stage.runtime("remove_pod", pod=pod.sandbox["id"])
        delete_claim(self.stage, "db-claim")

    def no_whole_cores(self) -> None:
        """Prepares a claim for whole cores while enough CPUs are free, but too few whole cores."""
        spread = [opaque("dra.cpu", "cpuConfig", {"strategy": "spread"}, "cpus")]
        halves = [claim_pod(self.stage, f"half-{n}", cpus(1, numa_node=1), config=spread) for n in (1, 2)]
        for half in halves:
            half.prepare()
        whole = [opaque("dra.cpu", "cpuConfig", {"fullPhysicalCores": True}, "cpus")]
        odd = claim_pod(self.stage, "odd", cpus(14, numa_node=1), config=whole)
        self.shown["no whole cores: Event"] = _error(odd.prepare)
        delete_claim(self.stage, "odd-claim")
        for half in halves:
            half.end()

    def no_cpus_left(self) -> None:
        """Claims every CPU except the reserved ones."""
        pods = [claim_pod(self.stage, f"big-{n}", cpus(14 + 2 * n, numa_node=n)) for n in (0, 1)]
        for pod in pods:
            pod.prepare()
            pod.run()
        wait_for("devices", lambda: sum(one["claimed"] for one in self.stage.state("/v1/devices")) == 30, 30.0)
        self._driver("no CPUs left", "status")
        for pod in pods:
            pod.end()

    def no_partitions(self) -> None:
        """Runs the status command on a node whose kernel does not support partitions."""
        self._has("PartitionsUnavailable")
        self._driver("no partitions", "status")

    def gate_off(self) -> None:
        """Disables the feature gate and deletes the slices, as if the API server had restarted without the gate."""
        self.stage.api("/fake", "POST", {"gates": {"DRAConsumableCapacity": False}})
        for one in self.stage.slices():
            self.stage.api(f"/apis/resource.k8s.io/v1/resourceslices/{one['metadata']['name']}", "DELETE")
        self._has("FeatureGateMissing")
        self._driver("gate off", "status")
        self.stage.api("/fake", "POST", {"gates": {"DRAConsumableCapacity": True}})
        wait_for("slices", lambda: "FeatureGateMissing" not in self._codes(), 90.0)

    def no_runtime(self) -> None:
        """Kills the runtime, which to the driver looks as if NRI were disabled."""
        next(one for one in self.stage.stand_ins if one.name == "runtime").kill()
        self._has("BackendNotConnected")
        wait_for("unreadiness", lambda: not self.stage.state("/v1/status")["ready"], 30.0)
        self._driver("no runtime", "status")
        self._driver("no runtime", "doctor")
        new = claim_pod(self.stage, "new", cpus(2))
        self.shown["no runtime: Event"] = _error(new.prepare)

    def no_backend(self) -> None:
        """Kills the backend."""
        self.stage.instances[0].backend.kill()
        self._has("BackendSilent")
        self._driver("no backend", "status")

    def no_service(self) -> None:
        """Kills the frontend. The backend is not running either."""
        self.stage.instances[0].frontend.kill()
        self._driver("no service", "status")

    def _create(self, pod: StagePod, status: dict[str, Any] | None = None, node: str = "node-a") -> None:
        document = pod.document() | {"status": status or {}}
        document["spec"] |= {"nodeName": node} if node else {}
        self.stage.api(_PODS, "POST", document)

    def _reserve(self, *pods: StagePod) -> Any:
        path = f"{_CLAIMS}/db-claim"
        claim = self.stage.api(path)
        claim["status"]["reservedFor"] = [{"resource": "pods", **pod.reference} for pod in pods]
        return self.stage.api(f"{path}/status", "PUT", claim)

    def _cpus(self) -> Any:
        return self.stage.state("/v1/node")["cpus"]

    def _codes(self) -> set[str]:
        status = self.stage.state("/v1/status")
        return {one["code"] for one in (*status["problems"], *status["warnings"])}

    def _has(self, code: str) -> None:
        wait_for(code, lambda: code in self._codes(), 40.0)

    def _driver(self, fault: str, command: str) -> None:
        """Runs a command in the driver's pod."""
        stage = self.stage
        pod = {"NODE_NAME": stage.settings.node, "POD_UID": stage.instances[0].pod_uid}
        flags = ["--config", str(stage.paths.config), "--host-root", str(stage.settings.host_root)]
        self._run(fault, command, [sys.executable, "-m", "numa_tools", command, *flags], pod)

    def _numa(self, fault: str, command: str) -> None:
        """Runs one of the kubectl plugin's commands."""
        flags = ["--kubeconfig", str(self.stage.paths.kubeconfig)]
        words = [sys.executable, "-c", _NUMA, str(self.kubectl), *command.split(), *flags]
        # The plugin is not installed as a Python package, because users get it as a single file.
        paths = [str(ROOT / "services/kubectl-numa/src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._run(fault, command, words, {"PYTHONPATH": os.pathsep.join(paths)})

    def _run(self, fault: str, command: str, words: list[str], environment: dict[str, str]) -> None:
        done = subprocess.run(
            words, env=os.environ | environment, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
        )
        text = done.stdout + done.stderr
        for path, usual in self._places():
            text = text.replace(str(path), usual)
        self.shown[f"{fault}: {command}"] = text

    def _places(self) -> Iterator[tuple[Path, str]]:
        paths = self.stage.paths
        yield paths.cgroup_root, "/sys/fs/cgroup"
        yield paths.run_dir, "/run/dra-driver-numa"
        yield paths.kubelet_root, "/var/lib/kubelet"
        yield paths.cdi_dir, "/var/run/cdi"
        yield paths.nri_socket, "/var/run/nri/nri.sock"


def _error(call: Any) -> str:
    """Returns the error from a call that fails."""
    try:
        call()
    except AnsweredError as error:
        return str(error)
    return ""


def _after(text: str, part: str) -> str:
    return text if part in text else ""


@contextlib.contextmanager
def played() -> Iterator[dict[str, str]]:
    """Causes all faults and yields the outputs."""
    with tempfile.TemporaryDirectory() as directory:
        outputs = Outputs(Path(directory))
        outputs.run()
        yield outputs.shown


if __name__ == "__main__":
    with played() as outputs:
        for name, output in outputs.items():
            print(f"##### {name}\n{output}", flush=True)
