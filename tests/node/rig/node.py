# SPDX-License-Identifier: Apache-2.0
"""The node under test: its runtime, its kubelet's cgroups and its cgroup driver."""

import signal
import subprocess
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.fakes.waiting import PATIENCE
from tests.node._pb import cri_pb2 as pb
from tests.node.rig.cri import Runtime
from tests.node.rig.pod_cgroups import Driver, PodCgroups, Qos
from tests.node.rig.pods import Pod, labels
from tests.node.rig.wait import until

CONTAINERD_CONFIG = Path("/etc/containerd/config.toml")
NRI_SOCKET = Path("/var/run/nri/nri.sock")
CDI_DIRECTORY = Path("/var/run/cdi")
_NRI_TABLE = "io.containerd.nri.v1.nri"
_NRI_SECONDS = 2  # the runtime's default timeout for a plugin
MARKER = Path("/opt/numa/profile.env")  # written by run.sh; exists only in the virtual machine


@dataclass(frozen=True, slots=True)
class Profile:
    """The machine that run.sh has started with QEMU."""

    name: str
    numa_nodes: int
    sockets: int
    cpus: int
    threads: int
    memory_gib: int
    pages: Mapping[str, int]  # "2MB" -> pages on each NUMA node

    @classmethod
    def read(cls, path: Path = MARKER) -> "Profile":
        values = dict(word.split("=", 1) for word in path.read_text().split())
        number = {key: int(value) for key, value in values.items() if value.isdigit()}
        return cls(
            name=values["NAME"],
            numa_nodes=number["NUMA"],
            sockets=number["SOCKETS"],
            cpus=number["SOCKETS"] * number["DIES"] * number["CORES"] * number["THREADS"],
            threads=number["THREADS"],
            memory_gib=number["MEM_GIB"],
            pages={"2MB": number["HP2M"], "1GB": number["HP1G"]},
        )


class Node:
    """A machine with containerd on which the tests act as the kubelet."""

    def __init__(self) -> None:
        self.profile = Profile.read()
        self.runtime = Runtime()
        self.cgroups = PodCgroups(self._configured_driver())
        self.kept: set[str] = set()
        """Sandboxes that a reset leaves alone."""

    def pod(
        self,
        name: str = "pod",
        *,
        uid: str = "",
        namespace: str = "default",
        qos: Qos = "burstable",
        hugetlb: Mapping[str, int] | None = None,
        annotations: Mapping[str, str] | None = None,
        privileged: bool = False,
    ) -> Pod:
        """Returns a new pod on the host's network.

        `hugetlb` maps page sizes to the bytes that the pod requests; for all other sizes, the pod's limit is 0. With
        `privileged`, all of the pod's containers are privileged.
        """
        uid = uid or str(uuid.uuid4())
        group = self.cgroups.make(qos, uid, hugetlb or {})
        host = pb.NamespaceOption(network=pb.NODE, pid=pb.CONTAINER, ipc=pb.POD)
        config = pb.PodSandboxConfig(
            metadata=pb.PodSandboxMetadata(name=name, uid=uid, namespace=namespace),
            log_directory=f"/var/log/pods/{uid}",
            labels=labels(uid, name, namespace),
            annotations=dict(annotations or {}),
            linux=pb.LinuxPodSandboxConfig(
                cgroup_parent=group.path,
                security_context=pb.LinuxSandboxSecurityContext(namespace_options=host, privileged=privileged),
            ),
        )
        return Pod(self.runtime, config, group)

    def extend_timeouts(self) -> None:
        """Makes the runtime wait longer for plugins on a busy host."""
        if PATIENCE == 1:
            return
        # A machine that was kept from an earlier run already has this setting.
        lines = [line for line in CONTAINERD_CONFIG.read_text().splitlines() if "plugin_request_timeout" not in line]
        if not any(_NRI_TABLE in line for line in lines):
            lines.append(f"[plugins.'{_NRI_TABLE}']")
        place = next(number for number, line in enumerate(lines) if _NRI_TABLE in line) + 1
        lines.insert(place, f'plugin_request_timeout = "{_NRI_SECONDS * PATIENCE:g}s"')
        CONTAINERD_CONFIG.write_text("\n".join(lines) + "\n")
        self.restart_containerd()

    def reset(self) -> None:
        """Resets the node: removes all CDI files and all pods except those in `kept`. If no pod is kept, the kubelet's
        cgroups are removed, too.
        """
        self.remove_pods()
        if not self.kept:
            self.cgroups.remove_all()
        for file in CDI_DIRECTORY.glob("*"):
            file.unlink()

    def remove_pods(self) -> None:
        """Removes all pods except those in `kept`, up to four at a time."""
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(self.runtime.remove_pod, set(self.runtime.pods()) - self.kept))

    def use_driver(self, driver: Driver) -> None:
        """Switches containerd and the rig's kubelet to a cgroup driver, after resetting the node. Does nothing if they
        already use that driver.
        """
        if driver == self.cgroups.driver:
            return
        self.reset()
        wanted = f"SystemdCgroup = {'true' if driver == 'systemd' else 'false'}"
        lines = CONTAINERD_CONFIG.read_text().splitlines(keepends=True)
        CONTAINERD_CONFIG.write_text("".join(_replace_setting(line, "SystemdCgroup", wanted) for line in lines))
        self.restart_containerd()
        self.cgroups = PodCgroups(driver)

    def restart_containerd(self) -> None:
        """Restarts containerd and waits until CRI and NRI respond. Containers keep running."""
        subprocess.run(["systemctl", "restart", "containerd"], check=True)
        self.wait_for_containerd()

    def kill_containerd(self) -> None:
        """Kills containerd with SIGKILL and waits until systemd has restarted it."""
        pid = self._containerd_pid()
        subprocess.run(["kill", f"-{signal.SIGKILL.value}", pid], check=True)
        until(lambda: self._containerd_pid() not in {pid, "0"}, "systemd has restarted containerd")
        self.wait_for_containerd()

    def wait_for_containerd(self) -> None:
        until(self.runtime.is_ready, "containerd responds")
        until(NRI_SOCKET.exists, f"{NRI_SOCKET} there")

    def _containerd_pid(self) -> str:
        command = ["systemctl", "show", "-P", "MainPID", "containerd"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    @staticmethod
    def _configured_driver() -> Driver:
        return "systemd" if "SystemdCgroup = true" in CONTAINERD_CONFIG.read_text() else "cgroupfs"


def _replace_setting(line: str, key: str, wanted: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return f"{indent}{wanted}\n" if line.lstrip().startswith(f"{key} =") else line
