# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for ``dra.cpu``: how a request's CPUs are chosen."""

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.records import CpuParameters
from pydantic import AfterValidator

from dra_frontend.allocation.claim import ClaimView, Result, Source
from dra_frontend.allocation.parameters import (
    CPU_KEY,
    Entry,
    Given,
    ParametersError,
    Section,
    contradiction,
    entries,
    merge,
)
from dra_frontend.devices.cpu_groups import DeviceKind


def _cpu_list(text: str) -> frozenset[int]:
    try:
        cpus = parse_cpu_list(text)
    except MalformedError as error:
        raise ValueError(error.reason) from error
    if not cpus:
        raise ValueError("names no CPU")
    return cpus


class CpuConfig(Section):
    """The fields of ``cpuConfig``."""

    KEY: ClassVar[str] = CPU_KEY

    cpuset: Annotated[str, AfterValidator(_cpu_list)] | None = None
    strategy: Literal["packed", "spread"] | None = None
    full_physical_cores: bool | None = None
    l3: Literal["preferred", "required", "ignore"] | None = None
    numa: Literal["group", "distribute"] | None = None
    isolated: Literal["ignore", "only", "never"] | None = None
    core_type: Literal["any", "performance", "efficiency"] | None = None
    quota: Literal["off", "keep"] | None = None


_CHOICE_FREE: Final = ("sharing", "quota")
"""Fields that do not choose CPUs, so that they go with every other."""


def _check_cpuset_source(said: Sequence[Entry[CpuConfig]]) -> None:
    naming = [entry.source for entry in said if entry.section.cpuset is not None]
    if Source.DEVICE_CLASS in naming:
        reason = "may come from the claim only, not from a class"
        raise ParametersError(Source.DEVICE_CLASS, CpuConfig.path("cpuset"), reason)
    if naming[1:]:
        raise ParametersError(naming[1], CpuConfig.path("cpuset"), "is given twice for the request, once is allowed")


def _check(given: Mapping[str, Given], kind: DeviceKind) -> None:
    choosing = [name for name in given if name not in _CHOICE_FREE]
    if "cpuset" in given:
        if kind is not DeviceKind.MACHINE:
            where = f"only in groupBy machine, and this node publishes its CPUs by {kind.value}"
            raise ParametersError(given["cpuset"].source, CpuConfig.path("cpuset"), f"is allowed {where}")
        for name in choosing:
            if name != "cpuset":
                reason = "excludes cpuset, which names the CPUs itself; beside it only sharing and quota are allowed"
                raise ParametersError(given[name].source, CpuConfig.path(name), reason)
    if kind is DeviceKind.CPU:
        for name in choosing:
            reason = "chooses among CPUs, but in individual mode the scheduler has chosen; use CEL selectors"
            raise ParametersError(given[name].source, CpuConfig.path(name), reason)
    contradiction(CpuConfig, given, ("strategy", "spread"), ("full_physical_cores", True))
    contradiction(CpuConfig, given, ("numa", "distribute"), ("l3", "required"))


def cpu_parameters(claim: ClaimView, result: Result, kind: DeviceKind) -> CpuParameters:
    """Returns how a result's request wants its CPUs; raises ParametersError."""
    said = entries(claim, result, CpuConfig)
    _check_cpuset_source(said)
    given = merge(said)
    _check(given, kind)
    return CpuParameters(**{name: entry.value for name, entry in given.items() if name != "sharing"})
