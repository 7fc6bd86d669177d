# SPDX-License-Identifier: Apache-2.0
"""The attribute by which a claim for CPUs and one for a device of another driver meet: PCIe roots (KEP-5491)."""

from collections.abc import Iterable, Mapping
from typing import Final

from dra_frontend.devices.cpu_groups import Attributes
from dra_frontend.devices.model import CpuDevice, Pool

PCIE_ROOT: Final = "resource.kubernetes.io/pcieRoot"
# The server counts each value of each attribute of a device.
_MOST_VALUES: Final = 48


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
