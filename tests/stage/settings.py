# SPDX-License-Identifier: Apache-2.0
"""How a stage is set up: which machine, which driver. A driver is a command with places to fill in, so any will do."""

import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OUR_FRONTEND = (
    f"{sys.executable} -m dra_frontend --config={{config}} --node={{node}} --pod-uid={{pod_uid}}"
    " --host-root={host_root} --bind-address=off"
)
OUR_BACKEND = (
    f"{sys.executable} -m nri_backend --config={{config}} --pod-uid={{pod_uid}} --host-root={{host_root}}"
    " --bind-address=off"
)


@dataclass(frozen=True, slots=True)
class StageSettings:
    """What the stage plays. Both commands know the places {config}, {kubeconfig}, {node}, {pod_uid}, {host_root},
    {kubelet_root}, {cdi_dir}, {run_dir}, {nri_socket} and {cgroup_root}; an empty one is not started."""

    node: str = "node-a"
    host_root: Path = Path("/")
    reserved_cpus: str = ""
    cgroup_driver: str = "systemd"
    nri_level: str = "0.12"
    gates_off: tuple[str, ...] = ()
    gates_on: tuple[str, ...] = ()
    kubernetes: str = "1.36"
    """Release that the API server plays."""
    config: Mapping[str, object] = field(default_factory=dict)
    """Further keys of the configuration file."""
    request_seconds: float = 2.0
    """Patience of the runtime for one call of a plugin."""
    frontend: str = OUR_FRONTEND
    backend: str = OUR_BACKEND
    in_memory: bool = False
    """Whether the directories are in memory where that is possible, as they are on a node."""
    drivers: tuple[str, ...] = ("dra.cpu", "dra.memory")
    """Which drivers register with the kubelet."""

    def machine_cpus(self) -> str:
        """The CPUs of the root cgroup, in list format."""
        return _online(self.host_root / "sys/devices/system/cpu", "cpu")

    def machine_mems(self) -> str:
        """The memory nodes of the root cgroup, in list format."""
        return _online(self.host_root / "sys/devices/system/node", "node") or "0"

    def hugepage_sizes(self) -> list[str]:
        """The sizes that the kernel offers, as in the names of hugetlb files (mem_fmt in mm/hugetlb_cgroup.c)."""
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
        return listed.read_text().strip()
    return ",".join(sorted((number for number in _names(directory, prefix) if number.isdecimal()), key=int))


@dataclass(frozen=True, slots=True)
class Paths:
    """Where everything of one stage is. The base is short, since a socket's path may have 107 bytes only."""

    base: Path

    @property
    def config(self) -> Path:
        """The configuration file of both services."""
        return self.base / "config.yaml"

    @property
    def kubeconfig(self) -> Path:
        """Access to the API server."""
        return self.base / "kubeconfig"

    @property
    def port(self) -> Path:
        """Holds the API server's port as soon as it serves."""
        return self.base / "port"

    @property
    def kubelet_root(self) -> Path:
        """The kubelet's directory."""
        return self.base / "kl"

    @property
    def cdi_dir(self) -> Path:
        """The CDI files."""
        return self.base / "cdi"

    @property
    def run_dir(self) -> Path:
        """The run directory of all instances."""
        return self.base / "run"

    @property
    def cgroup_root(self) -> Path:
        """The imitated cgroup tree."""
        return self.base / "cg"

    @property
    def nri_socket(self) -> Path:
        """Where plugins connect."""
        return self.base / "nri.sock"

    @property
    def kubelet_control(self) -> Path:
        """Where the kubelet stand-in takes orders."""
        return self.base / "kl.sock"

    @property
    def runtime_control(self) -> Path:
        """Where the runtime stand-in takes orders."""
        return self.base / "rt.sock"

    @property
    def logs(self) -> Path:
        """One file for each process."""
        return self.base / "logs"


def fill_in(template: str, settings: StageSettings, paths: Paths, pod_uid: str) -> list[str]:
    """The command that a template stands for."""
    values: Mapping[str, object] = {
        "config": paths.config,
        "kubeconfig": paths.kubeconfig,
        "node": settings.node,
        "pod_uid": pod_uid,
        "host_root": settings.host_root,
        "kubelet_root": paths.kubelet_root,
        "cdi_dir": paths.cdi_dir,
        "run_dir": paths.run_dir,
        "nri_socket": paths.nri_socket,
        "cgroup_root": paths.cgroup_root,
    }
    return [word.format_map(values) for word in shlex.split(template)]
