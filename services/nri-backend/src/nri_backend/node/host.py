# SPDX-License-Identifier: Apache-2.0
"""What the backend must know of the machine: CPUs online, hugepage sizes, whether its kernel makes partitions."""

from collections.abc import Callable
from pathlib import Path

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import parse_page_size

from nri_backend.limits.difference import Host
from nri_backend.node.cgroups import CgroupTree


class HostError(Exception):
    """The machine cannot be read; nothing can be enforced without knowing its CPUs."""


def possible_cpus(host_root: str) -> frozenset[int]:
    """Returns the CPUs that may ever be online below ``host_root``. OSError or ValueError if that cannot be read."""
    return parse_cpu_list(Path(host_root, "sys/devices/system/cpu/possible").read_text())


def read_host(host_root: str, tree: CgroupTree, partition_obstacle: Callable[[], str] = lambda: "") -> Host:
    """Reads the machine below ``host_root``, and whether the kernel of the tree makes partitions. Raises HostError.

    ``partition_obstacle`` returns why this process may not make partitions, or "". It is called only if the kernel of
    the tree makes them.
    """
    path = Path(host_root, "sys/devices/system/cpu/online")
    try:
        online = parse_cpu_list(path.read_text())
        if not online:
            raise MalformedError("list of CPUs", "", "no CPU is online")
        path = Path(host_root, "sys/kernel/mm/hugepages")
        # A kernel without hugepages has no such directory.
        names = [entry.name for entry in path.iterdir()] if path.exists() else []
        sizes = [parse_page_size(name) for name in names if name.startswith("hugepages-")]
    except (OSError, ValueError) as error:  # a MalformedError, or a text that is not UTF-8
        raise HostError(f"{path}: {error}; mount the node's /sys there or set --host-root") from error
    obstacle = tree.partition_obstacle() or partition_obstacle()
    return Host(online, tuple(sorted(sizes)), partitions=not obstacle, obstacle=obstacle)
