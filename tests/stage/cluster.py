# SPDX-License-Identifier: Apache-2.0
"""Simulates the parts of a cluster that a stage lacks: creates the pod of the driver's DaemonSet, creates and allocates
the claims of other pods, runs these pods, and serves ``kubectl exec`` and the kubelet's metrics.

For the driver's DaemonSet, the stage runs the driver's own processes, with the arguments, environment and ConfigMap
from its pod template. The processes have no mounts, so the paths in the configuration are replaced by paths on the
stage. No pod is created for the DaemonSets of other drivers.
"""

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

import yaml

from tests.fakes.control import Calls, serve
from tests.fakes.scheduler import UnschedulableError, schedule
from tests.fakes.waiting import PATIENCE
from tests.stage.pods import Box, Document, StagePod
from tests.stage.process import ROOT, wait_for
from tests.stage.stage import Instance, Stage
from tests.stage.wires import AnsweredError

_PROGRAMS: Final = {"frontend": "numa_tools", "backend": "nri_backend"}
_COMMANDS = {"dra-frontend": "numa_tools", "nri-backend": "nri_backend"}
"""Python modules for the commands that the images contain."""
# Arguments that the stage omits or replaces, because they refer to the pod's mounts or to its port.
_MOUNT_OPTIONS: Final = ("--config=", "--bind-address=", "--kernel-root=")
_POLL_SECONDS: Final = 0.1


