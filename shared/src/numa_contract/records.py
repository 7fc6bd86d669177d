# SPDX-License-Identifier: Apache-2.0
"""Allocation records: the frontend writes one into a claim's CDI file, and the backend enforces it.

Records have a version and keep unknown fields. The two images are updated one after the other, so release N reads
records from N-1 and N+1, and loses nothing when it writes them back.
"""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, Final, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from numa_contract.cpuset import MAX_CPU, format_cpu_list, parse_cpu_list
from numa_contract.errors import MalformedError, UnsupportedVersionError, shown
from numa_contract.models import BaseModel, as_markdown, attribute_docs
from numa_contract.names import CDI_KINDS, DRIVERS, cdi_device_name

RECORD_VERSION: Final = 1
_MAX_RESULTS: Final = 32
"""Maximum number of allocation results in a claim (resource.k8s.io, AllocationResultsMaxSize)."""
_MAX_PODS: Final = 256
"""Maximum number of entries in reservedFor (ResourceClaimReservedForMaxSize)."""
_MAX_SETS: Final = 1024
"""Maximum number of cached sets of field names, which instances share (see ``Document``). In practice, only a few
different sets occur for each model.
"""
_SMALLEST_PAGE: Final = 1 << 10
_MAX_PAGE: Final = 1 << 40


def _cpu_set(value: object, read: ValidatorFunctionWrapHandler) -> frozenset[int]:
    if isinstance(value, str):
        # Equal strings are parsed to the same set object, since a set of 128 CPUs takes up 8 KB.
        return parse_cpu_list(value)
    cpus: frozenset[int] = read(value)
    if cpus and not 0 <= min(cpus) <= max(cpus) <= MAX_CPU:
        raise ValueError(f"must be numbers from 0 to {MAX_CPU}")
    return cpus


CpuSet = Annotated[
    frozenset[int],
    WrapValidator(_cpu_set, json_schema_input_type=str),
    PlainSerializer(format_cpu_list, return_type=str),
]
"""A set of CPUs or NUMA nodes, written in JSON in the kernel's list format."""


def _page_size(value: int) -> int:
    if value & (value - 1):
        raise ValueError("must be a power of two")
    return value


Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]
PageBytes = Annotated[int, Field(ge=_SMALLEST_PAGE, le=_MAX_PAGE), AfterValidator(_page_size)]
NumaNode = Annotated[int, Field(ge=0, le=MAX_CPU)]


@lru_cache(_MAX_SETS)
def _shared_fields(given: frozenset[str]) -> set[str]:
    return set(given)


def _share_fields(model: BaseModel) -> None:
    if model.model_extra:  # Unknown fields can have any name, so sets that contain them could fill the cache.
        return
    object.__setattr__(model, "__pydantic_fields_set__", _shared_fields(frozenset(model.model_fields_set)))


class Document(BaseModel):
    """Base class of all documents that the driver's containers exchange.

    Documents are frozen, have camelCase names in JSON, and ignore unknown fields.

    A node has thousands of instances: five for each claim and one or more for each container, in both processes. For
    each of them, pydantic creates a set of the fields that were set (``model_fields_set``), which takes 216 to 728
    bytes. Instances with equal sets therefore share one set. That is safe because only an assignment to a field changes
    the set, and these models are frozen.
    """

    model_config = ConfigDict(
        frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True, serialize_by_alias=True
    )

    def model_post_init(self, _context: Any, /) -> None:
        """Replaces ``model_fields_set`` with an equal set that other instances share."""
        _share_fields(self)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Returns a copy with the given changes, without validating them."""
        copied = super().model_copy(update=update, deep=deep)
        _share_fields(copied)
        return copied

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """Returns the JSON schema with the docstrings of the class and its attributes as descriptions."""
        reference = handler(schema)
        found = handler.resolve_ref_schema(reference)
        found["description"] = as_markdown(cls.__doc__ or "")
        docs = attribute_docs(cls)
        for name, field in cls.model_fields.items():
            if shown := found.get("properties", {}).get(field.serialization_alias or name):
                shown.pop("title", None)
                shown |= {"description": docs[name]} if name in docs else {}
        return reference


class RecordPart(Document):  # noqa: PLW1641 - pydantic gives frozen models a hash of their fields
    """Base class of all parts of a record. Unknown fields are kept and written again, but ignored in comparisons."""

    model_config = ConfigDict(extra="allow")

    def __eq__(self, other: object) -> bool:
        # A release cannot tell whether a difference in an unknown field matters. An owner with an unknown field, for
        # example, is still the same container.
        return type(self) is type(other) and self.__dict__ == other.__dict__


class ClaimReference(RecordPart):
    """A ResourceClaim object."""

    uid: str
    """UID of the claim."""
    namespace: str
    """Namespace of the claim."""
    name: str
    """Name of the claim."""

    @property
    def full_name(self) -> str:
        """Namespace and name, ``namespace/name``."""
        return f"{self.namespace}/{self.name}"


class PodReference(RecordPart):
    """A pod that the claim is reserved for, in the claim's namespace."""

    uid: str
    """UID of the pod."""
    name: str
    """Name of the pod."""


