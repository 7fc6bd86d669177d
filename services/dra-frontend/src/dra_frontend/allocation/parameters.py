# SPDX-License-Identifier: Apache-2.0
"""Parses and merges the opaque parameters of DeviceClasses and claims for our drivers.

A field in the claim overrides the same field in the class, for each request separately. Unknown or contradictory fields
are refused, since a silently ignored parameter would only be noticed in production. Anyone who may create a claim can
write parameters, so each entry is limited in size and parsed only once.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final, Literal

from numa_contract.config import cpu_list_text
from numa_contract.documents import TOO_DEEP, value_too_deep
from numa_contract.errors import described, shown
from numa_contract.names import CPU_DRIVER, FORMER_PARAMETERS, MEMORY_DRIVER, FormerName, replace_former_names
from numa_contract.records import MemoryMount
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from dra_frontend.allocation.claim import ClaimView, OpaqueConfig, RefusedError, Source

API_VERSION: Final = "v1alpha1"
MAX_ENTRY_LENGTH: Final = 10 << 10
"""Maximum number of characters in an entry's JSON (resource.k8s.io, OpaqueParametersMaxLength)."""
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_.-]{1,40}", re.ASCII)
# Values that the kernel accepts for hugetlbfs's mode= (fs/hugetlbfs/inode.c): permissions and the sticky bit.
_MODE: Final = re.compile(r"0?[01]?[0-7]{3}", re.ASCII)
_MAX_PATH_BYTES: Final = 4095


_REMEDIES: Final = {
    ("cpuset", "string_type"): '; write a CPU list in quotes, such as "0-3,8"',
    ("mode", "string_type"): '; write octal permissions in quotes, such as "0770" (YAML reads 0770 as 504)',
    ("path", "string_type"): "; write it in quotes",
    ("fullPhysicalCores", "bool_type"): ", true or false without quotes",
    ("high", "float_type"): " without quotes",
}
"""Remedies by field name and pydantic error type."""


class Fields(BaseModel):
    """Base class for a group of fields; a field that is not set is None."""

    # Building validators takes 5 ms. They are built when the first claim with parameters arrives, because many nodes
    # never get such a claim.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel, defer_build=True)


def _manifest_key(group: type[Fields], name: str) -> str:
    """Returns a field's key in a manifest, such as ``coreType``."""
    return group.model_fields[name].alias or to_camel(name)


