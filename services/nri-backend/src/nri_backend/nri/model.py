# SPDX-License-Identifier: Apache-2.0
"""The plugin's values and callbacks: pods, containers, the hooks that the runtime triggers, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, Protocol

MAX_VARIABLES: Final = 256
"""Maximum number of the driver's environment variables in a container: enough for four CPU claims with 32 requests
each. MAX_CLAIMS (claims/authorization.py) limits the number of claims that they may name.
"""
MAX_VARIABLE_BYTES: Final = 64 << 10
"""Maximum total size of the driver's environment variables in a container. A list that names every CPU of the largest
machine individually takes up half of this.
"""


class ContainerState(Enum):
    """Lifecycle state that the runtime reports. UNKNOWN while the container is being created."""

    UNKNOWN = auto()
    CREATED = auto()
    PAUSED = auto()
    RUNNING = auto()
    STOPPED = auto()


@dataclass(frozen=True, slots=True)
class Resources:
    """Linux resources of a container. An empty string or None means "leave unchanged", never "clear"."""

    cpus: str = ""
    mems: str = ""
    cpu_quota: int | None = None
    """CFS quota in microseconds per period; -1 is unlimited."""
    cpu_period: int | None = None
    memory_limit: int | None = None
    """Memory limit in bytes."""
    hugepage_limits: dict[str, int] = field(default_factory=dict)
    """Hugepage limits in bytes, by OCI page size (``2MB``, ``1GB``)."""


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
    """Handler of the pod's RuntimeClass. Empty for the default handler, though some runtimes report its name."""


@dataclass(frozen=True, slots=True)
class Container:
    """A container as the runtime describes it in one message."""

    id: str
    pod_id: str
    name: str
    state: ContainerState
    env: tuple[str, ...]
    """``NAME=VALUE`` entries with the driver's prefixes, including those that CDI adds.

    If the entries exceed a limit, the list ends one variable or one byte beyond it, so that the excess is still
    detected. The pod's author can set such variables as well, so they authorize nothing.
    """
    cgroups_path: str
    """``slice:prefix:id`` with the systemd driver, otherwise a path under the cgroup root."""
    resources: Resources = Resources()
    """Resources as stored by the runtime. The kernel's values may differ."""


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """NUMA policy of the container's first process and the processes that it forks (set_mempolicy(2))."""

    mode: str
    """Mode, ``preferred`` or ``interleave``."""
    nodes: frozenset[int]


@dataclass(frozen=True, slots=True)
class Adjustment:
    """Changes to the specification of a container that is being created."""

    resources: Resources = Resources()
    env: dict[str, str] = field(default_factory=dict)
    memory_policy: MemoryPolicy | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """New resources for an existing container. The runtime ignores a failure to apply them."""

    container_id: str
    resources: Resources


class RejectedError(Exception):
    """Raised to refuse to create or start a container. The message appears in the pod's events and names the remedy."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """Current state of the connection to the runtime."""

    connected: bool = False
    synchronized: bool = False
    """True if the runtime's snapshot was processed on this connection, so that events are delivered."""
    runtime_name: str = ""
    runtime_version: str = ""
    nri_version: str = ""
    """The runtime's NRI version. Empty if the runtime is older than NRI 0.12, which introduced this field."""
    request_timeout: float | None = None
    """How long the runtime waits for a hook, in seconds; None if the runtime does not report this."""
    registration_timeout: float | None = None
    """How long the runtime waits for a plugin to register, in seconds; None if the runtime does not report this."""
    last_end: str = ""
    """Reason why the previous connection ended, or why the last attempt to connect failed."""


class ContainerHooks(Protocol):
    """Handlers for the runtime's events. Each should take at most 50 ms of this process's own time.

    To fail the runtime's operation, a handler raises RejectedError; it raises no other exception.
    """

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """Replaces all known pods and containers. Called once per connection, after all chunks have been joined."""

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """Waits until a container may be created, and returns the changes to its specification."""

    async def start_container(self, pod: Pod, container: Container) -> None:
        """Prepares a container whose cgroup exists and whose process has not yet run its first instruction."""

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """Handles a resize by the kubelet. A returned update for the same container amends the request."""

    async def stop_container(self, pod: Pod, container: Container) -> list[Update]:
        """Handles a container's exit. May be called twice, and for a container that never started."""

    async def remove_container(self, pod: Pod, container: Container) -> None:
        """Handles the removal of a container."""

    async def remove_pod(self, pod: Pod) -> None:
        """Handles the removal of a pod sandbox."""

    def disconnected(self) -> None:
        """Handles the end of the connection. The state of all containers is unknown until the next synchronize()."""