class Owner(RecordPart):
    """The container that first used a claim. After a restart, the container has a different ID but is still the same
    owner.
    """

    pod_uid: str
    """UID of the container's pod."""
    container: str
    """Name of the container in its pod."""

    # Each of the backend's hooks creates an Owner, and few of them are retained, so sharing the set of fields would not
    # pay off.
    model_post_init = BaseModel.model_post_init  # type: ignore[pydantic-field]


class AllocationResult(RecordPart):
    """One entry of ``status.allocation.devices.results``, as the scheduler wrote it."""

    request: str
    """Full name of the request, ``request`` or ``request/subrequest``."""
    pool: str
    """Name of the device's pool."""
    device: str
    """Name of the device in its pool."""
    share_id: str | None = None
    """ID of the device's share (``shareID``); null for a device that is allocated as a whole."""
    consumed: dict[str, str] = Field(default_factory=dict)
    """Consumed capacity by capacity name, as canonical quantities of CPUs or bytes."""

    @property
    def base(self) -> str:
        """Name of the request without its subrequest, as the kubelet and containers use it."""
        return self.request.partition("/")[0]


class JoinedAttribute(RecordPart):
    """Values that a claim's matchAttribute constraints require of its CPUs."""

    attribute: str
    """Name of the attribute with its domain, such as ``resource.kubernetes.io/numaNode``."""
    values: tuple[int | bool | str, ...]
    """One value per constraint, without duplicates."""


class CpuAllocation(RecordPart):
    """CPUs of one allocation result."""

    request: str
    """Base name of the request."""
    device: str
    """Name of the device."""
    cpus: CpuSet
    """CPUs of the result, in the kernel's list format."""
    joined: tuple[JoinedAttribute, ...] = ()
    """Attribute values that the claim's ``matchAttribute`` constraints require of these CPUs; empty if no constraint
    restricts the choice of CPUs.
    """


class MemoryAllocation(RecordPart):
    """Memory or hugepages of one allocation result."""

    request: str
    """Base name of the request."""
    device: str
    """Name of the device."""
    numa_node: NumaNode
    """ID of the memory's NUMA node."""
    size: Bytes
    """Allocated memory in bytes."""
    page_bytes: PageBytes
    """Size of one page in bytes: the hugepage size, or the machine's base page size."""
    hugepages: bool = False
    """True if the memory consists of hugepages."""


def _formerly(former: str, present: str) -> AfterValidator:
    """Returns a validator that replaces a former value, which records from earlier builds contain, with the current
    one.
    """
    return AfterValidator(lambda word: present if word == former else word)


