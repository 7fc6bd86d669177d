# SPDX-License-Identifier: Apache-2.0
"""What a claim was given: the record that the frontend writes into a claim's CDI file and the backend enforces.

Records carry a version and keep fields they do not know: the two images are rolled out one at a time, so release N
reads what N-1 and N+1 wrote, and what it writes again loses nothing.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from numa_contract.cpuset import HIGHEST_CPU, format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError, UnsupportedVersionError, shown
from numa_contract.names import CDI_KINDS, DRIVERS, cdi_device_name

RECORD_VERSION: Final = 1
_MOST_RESULTS: Final = 32
"""Of a claim (resource.k8s.io, AllocationResultsMaxSize)."""
_MOST_PODS: Final = 256
"""In reservedFor (ResourceClaimReservedForMaxSize)."""
_SMALLEST_PAGE: Final = 1 << 10
_LARGEST_PAGE: Final = 1 << 40


def _cpu_set(value: object, read: ValidatorFunctionWrapHandler) -> frozenset[int]:
    cpus: frozenset[int] = read(parse_cpu_list(value) if isinstance(value, str) else value)
    if cpus and not 0 <= min(cpus) <= max(cpus) <= HIGHEST_CPU:
        raise ValueError(f"must be numbers from 0 to {HIGHEST_CPU}")
    return cpus


CpuSet = Annotated[
    frozenset[int],
    WrapValidator(_cpu_set, json_schema_input_type=str),
    PlainSerializer(format_cpu_list, return_type=str),
]
"""A set of CPUs or NUMA nodes; in JSON the kernel's list format."""


def _page_size(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
PageBytes = Annotated[int, Field(ge=_SMALLEST_PAGE, le=_LARGEST_PAGE), AfterValidator(_page_size)]
NumaNode = Annotated[int, Field(ge=0, le=HIGHEST_CPU)]


class Document(BaseModel):
    """Base of everything that crosses the border: frozen, camelCase in JSON, unknown fields ignored."""

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True
    )


class RecordPart(Document):  # noqa: PLW1641 - pydantic gives frozen models a hash of their fields
    """Base of everything in a record. Unknown fields are kept and written again; they do not make two values differ."""

    model_config = ConfigDict(extra="allow")

    def __eq__(self, other: object) -> bool:
        # A release that does not know a field cannot tell whether it matters: an owner is still the same container.
        return type(self) is type(other) and self.__dict__ == other.__dict__


class ClaimReference(RecordPart):
    """A ResourceClaim object."""

    uid: str
    namespace: str
    name: str


class PodReference(RecordPart):
    """A pod that the claim is reserved for; it lives in the claim's namespace."""

    uid: str
    name: str


class Owner(RecordPart):
    """The container that first used a claim; a restart of it has another container id but the same owner."""

    pod_uid: str
    container: str


class AllocationResult(RecordPart):
    """One entry of ``status.allocation.devices.results``, as the scheduler wrote it."""

    request: str
    """Full name, ``request`` or ``request/subrequest``."""
    pool: str
    device: str
    share_id: str | None = None
    consumed: dict[str, str] = Field(default_factory=dict)
    """Capacity consumed, canonical quantities by the name under which they were found."""

    @property
    def base(self) -> str:
        """The request's name without its subrequest: what the kubelet and containers call it."""
        return self.request.partition("/")[0]


class JoinedAttribute(RecordPart):
    """Values that matchAttribute constraints of a claim demanded of CPUs."""

    attribute: str
    """Name with its domain, ``resource.kubernetes.io/numaNode``."""
    values: tuple[int | bool | str, ...]
    """One value per constraint, without duplicates."""


class CpuAllocation(RecordPart):
    """The CPUs that one allocation result was given."""

    request: str
    """Base name of the request."""
    device: str
    cpus: CpuSet
    joined: tuple[JoinedAttribute, ...] = ()
    """Empty if the device has only one value of each joined attribute."""


