# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters: what DeviceClasses and a claim say for one driver, read strictly and brought together.

The claim beats the class field by field, for each request by itself. What is unknown or contradicts itself is refused:
parameters that are silently ignored are found out in production.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar, get_args

from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from dra_frontend.allocation.claim import ClaimView, OpaqueConfig, Result

API_VERSION: Final = "v1alpha1"
CPU_KEY: Final = "cpuConfig"
MEMORY_KEY: Final = "memoryConfig"
_DRIVERS: Final = {CPU_KEY: CPU_DRIVER, MEMORY_KEY: MEMORY_DRIVER}


class ParametersError(Exception):
    """Parameters that cannot be used; the text names source, field and remedy."""

    def __init__(self, source: str, field: str, reason: str) -> None:
        self.source = source
        self.field = field
        self.reason = reason
        super().__init__(f"parameters {source}: {field}: {reason}")


class Fields(BaseModel):
    """Base of a group of fields; None is "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class Section(Fields):
    """Everything that may be said for one driver."""

    KEY: ClassVar[str]
    """Under which it stands beside ``apiVersion``."""

    sharing: Literal["container", "pod"] | None = None

    @classmethod
    def path(cls, name: str) -> str:
        """Returns a field as users write it: ``cpuConfig.coreType``."""
        return f"{cls.KEY}.{to_camel(name)}"


SectionT = TypeVar("SectionT", bound=Section)


@dataclass(frozen=True, slots=True)
class Entry(Generic[SectionT]):
    """One entry of the allocation's config for a request, and who wrote it."""

    source: str
    section: SectionT


@dataclass(frozen=True, slots=True)
class Given:
    """A value and who gave it."""

    value: Any
    source: str


def entries(claim: ClaimView, result: Result, section: type[SectionT]) -> list[Entry[SectionT]]:
    """Returns what is said for a result's request, later entries beat earlier ones; raises ParametersError."""
    return [Entry(config.source, _read(config, section)) for config in claim.configs_for(result)]


def merge(said: Sequence[Entry[SectionT]]) -> dict[str, Given]:
    """Returns the fields that are given at all, by their name in the model."""
    return {
        name: Given(value, entry.source)
        for entry in said
        for name in type(entry.section).model_fields
        if (value := getattr(entry.section, name)) is not None
    }


def contradiction(
    section: type[Section], given: Mapping[str, Given], one: tuple[str, Any], other: tuple[str, Any]
) -> None:
    """Raises ParametersError where both fields have the values that exclude each other."""
    pair = [(name, given[name]) for name, value in (one, other) if name in given and given[name].value == value]
    if len(pair) == 2:
        (first, a), (second, b) = pair
        reason = f"{_text(a.value)} contradicts {to_camel(second)}: {_text(b.value)} ({b.source})"
        raise ParametersError(a.source, section.path(first), reason)


def _text(value: Any) -> str:
    return str(value).lower()


def _read(config: OpaqueConfig, section: type[SectionT]) -> SectionT:
    said, known = config.parameters, ["apiVersion", section.KEY]
    if not said:
        return section()
    for key in sorted(said.keys() & _DRIVERS.keys() - {section.KEY}):
        wrong = f"is for the driver {_DRIVERS[key]}; {config.driver} takes {section.KEY}"
        raise ParametersError(config.source, key, wrong)
    for key in sorted(said.keys() - set(known)):
        raise ParametersError(config.source, key, _unknown(known))
    version = said.get("apiVersion")
    if version is None:
        raise ParametersError(config.source, "apiVersion", f"is missing; it must be {API_VERSION!r}")
    if version != API_VERSION:
        raise ParametersError(config.source, "apiVersion", f"{version!r}: input should be {API_VERSION!r}")
    if section.KEY not in said:
        raise ParametersError(config.source, section.KEY, "is missing")
    try:
        return section.model_validate(said[section.KEY])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, (section.KEY, *first["loc"])))
        raise ParametersError(config.source, place, _reason(section, first)) from error


def _unknown(known: Sequence[str]) -> str:
    return f"unknown field; known are {', '.join(known)}"


def _reason(section: type[Fields], fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        return _unknown([to_camel(name) for name in _group(section, fault["loc"][:-1]).model_fields])
    if fault["type"] == "missing":
        return "is missing"
    if fault["type"] == "model_type":
        return "must be a map of fields"
    message = fault["msg"].removeprefix("Value error, ")
    remedy = "; write it in quotes" if fault["type"] == "string_type" else ""
    return f"{str(fault['input'])[:80]!r}: {message[:1].lower()}{message[1:]}{remedy}"


def _group(fields: type[Fields], place: Sequence[int | str]) -> type[Fields]:
    """Returns the group of fields at a place inside another."""
    for part in place:
        kinds = next(get_args(field.annotation) for field in fields.model_fields.values() if field.alias == part)
        fields = next(kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Fields))
    return fields