class CpuParameters(RecordPart):
    """Parameters of a request for CPUs, with defaults filled in. A newer release may add values to any parameter."""

    cpuset: CpuSet | None = None
    """CPUs that the claim itself names, in the kernel's list format; null if the driver chooses them."""
    strategy: str = "packed"
    """Placement of the CPUs, ``packed`` or ``spread``."""
    full_physical_cores: bool = False
    """True if the request gets all CPUs of each core that it uses."""
    l3: str = "preferred"
    """Placement in one L3 cache: ``preferred``, ``required`` or ``ignore``."""
    numa: str = "group"
    """Distribution of the CPUs: all from one NUMA node (``group``), or equal numbers from several (``distribute``)."""
    isolcpus: Annotated[str, Field(alias="isolcpus", validation_alias=AliasChoices("isolcpus", "isolated"))] = "ignore"
    """Use of the CPUs in the kernel's boot parameter ``isolcpus=``: ``ignore``, ``only`` or ``never``."""
    core_type: str = "any"
    """Type of the cores: ``any``, ``performance`` or ``efficiency``."""
    quota: Annotated[str, _formerly("off", "lift")] = "lift"
    """CFS quota of the containers: ``lift`` (no quota if the claim covers their CPU limit) or ``keep``."""
    irqs: str = "move"
    """Interrupts on the CPUs: ``move`` (they are moved off the CPUs while a container runs) or ``keep``."""
    isolation: str = "exclusive"
    """Load balancing: ``exclusive`` (the kernel balances threads over the claim's CPUs), ``isolated`` (a thread stays
    on its CPU until it is moved explicitly), or ``mixed`` (like ``exclusive``, but the container may also use CPUs of
    the shared pool). A release that does not support ``mixed`` rejects the container.
    """
    pool_cpus: Annotated[
        str, Field(alias="poolCPUs", validation_alias=AliasChoices("poolCPUs", "shared")), _formerly("pool", "all")
    ] = "none"
    """CPUs of the shared pool that the container may also use: ``none``, ``all``, or ``numa`` (those on the NUMA
    nodes of its own CPUs)."""


class PoolCpus(RecordPart):
    """CPUs of the shared pool that a container using the request may use in addition to the claim's own."""

    cpus: CpuSet
    """All CPUs of the machine except the claim's, in the kernel's list format."""
    near: CpuSet
    """CPUs in ``cpus`` that the container may use, in the kernel's list format. If the pool contains none of them, the
    container may use the whole pool.
    """


class MemoryMount(RecordPart):
    """The hugetlbfs mount for a request's hugepages."""

    path: str
    """Mount point in the container."""
    mode: str = "0770"
    """Octal permissions of the mount's root directory."""


def hiding_mounts(paths: Iterable[str]) -> tuple[str, str] | None:
    """Returns two mount paths, the first of which equals or would hide the second, or None if there is no such pair."""
    # In sorted order, the paths under a directory directly follow the directory itself.
    ordered = sorted(f"{path}/" for path in paths)
    return next(((a[:-1], b[:-1]) for a, b in pairwise(ordered) if b.startswith(a)), None)


class MemoryParameters(RecordPart):
    """Parameters of a request for memory, with defaults filled in. A newer release may add values to any parameter."""

    binding: str = "strict"
    """Binding to the NUMA node: ``strict`` (``cpuset.mems``), ``preferred`` or ``interleave`` (memory policy of the
    process)."""
    limit: str = "none"
    """Memory limit: ``none``, or ``claim`` (``memory.max`` is set to the claimed bytes)."""
    protect: str = "none"
    """Protection against reclaim: ``none``, ``low`` or ``min`` (``memory.low`` or ``memory.min`` is set to the claimed
    bytes)."""
    high: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """``memory.high`` as a fraction of the claimed bytes, from 0 to 1; null if it is not set."""
    mount: MemoryMount | None = None
    """The hugetlbfs mount for the requested hugepages; null if there is none."""


_CPU_DEFAULTS: Final = CpuParameters()
_MEMORY_DEFAULTS: Final = MemoryParameters()


class MetadataFile(RecordPart):
    """The device metadata of a request (KEP-5304): a file on the host that the request's containers mount read-only."""

    host_path: str
    """Path of the file on the host."""
    mount_path: str
    """Path of the file in the container."""
    content: str
    """Content of the file: compact JSON, as a string. Only the container parses it."""


