# SPDX-License-Identifier: Apache-2.0
"""Model of the configuration file, which both containers read. Unlike records, it rejects unknown fields.

Keys that dra-driver-cpu also has use the same names and paths. The chart's JSON schema is generated from this model.
"""

import posixpath
import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.alias_generators import to_camel

from numa_contract.cpuset import MAX_CPU, format_cpu_list, parse_cpu_list
from numa_contract.errors import SHOWN_CHARACTERS, ContractError, described, shown
from numa_contract.models import BaseModel
from numa_contract.names import CDI_DIRECTORY, FORMER_SETTINGS, RUN_DIRECTORY, replace_former_names
from numa_contract.pagesize import parse_page_size
from numa_contract.quantity import parse_quantity

MAX_FAULTS: Final = 16
"""Maximum number of faults listed in a ConfigError's message. The limit keeps the message short even if the file has
many long keys.
"""


class ConfigError(ContractError):
    """The configuration is unusable. The message names the first MAX_FAULTS invalid keys."""

    def __init__(self, source: str, faults: list[str]) -> None:
        self.source = source
        self.faults = faults
        more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
        super().__init__(f"{source}: " + "; ".join([*faults[:MAX_FAULTS], *more]))


_TYPES: Final = {"tuple_type": "input should be a list", "model_type": "input should be a map"}
"""Replacements for pydantic's messages, which name Python types."""


def faults_of(
    error: ValidationError, known: Collection[str] = (), former: Mapping[str, str] = MappingProxyType({})
) -> list[str]:
    """Returns all faults in a document with their paths in the file.

    ``known`` contains the top-level keys. ``former`` maps a current key to the former key that the file contains
    instead.
    """
    found = []
    for fault in error.errors(include_url=False, include_context=False):
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            at_top = known and len(fault["loc"]) == 1
            text = "unknown key" + (f"; known keys are {', '.join(sorted(known))}" if at_top else "")
        elif fault["type"] not in ("missing", "value_error"):
            text = _TYPES.get(fault["type"], f"{text[:1].lower()}{text[1:]}")
            text = f"got {described(fault['input'])}; {text}"
        first, *inner = fault["loc"] or ("file",)
        found.append(f"{'.'.join(map(_key_text, (former.get(str(first), first), *inner)))}: {text}")
    return found


def _key_text(key: str | int) -> str:
    """Returns a key as it appears in the file, or quoted and truncated if it is long or has unprintable characters."""
    text = str(key)
    return text if text.isprintable() and len(text) <= SHOWN_CHARACTERS else shown(text)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "/../" in f"{path}/":
        raise ValueError("must be an absolute path without '..'")
    return "/" + posixpath.normpath(path).strip("/")


def _volatile(path: str) -> str:
    # The CDI directory is the database of prepared claims. A reboot must empty it, because a reboot ends all claims.
    if path == "/etc" or path.startswith("/etc/"):
        raise ValueError("must not be under /etc: files there survive a reboot, but claims do not; use /var/run/cdi")
    return path


_NUMBER_BITS: Final = 64
"""Maximum size in bits of an integer that is converted to text. The size is limited because the time for the conversion
grows with the square of the size.
"""


def cpu_list_text(value: object) -> object:
    """Converts a CPU list that YAML has read as an integer, such as ``0``, back to text. Returns other values
    unchanged.
    """
    is_number = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() <= _NUMBER_BITS
    return str(value) if is_number else value


def _cpu_list(value: object) -> object:
    text = cpu_list_text(value)
    if not isinstance(text, str | frozenset):
        raise ValueError(f'got {described(value)}; write a CPU list in quotes, such as "0-3,8"')
    return parse_cpu_list(text) if isinstance(text, str) else text


