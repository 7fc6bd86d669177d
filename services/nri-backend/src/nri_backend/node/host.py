# SPDX-License-Identifier: Apache-2.0
"""Reads the node's online CPUs and hugepage sizes, and determines whether cpuset partitions can be created."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import parse_page_size

from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.model import Host
from nri_backend.problems import NO_PROBLEM, Problem

_log = logging.getLogger(__name__)


class HostError(Exception):
    """The node's CPUs or hugepage sizes cannot be read. Without the list of online CPUs, nothing can be enforced."""


def possible_cpus(host_root: str) -> frozenset[int]:
    """Returns the CPUs that can come online, from sysfs under ``host_root``. Raises OSError or ValueError."""
    return parse_cpu_list(Path(host_root, "sys/devices/system/cpu/possible").read_text())


def read_host(host_root: str, tree: CgroupTree, partition_obstacle: Callable[[], Problem] = lambda: NO_PROBLEM) -> Host:
    """Reads the node's CPUs and hugepage sizes under ``host_root``, and determines whether partitions can be created in
    the tree. Raises HostError.

    ``partition_obstacle`` returns the reason why this process may not create partitions, or NO_PROBLEM. It is called
    only if the kernel supports them.
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
    except (OSError, ValueError) as error:  # MalformedError, or UnicodeDecodeError
        raise HostError(f"{path}: {error}; mount the node's /sys under the host root, or set --host-root") from error
    obstacle = tree.partition_obstacle() or partition_obstacle()
    return Host(online, tuple(sorted(sizes)), partitions=not obstacle, obstacle=obstacle)


class HostReader:
    """Reads the machine's CPUs and hugepage sizes for callers on an event loop."""

    def __init__(
        self, read: Callable[[], Host], changed: Callable[[Host], object], probe_is_due: Callable[[], bool]
    ) -> None:
        """``read`` is read_host() bound to its arguments. ``changed`` is called with each reading.

        ``probe_is_due`` returns True if the next call to ``read`` will write to cgroups to find out what the kernel
        permits.
        """
        self.problem = NO_PROBLEM
        """Reason why the CPUs or hugepage sizes cannot be read; empty if they can."""
        self._read = read
        self._changed = changed
        self._probe_is_due = probe_is_due

    async def refresh(self) -> None:
        """Reads the CPUs and hugepage sizes again. If that fails, the last values stay in use.

        They are read on the event loop itself, because that takes less time than switching to a thread. Reading does
        not wait for the cgroup locks: the kernel formats sysfs files from memory, and looks up and lists cgroups under
        the kernfs lock (kernfs_iop_getattr() and kernfs_fop_readdir() in fs/kernfs). A write to a cgroup may have to
        wait for the cgroup locks, but only the probe writes to cgroups. So a thread is used only if a probe is due.
        """
        try:
            host = await asyncio.to_thread(self._read) if self._probe_is_due() else self._read()
        except HostError as error:
            if not self.problem:
                _log.warning("the machine cannot be read", extra={"error": str(error)})
            self.problem = Problem(str(error), BackendCode.HOST_UNREADABLE)
            return
        self.problem = NO_PROBLEM
        self._changed(host)