class AllocationRecord(RecordPart):
    """One driver's allocation for one claim. Only the frontend writes it."""

    version: int = RECORD_VERSION
    """Version of the format."""
    driver: str
    """Name of the driver, ``dra.cpu`` or ``dra.memory``."""
    claim: ClaimReference
    """The claim that the devices are allocated to."""
    reserved_for: Annotated[tuple[PodReference, ...], Field(max_length=_MAX_PODS)] = ()
    """Pods that the claim was reserved for when the frontend last read it. If a pod is not in this list, the backend
    rejects its first container, and the frontend then reads the claim again."""
    results: Annotated[tuple[AllocationResult, ...], Field(max_length=_MAX_RESULTS)] = ()
    """Allocation results from which the record was created. A repeated Prepare compares the claim with these
    results.
    """
    cpus: Annotated[tuple[CpuAllocation, ...], Field(max_length=_MAX_RESULTS)] = ()
    """Allocated CPUs by result; empty in a ``dra.memory`` record."""
    memory: Annotated[tuple[MemoryAllocation, ...], Field(max_length=_MAX_RESULTS)] = ()
    """Allocated memory by result; empty in a ``dra.cpu`` record."""
    parameters: dict[str, CpuParameters] = Field(default_factory=dict)
    """Parameters of the requests for ``dra.cpu``, keyed by the request's base name."""
    memory_parameters: dict[str, MemoryParameters] = Field(default_factory=dict)
    """Parameters of the requests for ``dra.memory``, keyed by the request's base name."""
    metadata: dict[str, MetadataFile] = Field(default_factory=dict)
    """Metadata files, keyed by the request's base name; empty if metadata is off or the file could not be written."""
    pool_cpus: Annotated[
        dict[str, PoolCpus], Field(alias="poolCpus", validation_alias=AliasChoices("poolCpus", "sharedCpus"))
    ] = Field(default_factory=dict)
    """Shared-pool CPUs that containers may also use, keyed by the request's base name; only for requests whose
    ``poolCPUs`` is not ``none``.
    """
    sharing: str = "container"
    """How the claim is shared: ``pod`` if all containers of one pod share it, otherwise ``container``. An unknown value
    is enforced as ``container``, the stricter one.
    """
    counted: bool = False
    """True if the kubelet adds the claim to the limits of its pod and of the containers that name it (KEP-5517)."""
    owner: Owner | None = None
    """The container that first used the claim; null before the first use."""
    rebuilt: bool = False
    """True if the record was rebuilt from the API server and the kernel after its file was lost."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        if self.driver not in DRIVERS:
            raise ValueError(f"driver {shown(self.driver)} is not one of {', '.join(DRIVERS)}")
        return self

    @property
    def requests(self) -> tuple[str, ...]:
        """Base names of the requests for this driver, in result order."""
        return tuple(dict.fromkeys([result.base for result in self.results]))

    def device_request(self, request: str) -> str | None:
        """Returns the request name to use in CDI device names, or None if the claim has only one request for this
        driver.
        """
        return request if len(self.requests) > 1 else None

    def cdi_id(self, request: str) -> str:
        """Returns the qualified name of the CDI device for a request (given by its base name), such as
        ``dra.k8s.io/cpu=claim-<uid>``.

        The kubelet stores these names in its checkpoint.
        """
        return f"{CDI_KINDS[self.driver]}={cdi_device_name(self.claim.uid, self.device_request(request))}"

    def cpus_of(self, requests: Iterable[str] | None = None) -> frozenset[int]:
        """Returns the CPUs of the given requests, or of all requests by default."""
        wanted = None if requests is None else set(requests)
        return frozenset().union(*(a.cpus for a in self.cpus if wanted is None or a.request in wanted))

    def memory_of(self, requests: Iterable[str] | None = None) -> tuple[MemoryAllocation, ...]:
        """Returns the memory of the given requests, or of all requests by default."""
        wanted = None if requests is None else set(requests)
        return tuple(a for a in self.memory if wanted is None or a.request in wanted)

    def parameters_of(self, request: str) -> CpuParameters:
        """Returns the parameters of a request (base name), or the defaults if none are recorded."""
        return self.parameters.get(request) or _CPU_DEFAULTS

    def memory_parameters_of(self, request: str) -> MemoryParameters:
        """Returns the memory parameters of a request (base name), or the defaults if none are recorded."""
        return self.memory_parameters.get(request) or _MEMORY_DEFAULTS

    def reserves(self, pod_uid: str) -> bool:
        """Returns True if ``reservedFor``, as last read, allows the pod to use the claim."""
        return any(pod.uid == pod_uid for pod in self.reserved_for)


def check_version(kind: str, document: Any, current: int) -> None:
    """Raises UnsupportedVersionError if the document's ``version`` is too new for this release, that is, above N+1."""
    version = document.get("version") if isinstance(document, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or not max(current - 1, 1) <= version <= current + 1:
        raise UnsupportedVersionError(
            f"{kind} has format version {shown(version)}; this release reads versions up to {current + 1}"
        )


def parse_record(document: Any) -> AllocationRecord:
    """Parses the JSON value of a record. Raises ContractError if it is malformed or has an unsupported version."""
    check_version("allocation record", document, RECORD_VERSION)
    try:
        return AllocationRecord.model_validate(document)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "record"
        raise MalformedError("allocation record", where, first["msg"]) from error
