# SPDX-License-Identifier: Apache-2.0
"""Pods and containers as this plugin sees them, and what it may answer. No protobuf goes further than plugin.py."""

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

MAX_VARIABLES: Final = 512
"""Variables of ours that a container may have; each of the 32 requests of a claim brings five at most."""
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
    unified: dict[str, str] = field(default_factory=dict)
    """cgroup v2 files by name."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod sandbox."""

    id: str
    uid: str
    namespace: str
    name: str
    cgroup_parent: str
    """The pod's cgroup: a path (cgroupfs driver) or a slice name or path (systemd driver)."""


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
    pid: int = 0


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
    """New resources for a container that exists."""

    container_id: str
    resources: Resources
    ignore_failure: bool = True


class RefusedError(Exception):
    """A container must not be created or started; the text reaches the pod's events and names the remedy."""
