# SPDX-License-Identifier: Apache-2.0
"""Pods, containers and the runtime as this plugin sees them, the hooks that it calls, and what these may answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol

MAX_VARIABLES: Final = 256
"""Variables of ours that a container may have: those of four claims with 32 requests each."""
MAX_VARIABLE_BYTES: Final = 64 << 10
"""Of all these together. The CPUs of the largest machine, one by one, are half of it."""


class ContainerState(Enum):
    """Where a container is in its life; UNKNOWN while it is being created."""

    UNKNOWN = auto()
    CREATED = auto()
    PAUSED = auto()
    RUNNING = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Resources:
    """Linux resources of a container. An empty text or an absent value means "leave as it is", never "clear"."""

    cpus: str = ""
    mems: str = ""
    cpu_quota: int | None = None
    """CFS quota in microseconds per period; -1 is unlimited."""
    cpu_period: int | None = None
    memory_limit: int | None = None
    """Bytes."""
    hugepage_limits: dict[str, int] = field(default_factory=dict)
    """Bytes by OCI page size (``2MB``, ``1GB``)."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod sandbox."""

    id: str
    uid: str
    namespace: str
    name: str
    cgroup_parent: str
    """The pod's cgroup: a path (cgroupfs driver) or a slice name or path (systemd driver)."""
    runtime_handler: str = ""
    """Handler of the pod's RuntimeClass; empty for the default, which some runtimes name all the same."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the runtime describes it in one message."""

    id: str
    pod_id: str
    name: str
    state: ContainerState
    env: tuple[str, ...]
    """``K=V`` entries that carry our prefixes, CDI edits included; what is over the limits shows as one variable or
    one byte too many. Evidence, not authority: the pod's author can write here."""
    cgroups_path: str
    """``slice:prefix:id`` under the systemd driver, else a path below the cgroup root."""
    resources: Resources = Resources()
    """What the runtime has stored, not what the kernel holds."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """Where the first process of a container, and what it forks, gets its memory (set_mempolicy(2))."""

    mode: str
    """``preferred`` or ``interleave``."""
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What a container that is being created shall get beyond what the runtime has planned."""

    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    memory_policy: MemoryPolicy | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """New resources for an existing container; if applying them fails, the runtime carries on."""

    container_id: str
    resources: Resources


class RefusedError(Exception):
    """A container must not be created or started; the text reaches the pod's events and names the remedy."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The connection to the runtime, as it is now."""

    connected: bool = False
    synchronized: bool = False
    """The runtime's snapshot was answered on this connection, and events flow."""
    runtime_name: str = ""
    runtime_version: str = ""
    nri_version: str = ""
    """Empty for runtimes before NRI 0.12, which do not tell."""
    request_timeout: float | None = None
    """Seconds that the runtime gives a hook; None where it does not say."""
    registration_timeout: float | None = None
    """Seconds that it gives a plugin to register."""
    last_end: str = ""
    """Why the connection before this one ended, or why the last attempt to connect failed."""


class ContainerHooks(Protocol):
    """The events of the runtime: each is to be answered within 50 ms of our own time.

    A RefusedError fails the operation; nothing else may be raised.
    """

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """The complete state of the runtime, once per connection, all chunks joined."""

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """A container is about to be created; answers when it may be."""

    async def start_container(self, pod: Pod, container: Container) -> None:
        """The container's cgroup exists and its first instruction has not run."""

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """The kubelet wants other resources; an update for this very container amends the request."""

    async def stop_container(self, pod: Pod, container: Container) -> list[Update]:
        """The container has ended; may come twice, or for one that never started."""

    async def remove_container(self, pod: Pod, container: Container) -> None:
        """The runtime forgets the container."""

    async def remove_pod(self, pod: Pod) -> None:
        """The runtime forgets the sandbox."""

    def disconnected(self) -> None:
        """The connection to the runtime is gone; nothing is known about containers until the next synchronize."""
