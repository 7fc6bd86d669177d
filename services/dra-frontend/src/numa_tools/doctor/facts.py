# SPDX-License-Identifier: Apache-2.0
"""What the sources read of a node, as values. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dra_frontend.devices.inventory import Inventory
from dra_frontend.machine.host_hugepages import PageKey
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import ClaimKey
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus, ContainerReport
from numa_contract.state.devices import DeviceDocument
from numa_contract.state.status import PREVENTS_PREPARE, StatusDocument

from numa_tools.doctor.model import Unread
from numa_tools.doctor.runtime_settings import RuntimeConfig

Document = dict[str, Any]
Right = tuple[str, str, str, str]
"""Verb, API group, resource and name ("" for any), as RBAC has them."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """What the kernel says of itself below /proc and /sys."""

    release: tuple[int, int]
    """Major and minor number."""
    nohz_full: frozenset[int]
    rcu_nocbs: frozenset[int]
    """As the boot line has it."""
    clocksource: str
    """Empty where the kernel does not say."""
    workqueues: frozenset[int]
    """CPUs of unbound kernel workers; empty where the kernel does not say."""
    open_files: tuple[int, int]
    """In use and the most, of the whole node."""
    interrupts: Mapping[int, frozenset[int]]
    """CPUs at which each interrupt of a device arrives now."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The node's cgroup tree."""

    root: str
    controllers: frozenset[str] | None
    """None where the tree is not version 2."""
    passed_on: frozenset[str]
    """``cgroup.subtree_control`` of the root."""
    pods: Mapping[str, frozenset[str]]
    """``cgroup.subtree_control`` of the groups that all pods are below, by path."""
    can_kill: bool
    """Whether cgroups have ``cgroup.kill`` (Linux 5.14)."""
    partitions: bool
    """Whether cgroups have ``cpuset.cpus.exclusive`` (Linux 6.7)."""
    options: frozenset[str]
    """Of the mount."""
    slices: Mapping[str, frozenset[int]]
    """CPUs on which the processes of ``system.slice`` and its like may run; those without processes are left out."""
    host_pages: Mapping[PageKey, int] | None
    """Hugepages in use by no pod; None where the kernel does not tell what pods use."""


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """The kubelet's effective configuration, as far as it was seen."""

    source: str
    cpu_manager: str
    """Policy that runs now; that of the files if no state file was found."""
    memory_manager: str
    topology_manager: str
    gates: Mapping[str, bool]
    reserved_cpus: frozenset[int] | None
    """``reservedSystemCPUs``; None where it is not set."""
    reserved_memory: tuple[Document, ...]
    origins: Mapping[str, str] = field(default_factory=dict)
    """File or command line that sets each setting."""
    running: Mapping[str, str] = field(default_factory=dict)
    """Policies of the managers (``cpu``, ``memory``) in their state files."""
    configured: Mapping[str, str] = field(default_factory=dict)
    """Policies of the managers in files and flags, as far as these were seen."""
    runtime_endpoint: str = ""
    """``containerRuntimeEndpoint``; empty if it is not set, or if a part that was not seen may set it."""
    unseen: Unread | None = None
    """Reason why an absence proves nothing: a part of the configuration was not seen."""


@dataclass(frozen=True, slots=True)
class PodFault:
    """Something that the driver's pod lacks."""

    what: str
    remedy: str
    fatal: bool
    """Whether the service cannot work without it."""


@dataclass(frozen=True, slots=True)
class Service:
    """What the service of this pod reports on its state socket."""

    status: StatusDocument
    """``/v1/status``: the version, problems and warnings."""
    records: tuple[AllocationRecord, ...]
    containers: tuple[ContainerReport, ...]
    quarantine: Mapping[str, str]
    devices: tuple[DeviceDocument, ...]
    """``/v1/devices``: the devices that the service offers."""

    @property
    def hindrances(self) -> tuple[str, ...]:
        """Reasons why no claim can run here, whatever it requests; those of the backend as soon as they are known."""
        return tuple(one.text for one in self.status.problems if one.unready or one.code in PREVENTS_PREPARE)


@dataclass(frozen=True, slots=True)
class Space:
    """What is left of a file system."""

    path: str
    free_bytes: int
    free_files: int | None
    """None where the file system does not count them."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory that all instances on a node share."""

    path: str
    mode: int
    active: str | None
    """Pod UID to which ``state.sock`` leads; None without a link."""
    instances: Mapping[str, bool]
    """Pod UIDs with a state socket, and whether a process listens on it."""
    journal_problem: str
    space: Space


@dataclass(frozen=True, slots=True)
class Claims:
    """The claim files of the CDI directory."""

    files: Mapping[ClaimKey, ClaimFile]
    problems: Mapping[str, str]
    """By file name; "" is the directory itself."""
    detached: bool
    """True if the directory was replaced on the node, so that no other process uses the one that is mounted here."""
    space: Space

    @property
    def records(self) -> list[AllocationRecord]:
        """Returns every readable record, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]


@dataclass(frozen=True, slots=True)
class Trial:
    """What the API server made of a slice with every field that this node may publish, in a dry run."""

    dropped: tuple[str, ...]
    """Paths that were sent and did not come back."""
    refused: tuple[str, ...]
    """Feature gates without which it accepted the slice only without their fields."""
    server_ahead: float
    """Seconds by which the server's clock is ahead of this node's; its own has whole seconds."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that is known of a node. A source that could not be read is an Unread."""

    config: Config
    node_name: str
    kernel: Kernel | Unread
    cgroups: Cgroups | Unread
    machine: Inventory | Unread
    kubelet: KubeletConfig | Unread
    runtime: RuntimeConfig | Unread
    sockets: Mapping[str, str] | Unread
    """By driver, why the kubelet cannot reach it at its sockets; empty where it can."""
    pod: tuple[PodFault, ...]
    """Directories and mounts of the node that the driver's pod lacks."""
    service: Service | Unread
    backend: BackendStatus | Unread
    run_directory: RunDirectory | Unread
    claims: Claims | Unread
    open_files: tuple[int, int]
    """Files that a process of this container may have open: soft and hard limit."""
    server: str | Unread
    """The API server's version, ``v1.36.1``."""
    classes: frozenset[str] | Unread
    node: Document | Unread
    rights: Mapping[Right, bool] | Unread
    trial: Trial | Unread
    slices: tuple[Document, ...] | Unread
    api_claims: Mapping[str, Document | None] | Unread = field(default_factory=dict)
    """By UID of each record, the claim as the API server has it; None where there is none of that name and UID."""
