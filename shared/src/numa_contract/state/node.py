# SPDX-License-Identifier: Apache-2.0
"""``/v1/node``: everything that the web page shows, in one document.

A field that has no value is omitted. As long as nothing changes on the node, every request returns the same document.
"""

from numa_contract.records import CpuSet
from numa_contract.state.base import StateDocument
from numa_contract.state.devices import CpuDocument, MemoryDocument


class ProblemDocument(StateDocument):
    """One problem or warning."""

    level: str
    """Level of the problem: ``fault`` (something does not work) or ``warning`` (the driver works, but an operator
    should know about it).
    """
    code: str
    """Code of the problem or warning, with the same values as in ``/v1/status``; empty in the entry that counts the
    omitted entries.
    """
    subject: str
    """Object that the problem concerns; empty if it concerns the whole node."""
    text: str
    """Description of the problem, in most cases with the remedy."""


class PageNumaNode(StateDocument):
    """One NUMA node."""

    id: int
    """ID of the NUMA node."""
    sockets: tuple[int, ...]
    """Numbers of the sockets that the NUMA node's online CPUs are in."""
    distances: dict[int, int]
    """Distance to each NUMA node by its ID, in the kernel's relative unit: 10 is local."""
    tier: str
    """Tier of the memory: ``local`` if its NUMA node has CPUs, else ``far``."""
    memory_kind: str
    """Kind of memory: ``dram``, ``hbm``, ``cxl``, ``pmem`` or ``unknown``."""


class PageCpu(CpuDocument):
    """One CPU that is present, and its use."""

    use: str
    """Use of the CPU: ``exclusive``, ``isolated``, ``pod-shared``, ``held``, ``pool``, ``withheld``, ``reserved`` or
    ``offline``; see the table on the web page.
    """
    isolcpus: bool | None = None
    """True if the CPU has been isolated since boot; otherwise omitted."""
    socket: int | None = None
    """Number of the CPU's socket; omitted if the CPU has been offline since the frontend started."""
    core_type: str | None = None
    """Type of the CPU's core: ``standard``, ``p-core`` or ``e-core``; omitted if the CPU has been offline since the
    frontend started.
    """


class PageMemory(MemoryDocument):
    """A memory device, and the total amount of memory that has the device's page size on its NUMA node."""

    total_bytes: int
    """Memory of this page size on the NUMA node in bytes, including memory not available to claims."""


class EnforcedDocument(StateDocument):
    """A claim's ``Enforced`` condition, taken from the device with the worst status."""

    status: str
    """Status of the condition: ``True``, ``False`` or ``Unknown``."""
    reason: str
    """The condition's reason, in one word."""
    message: str
    """Explanation; may be empty."""


class PageClaimMemory(StateDocument):
    """Memory of a claim on one NUMA node."""

    numa_node: int
    """ID of the NUMA node."""
    bytes: int
    """Memory in bytes."""
    page_size: str
    """Size of one hugepage, such as ``2Mi``; empty for plain memory."""


class PageClaim(StateDocument):
    """One claim with a record."""

    uid: str
    """UID of the claim."""
    claim: str
    """Namespace and name of the claim, ``namespace/name``."""
    pods: tuple[str, ...]
    """Names of the pods that the claim is reserved for."""
    enforced: EnforcedDocument
    """Status of the claim's enforcement."""
    cpus: CpuSet | None = None
    """CPUs of the claim, in the kernel's list format; omitted if it has none."""
    memory: tuple[PageClaimMemory, ...] | None = None
    """Memory of the claim; omitted if it has none."""


class PageContainer(StateDocument):
    """One container that may be running."""

    name: str
    """Name of the container in its pod."""
    pod: str
    """Namespace and name of the container's pod, ``namespace/name``."""
    cpus: CpuSet
    """CPUs of the container, in the kernel's list format; empty if they are not known."""
    claims: tuple[str, ...] | None = None
    """UIDs of the claims that the container uses or requests; omitted if there are none."""


class NodeDocument(StateDocument):
    """CPUs, memory, claims, containers and problems of a node."""

    node: str
    """Name of the node."""
    version: str
    """Version of the frontend."""
    runtime: str
    """Name and version of the container runtime; empty if it is not known."""
    live: bool
    """True if a backend on this node enforces claims, and the reports are complete and at most 10 s old. Prepare can
    still fail for other reasons.
    """
    problems: tuple[ProblemDocument, ...]
    """Problems, followed by warnings: at most 100 in total. If some are omitted, one more entry contains the number of
    omitted problems and warnings.
    """
    numa_nodes: tuple[PageNumaNode, ...]
    """NUMA nodes by ID."""
    memory: tuple[PageMemory, ...]
    """Memory devices."""
    cpus: tuple[PageCpu, ...]
    """All CPUs that are present."""
    claims: tuple[PageClaim, ...]
    """Claims with a record."""
    containers: tuple[PageContainer, ...]
    """Containers that may be running and were not rejected."""
    lost: tuple[str, ...]
    """UIDs of the claims whose record is lost."""
