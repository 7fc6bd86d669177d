# SPDX-License-Identifier: Apache-2.0
"""The DaemonSet's pod as a kubelet runs it: containers from the built images, with the chart's mounts and rights.

One thing is not as in a cluster: the pod has the node's network, since the test machine has no CNI plugin.
"""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.waiting import PATIENCE
from tests.node._pb import cri_pb2 as pb
from tests.node.rig import kernel
from tests.node.rig.node import Node
from tests.node.rig.pods import cri_log
from tests.node.rig.wait import until

VOLUMES = Path("/run/node-test/volumes")
NAMESPACE = "dra-driver-numa"
# What a kubelet hides from containers that are not privileged (its default proc mount).
MASKED = [f"/proc/{name}" for name in ("asound", "acpi", "kcore", "keys", "latency_stats", "timer_list", "scsi")]
READONLY = [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger")]
Document = Mapping[str, Any]


class DriverContainer:
    """One container of the pod; it can be killed and started again, as the kubelet does it. As rig.services.Service."""

    def __init__(self, pod: "DriverPod", spec: Document) -> None:
        self._pod = pod
        self._spec = spec
        self.name = str(spec["name"])
        self._id = ""
        self._attempt = 0
        self._log = Path()

    def start(self) -> "DriverContainer":
        """A new container in the pod's sandbox; returns when its process runs."""
        runtime, sandbox, config = self._pod.node.runtime, self._pod.sandbox, self._pod.config
        if self._id:
            runtime.remove(self._id)
        log = f"{self.name}/{self._attempt}.log"
        self._log = Path(config.log_directory, log)
        self._id = runtime.create(sandbox, self._container(log), config)
        self._attempt += 1
        runtime.start(self._id)
        return self

    def _container(self, log: str) -> pb.ContainerConfig:
        fields = {"metadata.uid": self._pod.uid, "spec.nodeName": self._pod.node_name}
        env = {
            one["name"]: one.get("value") or fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in self._spec["env"]
        }
        return pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=self.name, attempt=self._attempt),
            image=pb.ImageSpec(image=self._spec["image"]),
            args=self._spec["args"],
            envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in env.items()],
            mounts=[self._mount(one) for one in self._spec["volumeMounts"] if one["name"] in self._pod.volumes],
            labels={**self._pod.config.labels, "io.kubernetes.container.name": self.name},
            log_path=log,
            linux=pb.LinuxContainerConfig(security_context=self._rights()),
        )

    def _mount(self, mount: Document) -> pb.Mount:
        return pb.Mount(
            container_path=mount["mountPath"],
            host_path=self._pod.volumes[mount["name"]],
            readonly=mount.get("readOnly", False),
        )

    def _rights(self) -> pb.LinuxContainerSecurityContext:
        pod, own = self._pod.spec["securityContext"], self._spec["securityContext"]
        return pb.LinuxContainerSecurityContext(
            capabilities=pb.Capability(
                add_capabilities=own["capabilities"].get("add", []), drop_capabilities=own["capabilities"]["drop"]
            ),
            namespace_options=self._pod.config.linux.security_context.namespace_options,
            run_as_user=pb.Int64Value(value=pod["runAsUser"]),
            run_as_group=pb.Int64Value(value=pod["runAsGroup"]),
            readonly_rootfs=own["readOnlyRootFilesystem"],
            no_new_privs=not own["allowPrivilegeEscalation"],
            masked_paths=MASKED,
            readonly_paths=READONLY,
            seccomp=pb.SecurityProfile(profile_type={"RuntimeDefault": 0}[pod["seccompProfile"]["type"]]),
        )

    @property
    def alive(self) -> bool:
        return bool(self._id) and self._pod.node.runtime.state(self._id).state == pb.CONTAINER_RUNNING

    @property
    def pid(self) -> int:
        return self._pod.node.runtime.pid(self._id)

    def send(self, number: signal.Signals) -> None:
        """A signal to its process."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        if self.alive:
            self._pod.node.runtime.stop(self._id, 0)

    def stop(self, within: float = 30.0) -> int:
        """SIGTERM; the exit status."""
        self._pod.node.runtime.stop(self._id, int(within * PATIENCE))
        return int(self._pod.node.runtime.state(self._id).exit_code)

    def log(self) -> str:
        """What this start wrote."""
        return cri_log(self._log)

    def wait_for_log(self, text: str, within: float = 30.0) -> None:
        until(lambda: text in self.log(), f"{text!r} in the log of {self.name}", within)

    def status(self, field: str) -> str:
        """A field of /proc/PID/status, e.g. CapEff."""
        return kernel.status(self.pid, field)

    def mebibytes(self, field: str) -> float:
        """A field of /proc/PID/smaps_rollup, e.g. Rss, Pss (pages shared by several processes count in part)."""
        return int(Path(f"/proc/{self.pid}/smaps_rollup").read_text().split(f"{field}:")[1].split()[0]) / 1024


class DriverPod:
    """The pod of the chart's DaemonSet on this node. Its sandbox is made when it is first needed and kept by resets."""

    def __init__(self, node: Node, objects: list[Document], uid: str, node_name: str) -> None:
        kinds = {one["kind"]: one for one in objects}
        self.node = node
        self.uid = uid
        self.node_name = node_name
        self.spec: Document = kinds["DaemonSet"]["spec"]["template"]["spec"]
        self._files: Document = kinds["ConfigMap"]["data"]
        self.volumes = dict(filter(None, map(self._volume, self.spec["volumes"])))
        self.frontend, self.backend = (DriverContainer(self, one) for one in self.spec["containers"])
        self._sandbox = ""
        self.config = pb.PodSandboxConfig()

    def _volume(self, volume: Document) -> tuple[str, str] | None:
        name = str(volume["name"])
        if "hostPath" in volume:
            path = Path(volume["hostPath"]["path"])
            if volume["hostPath"].get("type") == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            return name, str(path)
        if "configMap" in volume or "emptyDir" in volume:
            directory = VOLUMES / self.uid / name
            directory.mkdir(parents=True, exist_ok=True)
            for file, text in self._files.items() if "configMap" in volume else ():
                (directory / file).write_text(text)
            return name, str(directory)
        return None  # The service account's token: the stand-in of the API server asks for none.

    @property
    def sandbox(self) -> str:
        """The sandbox's id."""
        if not self._sandbox:
            pod = self.node.pod("driver", uid=self.uid, namespace=NAMESPACE)
            self._sandbox, self.config = pod.id, pod.config
            self.node.kept.add(pod.id)
        return self._sandbox

    def remove(self) -> None:
        """Ends both containers and the sandbox."""
        if self._sandbox:
            self.node.kept.discard(self._sandbox)
            self.node.runtime.remove_pod(self._sandbox)
            self._sandbox = ""
