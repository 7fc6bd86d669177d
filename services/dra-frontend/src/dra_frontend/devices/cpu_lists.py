# SPDX-License-Identifier: Apache-2.0
"""Publishes CPU lists and the SMT layout as attributes, for schedulers that choose CPUs themselves, as dra-driver-cpu
does.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Final

from numa_contract.cpuset import format_cpu_list

from dra_frontend.devices.model import CpuDevice
from dra_frontend.machine.model import Machine

CPU_IDS: Final = "dra.cpu/cpuIDs"
"""Attribute that lists the CPUs that a device offers, in the kernel's list format."""
SMT_LAYOUT: Final = "dra.cpu/smtLayout"
"""Attribute that shows which CPUs are threads of the same core, in the format of :func:`smt_layout`."""
_MAX_BYTES: Final = 64
"""Maximum length of a string attribute (DeviceAttributeMaxValueLength)."""
_THREADS: Final = 2


def cpu_lists(machine: Machine, device: CpuDevice) -> dict[str, str]:
    """Returns a device's CPU list and SMT layout as attributes. Values that are too long for the server are omitted."""
    texts = {CPU_IDS: format_cpu_list(device.cpus), SMT_LAYOUT: smt_layout(machine)}
    return {name: text for name, text in texts.items() if 0 < len(text) <= _MAX_BYTES}


def smt_layout(machine: Machine) -> str:
    """Returns a description of which threads share a core. In ``0-7>4;8-11``, CPUs 0 and 4, 1 and 5, 2 and 6, and 3 and
    7 share a core; each of CPUs 8 to 11 has a core to itself.

    Entries are ordered by the distance between the two threads, with single threads last. The result is empty if a core
    has more than two threads.
    """
    cores: defaultdict[int, list[int]] = defaultdict(list)
    for cpu in sorted(machine.cpus):
        cores[machine.cpus[cpu].core].append(cpu)
    strides: defaultdict[int, list[int]] = defaultdict(list)
    for threads in cores.values():
        if len(threads) > _THREADS:
            return ""
        strides[threads[-1] - threads[0]] += threads
    single = strides.pop(0, None)
    entries = [f"{format_cpu_list(cpus)}>{stride}" for stride, cpus in sorted(strides.items())]
    return ";".join([*entries, format_cpu_list(single)] if single else entries)


def omission_messages(machine: Machine, devices: list[CpuDevice]) -> Iterator[str]:
    """Yields a message for each attribute that had to be omitted."""
    if long := [device.name for device in devices if CPU_IDS not in device.attributes]:
        yield (
            f"{', '.join(long)}: {CPU_IDS} is omitted, as it would exceed {_MAX_BYTES} bytes; "
            "choose a groupBy with smaller groups"
        )
    if any(SMT_LAYOUT not in device.attributes for device in devices):
        layout = smt_layout(machine)
        reason = (
            f"does not fit in {_MAX_BYTES} bytes" if layout else f"only supports cores with up to {_THREADS} threads"
        )
        yield f"allocator: external: {SMT_LAYOUT} is omitted, since it {reason}"