_WHOLE_BYTES: Final = re.compile(r"[0-9]{1,18}([kMGT]|[KMGT]i)?")
_PAGE_SIZE: Final = re.compile(r"[1-9][0-9]{0,8}[kmgKMG](i|[bB])?")
_LIMIT_NAME: Final = re.compile(f"memory|hugepages-{_PAGE_SIZE.pattern}")
# The chart's templates check what a JSON schema cannot express: that CPU lists are in order, that paths do not contain
# "..", and that no NUMA node is listed twice.
_CpuListSchema = Annotated[str, Field(pattern=r"^([0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*)?$")]
_ByteSchema = Annotated[str, Field(pattern=f"^{_WHOLE_BYTES.pattern}$")] | Annotated[int, Field(ge=0)]
_LimitName = Annotated[str, WithJsonSchema({"type": "string", "pattern": f"^({_LIMIT_NAME.pattern})$"})]

AbsolutePath = Annotated[str, AfterValidator(_absolute), WithJsonSchema({"type": "string", "pattern": "^/"})]
CpuList = Annotated[
    frozenset[int],
    BeforeValidator(_cpu_list, json_schema_input_type=_CpuListSchema),
    PlainSerializer(format_cpu_list, return_type=str),
]


def _bytes(value: object) -> object:
    if isinstance(value, str):
        if not _WHOLE_BYTES.fullmatch(value):
            raise ValueError('must be a whole number of bytes or a quantity such as "512Mi"')
        return int(parse_quantity(value))
    return value


Bytes = Annotated[int, Field(ge=0, strict=True), BeforeValidator(_bytes, json_schema_input_type=_ByteSchema)]


class Section(BaseModel):
    """Base class of the configuration's sections. They are frozen, have camelCase keys, reject unknown keys, and accept
    the same types as the chart's schema.

    A key without a value (``key:``) or with null is treated as absent.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        alias_generator=to_camel,
        populate_by_name=True,
        serialize_by_alias=True,
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: object) -> object:
        return (
            {key: value for key, value in values.items() if value is not None} if isinstance(values, dict) else values
        )


class ReservedMemory(Section):
    """Memory on one NUMA node that is never offered, in the format of the kubelet's ``reservedMemory``."""

    numa_node: Annotated[int, Field(ge=0)]
    limits: dict[_LimitName, Bytes]
    """Reserved bytes, keyed by ``memory`` or ``hugepages-<size>``."""

    @field_validator("limits")
    @classmethod
    def _known_resources(cls, limits: dict[str, int]) -> dict[str, int]:
        for name in limits:
            if not _LIMIT_NAME.fullmatch(name):
                raise ValueError(f"{shown(name)} is neither memory nor hugepages-<size>, such as hugepages-2Mi")
        return limits


class MemoryProtection(Section):
    """Limits on the memory that claims can protect from reclaim (``memoryConfig.protect``)."""

    allowed: Annotated[tuple[Literal["low", "min"], ...], Field(strict=False)] = ("low",)
    """Kinds of protection that a claim may request. If empty, claims may request none."""
    max_fraction: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.5
    """Maximum share of a NUMA node's memory that all claims together may protect."""


def _page_size(text: str) -> str:
    if not _PAGE_SIZE.fullmatch(text):
        raise ValueError(f"{shown(text)} is not a page size such as 2Mi or 1Gi")
    return text


class OnDemandPages(Section):
    """Hugepages of one size on a NUMA node that are allocated for claims and freed afterwards."""

    numa_node: Annotated[int, Field(ge=0)]
    size: Annotated[
        str, AfterValidator(_page_size), WithJsonSchema({"type": "string", "pattern": f"^{_PAGE_SIZE.pattern}$"})
    ]
    pages: Annotated[int, Field(ge=1)]
    """Maximum number of pages, including those in use and the reserve."""


class HardwareErrors(Section):
    """Error counts, as reported by the kernel, at which memory and CPUs are withheld from new claims. 0 disables the
    check.
    """

    uncorrected: Annotated[int, Field(ge=0)] = 1
    """Number of uncorrected errors in one counter since the counter was reset, usually at boot."""
    corrected_per_hour: Annotated[int, Field(ge=0)] = 1000


