# SPDX-License-Identifier: Apache-2.0
"""What the backend must know of the machine: CPUs online, hugepage sizes. Read from sysfs."""

from pathlib import Path

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import parse_page_size

from nri_backend.limits.difference import Host


class HostError(Exception):
    """The machine cannot be read; nothing can be enforced without knowing its CPUs."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}; mount the node's /sys there or set --host-root")


def _set(path: Path) -> frozenset[int]:
    try:
        return parse_cpu_list(path.read_text())
    except (OSError, MalformedError) as error:
        raise HostError(str(path), str(error)) from error


def _page_sizes(path: Path) -> tuple[int, ...]:
    try:
        names = [entry.name for entry in path.iterdir() if entry.name.startswith("hugepages-")]
        return tuple(sorted(parse_page_size(name.removesuffix("kB") + "k") for name in names))
    except FileNotFoundError:
        return ()
    except (OSError, MalformedError) as error:
        raise HostError(str(path), str(error)) from error


def read_host(host_root: str) -> Host:
    """Reads the machine below ``host_root``. HostError."""
    sys = Path(host_root, "sys")
    online = _set(sys / "devices/system/cpu/online")
    if not online:
        raise HostError(str(sys / "devices/system/cpu/online"), "no CPU is online")
    return Host(online, _page_sizes(sys / "kernel/mm/hugepages"))