class Cluster:
    """A stage's cluster: a context manager for use inside the stage's ``with`` block. ``failures`` contains the errors
    of the cluster's controllers.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.failures: list[str] = []
        self._drivers: dict[str, Instance] = {}
        """Instances, by the DaemonSet's UID."""
        self._templates: dict[str, Document] = {}
        """Pod template of each instance, by the DaemonSet's UID."""
        self._pods: dict[str, tuple[StagePod, Box]] = {}
        """Pods with their containers, by the Pod's UID."""
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        self._places = yaml.safe_load(self.stage.paths.config.read_text())
        self._places.pop("reservedCPUs")
        self._threads = [
            threading.Thread(target=self._control, name="controllers"),
            threading.Thread(target=lambda: asyncio.run(self._serve()), name="exec"),
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _control(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            try:
                sets = {one["metadata"]["uid"]: one for one in self.stage.api("/apis/apps/v1/daemonsets")["items"]}
                for uid in self._drivers.keys() - sets.keys():
                    self._end(self._drivers.pop(uid), uid)
                    self._delete_slices()
                for one in sets.values():
                    self._roll_out(one)
                pods = {one["metadata"]["uid"]: one for one in self.stage.api("/api/v1/pods")["items"]}
                for uid in self._pods.keys() - pods.keys():
                    self._pods.pop(uid)[0].end()
                for uid, pod in pods.items():
                    if uid not in self._pods and "ownerReferences" not in pod["metadata"]:
                        self._pods[uid] = self._run(pod)
            except (AnsweredError, UnschedulableError, OSError) as error:
                self.failures.append(str(error))

    def _roll_out(self, one: Document) -> None:
        """Starts the driver's pod, or replaces it if the DaemonSet's template has changed. Updates the DaemonSet's
        status once the pod is ready.
        """
        metadata, template = one["metadata"], one["spec"]["template"]
        uid = metadata["uid"]
        if {box["name"] for box in template["spec"]["containers"]} != _PROGRAMS.keys():
            return
        if uid in self._drivers and self._templates[uid] != template:
            self._end(self._drivers.pop(uid), uid)
        if uid not in self._drivers:
            self._drivers[uid], self._templates[uid] = self._start(one), template
        observed = (one.get("status") or {}).get("observedGeneration")
        if observed != metadata["generation"] and not self.stage.unready(self._drivers[uid]):
            counts = ("desiredNumberScheduled", "updatedNumberScheduled", "numberAvailable", "numberReady")
            status = {"observedGeneration": metadata["generation"], **dict.fromkeys(counts, 1)}
            path = f"/apis/apps/v1/namespaces/{metadata['namespace']}/daemonsets/{metadata['name']}/status"
            self.stage.api(path, "PUT", one | {"status": status})

    def _end(self, instance: Instance, owner: str) -> None:
        for process in instance.processes:
            process.stop()
        for pod in self.stage.api("/api/v1/pods")["items"]:
            if any(one["uid"] == owner for one in pod["metadata"].get("ownerReferences", [])):
                path = f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"
                self.stage.api(path, "DELETE")

    def _delete_slices(self) -> None:
        """Deletes the node's ResourceSlices, as the kubelet does 30 s after a driver's last socket has disappeared."""
        for one in self.stage.slices():
            self.stage.api(f"/apis/resource.k8s.io/v1/resourceslices/{one['metadata']['name']}", "DELETE")

    def _start(self, one: Document) -> Instance:
        stage, template = self.stage, one["spec"]["template"]
        namespace, name = one["metadata"]["namespace"], one["metadata"]["name"]
        [config] = [volume["configMap"]["name"] for volume in template["spec"]["volumes"] if "configMap" in volume]
        data = stage.api(f"/api/v1/namespaces/{namespace}/configmaps/{config}")["data"]
        stage.paths.config.write_text(yaml.safe_dump(yaml.safe_load(data["config.yaml"]) | self._places))
        commands = {box["name"]: _command(box) for box in template["spec"]["containers"]}
        frontend, backend = commands["frontend"], commands["backend"]
        stage.settings = dataclasses.replace(stage.settings, frontend=frontend, backend=backend)
        instance = stage.add_instance()
        owner = {"kind": "DaemonSet", "name": name, "uid": one["metadata"]["uid"]}
        pod = {"generateName": f"{name}-", "labels": template["metadata"]["labels"], "ownerReferences": [owner]}
        spec = template["spec"] | {"nodeName": stage.settings.node}
        path = f"/api/v1/namespaces/{namespace}/pods"
        made = stage.api(path, "POST", {"metadata": pod, "spec": spec})
        stage.api(f"{path}/{made['metadata']['name']}/status", "PUT", made | {"status": {"phase": "Running"}})
        return instance

    def _run(self, pod: Document) -> tuple[StagePod, Box]:
        """Runs a pod with one container and at most one claim, as the controllers, the scheduler, the kubelet and the
        runtime would.
        """
        metadata = pod["metadata"]
        running = StagePod(self.stage, metadata["name"], uid=metadata["uid"], namespace=metadata["namespace"])
        status: Document = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
        for one in pod["spec"].get("resourceClaims", []):
            running.claim = self._claim(running, metadata["namespace"], one)
            made = {"name": one["name"], "resourceClaimName": running.claim["metadata"]["name"]}
            status["resourceClaimStatuses"] = [made]
        pod = pod | {"status": status}
        [box] = pod["spec"]["containers"]
        if running.claim:
            given = self.stage.kubelet("prepare", pod=pod, claims=[running.claim])
            running.cdi_ids = list(dict.fromkeys(given[box["name"]]))
        container = running.run(box["name"])
        if pod["spec"].get("restartPolicy") == "Never":
            ended = _in_container(container, [*box.get("command", []), *box.get("args", [])])
            status["phase"] = "Failed" if ended["status"] else "Succeeded"
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/status"
        self.stage.api(path, "PUT", pod)
        return running, container

    def _claim(self, pod: StagePod, namespace: str, reference: Document) -> Document:
        base = f"/apis/resource.k8s.io/v1/namespaces/{namespace}"
        template = self.stage.api(f"{base}/resourceclaimtemplates/{reference['resourceClaimTemplateName']}")
        metadata = {"generateName": f"{pod.name}-{reference['name']}-"}
        made = self.stage.api(f"{base}/resourceclaims", "POST", {**template["spec"], "metadata": metadata})
        return schedule(self.stage.server, namespace, made["metadata"]["name"], pods=[pod.reference])

    async def _serve(self) -> None:
        calls: Calls = {"exec": self._exec, "metrics": self._metrics}
        async with serve(self.stage.paths.node_socket, calls, AnsweredError, OSError):
            await asyncio.to_thread(self._stop.wait)

    async def _metrics(self, node: str) -> str:
        """Returns the kubelet's metrics for claims in use (pkg/kubelet/metrics)."""
        assert node == self.stage.settings.node
        claims = [pod.claim for pod, _ in list(self._pods.values()) if pod.claim]
        used = Counter(
            driver
            for claim in claims
            for driver in {result["driver"] for result in claim["status"]["allocation"]["devices"]["results"]}
        )
        lines = [f'dra_resource_claims_in_use{{driver_name="{driver}"}} {count}' for driver, count in used.items()]
        return "\n".join([f'dra_resource_claims_in_use{{driver_name="<any>"}} {len(claims)}', *lines, ""])

    async def _exec(self, namespace: str, pod: str, command: list[str], **_: Any) -> Document:
        """Runs one of the driver's commands with the environment of its pod. In any other pod, a command that
        reads /proc/self/status gets the file as it would be in the container.
        """
        document = self.stage.api(f"/api/v1/namespaces/{namespace}/pods/{pod}")
        owner = document["metadata"].get("ownerReferences")
        if owner:
            return await asyncio.to_thread(self._in_driver, self._drivers[owner[0]["uid"]], command)
        # The pod may become Ready in the API server before it is recorded here.
        uid = document["metadata"]["uid"]
        await asyncio.to_thread(wait_for, "the pod", lambda: uid in self._pods)
        return await asyncio.to_thread(_in_container, self._pods[uid][1], command)

    def _in_driver(self, instance: Instance, command: list[str]) -> Document:
        stage = self.stage
        program = [sys.executable, "-m", _COMMANDS[command[0]], *command[1:]]
        places = ["--config", str(stage.paths.config), "--host-root", str(stage.settings.host_root)]
        return _ran([*program, *places], {"NODE_NAME": stage.settings.node, "POD_UID": instance.pod_uid})


def _command(box: Document) -> str:
    """Returns the stage's command for a container in the driver's pod."""
    kept = [word for word in box["args"] if not word.startswith(_MOUNT_OPTIONS)]
    variables = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in box["env"]}
    assert variables == {"NODE_NAME": "spec.nodeName", "POD_UID": "metadata.uid"}, "the stage sets only these variables"
    places = ["--config={config}", "--host-root={host_root}", "--bind-address=off"]
    return " ".join([sys.executable, "-m", _PROGRAMS[box["name"]], *kept, *places])


@contextlib.contextmanager
def _proc(box: Box) -> Iterator[Path]:
    """Creates a directory with the files that the kernel would show for a process in the container."""
    with tempfile.TemporaryDirectory() as directory:
        status = Path(directory, "status")
        status.write_text(f"Cpus_allowed_list:\t{box.read('cpuset.cpus.effective')}\n")
        yield status


def _in_container(box: Box, command: list[str]) -> Document:
    with _proc(box) as status:
        return _ran([word.replace("/proc/self/status", str(status)) for word in command], box.env)


def _ran(command: list[str], environment: dict[str, Any]) -> Document:
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, timeout=60 * PATIENCE, check=False
    )
    # One character per byte, because JSON has no type for bytes.
    printed = {"stdout": done.stdout.decode("latin-1"), "stderr": done.stderr.decode("latin-1")}
    return {"status": done.returncode, **printed}