class Section(Fields):
    """Base class for a parameter section, which contains the parameters for one driver."""

    KEY: ClassVar[str]
    """The parameter section's key, a sibling of ``apiVersion``."""
    PER_REQUEST_FIELDS: ClassVar[frozenset[str]] = frozenset()
    """Fields that may only be set in the claim, once for each request."""
    FORMER_NAMES: ClassVar[tuple[FormerName, ...]] = ()
    """Fields and values that were renamed, with their former and current names."""

    sharing: Literal["container", "pod"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _present_names(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        present = replace_former_names(fields, cls.FORMER_NAMES)
        if present.faults:
            raise ValueError(" ".join(present.faults[0]))
        return present.document

    @classmethod
    def path(cls, name: str) -> str:
        """Returns a field's path as users write it, such as ``cpuConfig.coreType``."""
        return f"{cls.KEY}.{_manifest_key(cls, name)}"


class CpuConfig(Section):
    """The fields of ``cpuConfig``, which control how a request's CPUs are chosen and used."""

    KEY: ClassVar[str] = "cpuConfig"
    PER_REQUEST_FIELDS: ClassVar[frozenset[str]] = frozenset({"cpuset"})
    FORMER_NAMES: ClassVar[tuple[FormerName, ...]] = FORMER_PARAMETERS

    cpuset: Annotated[str | None, BeforeValidator(cpu_list_text)] = None
    """CPU list as text. It is parsed only once the field is known to be allowed. YAML reads a single CPU as an
    integer, which is converted to text.
    """
    strategy: Literal["packed", "spread"] | None = None
    full_physical_cores: bool | None = None
    l3: Literal["preferred", "required", "ignore"] | None = None
    numa: Literal["group", "distribute"] | None = None
    isolcpus: Literal["ignore", "only", "never"] | None = None
    core_type: Literal["any", "performance", "efficiency"] | None = None
    quota: Literal["lift", "keep"] | None = None
    irqs: Literal["move", "keep"] | None = None
    isolation: Literal["exclusive", "isolated"] | None = None
    pool_cpus: Annotated[Literal["none", "all", "numa"] | None, Field(alias="poolCPUs")] = None


def _mount_path(text: str) -> str:
    parts = [part for part in text.split("/") if part]
    if not text.startswith("/") or not {".", ".."}.isdisjoint(parts):
        raise ValueError("must be an absolute path without '.' or '..', as the container sees it")
    if not text.isprintable() or len(text.encode()) > _MAX_PATH_BYTES:
        raise ValueError(f"must be at most {_MAX_PATH_BYTES} bytes of printable characters")
    if not parts or parts[0] == "proc" or parts in (["dev"], ["sys"]):
        raise ValueError("is managed by the container runtime; choose a separate directory such as /dev/hugepages")
    return "/" + "/".join(parts)


def _mode(text: str) -> str:
    if not _MODE.fullmatch(text):
        raise ValueError('must be octal permissions, such as "0770" or "1777"')
    return text


class MountConfig(Fields):
    """The fields of ``mount``."""

    path: Annotated[str, AfterValidator(_mount_path)]
    mode: Annotated[str, AfterValidator(_mode)] = MemoryMount.model_fields["mode"].default


class MemoryConfig(Section):
    """The fields of ``memoryConfig``: binding, limits, protection and mounts for a request's memory or hugepages."""

    KEY: ClassVar[str] = "memoryConfig"

    binding: Literal["strict", "preferred", "interleave"] | None = None
    limit: Literal["none", "claim"] | None = None
    protect: Literal["none", "low", "min"] | None = None
    high: Annotated[float, Field(gt=0, le=1)] | None = None
    mount: MountConfig | None = None


_SECTIONS: Final[Mapping[str, type[Section]]] = {CPU_DRIVER: CpuConfig, MEMORY_DRIVER: MemoryConfig}
_OWNERS: Final = {section.KEY: driver for driver, section in _SECTIONS.items()}


@dataclass(frozen=True, slots=True)
class ParameterValue:
    """A parameter value with its source."""

    value: Any
    source: Source


SetFields = dict[str, ParameterValue]
"""The fields set for one request, by their names in the model."""


def refusal(source: Source, field: str, reason: str) -> RefusedError:
    """Returns the error for a rejected parameter, naming its source and field."""
    return RefusedError(f"parameters of {source.owner}: {field}: {reason}")


def read_parameters(claim: ClaimView) -> dict[tuple[str, str], SetFields]:
    """Returns the parameters of each request that has an allocation result, by driver and full request name.

    Raises RefusedError for an invalid entry, naming the first request to which it applies.
    """
    read: dict[int, Section] = {}
    set_fields: dict[tuple[str, str], SetFields] = {}
    for driver, result in [(driver, result) for driver, results in claim.results.items() for result in results]:
        if (driver, result.request) not in set_fields:
            set_fields[driver, result.request] = {}
            try:
                for place in [n for n, config in enumerate(claim.configs) if config.applies_to(driver, result)]:
                    section = read[place] = read.get(place) or _read_section(claim.configs[place])
                    _add_fields(set_fields[driver, result.request], section, claim.configs[place].source)
            except RefusedError as error:
                raise RefusedError(f"request {result.request}: {error}") from error
    return set_fields


def _add_fields(set_fields: SetFields, section: Section, source: Source) -> None:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if value is None:
            continue
        if name in section.PER_REQUEST_FIELDS and source is not Source.CLAIM:
            raise refusal(source, section.path(name), "may only be set in the claim, not in a DeviceClass")
        if name in section.PER_REQUEST_FIELDS and name in set_fields:
            raise refusal(source, section.path(name), "is set twice for the request")
        set_fields[name] = ParameterValue(value, source)


def _read_section(config: OpaqueConfig) -> Section:
    parameters, source, section = config.parameters, config.source, _SECTIONS[config.driver]
    known = ["apiVersion", section.KEY]
    if not parameters:
        return section()
    if value_too_deep(parameters):
        raise refusal(source, "entry", TOO_DEEP)
    if _encoded_length(parameters) > MAX_ENTRY_LENGTH:
        raise refusal(source, "entry", f"has more than {MAX_ENTRY_LENGTH} characters")
    for key in sorted(parameters.keys() & _OWNERS.keys() - {section.KEY}):
        raise refusal(source, key, f"is for the driver {_OWNERS[key]}; {config.driver} accepts {section.KEY}")
    for key in sorted(parameters.keys() - set(known)):
        raise refusal(source, _key(key), _unknown(known))
    version = parameters.get("apiVersion")
    if version != API_VERSION:
        missing, wrong = f"is missing; it must be {API_VERSION!r}", f"input should be {API_VERSION!r}"
        raise refusal(source, "apiVersion", missing if version is None else f"{shown(version)}: {wrong}")
    if section.KEY not in parameters:
        raise refusal(source, section.KEY, "is missing")
    try:
        return section.model_validate(parameters[section.KEY])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        path = _key_path(section, parameters[section.KEY], first["loc"])
        raise refusal(source, ".".join([section.KEY, *path]), _reason(section, first)) from error


def _key_path(section: type[Section], fields: Any, location: Sequence[int | str]) -> list[str]:
    """Returns the key path of the invalid field. If the user wrote a field's former name, the path contains that
    name.
    """
    former = replace_former_names(fields, section.FORMER_NAMES).former if isinstance(fields, dict) else {}
    return [_key(former.get(str(key), key)) for key in location]


def _encoded_length(parameters: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(parameters, separators=(",", ":"), ensure_ascii=False))
    except ValueError:
        return MAX_ENTRY_LENGTH + 1


def _key(key: int | str) -> str:
    return str(key) if _PLAIN_KEY.fullmatch(str(key)) else shown(key)


def _unknown(known: Sequence[str]) -> str:
    return f"unknown field; known fields are {', '.join(known)}"


def _reason(section: type[Section], fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        group = MountConfig if len(fault["loc"]) > 1 else section  # The only nested group is ``mount``.
        return _unknown([_manifest_key(group, name) for name in group.model_fields])
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "model_type":
        return "must be a map of fields"
    message: str = fault["msg"].removeprefix("Value error, ")
    if not fault["loc"]:
        return message
    message = f"{message[:1].lower()}{message[1:]}{_REMEDIES.get((fault['loc'][-1], fault['type']), '')}"
    if isinstance(fault["input"], str) and fault["type"] in ("literal_error", "value_error"):
        return f"{shown(fault['input'])}: {message}"
    return f"got {described(fault['input'])}; {message}"
