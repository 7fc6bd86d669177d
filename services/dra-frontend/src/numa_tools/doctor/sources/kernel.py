# SPDX-License-Identifier: Apache-2.0
"""Reads facts about the kernel and the cgroup tree. Every call blocks."""

import re
import resource
from typing import Final

from dra_frontend.machine.file_tree import FileTree, HostTreeError, Reader
from dra_frontend.machine.host_hugepages import PageKey, find_pods_groups, held_pages, read_pod_pages
from dra_frontend.machine.model import Machine
from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError
from numa_node.mounts import mounts_over, parse_mounts

from numa_tools.doctor.facts import Cgroups, Kernel
from numa_tools.doctor.model import Unread

_SLICES: Final = ("system.slice", "user.slice", "init.scope")
_MAX_INTERRUPTS: Final = 16384
_NO_HANDLERS: Final = {
    *("smp_affinity", "smp_affinity_list", "effective_affinity", "effective_affinity_list"),
    *("affinity_hint", "node", "spurious"),
}
_WORKQUEUES: Final = "/sys/devices/virtual/workqueue/cpumask"
_CLOCK: Final = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def read_kernel(tree: FileTree) -> Kernel | Unread:
    """Returns the facts from the host's /proc and /sys."""
    reader = Reader(tree)
    try:
        release = re.match(r"(\d{1,4})\.(\d{1,4})", reader.text("/proc/sys/kernel/osrelease") or "", re.ASCII)
        if release is None:
            raise HostTreeError("/proc/sys/kernel/osrelease", "does not contain a Linux release")
        files = (reader.text("/proc/sys/fs/file-nr") or "0 0 0").split()
        return Kernel(
            release=(int(release[1]), int(release[2])),
            nohz_full=_cpus(reader.text("/sys/devices/system/cpu/nohz_full")),
            rcu_nocbs=_boot_cpus(reader, "rcu_nocbs"),
            clocksource=reader.text(_CLOCK) or "",
            workqueues=reader.cpu_mask(_WORKQUEUES) or frozenset(),
            open_files=(int(files[0]), int(files[-1])),
            interrupts=_interrupts(reader, tree),
        )
    except (HostTreeError, ValueError) as error:
        return Unread(str(error), "run the command in the driver's pod, or pass --host-root")


def _cpus(text: str | None) -> frozenset[int]:
    # /sys/devices/system/cpu/nohz_full may contain "(null)" if the kernel was booted without nohz_full.
    try:
        return parse_cpu_list(text or "")
    except MalformedError:
        return frozenset()


def _boot_cpus(reader: Reader, name: str) -> frozenset[int]:
    possible = reader.cpu_list("/sys/devices/system/cpu/possible") or frozenset()
    options = re.findall(rf"(?:^|\s){name}(?:=(\S*))?(?=\s|$)", reader.text("/proc/cmdline") or "", re.ASCII)
    if not options:
        return frozenset()
    return possible if options[-1] in ("all", "") else _cpus(options[-1].replace("N", str(max(possible, default=0))))


def _interrupts(reader: Reader, tree: FileTree) -> dict[int, frozenset[int]]:
    found = {}
    for number, name in list((reader.names("/proc/irq", r"(\d{1,7})") or {}).items())[:_MAX_INTERRUPTS]:
        if set(tree.names(f"/proc/irq/{name}") or ()) <= _NO_HANDLERS:
            continue
        for file in ("effective_affinity_list", "smp_affinity_list"):
            if cpus := _cpus(reader.text(f"/proc/irq/{name}/{file}")):
                found[number] = cpus
                break
    return found


def read_cgroups(tree: FileTree, root: str, mountinfo: str, machine: Machine | None) -> Cgroups | Unread:
    """Returns the facts about the cgroup tree. The root of ``tree`` is the cgroup mount, and ``mountinfo`` contains the
    contents of a process's mountinfo file.
    """
    try:
        controllers, names = tree.read("/cgroup.controllers"), tree.names("/")
        if names is None:
            return Unread(f"{root} does not exist", "set cgroupRoot to where the node's cgroup tree is mounted")
        above = mounts_over(root, parse_mounts(mountinfo))
        if controllers is None and above and above[-1].point == root and not above[-1].kind.startswith("cgroup"):
            return Unread(
                f"{root} is a file system of type {above[-1].kind} instead of the node's cgroup tree",
                "mount the node's cgroup2 tree there (hostHugepages.detect: true in the chart), or set cgroupRoot",
            )
        pods = find_pods_groups(tree)
        if controllers is not None and not pods and "cgroup.events" in names:
            return Unread(
                f"{root} is this container's own cgroup: the node's tree is not visible from here",
                "set hostHugepages.detect: true in the chart, which mounts it read-only",
            )
        inner = next((one for one in (*pods, *(f"/{name}" for name in names)) if tree.names(one)), "/")
        files = set(tree.names(inner) or ())
        return Cgroups(
            root=root,
            controllers=None if controllers is None else frozenset(controllers.split()),
            delegated=_words(tree, "/cgroup.subtree_control"),
            pods={group: _words(tree, f"{group}/cgroup.subtree_control") for group in pods},
            can_kill="cgroup.kill" in files,
            partitions="cpuset.cpus.exclusive" in files,
            options=_options(mountinfo, root),
            slices=dict(_slices(tree)),
            host_pages=_host_pages(tree, machine),
        )
    except HostTreeError as error:
        return Unread(str(error), "run the command in the driver's pod")


def _words(tree: FileTree, path: str) -> frozenset[str]:
    return frozenset((tree.read(path) or "").split())


def _options(mountinfo: str, root: str) -> frozenset[str]:
    """Returns the mount options of the file system at a path, or an empty set if its type is not cgroup2."""
    above = mounts_over(root, parse_mounts(mountinfo))
    return above[-1].options if above and above[-1].kind == "cgroup2" else frozenset()


def _slices(tree: FileTree) -> list[tuple[str, frozenset[int]]]:
    shown = [(name, tree.read(f"/{name}/cgroup.events"), f"/{name}/cpuset.cpus.effective") for name in _SLICES]
    return [(name, _cpus(tree.read(path))) for name, events, path in shown if "populated 1" in (events or "")]


def _host_pages(tree: FileTree, machine: Machine | None) -> dict[PageKey, int] | None:
    pools = [] if machine is None else [(n, pool) for n in machine.numa_nodes.values() for pool in n.hugepages]
    sizes = frozenset(pool.page_bytes for _, pool in pools)
    pods = read_pod_pages(tree, sizes)
    if machine is None or not sizes <= pods.keys():
        return None
    return {(n.id, pool.page_bytes): held_pages(n.id, pool, pods[pool.page_bytes]) for n, pool in pools}


def open_file_limits() -> tuple[int, int]:
    """Returns the soft and hard open-file limits for a process in this container."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)
