# SPDX-License-Identifier: Apache-2.0
"""Objects through which tests create pods and containers in the same way as the kubelet."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.node._pb import cri_pb2 as pb
from tests.node.rig import kernel
from tests.node.rig.cri import ExecResult, Runtime
from tests.node.rig.kernel import Cgroup
from tests.node.rig.wait import until

PROGRAMS = Path("/opt/numa/src/tests/node/programs")  # mounted at /programs in every container
FOREVER = ("sleep", "2147483647")


@dataclass(frozen=True, slots=True)
class Resources:
    """The values that a kubelet writes into LinuxContainerResources; "" and 0 mean that a value is not set."""

    cpus: str = ""
    mems: str = ""
    shares: int = 0
    quota: int = 0  # microseconds per period of 100000
    memory: int = 0  # bytes
    hugepages: Mapping[str, int] = field(default_factory=dict)  # "2MB" -> bytes
    unified: Mapping[str, str] = field(default_factory=dict)

    def to_cri(self) -> pb.LinuxContainerResources:
        return pb.LinuxContainerResources(
            cpuset_cpus=self.cpus,
            cpuset_mems=self.mems,
            cpu_shares=self.shares,
            cpu_quota=self.quota,
            cpu_period=100_000 if self.quota else 0,
            memory_limit_in_bytes=self.memory,
            hugepage_limits=[pb.HugepageLimit(page_size=size, limit=limit) for size, limit in self.hugepages.items()],
            unified=dict(self.unified),
        )


def cri_log(path: Path) -> str:
    """Returns a container's output without the time and the stream that the runtime adds to each line, or "" before the
    container has started.
    """
    lines = path.read_text().splitlines() if path.exists() else []
    return "".join(line.split(" ", 3)[3] + "\n" for line in lines)


class Container:
    """A container that has been created."""

    def __init__(self, runtime: Runtime, container_id: str, name: str, log: Path) -> None:
        self._runtime = runtime
        self.id = container_id
        self.name = name
        self._log = log
        self._process = 0

    def start(self) -> "Container":
        self._runtime.start(self.id)
        return self

    def stop(self, grace: int = 0) -> None:
        self._runtime.stop(self.id, grace)

    def remove(self) -> None:
        self._runtime.remove(self.id)

    def update(self, resources: Resources) -> None:
        self._runtime.update(self.id, resources.to_cri())

    def exec(self, *command: str, limit: int = 60) -> ExecResult:
        return self._runtime.exec(self.id, list(command), limit)

    def touch_memory(self, *mappings: str) -> list[dict[str, Any]]:
        """Runs programs/touch_memory.py inside (python image only), with arguments such as ("2M:3", "4K:100"); returns
        its JSON output.
        """
        result = self.exec("python3", "-IS", "/programs/touch_memory.py", *mappings)
        if result.code != 0:
            raise AssertionError(f"touch_memory.py ended with {result.code}: {result.err}")
        answer: list[dict[str, Any]] = json.loads(result.out)
        return answer

    @property
    def state(self) -> str:
        """Returns created, running, exited or unknown."""
        name: str = pb.ContainerState.Name(self._runtime.state(self.id).state)
        return name.removeprefix("CONTAINER_").lower()

    @property
    def exit_code(self) -> int:
        return int(self._runtime.state(self.id).exit_code)

    @property
    def reason(self) -> str:
        """Returns the reason that the runtime gives for the container's exit, such as OOMKilled."""
        return str(self._runtime.state(self.id).reason)

    def wait_exited(self, within: float = 30.0) -> int:
        """Waits until the container has exited and returns the exit code."""
        until(lambda: self.state == "exited", f"container {self.name} has exited", within)
        return self.exit_code

    @property
    def pid(self) -> int:
        return self._runtime.pid(self.id)

    @property
    def process(self) -> int:
        """Returns the same process id as pid, but asks the runtime only once. The runtime takes a tenth of a second to
        respond, much longer than reading one of the kernel's files.
        """
        self._process = self._process or self.pid
        return self._process

    @property
    def cgroup(self) -> Cgroup:
        """Returns the cgroup of the container's first process, which exists only while the container is running."""
        return kernel.cgroup_of(self.process)

    @property
    def partition(self) -> str:
        """Returns the partition type of the container's cgroup: member, root, isolated, or the reason why it is
        invalid.
        """
        return self.cgroup.read("cpuset.cpus.partition")

    @property
    def cpus_allowed(self) -> frozenset[int]:
        return kernel.cpus_allowed(self.process)

    @property
    def mems_allowed(self) -> frozenset[int]:
        return kernel.mems_allowed(self.process)

    def log(self) -> str:
        """Returns the container's output so far."""
        return cri_log(self._log)


class Pod:
    """A pod sandbox on the host's network, in a pod cgroup that the rig's kubelet has created."""

    def __init__(self, runtime: Runtime, config: pb.PodSandboxConfig, cgroup: Cgroup) -> None:
        self._runtime = runtime
        self.config = config
        self.cgroup = cgroup
        self.uid = config.metadata.uid
        self.name = config.metadata.name
        self.id = runtime.run_pod(config)

    def create(
        self,
        name: str = "main",
        command: Sequence[str] = FOREVER,
        *,
        image: str = "busybox",
        cdi: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        resources: Resources | None = None,
        mounts: Mapping[str, str] | None = None,
        attempt: int = 0,
    ) -> Container:
        """Creates a container without starting it. Raises CriError if the runtime or a plugin rejects it.

        `mounts` maps a path on the node to a path in the container, read-only. `attempt` counts restarts.
        """
        places = {str(PROGRAMS): "/programs", **(mounts or {})}
        log = f"{name}/{attempt}.log"
        config = pb.ContainerConfig(
            metadata=pb.ContainerMetadata(name=name, attempt=attempt),
            image=pb.ImageSpec(image=f"localhost/{image}:node-vm"),
            command=list(command),
            envs=[pb.KeyValue(key=key, value=value.encode()) for key, value in (env or {}).items()],
            mounts=[pb.Mount(host_path=host, container_path=inside, readonly=True) for host, inside in places.items()],
            labels={**self.config.labels, "io.kubernetes.container.name": name},
            log_path=log,
            linux=pb.LinuxContainerConfig(
                resources=(resources or Resources()).to_cri(), security_context=self._rights()
            ),
            CDI_devices=[pb.CDIDevice(name=device) for device in cdi],
        )
        created = self._runtime.create(self.id, config, self.config)
        return Container(self._runtime, created, name, Path(self.config.log_directory, log))

    def _rights(self) -> pb.LinuxContainerSecurityContext:
        # A privileged container sees the node's cgroup tree and may write to it. Like the kubelet, pass the pod's
        # namespace options for each container again: without them the container shares the sandbox's processes, and
        # /proc/1 is the pause process.
        pod = self.config.linux.security_context
        return pb.LinuxContainerSecurityContext(privileged=pod.privileged, namespace_options=pod.namespace_options)

    def run(self, name: str = "main", command: Sequence[str] = FOREVER, **options: Any) -> Container:
        """Creates and starts a container."""
        return self.create(name, command, **options).start()

    def remove(self) -> None:
        """Stops all its containers (SIGKILL) and removes the sandbox; the pod's cgroup is kept."""
        self._runtime.remove_pod(self.id)


def labels(uid: str, name: str, namespace: str) -> dict[str, str]:
    """Returns the labels that the kubelet and every NRI plugin use to recognize a pod."""
    return {
        "io.kubernetes.pod.uid": uid,
        "io.kubernetes.pod.name": name,
        "io.kubernetes.pod.namespace": namespace,
    }
