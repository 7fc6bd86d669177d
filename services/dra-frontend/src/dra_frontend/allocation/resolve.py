# SPDX-License-Identifier: Apache-2.0
"""From what is stated to what holds: how each request of a claim wants its CPUs or its memory, and how it is shared."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from numa_contract.config import MemoryProtection
from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError, shown
from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.records import AllocationResult, CpuParameters, MemoryMount, MemoryParameters, hiding_mounts

from dra_frontend.allocation.claim import ClaimView, Refused, count_of
from dra_frontend.allocation.cpus import cpu_device, no_cpu_device
from dra_frontend.allocation.memory import memory_device
from dra_frontend.allocation.parameters import CpuConfig, MemoryConfig, Stated, read_parameters, refusal
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import DeviceKind, MemoryDevice

_CHOICE_FREE: Final = ("sharing", "quota", "irqs", "isolation", "shared")
"""Fields that do not choose CPUs, so that they go with every other."""
_EXCLUSIVE: Final = (
    (("strategy", "spread"), ("full_physical_cores", True)),
    (("numa", "distribute"), ("l3", "required")),
    (("isolation", "isolated"), ("sharing", "pod")),
)
"""Values of fields for CPUs that contradict each other."""
_CHARGED: Final = ("limit", "protect", "high")
"""Fields about memory that cgroups charge; hugepages are not charged there."""
_ONLY: Final = "name only such requests under config[].requests"


def resolve(view: ClaimView, driver: str, inventory: Inventory, protection: MemoryProtection) -> dict[str, Any]:
    """Returns the fields of the record that opaque parameters decide, for one driver. Raises Refused."""
    stated = read_parameters(view)
    by_request: dict[str, list[AllocationResult]] = {}
    for result in view.results[driver]:
        by_request.setdefault(result.base, []).append(result)
    parameters: dict[str, Any] = {}
    for request, results in by_request.items():
        if driver == CPU_DRIVER:
            for result in results:
                if (device := cpu_device(result, inventory)) is None:
                    raise no_cpu_device(result, inventory)
                with _about(result.request):
                    parameters[request] = cpu_parameters(stated[driver, result.request], device.kind)
        else:
            # Of a device that is gone the name tells enough; who needs the device itself is refused when allocated.
            devices = [memory_device(result, inventory, gone=True) for result in results]
            size = sum(count_of(MEMORY_DRIVER, result) for result in results)
            with _about(request):
                given = stated[driver, results[0].request]
                parameters[request] = memory_parameters(given, devices, size, protection)
    if driver == MEMORY_DRIVER:
        _check_mounts(parameters)
    name = "parameters" if driver == CPU_DRIVER else "memory_parameters"
    return {name: parameters, "sharing": _sharing(stated)}


@contextmanager
def _about(request: str) -> Iterator[None]:
    """A refusal inside names the request."""
    try:
        yield
    except Refused as error:
        raise Refused(f"request {request}: {error}") from error


def _sharing(stated: Mapping[tuple[str, str], Stated]) -> str:
    """Returns how the claim is shared: one answer for both drivers, since one container uses the whole claim.

    Requests that say nothing follow those that do. Raises Refused where two differ.
    """
    shared = {key: given["sharing"] for key, given in stated.items() if "sharing" in given}
    values = {given.value for given in shared.values()}
    if len(values) > 1:
        all_ = ", ".join(
            f"{name} of {driver}: {by.value} in {by.source.owner}" for (driver, name), by in shared.items()
        )
        raise Refused(
            f"parameters: sharing: holds for the whole claim, but its requests differ ({all_}); give all the same"
        )
    return values.pop() if values else "container"


def cpu_parameters(stated: Stated, kind: DeviceKind) -> CpuParameters:
    """Returns how a request wants its CPUs of a device of that kind. Raises Refused."""
    choosing = [name for name in stated if name not in _CHOICE_FREE]
    values = {name: given.value for name, given in stated.items()}
    if choosing and kind is DeviceKind.CPU:
        reason = "chooses among CPUs, but in individual mode the scheduler has chosen; use CEL selectors"
        raise refusal(stated[choosing[0]].source, CpuConfig.path(choosing[0]), reason)
    if "cpuset" in stated:
        values["cpuset"] = _named_cpus(stated, choosing)
    for (one, value), (other, excluded) in _EXCLUSIVE:
        if values.get(one) == value and values.get(other) == excluded:
            text = (
                f"{CpuConfig.path(other).partition('.')[2]}: {str(excluded).lower()} (in {stated[other].source.owner})"
            )
            raise refusal(stated[one].source, CpuConfig.path(one), f"{value} contradicts {text}")
    values.pop("sharing", None)
    if values.get("shared", "none") != "none":
        values["isolation"] = _mixed(stated)
    return CpuParameters(**values)


def _mixed(stated: Stated) -> str:
    if (isolation := stated.get("isolation")) and isolation.value == "isolated":
        given = f"{stated['shared'].value} (in {stated['shared'].source.owner})"
        reason = f"isolated contradicts shared: {given}: the kernel isolates a container with its own CPUs alone"
        raise refusal(isolation.source, CpuConfig.path("isolation"), reason)
    return "mixed"


def _named_cpus(stated: Stated, choosing: list[str]) -> frozenset[int]:
    given, path = stated["cpuset"], CpuConfig.path("cpuset")
    for name in choosing:
        if name != "cpuset":
            free = f"{', '.join(_CHOICE_FREE[:-1])} and {_CHOICE_FREE[-1]}"
            reason = f"excludes cpuset, which names the CPUs itself; beside it only {free} are allowed"
            raise refusal(stated[name].source, CpuConfig.path(name), reason)
    try:
        cpus = parse_cpu_list(given.value)
    except MalformedError as error:
        raise refusal(given.source, path, f"{shown(given.value)}: {error.reason}") from error
    if not cpus:
        raise refusal(given.source, path, "names no CPU")
    return cpus


def memory_parameters(
    stated: Stated, devices: Sequence[MemoryDevice], size: int, protection: MemoryProtection
) -> MemoryParameters:
    """Returns how one request wants its memory: ``size`` bytes in sum of all its devices. Raises Refused."""
    for name, given in stated.items():
        if fault := _memory_fault(name, given.value, devices, size, protection):
            raise refusal(given.source, MemoryConfig.path(name), fault)
    values = {name: given.value for name, given in stated.items() if name not in ("sharing", "mount")}
    mount = MemoryMount(**stated["mount"].value.model_dump()) if "mount" in stated else None
    return MemoryParameters(**values, mount=mount)


def _memory_fault(
    name: str, value: Any, devices: Sequence[MemoryDevice], size: int, protection: MemoryProtection
) -> str:
    """Returns why the value of a field cannot be kept; empty when it can."""
    pages = [kubernetes_page_size(size) for size in sorted({one.page_bytes for one in devices if one.hugepages})]
    if name in _CHARGED and pages and value != "none":
        return (
            f"{value} is for plain memory, and the request is of {pages[0]} hugepages, "
            f"which have a limit of their own; {_ONLY}"
        )
    if name == "mount" and not all(device.hugepages for device in devices):
        return f"is for hugepages, and the request is of plain memory; {_ONLY}"
    if name == "mount" and len(pages) > 1:
        sizes = ", ".join(pages)
        return f"is of one page size, and the request has pages of {sizes}; make a request for each size"
    if name == "high" and int(value * size) < devices[0].page_bytes:
        return f"{value} of {size} bytes is less than a page, so that nothing could run; choose a larger one"
    if name == "protect" and value not in ("none", *protection.allowed):
        allowed = " or ".join(("none", *protection.allowed))
        return f"{value} is not allowed on this node (memoryProtection.allowed); ask for {allowed}"
    return ""


def _check_mounts(parameters: Mapping[str, MemoryParameters]) -> None:
    """A mount that hides another would take its pages away from everybody."""
    pair = hiding_mounts(wanted.mount.path for wanted in parameters.values() if wanted.mount)
    if pair is not None:
        requests = ", ".join(name for name, wanted in parameters.items() if wanted.mount and wanted.mount.path in pair)
        raise Refused(
            f"requests {requests}: memoryConfig.mount.path: {pair[0]} would hide {pair[1]}; "
            "give each request its own directory by an entry of config[] with its name in requests"
        )