class MemoryAllocation(RecordPart):
    """The memory or hugepages that one allocation result was given."""

    request: str
    """Base name of the request."""
    device: str
    numa_node: NumaNode
    size: Bytes
    """Bytes."""
    page_bytes: PageBytes
    hugepages: bool = False


class CpuParameters(RecordPart):
    """What a request was given its CPUs by, resolved. Texts and not choices: a newer release may know more of them."""

    cpuset: CpuSet | None = None
    """The CPUs that the claim named itself."""
    strategy: str = "packed"
    """``packed`` or ``spread``."""
    full_physical_cores: bool = False
    l3: str = "preferred"
    """``preferred``, ``required`` or ``ignore``."""
    numa: str = "group"
    """``group`` or ``distribute``."""
    isolated: str = "ignore"
    """``ignore``, ``only`` or ``never``."""
    core_type: str = "any"
    """``any``, ``performance`` or ``efficiency``."""
    quota: str = "off"
    """``off`` (no CFS quota where the claim covers the limit) or ``keep``."""
    irqs: str = "move"
    """``move`` (interrupts leave the CPUs while they are in use) or ``keep``."""
    isolation: str = "exclusive"
    """``exclusive`` (threads are balanced over the claim's CPUs), ``isolated`` (they stay where they are put), or
    ``mixed`` (as ``exclusive``, with the shared pool beside them), which releases that do not know it refuse."""
    shared: str = "none"
    """What the container has of the shared pool beside its CPUs: ``none``, ``pool`` (all) or ``numa``."""


class SharedCpus(RecordPart):
    """Where a container of a request may run beside the claim's own CPUs, as far as that is in the shared pool."""

    cpus: CpuSet
    """Every CPU of the machine but the claim's."""
    near: CpuSet
    """Those of them that the container gets of the pool. Where the pool has none of these, it gets all of the pool."""


class MemoryMount(RecordPart):
    """A hugetlbfs that a request's pages are mounted as."""

    path: str
    """Where, in the container."""
    mode: str = "0770"
    """Permissions of its root, octal."""


def hiding_mounts(paths: Iterable[str]) -> tuple[str, str] | None:
    """Returns two mount paths of which the first would hide the second, or is the same; None where there are none."""
    # In this order whatever lies in a directory follows it at once.
    ordered = sorted(f"{path}/" for path in paths)
    return next(((a[:-1], b[:-1]) for a, b in pairwise(ordered) if b.startswith(a)), None)


class MemoryParameters(RecordPart):
    """How a request's memory is enforced, resolved. Texts and not choices: a newer release may know more of them."""

    binding: str = "strict"
    """``strict`` (cpuset.mems), ``preferred`` or ``interleave`` (memory policy of the process)."""
    limit: str = "none"
    """``none``, or ``claim``: ``memory.max`` is the claimed bytes."""
    protect: str = "none"
    """``none``, ``low`` or ``min``: the claimed bytes are in ``memory.low`` or ``memory.min``."""
    high: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """``memory.high`` as a fraction of the claimed bytes."""
    mount: MemoryMount | None = None
    """Hugepage requests only."""


_CPU_DEFAULTS: Final = CpuParameters()
_MEMORY_DEFAULTS: Final = MemoryParameters()


class MetadataFile(RecordPart):
    """What a request's containers are told of their devices (KEP-5304): a file of the host, mounted read-only."""

    host_path: str
    mount_path: str
    """Where, in the container."""
    content: str
    """Compact JSON. A text, since nobody but the container reads it and hundreds of records are held in memory."""


