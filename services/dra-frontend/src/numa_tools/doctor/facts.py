# SPDX-License-Identifier: Apache-2.0
"""Values that the sources read from a node. This module does no I/O."""

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
"""Verb, API group, resource and name ("" for any), as in an RBAC rule."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Kernel facts from /proc and /sys."""

    release: tuple[int, int]
    """Major and minor version."""
    nohz_full: frozenset[int]
    rcu_nocbs: frozenset[int]
    """CPUs listed in the boot option ``rcu_nocbs``."""
    clocksource: str
    """Current clock source, or "" if the kernel does not report it."""
    workqueues: frozenset[int]
    """CPUs on which unbound kernel workers may run. Empty if the kernel does not report them."""
    open_files: tuple[int, int]
    """Number of open files on the node, and the maximum number."""
    interrupts: Mapping[int, frozenset[int]]
    """Effective CPU affinity of each device interrupt."""


@dataclass(frozen=True, slots=True)
class Cgroups:
    """The node's cgroup tree."""

    root: str
    controllers: frozenset[str] | None
    """Available controllers, or None if the tree is not version 2."""
    delegated: frozenset[str]
    """Contents of ``cgroup.subtree_control`` at the root."""
    pods: Mapping[str, frozenset[str]]
    """Contents of ``cgroup.subtree_control`` by path, for the cgroups above the pods."""
    can_kill: bool
    """True if cgroups have ``cgroup.kill`` (Linux 5.14)."""
    partitions: bool
    """True if cgroups have ``cpuset.cpus.exclusive`` (Linux 6.7)."""
    options: frozenset[str]
    """Mount options."""
    slices: Mapping[str, frozenset[int]]
    """CPUs that the processes in ``system.slice`` and similar cgroups may use. Cgroups without processes are
    omitted."""
    host_pages: Mapping[PageKey, int] | None
    """Hugepages in use outside pods, or None if the kernel does not report the pods' usage."""


@dataclass(frozen=True, slots=True)
class KubeletConfig:
    """The kubelet's effective configuration, as far as it could be read."""

    source: str
    cpu_manager: str
    """Policy in use, or the configured policy if no state file was found."""
    memory_manager: str
    topology_manager: str
    gates: Mapping[str, bool]
    reserved_cpus: frozenset[int] | None
    """CPUs in ``reservedSystemCPUs``, or None if it is not set."""
    reserved_memory: tuple[Document, ...]
    origins: Mapping[str, str] = field(default_factory=dict)
    """File or command line from which each setting comes."""
    running: Mapping[str, str] = field(default_factory=dict)
    """Policies that the managers (``cpu``, ``memory``) have recorded in their state files."""
    configured: Mapping[str, str] = field(default_factory=dict)
    """Policies set for the managers in the files and flags that could be read."""
    runtime_endpoint: str = ""
    """``containerRuntimeEndpoint``.

    Empty if it is not set, or if a part of the configuration that could not be read might set it.
    """
    incomplete: Unread | None = None
    """Set if a part of the configuration could not be read. A setting that seems to be missing may be in that part."""


@dataclass(frozen=True, slots=True)
class PodFault:
    """A resource that the driver's pod does not have."""

    what: str
    remedy: str
    fatal: bool
    """True if the service cannot work without the resource."""


@dataclass(frozen=True, slots=True)
class Service:
    """Documents that this pod's service returns on its state socket."""

    status: StatusDocument
    """``/v1/status``: the version, problems and warnings."""
    records: tuple[AllocationRecord, ...]
    containers: tuple[ContainerReport, ...]
    quarantine: Mapping[str, str]
    devices: tuple[DeviceDocument, ...]
    """``/v1/devices``: the devices that the service offers."""

    @property
    def refusal_reasons(self) -> tuple[str, ...]:
        """Reasons why this node accepts no claims, whatever they request. The backend's reasons are included once the
        backend has reported.
        """
        return tuple(one.text for one in self.status.problems if one.unready or one.code in PREVENTS_PREPARE)


@dataclass(frozen=True, slots=True)
class Space:
    """Free space on a file system."""

    path: str
    free_bytes: int
    free_files: int | None
    """Number of files that can still be created, or None if the file system does not count them."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory shared by all instances on a node."""

    path: str
    mode: int
    active: str | None
    """UID of the pod whose socket ``state.sock`` points to, or None if the link is missing."""
    instances: Mapping[str, bool]
    """For each pod that has a state socket, by UID: True if a process is listening on that socket."""
    journal_problem: str
    space: Space


@dataclass(frozen=True, slots=True)
class Claims:
    """The claim files in the CDI directory."""

    files: Mapping[ClaimKey, ClaimFile]
    problems: Mapping[str, str]
    """Problems by file name. The name "" is used for the directory itself."""
    detached: bool
    """True if the directory was replaced on the node, in which case no other process uses the directory that is mounted
    here.
    """
    space: Space

    @property
    def records(self) -> list[AllocationRecord]:
        """Returns all readable records, ordered by driver and claim."""
        return [file.record for _, file in sorted(self.files.items()) if file.record]


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a dry run that creates a slice with every field that this node might publish."""

    dropped: tuple[str, ...]
    """Paths of fields that the API server dropped."""
    refused: tuple[str, ...]
    """Feature gates whose fields had to be removed before the API server accepted the slice."""
    server_ahead: float
    """Number of seconds by which the server's clock is ahead of this node's clock. The server reports whole seconds."""


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts about a node. If a source could not be read, the field for its facts is an Unread."""

    config: Config
    node_name: str
    kernel: Kernel | Unread
    cgroups: Cgroups | Unread
    machine: Inventory | Unread
    kubelet: KubeletConfig | Unread
    runtime: RuntimeConfig | Unread
    sockets: Mapping[str, str] | Unread
    """For each driver, the reason why the kubelet cannot reach its socket, or "" if the kubelet can reach it."""
    pod: tuple[PodFault, ...]
    """Resources that the driver's pod lacks, such as the node's directories, mounts, or access to the API server."""
    service: Service | Unread
    backend: BackendStatus | Unread
    run_directory: RunDirectory | Unread
    claims: Claims | Unread
    open_files: tuple[int, int]
    """Soft and hard open-file limits for a process in this container."""
    server: str | Unread
    """The API server's version, such as ``v1.36.1``."""
    classes: frozenset[str] | Unread
    node: Document | Unread
    rights: Mapping[Right, bool] | Unread
    trial: Trial | Unread
    slices: tuple[Document, ...] | Unread
    api_claims: Mapping[str, Document | None] | Unread = field(default_factory=dict)
    """The API server's claim for each record's UID, or None if no claim has the record's name and UID."""
