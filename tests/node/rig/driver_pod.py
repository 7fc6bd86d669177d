# SPDX-License-Identifier: Apache-2.0
"""Runs the result of kubelet_pod.py as a kubelet does: volumes, sandbox, containers and probes of the driver's pod."""

import http.client
import os
import secrets
import shutil
import signal
import uuid
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.waiting import PATIENCE
from tests.node._pb import cri_pb2 as pb
from tests.node.rig import kernel
from tests.node.rig.cri import CriError
from tests.node.rig.kubelet_pod import Container, Document, Identity, KubeletPod, NodeFacts, Probe, Volume, translate
from tests.node.rig.kubelet_resources import cpu_weight
from tests.node.rig.node import Node
from tests.node.rig.pods import cri_log
from tests.node.rig.wait import until

_CPUS = Path("/sys/devices/system/cpu")


def node_facts(name: str) -> NodeFacts:
    """Returns the facts that this node's kubelet knows about the node."""
    memory = sum(kernel.node_memory_kib(number) for number in kernel.numa_nodes()) << 10
    lines = [line.split() for line in Path("/etc/resolv.conf").read_text().splitlines()]
    resolvers = tuple(words[1] for words in lines if words[:1] == ["nameserver"])
    throttle = tuple(sorted(map(str, _CPUS.glob("cpu[0-9]*/thermal_throttle"))))
    return NodeFacts(name, memory, resolvers=resolvers, thermal_throttle=throttle)


class DriverContainer:
    """A container in the pod. Each start creates a new container with the next attempt number; the last container that
    exited is kept.
    """

    def __init__(self, pod: "DriverPod", plan: Container) -> None:
        self._pod = pod
        self.plan = plan
        self.name = plan.name
        self.pod_name = pod.name
        self.id = ""
        self._ended = ""
        self.attempt = -1
        self._log = Path()
        self._pid = 0

    def start(self) -> "DriverContainer":
        """Creates and starts the container; returns once its process is running."""
        runtime, sandbox = self._pod.node.runtime, self._pod.sandbox
        self.attempt += 1
        if self._ended:
            runtime.remove(self._ended)
        self._ended, self.id, self._pid = self.id, "", 0
        config = self.plan.started(self.attempt)
        self._log = Path(self._pod.config.log_directory, config.log_path)
        self.id = runtime.create(sandbox, config, self._pod.config)
        runtime.start(self.id)
        return self

    @property
    def alive(self) -> bool:
        """Returns True if the container's process is running, according to the kernel's files, since the runtime may be
        down.
        """
        if not self.id:
            return False
        try:
            return bool(self.pid) and "Z" not in kernel.status(self.pid, "State")
        except FileNotFoundError:
            return False

    @property
    def pid(self) -> int:
        """Returns the pid of the container's first process, or 0 before it starts and after it exits."""
        self._pid = self._pid or self._pod.node.runtime.pid(self.id)
        return self._pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the container's process from the node."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the container's process with SIGKILL and waits until the runtime has noticed."""
        if self.alive:
            self.send(signal.SIGKILL)
            self._wait_exited()

    def stop(self, within: float = 30.0) -> int:
        """Stops the container as the kubelet does, with SIGTERM, and with SIGKILL after the grace period; returns the
        exit status.
        """
        if self.alive:
            self.send(signal.SIGCONT)
        self._pod.node.runtime.stop(self.id, int(within * PATIENCE))
        return int(self._pod.node.runtime.state(self.id).exit_code)

    def _wait_exited(self) -> None:
        def ended() -> bool:
            try:
                return bool(self._pod.node.runtime.state(self.id).state == pb.CONTAINER_EXITED)
            except CriError as error:
                if error.code != "UNAVAILABLE":
                    raise
                return False

        until(ended, f"the runtime has noticed that {self.name} has ended", every=0.2)

    def probe(self, kind: str) -> str:
        """Runs one probe (startup, liveness, readiness) and returns the reason for its failure, or "" if it succeeded.

        As in the kubelet, a container without that probe counts as one whose probe succeeds.
        """
        probe = self.plan.probes.get(kind)
        return "" if probe is None else probed(self._pod.address, probe)

    def log(self) -> str:
        """Returns the container's log since its latest start."""
        return cri_log(self._log)

    def wait_for_log(self, text: str, within: float = 30.0) -> None:
        """Waits until the log since the latest start contains a string."""
        until(lambda: text in self.log(), f"{text!r} is in the log of {self.name}", within)

    def status(self, field: str) -> str:
        """Returns a field of /proc/PID/status, such as CapEff."""
        return kernel.status(self.pid, field)

    def mebibytes(self, field: str) -> float:
        """Returns a field of /proc/PID/smaps_rollup, such as Rss or Pss (which divides shared pages by the number of
        processes).
        """
        return int(Path(f"/proc/{self.pid}/smaps_rollup").read_text().split(f"{field}:")[1].split()[0]) / 1024