class AllocationRecord(RecordPart):
    """Everything one driver gave to one claim. Written by the frontend alone."""

    version: int = RECORD_VERSION
    driver: str
    claim: ClaimReference
    reserved_for: Annotated[tuple[PodReference, ...], Field(max_length=_MOST_PODS)] = ()
    """Snapshot; the backend refuses once when a pod outside it shows up, and the frontend reads the claim again."""
    results: Annotated[tuple[AllocationResult, ...], Field(max_length=_MOST_RESULTS)] = ()
    """What the record was made from, so that a repeated Prepare can tell "same" from "allocated anew"."""
    cpus: Annotated[tuple[CpuAllocation, ...], Field(max_length=_MOST_RESULTS)] = ()
    memory: Annotated[tuple[MemoryAllocation, ...], Field(max_length=_MOST_RESULTS)] = ()
    parameters: dict[str, CpuParameters] = Field(default_factory=dict)
    """By base name of the request; none in records of releases that had no parameters."""
    memory_parameters: dict[str, MemoryParameters] = Field(default_factory=dict)
    """As ``parameters``, for requests of dra.memory."""
    metadata: dict[str, MetadataFile] = Field(default_factory=dict)
    """By base name of the request; none where metadata is off, or its file could not be written."""
    shared_cpus: dict[str, SharedCpus] = Field(default_factory=dict)
    """By base name of the request; none for those that have their own CPUs alone."""
    sharing: str = "container"
    """``pod``, or ``container``, the stricter one, as which every other word is enforced."""
    counted: bool = False
    """The kubelet adds the claim to the limits of its pod, and of the containers that name it (KEP-5517)."""
    owner: Owner | None = None
    rebuilt: bool = False
    """True when the record was put together again from the API server and the kernel after its file was lost."""

    @model_validator(mode="after")
    def _belongs_together(self) -> Self:
        if self.driver not in DRIVERS:
            raise ValueError(f"driver {shown(self.driver)} is none of {', '.join(DRIVERS)}")
        return self

    @property
    def requests(self) -> tuple[str, ...]:
        """Base names of the requests for this driver, in the order of the results."""
        return tuple(dict.fromkeys([result.base for result in self.results]))

    def device_request(self, request: str) -> str | None:
        """Returns the request as it appears in CDI names: None when the claim has a single one for this driver."""
        return request if len(self.requests) > 1 else None

    def cdi_id(self, request: str) -> str:
        """Returns the qualified CDI device of a request (base name), ``dra.k8s.io/cpu=claim-<uid>``.

        The kubelet checkpoints these.
        """
        return f"{CDI_KINDS[self.driver]}={cdi_device_name(self.claim.uid, self.device_request(request))}"

    def cpus_of(self, requests: Iterable[str] | None = None) -> frozenset[int]:
        """Returns the CPUs of some requests, of all of them by default."""
        wanted = None if requests is None else set(requests)
        return frozenset().union(*(a.cpus for a in self.cpus if wanted is None or a.request in wanted))

    def memory_of(self, requests: Iterable[str] | None = None) -> tuple[MemoryAllocation, ...]:
        """Returns the memory of some requests, of all of them by default."""
        wanted = None if requests is None else set(requests)
        return tuple(a for a in self.memory if wanted is None or a.request in wanted)

    def parameters_of(self, request: str) -> CpuParameters:
        """Returns the parameters of a request (base name), the defaults where none are recorded."""
        return self.parameters.get(request) or _CPU_DEFAULTS

    def memory_parameters_of(self, request: str) -> MemoryParameters:
        """Returns the memory parameters of a request (base name), the defaults where none are recorded."""
        return self.memory_parameters.get(request) or _MEMORY_DEFAULTS

    def reserves(self, pod_uid: str) -> bool:
        """Tells whether the pod may use the claim, as far as this snapshot knows."""
        return any(pod.uid == pod_uid for pod in self.reserved_for)


def check_version(kind: str, document: Any, current: int) -> None:
    """Raises UnsupportedVersionError unless the document's ``version`` is one this release reads: up to N+1."""
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or not max(current - 1, 1) <= version <= current + 1:
        raise UnsupportedVersionError(
            f"{kind} has format version {shown(version)}; this release reads up to {current + 1}"
        )


def parse_record(document: Any) -> AllocationRecord:
    """Reads the JSON value of a record; raises ContractError (malformed, or of a version out of reach)."""
    check_version("allocation record", document, RECORD_VERSION)
    try:
        return AllocationRecord.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise MalformedError("allocation record", where, first["msg"]) from error
