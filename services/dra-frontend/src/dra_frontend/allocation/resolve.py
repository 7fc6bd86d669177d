# SPDX-License-Identifier: Apache-2.0
"""Resolves a claim's parsed parameters into each request's parameters and the claim's sharing mode.

Checks each field against the request's devices and the node's configuration, and against the other fields.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from numa_contract.config import MemoryProtection
from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.records import AllocationResult, CpuParameters, MemoryMount, MemoryParameters, hiding_mounts

from dra_frontend.allocation.claim import ClaimView, RefusedError, count_of
from dra_frontend.allocation.cpus import cpu_device, no_cpu_device
from dra_frontend.allocation.memory import memory_device
from dra_frontend.allocation.parameters import CpuConfig, MemoryConfig, SetFields, read_parameters, refusal
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import DeviceKind, MemoryDevice

_NEUTRAL_FIELDS: Final = ("sharing", "quota", "irqs", "isolation", "pool_cpus")
"""Fields that do not influence which CPUs are chosen, and may therefore be combined with any other field."""
_CONFLICTS: Final = (
    (("strategy", "spread"), ("full_physical_cores", True)),
    (("numa", "distribute"), ("l3", "required")),
    (("isolation", "isolated"), ("sharing", "pod")),
)
"""Pairs of CPU fields, with the values that conflict with each other."""
_CHARGED_FIELDS: Final = ("limit", "protect", "high")
"""Fields that apply only to memory charged by the memory cgroup controller, and therefore not to hugepages."""
_REQUESTS_REMEDY: Final = "under config[].requests, list only requests to which the field applies"


def resolve(view: ClaimView, driver: str, inventory: Inventory, protection: MemoryProtection) -> dict[str, Any]:
    """Returns one driver's record fields that depend on the claim's opaque parameters. Raises RefusedError."""
    set_fields = read_parameters(view)
    by_request: dict[str, list[AllocationResult]] = {}
    for result in view.results[driver]:
        by_request.setdefault(result.base, []).append(result)
    parameters: dict[str, Any] = {}
    for request, results in by_request.items():
        if driver == CPU_DRIVER:
            for result in results:
                if (device := cpu_device(result, inventory)) is None:
                    raise no_cpu_device(result, inventory)
                with _naming_request(result.request):
                    parameters[request] = cpu_parameters(set_fields[driver, result.request], device.kind)
        else:
            # Only the device's name is needed here, so the device itself may be gone. A claim whose device is gone is
            # refused only when it is allocated.
            devices = [memory_device(result, inventory, allow_missing=True) for result in results]
            size = sum(count_of(MEMORY_DRIVER, result) for result in results)
            with _naming_request(request):
                request_fields = set_fields[driver, results[0].request]
                parameters[request] = memory_parameters(request_fields, devices, size, protection)
    if driver == MEMORY_DRIVER:
        _check_mounts(parameters)
    name = "parameters" if driver == CPU_DRIVER else "memory_parameters"
    return {name: parameters, "sharing": _sharing_mode(set_fields)}


@contextmanager
def _naming_request(request: str) -> Iterator[None]:
    """Adds the request's name to an error raised inside the ``with`` block."""
    try:
        yield
    except RefusedError as error:
        raise RefusedError(f"request {request}: {error}") from error


def _sharing_mode(set_fields: Mapping[tuple[str, str], SetFields]) -> str:
    """Returns the sharing mode. It applies to both drivers, since a container always uses the whole claim.

    If only some requests set the field, their value applies to the others as well. Raises RefusedError if two requests
    set different values.
    """
    shared = {key: fields["sharing"] for key, fields in set_fields.items() if "sharing" in fields}
    values = {parameter.value for parameter in shared.values()}
    if len(values) > 1:
        all_ = ", ".join(
            f"{name} of {driver}: {by.value} in {by.source.owner}" for (driver, name), by in shared.items()
        )
        raise RefusedError(
            f"parameters: sharing: applies to the whole claim, but its requests differ ({all_}); "
            "set the same value for all"
        )
    return values.pop() if values else "container"


