# SPDX-License-Identifier: Apache-2.0
"""PCIe root complexes and the CPUs near them. Core.

A claim for CPUs and one for a device of another driver meet at the root that both name (KEP-5491, list attributes).
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from dra_frontend.cpu_groups import Attributes
from dra_frontend.devices import CpuDevice, Pool
from dra_frontend.file_tree import Reader

PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
# The server counts each value of each attribute of a device.
_MOST_VALUES: Final = 48
_DEVICES: Final = "/sys/devices"
# A domain has more than four digits where the firmware gives none and the kernel counts on (Intel VMD, Hyper-V).
_ROOT = re.compile(r"pci([0-9a-f]{4,8}:[0-9a-f]{2})", re.ASCII)


def read_pcie_roots(reader: Reader) -> dict[str, frozenset[int]]:
    """Returns the CPUs near each PCIe root, by the root's name in sysfs; HostTreeError for a list that is none.

    A bridge that goes while we look has no list, and is left out.
    """
    found: dict[str, frozenset[int]] = {}
    for name in reader.all_names(_DEVICES) or ():
        match = _ROOT.fullmatch(name)
        cpus = match and reader.cpu_list(f"{_DEVICES}/{name}/pci_bus/{match[1]}/cpulistaffinity")
        if cpus is not None:
            found[name] = cpus
    return dict(sorted(found.items()))


def pcie_attribute(roots: Mapping[str, frozenset[int]], cpus: frozenset[int], others: int) -> Attributes:
    """Returns the attribute of a device with these CPUs and ``others`` attributes more; none where no root is near.

    A list that is too long for the server is cut: what it names is true, and the whole slice would be refused.
    """
    near = tuple(name for name, local in sorted(roots.items()) if local & cpus)[: _MOST_VALUES - others]
    return {PCIE_ROOT: near} if near else {}


def cut_devices(roots: Mapping[str, frozenset[int]], pools: Iterable[Pool]) -> list[str]:
    """Returns the devices whose list was cut."""
    cut = []
    for pool in pools:
        for device in pool.devices:
            listed = device.attributes.get(PCIE_ROOT)
            if isinstance(device, CpuDevice) and isinstance(listed, tuple):
                near = sum(bool(local & device.cpus) for local in roots.values())
                cut += [device.name] if near > len(listed) else []
    return cut
