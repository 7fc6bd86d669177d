# SPDX-License-Identifier: Apache-2.0
"""PCIe root complexes and the CPUs near them.

A claim for CPUs and one for a device of another driver meet at the root that both name (KEP-5491, list attributes).
"""

import re
from typing import Final

from dra_frontend.machine.file_tree import Reader

_DEVICES: Final = "/sys/devices"
# A domain has more than four digits where the firmware gives none and the kernel counts on (Intel VMD, Hyper-V).
_ROOT = re.compile(r"pci([0-9a-f]{4,8}:[0-9a-f]{2})", re.ASCII)


def read_pcie_roots(reader: Reader) -> dict[str, frozenset[int]]:
    """Returns the CPUs near each PCIe root, by the root's name in sysfs; HostTreeError for a list that is not one.

    A bridge that goes meanwhile has no list, and is left out.
    """
    found: dict[str, frozenset[int]] = {}
    for name in reader.all_names(_DEVICES) or ():
        match = _ROOT.fullmatch(name)
        cpus = match and reader.cpu_list(f"{_DEVICES}/{name}/pci_bus/{match[1]}/cpulistaffinity")
        if cpus is not None:
            found[name] = cpus
    return dict(sorted(found.items()))
