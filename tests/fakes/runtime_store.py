# SPDX-License-Identifier: Apache-2.0
"""The fake runtime's store of pods and containers, and the errors that its operations raise."""

from dataclasses import dataclass
from pathlib import Path

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_merge import env_of


class OperationError(Exception):
    """A CRI call failed for the reason in the message; the kubelet would retry."""


@dataclass(eq=False)
class Pod:
    """A pod sandbox."""

    message: pb.PodSandbox

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def uid(self) -> str:
        return self.message.uid


@dataclass(eq=False)
class Container:
    """A container and its stored spec, including adjustments."""

    message: pb.Container
    pod: Pod
    directory: Path | None = None
    """The container's cgroup in the fake tree, once the container has been started."""

    @property
    def id(self) -> str:
        return self.message.id

    @property
    def name(self) -> str:
        return self.message.name

    @property
    def env(self) -> dict[str, str]:
        return env_of(self.message.env)

    @property
    def cpus(self) -> str:
        """Returns the stored cpuset."""
        return self.message.linux.resources.cpu.cpus

    @property
    def mems(self) -> str:
        """Returns the stored memory nodes."""
        return self.message.linux.resources.cpu.mems

    @property
    def running(self) -> bool:
        return self.message.state == pb.CONTAINER_RUNNING

    def cgroup_file(self, name: str) -> str:
        """Returns the current content of a file in the cgroup."""
        if self.directory is None:
            raise OperationError(f"container {self.name} has no cgroup yet")
        return (self.directory / name).read_text().strip()


def resources(
    *,
    cpus: str = "",
    mems: str = "",
    cpu_quota: int = 0,
    cpu_period: int = 0,
    memory_limit: int = 0,
    hugepage_limits: dict[str, int] | None = None,
) -> pb.LinuxResources:
    """Returns resources as CRI relays them: optional values are always present, and zero means "not given"."""
    message = pb.LinuxResources()
    message.cpu.cpus, message.cpu.mems = cpus, mems
    message.cpu.shares.value = 0
    message.cpu.quota.value = cpu_quota
    message.cpu.period.value = cpu_period
    message.memory.limit.value = memory_limit
    for size, limit in (hugepage_limits or {}).items():
        message.hugepage_limits.add(page_size=size, limit=limit)
    return message
