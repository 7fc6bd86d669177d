# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for ``dra.cpu``: what a DeviceClass and a claim ask for, read strictly and brought together.

The claim beats the class field by field, for each request by itself. What is unknown or contradicts itself is refused:
parameters that are silently ignored are found out in production.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.records import CpuParameters
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from dra_frontend.claims import ClaimView, OpaqueConfig, Result, Source
from dra_frontend.cpu_groups import DeviceKind

API_VERSION: Final = "v1alpha1"


class ParametersError(Exception):
    """Parameters that cannot be used; the text names source, field and remedy."""

    def __init__(self, source: str, field: str, reason: str) -> None:
        self.source = source
        self.field = field
        self.reason = reason
        super().__init__(f"parameters {source}: {field}: {reason}")


def _cpu_list(text: str) -> frozenset[int]:
    try:
        cpus = parse_cpu_list(text)
    except MalformedError as error:
        raise ValueError(error.reason) from error
    if not cpus:
        raise ValueError("names no CPU")
    return cpus


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class CpuConfig(_Strict):
    """The fields of ``cpuConfig``; None is "not given"."""

    cpuset: Annotated[str, AfterValidator(_cpu_list)] | None = None
    strategy: Literal["packed", "spread"] | None = None
    full_physical_cores: bool | None = None
    l3: Literal["preferred", "required", "ignore"] | None = None
    numa: Literal["group", "distribute"] | None = None
    isolated: Literal["ignore", "only", "never"] | None = None
    core_type: Literal["any", "performance", "efficiency"] | None = None
    sharing: Literal["container", "pod"] | None = None
    quota: Literal["off", "keep"] | None = None


class _Document(_Strict):
    api_version: Literal["v1alpha1"]
    cpu_config: CpuConfig = Field(default_factory=CpuConfig)


@dataclass(frozen=True, slots=True)
class _Given:
    """A value and who gave it."""

    value: Any
    source: Source


@dataclass(frozen=True, slots=True)
class RequestParameters:
    """What one request asks for."""

    cpus: CpuParameters
    sharing: str | None
    """None where nobody says."""


_NAMES: Final = {name: to_camel(name) for name in CpuConfig.model_fields}
_CHOICE_FREE: Final = ("sharing", "quota")
"""Fields that do not choose CPUs, so that they go with every other."""


def _read(config: OpaqueConfig) -> CpuConfig:
    if not config.parameters:
        return CpuConfig()
    if "memoryConfig" in config.parameters:
        raise ParametersError(config.source, "memoryConfig", "is for the driver dra.memory; dra.cpu takes cpuConfig")
    try:
        return _Document.model_validate(config.parameters).cpu_config
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        raise ParametersError(config.source, ".".join(map(str, first["loc"])), _reason(first)) from error


def _reason(fault: Any) -> str:
    if fault["type"] == "extra_forbidden":
        known = list(_NAMES.values()) if len(fault["loc"]) > 1 else ["apiVersion", "cpuConfig"]
        return f"unknown field; known are {', '.join(known)}"
    if fault["type"] == "missing":
        return f"is missing; it must be {API_VERSION!r}"
    message = fault["msg"].removeprefix("Value error, ")
    return f"{str(fault['input'])[:80]!r}: {message[:1].lower()}{message[1:]}"


def _merge(configs: Sequence[OpaqueConfig]) -> dict[str, _Given]:
    given: dict[str, _Given] = {}
    for config in configs:
        read = _read(config)
        for name in _NAMES:
            value = getattr(read, name)
            if value is None:
                continue
            if name == "cpuset" and config.source is Source.DEVICE_CLASS:
                raise ParametersError(
                    config.source, "cpuConfig.cpuset", "may come from the claim only, not from a class"
                )
            if name == "cpuset" and name in given:
                raise ParametersError(
                    config.source, "cpuConfig.cpuset", "is given twice for the request, once is allowed"
                )
            given[name] = _Given(value, config.source)
    return given


def _check(given: dict[str, _Given], kind: DeviceKind) -> None:
    choosing = [name for name in given if name not in _CHOICE_FREE]
    if "cpuset" in given:
        if kind is not DeviceKind.MACHINE:
            where = f"only in groupBy machine, and this node publishes its CPUs by {kind.value}"
            raise ParametersError(given["cpuset"].source, "cpuConfig.cpuset", f"is allowed {where}")
        for name in choosing:
            if name != "cpuset":
                reason = "excludes cpuset, which names the CPUs itself; beside it only sharing and quota are allowed"
                raise ParametersError(given[name].source, f"cpuConfig.{_NAMES[name]}", reason)
    if kind is DeviceKind.CPU:
        for name in choosing:
            reason = "chooses among CPUs, but in individual mode the scheduler has chosen; use CEL selectors"
            raise ParametersError(given[name].source, f"cpuConfig.{_NAMES[name]}", reason)
    _contradiction(given, ("strategy", "spread"), ("full_physical_cores", True))
    _contradiction(given, ("numa", "distribute"), ("l3", "required"))


def _contradiction(given: dict[str, _Given], one: tuple[str, Any], other: tuple[str, Any]) -> None:
    pair = [(name, given[name]) for name, value in (one, other) if name in given and given[name].value == value]
    if len(pair) == 2:
        (first, a), (second, b) = pair
        reason = f"{_text(a.value)} contradicts {_NAMES[second]}: {_text(b.value)} ({b.source})"
        raise ParametersError(a.source, f"cpuConfig.{_NAMES[first]}", reason)


def _text(value: Any) -> str:
    return str(value).lower()


def request_parameters(claim: ClaimView, result: Result, kind: DeviceKind) -> RequestParameters:
    """Returns what a result's request asks for; raises ParametersError."""
    given = _merge(claim.configs_for(result))
    _check(given, kind)
    sharing = given.pop("sharing", None)
    return RequestParameters(
        CpuParameters(**{name: entry.value for name, entry in given.items()}), sharing.value if sharing else None
    )


def claim_sharing(wishes: dict[str, str | None]) -> Literal["container", "pod"]:
    """Returns the one sharing of a claim from the wishes of its requests; raises ParametersError where they differ."""
    stated = {request: wish for request, wish in wishes.items() if wish is not None}
    if len(set(stated.values())) > 1:
        shown = ", ".join(f"{request}: {wish}" for request, wish in stated.items())
        raise ParametersError(
            Source.CLAIM, "cpuConfig.sharing", f"holds for the whole claim, but its requests differ ({shown})"
        )
    return "pod" if "pod" in stated.values() else "container"