def cpu_parameters(set_fields: SetFields, kind: DeviceKind) -> CpuParameters:
    """Returns a request's CPU parameters for a device of the given kind. Raises RefusedError."""
    choosing = [name for name in set_fields if name not in _NEUTRAL_FIELDS]
    values = {name: parameter.value for name, parameter in set_fields.items()}
    if choosing and kind is DeviceKind.CPU:
        reason = "selects among CPUs, but in individual mode the scheduler selects them; use CEL selectors"
        raise refusal(set_fields[choosing[0]].source, CpuConfig.path(choosing[0]), reason)
    if "cpuset" in set_fields:
        values["cpuset"] = _named_cpus(set_fields, choosing)
    for (one, value), (other, excluded) in _CONFLICTS:
        if values.get(one) == value and values.get(other) == excluded:
            field, owner = CpuConfig.path(other).partition(".")[2], set_fields[other].source.owner
            text = f"{field}: {str(excluded).lower()} (in {owner})"
            raise refusal(set_fields[one].source, CpuConfig.path(one), f"{value} conflicts with {text}")
    values.pop("sharing", None)
    if values.get("pool_cpus", "none") != "none":
        values["isolation"] = _mixed_isolation(set_fields)
    return CpuParameters(**values)


def _mixed_isolation(set_fields: SetFields) -> str:
    if (isolation := set_fields.get("isolation")) and isolation.value == "isolated":
        pool_text = f"{set_fields['pool_cpus'].value} (in {set_fields['pool_cpus'].source.owner})"
        reason = f"isolated conflicts with poolCPUs: {pool_text}: an isolated container cannot use any pool CPUs"
        raise refusal(isolation.source, CpuConfig.path("isolation"), reason)
    return "mixed"


def _named_cpus(set_fields: SetFields, choosing: list[str]) -> frozenset[int]:
    cpuset, path = set_fields["cpuset"], CpuConfig.path("cpuset")
    for name in choosing:
        if name != "cpuset":
            *others, last = [CpuConfig.path(one).removeprefix(f"{CpuConfig.KEY}.") for one in _NEUTRAL_FIELDS]
            combinable = f"{', '.join(others)} and {last}"
            reason = f"cannot be combined with cpuset, which specifies the CPUs; only {combinable} can"
            raise refusal(set_fields[name].source, CpuConfig.path(name), reason)
    try:
        cpus = parse_cpu_list(cpuset.value)
    except MalformedError as error:
        raise refusal(cpuset.source, path, f"{shown(cpuset.value)}: {error.reason}") from error
    if not cpus:
        raise refusal(cpuset.source, path, "contains no CPU")
    return cpus


def memory_parameters(
    set_fields: SetFields, devices: Sequence[MemoryDevice], size: int, protection: MemoryProtection
) -> MemoryParameters:
    """Returns the memory parameters of a request whose results total ``size`` bytes. Raises RefusedError."""
    for name, parameter in set_fields.items():
        if fault := _memory_fault(name, parameter.value, devices, size, protection):
            raise refusal(parameter.source, MemoryConfig.path(name), fault)
    values = {name: parameter.value for name, parameter in set_fields.items() if name not in ("sharing", "mount")}
    mount = MemoryMount(**set_fields["mount"].value.model_dump()) if "mount" in set_fields else None
    return MemoryParameters(**values, mount=mount)


def _memory_fault(
    name: str, value: Any, devices: Sequence[MemoryDevice], size: int, protection: MemoryProtection
) -> str:
    """Returns the reason why a field's value cannot be applied, or "" if it can."""
    pages = [kubernetes_page_size(size) for size in sorted({one.page_bytes for one in devices if one.hugepages})]
    if name in _CHARGED_FIELDS and pages and value != "none":
        return (
            f"{value} applies to plain memory, but the request is for {pages[0]} hugepages, "
            f"which have their own limit; {_REQUESTS_REMEDY}"
        )
    if name == "mount" and not all(device.hugepages for device in devices):
        return f"applies to hugepages, but the request is for plain memory; {_REQUESTS_REMEDY}"
    if name == "mount" and len(pages) > 1:
        sizes = " and ".join(pages)
        return f"can have only one page size, but the request has {sizes} pages; use one request for each size"
    if name == "high" and int(value * size) < devices[0].page_bytes:
        return f"{value} of {size} bytes is less than one page, so no process could run; choose a larger value"
    if name == "protect" and value not in ("none", *protection.allowed):
        allowed = " or ".join(("none", *protection.allowed))
        return f"{value} is not allowed on this node (memoryProtection.allowed); use {allowed}"
    return ""


def _check_mounts(parameters: Mapping[str, MemoryParameters]) -> None:
    """Raises RefusedError if one mount would hide another: containers could not use the hidden mount's hugepages."""
    pair = hiding_mounts(wanted.mount.path for wanted in parameters.values() if wanted.mount)
    if pair is not None:
        requests = ", ".join(name for name, wanted in parameters.items() if wanted.mount and wanted.mount.path in pair)
        raise RefusedError(
            f"requests {requests}: memoryConfig.mount.path: {pair[0]} would hide {pair[1]}; "
            "give each request its own directory in a separate entry of config[] that lists only that request"
        )
