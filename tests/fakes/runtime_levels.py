# SPDX-License-Identifier: Apache-2.0
"""The configuration of a runtime, and the differences that a plugin can see between the NRI releases in containerd."""

from dataclasses import dataclass
from pathlib import Path

from tests.fakes._pb import nri_pb2 as pb


@dataclass(frozen=True)
class ApiLevel:
    """A generation of the NRI library."""

    name: str
    runtime_version: str
    """A containerd release that contains this generation."""
    timeouts: bool
    """Whether Configure contains the timeouts, Synchronize may arrive in parts, and messages are checked against the
    4 MiB limit.
    """
    valid_events: int
    dedicated: bool
    """Whether lifecycle events have their own methods and Configure contains the NRI version."""
    nri_version: str = ""


LEVELS = {
    "0.6": ApiLevel("0.6", "1.7.16", timeouts=False, valid_events=0x7FF, dedicated=False),
    "0.8": ApiLevel("0.8", "2.1.4", timeouts=True, valid_events=0x7FF, dedicated=False),
    "0.11": ApiLevel("0.11", "2.2.7", timeouts=True, valid_events=0x3FFF, dedicated=False),
    "0.12": ApiLevel("0.12", "2.3.0", timeouts=True, valid_events=0x3FFF, dedicated=True, nri_version="v0.12.0"),
}

# Events that had no method of their own before 0.12.
LIFECYCLE = {
    "RunPodSandbox": pb.RUN_POD_SANDBOX,
    "StopPodSandbox": pb.STOP_POD_SANDBOX,
    "RemovePodSandbox": pb.REMOVE_POD_SANDBOX,
    "PostCreateContainer": pb.POST_CREATE_CONTAINER,
    "StartContainer": pb.START_CONTAINER,
    "PostStartContainer": pb.POST_START_CONTAINER,
    "PostUpdateContainer": pb.POST_UPDATE_CONTAINER,
    "RemoveContainer": pb.REMOVE_CONTAINER,
}
EVENTS = LIFECYCLE | {
    "CreateContainer": pb.CREATE_CONTAINER,
    "UpdateContainer": pb.UPDATE_CONTAINER,
    "StopContainer": pb.STOP_CONTAINER,
}


@dataclass(frozen=True)
class RuntimeOptions:
    """Configuration for the node and its runtime. Defaults are containerd's."""

    socket: Path
    level: str = "0.12"
    cdi_dirs: tuple[Path, ...] = ()
    cgroup_root: Path | None = None
    cgroup_driver: str = "systemd"
    machine_cpus: str = "0-7"
    machine_mems: str = "0-1"
    hugepage_sizes: tuple[str, ...] = ("2MB", "1GB")
    partitions: bool = False
    """Whether cgroups have the files for cpuset partitions."""
    request_seconds: float = 2.0