class Config(Section):
    """All of the operator's settings. Command-line flags take precedence over the file."""

    api_version: Literal["v1alpha1"] = "v1alpha1"
    """Version of the file's format."""
    kubeconfig: str = ""
    """File with the credentials for the API server. If empty, the pod's service account is used."""
    hostname_override: str = ""
    """Name of the Node object, used if the environment variable NODE_NAME is not set."""
    cpu_device_mode: Literal["grouped", "individual"] = "grouped"
    """``grouped``: each CPU device is a group of CPUs. ``individual``: each CPU device is one CPU."""
    group_by: Literal["numanode", "socket", "machine", "l3", "coretype"] = "numanode"
    """CPUs that form one device: those of a NUMA node, a socket, the machine, an L3 cache (``l3``) or a type of core
    (``coretype``). It has no effect in individual mode."""
    allocator: Literal["cpumanager", "external"] = "cpumanager"
    """``cpumanager``: the driver chooses the CPUs if a claim names none. ``external``: claims must name them. It has no
    effect in individual mode."""
    enforcement: Literal["enforce", "observe"] = "enforce"
    """``observe``: the driver changes nothing on the node, reports what it would write, and refuses claims."""
    reserved_cpus: Annotated[CpuList, Field(alias="reservedCPUs")] = frozenset()
    """CPUs for the system, such as ``"0-1,64-65"``. They are not allocated to new claims, and are in the shared pool
    only if all other CPUs are claimed. All of them must exist."""
    reserved_memory: Annotated[tuple[ReservedMemory, ...], Field(strict=False)] = ()
    """Memory and hugepages that are never offered: a list of ``{numaNode, limits: {memory, hugepages-2Mi, ...}}``. If
    no entry has ``memory``, the kubelet's reserve is used.
    """
    cpu_exclusivity: Literal["auto", "partition", "pool"] = "auto"
    """How claimed CPUs are isolated. ``partition``: the kernel isolates them in cpuset partitions, and claims that it
    cannot enforce are refused. ``pool``: the driver confines other containers to the shared pool. ``auto``: like
    ``partition`` if possible, else like ``pool``.
    """
    pool_growth: Literal["immediate", "lazy"] = "immediate"
    """Time at which running containers without a CPU claim may use the CPUs that a claim has released: ``immediate``,
    or ``lazy`` (the next time the driver changes these containers' CPUs anyway).
    """
    withheld_cpus: Annotated[int, Field(ge=0, le=MAX_CPU)] | None = Field(default=None, alias="withheldCPUs")
    """Minimum number of unreserved CPUs that claims leave to other containers. If it is not set, the value is 1 if no
    CPU is reserved, else 0.
    """
    max_claim_fraction: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Maximum share of the CPUs offered on the node that one claim may request."""
    cpu_quota: Literal["raise", "lift", "keep"] = "raise"
    """Effect of a claim on its pod's CPU limit: ``raise`` (by the number of claimed CPUs), ``lift`` or ``keep``."""
    irqs: Literal["move", "keep"] = "move"
    """``move``: device interrupts and unbound kernel workers are moved off the claimed CPUs of running containers.
    ``keep``: they stay."""
    host_slices: bool = False
    """Whether system.slice, user.slice and init.scope are kept off claimed CPUs."""
    memory_protection: MemoryProtection = MemoryProtection()
    """Limits for claims that protect memory from reclaim: the kinds that they may request (``allowed``), and the share
    of a NUMA node's memory that all of them together may protect (``maxFraction``)."""
    hugepage_guard: bool = True
    """Whether ``mmap`` with ``MAP_HUGETLB`` fails in containers without hugepages. Otherwise the kernel may kill such a
    container when it first touches the mapped memory."""
    device_metadata: bool = True
    """Whether containers with claims get the metadata files of KEP-5304."""
    publish_node_allocatable_resource_mapping: bool = False
    """Whether the scheduler counts claims against the node's CPUs and memory (KEP-5517). It requires the cluster's
    feature gate DRANodeAllocatableResources.
    """
    expose_pcie_roots: Annotated[bool, Field(alias="exposePCIeRoots")] = False
    """Whether CPU devices list the PCIe roots near them. It requires the cluster's feature gate
    DRAListTypeAttributes.
    """
    hardware_errors: HardwareErrors = HardwareErrors()
    """Hardware error counts at which the affected devices are withheld from new claims. 0 disables the check."""
    hugepages_on_demand: Annotated[tuple[OnDemandPages, ...], Field(strict=False)] = ()
    """Hugepages that are allocated for claims and freed afterwards: a list of ``{numaNode, size, pages}``."""
    sysfs_overlay: AbsolutePath | Literal[""] = ""
    """File whose contents replace files in /sys, for tests and what-if analyses."""
    cdi_dir: Annotated[AbsolutePath, AfterValidator(_volatile)] = CDI_DIRECTORY
    """Directory of the claims' CDI files. It must not survive a reboot."""
    run_dir: AbsolutePath = RUN_DIRECTORY
    """Directory for sockets and locks, shared by all instances on the node. Its path may be at most 59 bytes long."""
    kubelet_root_dir: AbsolutePath = "/var/lib/kubelet"
    """Root directory of the kubelet. Its path may be at most 33 bytes long. If it is longer, start the kubelet with a
    shorter symbolic link to the directory."""
    nri_socket: AbsolutePath = "/var/run/nri/nri.sock"
    """The container runtime's NRI socket."""
    cgroup_root: AbsolutePath = "/sys/fs/cgroup"
    """Mount point of cgroup v2."""
    page_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """TCP port that serves the web page on the loopback address of the frontend's pod. Without a port, only the state
    socket serves the page."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is logged: ``debug``, ``info``, ``warning`` or ``error``."""
    log_format: Literal["text", "json"] = "text"
    """``text`` (key=value), or ``json`` (one object per line)."""
    _former_names: tuple[str, ...] = ()

    def model_post_init(self, context: Any, /) -> None:
        """Stores the messages about former names, which parse_config passes as context."""
        self._former_names = tuple(context or ())

    @property
    def former_names(self) -> tuple[str, ...]:
        """One message for each former name of a setting or of a value that the file contains."""
        return self._former_names

    @field_validator("reserved_memory")
    @classmethod
    def _once_per_node(cls, entries: tuple[ReservedMemory, ...]) -> tuple[ReservedMemory, ...]:
        nodes = [entry.numa_node for entry in entries]
        if len(nodes) != len(set(nodes)):
            raise ValueError("names a NUMA node twice")
        return entries

    @property
    def observes(self) -> bool:
        """True if the driver must not change the node."""
        return self.enforcement == "observe"

    def pages_on_demand(self, numa_node: int, page_bytes: int) -> int:
        """Returns how many pages of this size a NUMA node may have for claims, including existing pages."""
        entries = self.hugepages_on_demand
        return max(
            (one.pages for one in entries if (one.numa_node, parse_page_size(one.size)) == (numa_node, page_bytes)),
            default=0,
        )

    def reserved_bytes(self, numa_node: int, page_bytes: int | None = None) -> int:
        """Returns the bytes reserved on a NUMA node, either of plain memory or of hugepages of one size."""
        for entry in self.reserved_memory:
            if entry.numa_node == numa_node:
                return sum(
                    size
                    for name, size in entry.limits.items()
                    if (None if name == "memory" else parse_page_size(name)) == page_bytes
                )
        return 0


def parse_config(document: Any, source: str) -> Config:
    """Validates the parsed content of a configuration file (None for an empty file). Raises ConfigError."""
    if document is None:
        document = {}
    if not isinstance(document, dict):
        raise ConfigError(source, ["must be a map of settings"])
    known = {field.alias or name: name for name, field in Config.model_fields.items()}
    misspelt = {key: right for key in document for right in known if str(key).lower() == right.lower() and key != right}
    if misspelt:
        raise ConfigError(source, [f"{key}: wrong spelling; use {right}" for key, right in sorted(misspelt.items())])
    present = replace_former_names(document, FORMER_SETTINGS)
    faults = [f"{key}: {reason}" for key, reason in present.faults]
    try:
        # By alias only: the names of the model's fields are not valid in the file.
        config = Config.model_validate(present.document, by_alias=True, by_name=False, context=present.warnings)
    except ValidationError as error:
        raise ConfigError(source, faults + faults_of(error, known, present.former)) from error
    if faults:
        raise ConfigError(source, faults)
    return config
