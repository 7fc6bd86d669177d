# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters: what DeviceClasses and a claim say for our drivers, read strictly and brought together.

The claim beats the class field by field, for each request by itself. What is unknown or contradicts itself is refused:
parameters that are silently ignored are found out in production. Anybody who may create a claim writes them: each
entry is bounded, and read once.
"""

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, get_args

from numa_contract.errors import shown
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from dra_frontend.allocation.claim import ClaimView, OpaqueConfig, Source
from dra_frontend.allocation.errors import Refused

API_VERSION: Final = "v1alpha1"
CPU_KEY: Final = "cpuConfig"
MEMORY_KEY: Final = "memoryConfig"
LARGEST: Final = 10 << 10
"""Characters of one entry as JSON (resource.k8s.io, OpaqueParametersMaxLength)."""
_DRIVERS: Final = {CPU_KEY: CPU_DRIVER, MEMORY_KEY: MEMORY_DRIVER}
_PLAIN_KEY: Final = re.compile(r"[A-Za-z0-9_.-]{1,40}", re.ASCII)


class Fields(BaseModel):
    """Base of a group of fields; None is "not given"."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class Section(Fields):
    """Everything that may be said for one driver."""

    KEY: ClassVar[str]
    """Under which it stands beside ``apiVersion``."""
    ONCE: ClassVar[frozenset[str]] = frozenset()
    """Fields that only the claim may give, and once for each request."""

    sharing: Literal["container", "pod"] | None = None

    @classmethod
    def path(cls, name: str) -> str:
        """Returns a field as users write it: ``cpuConfig.coreType``."""
        return f"{cls.KEY}.{to_camel(name)}"


@dataclass(frozen=True, slots=True)
class Given:
    """A value and who gave it."""

    value: Any
    source: Source


Stated = dict[str, Given]
"""The fields that are given for one request, by their name in the model."""


def refusal(source: Source, field: str, reason: str) -> Refused:
    """Returns why parameters cannot be used, naming who wrote them and the field."""
    return Refused(f"parameters {source}: {field}: {reason}")


def read_parameters(claim: ClaimView, sections: Mapping[str, type[Section]]) -> dict[tuple[str, str], Stated]:
    """Returns what is stated for each request that takes something, by driver and full name of the request.

    Raises Refused, naming the first request that an entry is for which cannot be used.
    """
    read: dict[int, Section] = {}
    stated: dict[tuple[str, str], Stated] = {}
    for result in claim.results if claim.configs else ():
        key = (result.driver, result.recorded.request)
        if result.admin_access or key in stated:
            continue
        stated[key] = {}
        for place, config in enumerate(claim.configs):
            if config.applies_to(result):
                try:
                    section = read[place] = read.get(place) or _read(config, sections[config.driver])
                    _add(stated[key], section, config.source)
                except Refused as error:
                    raise Refused(f"request {key[1]}: {error}") from error
    return stated


def _add(stated: Stated, section: Section, source: Source) -> None:
    for name in type(section).model_fields:
        value = getattr(section, name)
        if value is None:
            continue
        if name in section.ONCE and source is not Source.CLAIM:
            raise refusal(source, section.path(name), "may come from the claim only, not from a class")
        if name in section.ONCE and name in stated:
            raise refusal(source, section.path(name), "is given twice for the request, once is allowed")
        stated[name] = Given(value, source)


def contradiction(
    section: type[Section], stated: Mapping[str, Given], one: tuple[str, Any], other: tuple[str, Any]
) -> None:
    """Raises Refused where both fields have the values that exclude each other."""
    pair = [(name, stated[name]) for name, value in (one, other) if name in stated and stated[name].value == value]
    if len(pair) == 2:
        (first, a), (second, b) = pair
        reason = f"{_text(a.value)} contradicts {to_camel(second)}: {_text(b.value)} ({b.source})"
        raise refusal(a.source, section.path(first), reason)


def _text(value: Any) -> str:
    return str(value).lower()


def _read(config: OpaqueConfig, section: type[Section]) -> Section:
    said, known, source = config.parameters, ["apiVersion", section.KEY], config.source
    if not said:
        return section()
    if _size(said) > LARGEST:
        raise refusal(source, "entry", f"has more than {LARGEST} characters, or is nested too deep")
    for key in sorted(said.keys() & _DRIVERS.keys() - {section.KEY}):
        raise refusal(source, key, f"is for the driver {_DRIVERS[key]}; {config.driver} takes {section.KEY}")
    for key in sorted(said.keys() - set(known)):
        raise refusal(source, _key(key), _unknown(known))
    version = said.get("apiVersion")
    if version != API_VERSION:
        wrong = f"is missing; it must be {API_VERSION!r}"
        raise refusal(
            source, "apiVersion", wrong if version is None else f"{shown(version)}: input should be {API_VERSION!r}"
        )
    if section.KEY not in said:
        raise refusal(source, section.KEY, "is missing")
    try:
        return section.model_validate(said[section.KEY])
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise refusal(source, ".".join([section.KEY, *map(_key, first["loc"])]), _reason(section, first)) from error


def _size(parameters: Mapping[str, Any]) -> int:
    try:
        return len(json.dumps(parameters, separators=(",", ":"), ensure_ascii=False))
    except (RecursionError, ValueError):
        return LARGEST + 1


def _key(key: int | str) -> str:
    return str(key) if _PLAIN_KEY.fullmatch(str(key)) else shown(key)


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
    return f"{shown(fault['input'])}: {message[:1].lower()}{message[1:]}{remedy}"


def _group(fields: type[Fields], place: Sequence[int | str]) -> type[Fields]:
    """Returns the group of fields at a place inside another."""
    for part in place:
        kinds = next(get_args(field.annotation) for field in fields.model_fields.values() if field.alias == part)
        fields = next(kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Fields))
    return fields
