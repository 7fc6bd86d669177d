# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for ``dra.cpu``: how a request's CPUs are chosen."""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.records import CpuParameters

from dra_frontend.allocation.parameters import CPU_KEY, Given, Section, contradiction, refusal
from dra_frontend.devices.cpu_groups import DeviceKind


class CpuConfig(Section):
    """The fields of ``cpuConfig``."""

    KEY: ClassVar[str] = CPU_KEY
    ONCE: ClassVar[frozenset[str]] = frozenset({"cpuset"})

    cpuset: str | None = None
    """Read by :func:`cpu_parameters` where it is allowed: elsewhere nobody need expand it."""
    strategy: Literal["packed", "spread"] | None = None
    full_physical_cores: bool | None = None
    l3: Literal["preferred", "required", "ignore"] | None = None
    numa: Literal["group", "distribute"] | None = None
    isolated: Literal["ignore", "only", "never"] | None = None
    core_type: Literal["any", "performance", "efficiency"] | None = None
    quota: Literal["off", "keep"] | None = None


_CHOICE_FREE: Final = ("sharing", "quota")
"""Fields that do not choose CPUs, so that they go with every other."""


def cpu_parameters(stated: Mapping[str, Given], kind: DeviceKind) -> CpuParameters:
    """Returns how a request wants its CPUs of a device of that kind. Raises Refused."""
    choosing = [name for name in stated if name not in _CHOICE_FREE]
    if kind is DeviceKind.CPU and choosing:
        reason = "chooses among CPUs, but in individual mode the scheduler has chosen; use CEL selectors"
        if "cpuset" not in choosing:
            raise refusal(stated[choosing[0]].source, CpuConfig.path(choosing[0]), reason)
    values = {name: given.value for name, given in stated.items() if name != "sharing"}
    if "cpuset" in stated:
        values["cpuset"] = _named_cpus(stated, choosing, kind)
    contradiction(CpuConfig, stated, ("strategy", "spread"), ("full_physical_cores", True))
    contradiction(CpuConfig, stated, ("numa", "distribute"), ("l3", "required"))
    return CpuParameters(**values)


def _named_cpus(stated: Mapping[str, Given], choosing: list[str], kind: DeviceKind) -> frozenset[int]:
    given, path = stated["cpuset"], CpuConfig.path("cpuset")
    if kind is not DeviceKind.MACHINE:
        where = f"only in groupBy machine, and this node publishes its CPUs by {kind.value}"
        raise refusal(given.source, path, f"is allowed {where}")
    for name in choosing:
        if name != "cpuset":
            reason = "excludes cpuset, which names the CPUs itself; beside it only sharing and quota are allowed"
            raise refusal(stated[name].source, CpuConfig.path(name), reason)
    try:
        cpus = parse_cpu_list(given.value)
    except MalformedError as error:
        raise refusal(given.source, path, f"{shown(given.value)}: {error.reason}") from error
    if not cpus:
        raise refusal(given.source, path, "names no CPU")
    return cpus
