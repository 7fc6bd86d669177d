# SPDX-License-Identifier: Apache-2.0
"""Configuration of a stage: the machine and the driver. A driver is a command with placeholders, so any driver can be
used.
"""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

OUR_FRONTEND = (
    f"{sys.executable} -m numa_tools --config={{config}} --node={{node}} --pod-uid={{pod_uid}}"
    " --host-root={host_root} --bind-address=off"
)
OUR_BACKEND = (
    f"{sys.executable} -m nri_backend --config={{config}} --pod-uid={{pod_uid}} --host-root={{host_root}}"
    " --bind-address=off"
)
_HUGEPAGES = 'device.driver == "dra.memory" && device.attributes["resource.kubernetes.io"].hugeTLB'
CLASSES = {
    "dra.cpu": 'device.driver == "dra.cpu"',
    "dra.memory": 'device.driver == "dra.memory" && !device.attributes["resource.kubernetes.io"].hugeTLB',
} | {
    f"dra.hugepages-{size}": f'{_HUGEPAGES} && device.attributes["resource.kubernetes.io"].pageSize == "{size}"'
    for size in ("64k", "1m", "2m", "4m", "16m", "32m", "512m", "1g", "2g", "16g")
}
"""CEL expressions of the chart's DeviceClasses, keyed by class name. There is a hugepage class for every page size."""


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Configuration of the stage.

    Both commands may contain the placeholders {config}, {kubeconfig}, {node}, {pod_uid}, {host_root}, {kubelet_root},
    {cdi_dir}, {run_dir}, {nri_socket} and {cgroup_root}; an empty command is not started.
    """

    node: str = "node-a"
    host_root: Path = Path("/")
    reserved_cpus: str = ""
    cgroup_driver: str = "systemd"
    nri_level: str = "0.12"
    gates_off: tuple[str, ...] = ()
    gates_on: tuple[str, ...] = ()
    kubernetes: str = "1.36"
    """The API server's Kubernetes release."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Additional keys for the configuration file."""
    partitions: bool = False
    """Whether the kernel supports cpuset partitions."""
    request_seconds: float = 2.0
    """The runtime's timeout for one plugin call."""
    frontend: str = OUR_FRONTEND
    backend: str = OUR_BACKEND
    environment: Mapping[str, str] = field(default_factory=dict)
    """Additional environment variables for both commands."""
    in_memory: bool = False
    """Whether to keep the directories in memory, as on a node, if that is possible."""
    classes: Mapping[str, str] = field(default_factory=lambda: CLASSES)
    """DeviceClasses that exist from the start."""
    drivers: tuple[str, ...] = ("dra.cpu", "dra.memory")
    """The drivers that register with the kubelet."""

    def machine_cpus(self) -> str:
        """Returns the CPUs of the root cgroup in list format."""
        return _online(self.host_root / "sys/devices/system/cpu", "cpu")

    def machine_mems(self) -> str:
        """Returns the memory nodes of the root cgroup in list format."""
        return _online(self.host_root / "sys/devices/system/node", "node") or "0"

    def hugepage_sizes(self) -> list[str]:
        """Returns the kernel's page sizes as spelled in hugetlb file names (mem_fmt in mm/hugetlb_cgroup.c)."""
        names = _names(self.host_root / "sys/kernel/mm/hugepages", "hugepages-")
        return [_size_name(int(name.removesuffix("kB"))) for name in sorted(names)]


def _size_name(kib: int) -> str:
    if kib >= 1 << 20:
        return f"{kib >> 20}GB"
    return f"{kib >> 10}MB" if kib >= 1 << 10 else f"{kib}KB"


def _names(directory: Path, prefix: str) -> list[str]:
    found = [path.name for path in directory.iterdir()] if directory.exists() else []
    return [name.removeprefix(prefix) for name in found if name.startswith(prefix)]


def _online(directory: Path, prefix: str) -> str:
    listed = directory / "online"
    if listed.exists():
        return listed.read_text().rstrip("\0").strip()
    return ",".join(sorted((number for number in _names(directory, prefix) if number.isdecimal()), key=int))


@dataclass(frozen=True, slots=True)
class Paths:
    """All paths that one stage uses. The base is short, since a socket path is limited to 107 bytes."""

    base: Path
    config: Path
    kubeconfig: Path
    port: Path
    kubelet_root: Path
    cdi_dir: Path
    run_dir: Path
    cgroup_root: Path
    nri_socket: Path
    kubelet_control: Path
    runtime_control: Path
    node_socket: Path
    logs: Path

    @classmethod
    def below(cls, base: Path, **elsewhere: Path) -> "Paths":
        """Returns the default paths under a base directory. Paths that are passed as keyword arguments replace the
        defaults.
        """
        return cls(base, **{name: base / file for name, file in _FILES.items()} | elsewhere)


_FILES = {
    "config": "config.yaml",
    "kubeconfig": "kubeconfig",
    "port": "port",  # contains the API server's port; exists as soon as the server is ready
    "kubelet_root": "kl",
    "cdi_dir": "cdi",
    "run_dir": "run",
    "cgroup_root": "cg",
    "nri_socket": "nri.sock",
    "kubelet_control": "kl.sock",
    "runtime_control": "rt.sock",
    "node_socket": "node.sock",  # socket on which a cluster serves exec and metrics (cluster.py)
    "logs": "logs",
}


def fill_in(template: str, settings: StageSettings, paths: Paths, pod_uid: str) -> list[str]:
    """Returns the command with the placeholders filled in."""
    values: dict[str, object] = asdict(paths)
    values |= {"node": settings.node, "pod_uid": pod_uid, "host_root": settings.host_root}
    return [word.format_map(values) for word in shlex.split(template)]