class DriverPod:
    """A pod from the rendered DaemonSet. Its sandbox is created when the pod first starts, and kept when the node is
    reset.
    """

    def __init__(self, node: Node, objects: Sequence[Document], node_name: str) -> None:
        self.node = node
        self.uid = str(uuid.uuid4())
        self.name = f"dra-driver-numa-{secrets.token_hex(3)}"
        self.plan: KubeletPod = translate(objects, Identity(self.name, self.uid), node_facts(node_name))
        self.containers = {one.name: DriverContainer(self, one) for one in self.plan.containers}
        self.frontend, self.backend = self.containers["frontend"], self.containers["backend"]
        self.config = pb.PodSandboxConfig()
        self._sandbox = ""
        self._address = ""

    @property
    def sandbox(self) -> str:
        """Returns the sandbox's id."""
        if not self._sandbox:
            self._make()
        return self._sandbox

    @property
    def address(self) -> str:
        """Returns the address of the pod's ports: the pod's address in the pod network, or the node's loopback with
        hostNetwork.
        """
        if not self._address:
            status = self.node.runtime.call(pb.PodSandboxStatusRequest(pod_sandbox_id=self.sandbox)).status
            self._address = str(status.network.ip) or "127.0.0.1"
        return self._address

    def _make(self) -> None:
        for volume in self.plan.volumes:
            make_volume(volume)
        wanted = self.plan.group
        group = self.node.cgroups.make(wanted.qos, self.uid, {}, cpu_weight(wanted.shares), wanted.memory)
        self.config.CopyFrom(self.plan.sandbox)
        self.config.linux.cgroup_parent = group.path
        Path(self.config.log_directory).mkdir(parents=True, exist_ok=True)
        self._sandbox = self.node.runtime.run_pod(self.config)
        self.node.kept.add(self._sandbox)
        for container in self.plan.containers:
            for file, text in ((container.hosts_file, self._hosts()), (container.termination_log, "")):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_text(text)

    def _hosts(self) -> str:
        return f"127.0.0.1\tlocalhost\n{self.address}\t{self.config.hostname}\n"

    def remove(self) -> None:
        """Stops the containers, and removes the sandbox and the files that the kubelet has created for them."""
        if self._sandbox:
            self.node.kept.discard(self._sandbox)
            self.node.runtime.remove_pod(self._sandbox)
            self._sandbox = ""
        shutil.rmtree(f"/var/lib/kubelet/pods/{self.uid}", ignore_errors=True)


def make_volume(volume: Volume) -> None:
    """Creates a volume as the kubelet does before it starts a pod. Raises NotADirectoryError like the kubelet's type
    check.
    """
    path = Path(volume.path)
    if volume.host_type == "Directory" and not path.is_dir():
        raise NotADirectoryError(f"hostPath type check failed: {path} is not a directory")
    if volume.host_type in (None, "DirectoryOrCreate"):
        path.mkdir(parents=True, exist_ok=True)
    for name, text in volume.files.items():
        (path / name).write_text(text)


def probed(address: str, probe: Probe) -> str:
    """Runs one HTTP probe as the kubelet does; returns the reason for its failure, or "" if it succeeded."""
    connection = http.client.HTTPConnection(address, probe.port, timeout=probe.timeout * PATIENCE)
    try:
        connection.request("GET", probe.path, headers={"User-Agent": "kube-probe/1.36", "Connection": "close"})
        answer = connection.getresponse()
        text = answer.read(10_240).decode(errors="replace").strip()
    except (OSError, http.client.HTTPException) as error:
        return f"{probe.path} at port {probe.port}: {str(error) or type(error).__name__}"
    finally:
        connection.close()
    if 200 <= answer.status < 400:
        return ""
    return f"{probe.path} at port {probe.port}: {answer.status} {text}"
