# SPDX-License-Identifier: Apache-2.0
"""Checks disk space, open files, and the host processes that run on claimed CPUs or use hugepages. This module does no
I/O.
"""

from collections.abc import Iterator
from typing import Final

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import kubernetes_page_size

from numa_tools.doctor.facts import Cgroups, Claims, Kernel, RunDirectory, Service, Space
from numa_tools.doctor.model import Check, Finding, Unread, note, problem, unknown

_MIN_BYTES: Final = 16 << 20
"""Minimum free space in bytes. It equals the size limit of the quarantine directory. The journal takes up 256 KiB, and
each record takes up a few KiB.
"""
_MIN_FILES: Final = 1024
_MIN_OPEN: Final = 4096
"""Minimum open-file limit per process. Each kubelet call, connection, watch and container cgroup requires an open file.
"""
_FULL: Final = 0.9
_MAX_SHOWN: Final = 20


def _own_cpus(service: Service, *, without_kept: bool = False) -> frozenset[int]:
    """Returns the CPUs held by claims with running containers. ``without_kept`` skips claims with ``irqs: keep``."""
    held = {(record.driver, record.claim.uid): record for record in service.records}
    cpus = set[int]()
    for one in service.containers:
        for use in one.claims if one.state == "running" and not one.refused else ():
            record = held.get((use.driver, use.uid))
            for name in use.requests or (record.requests if record else ()):
                if record and not (without_kept and record.parameters_of(name).irqs == "keep"):
                    cpus |= record.cpus_of([name])
    return frozenset(cpus)


def _daemons(cgroups: Cgroups, service: Service, config: Config) -> Iterator[Finding]:
    ours = _own_cpus(service)
    remedy = "boot Linux 6.7 or later, so that the kernel keeps them off these CPUs; or set hostSlices: true"
    if cgroups.partitions:
        remedy = "see claims.kept-by-kernel and driver.exclusivity; or set hostSlices: true"
    if config.host_slices:
        remedy = "hostSlices: true should have moved them within 5 s: see driver.status"
    found = {name: both for name, cpus in cgroups.slices.items() if (both := cpus & ours)}
    if found:
        yield problem(
            f"Host processes may run on claimed CPUs {format_cpu_list(frozenset().union(*found.values()))}.",
            "the containers that claimed these CPUs do not have exclusive use of them",
            remedy,
            [f"{name} may use CPUs {format_cpu_list(cpus)}" for name, cpus in found.items()],
        )


def _interrupts(kernel: Kernel, service: Service, config: Config) -> Iterator[Finding]:
    ours = _own_cpus(service, without_kept=True)
    there = [number for number, cpus in kernel.interrupts.items() if cpus & ours]
    # For a claim with irqs: keep, the driver moves neither interrupts nor kernel workers.
    workers = kernel.workqueues & _own_cpus(service) if config.irqs == "move" else frozenset()
    evidence = []
    if there:
        numbers = ", ".join(map(str, there[:_MAX_SHOWN])) + (", ..." if len(there) > _MAX_SHOWN else "")
        evidence.append(f"{len(there)} device interrupts arrive on claimed CPUs: {numbers}")
    if workers:
        evidence.append(f"unbound kernel workers may run on CPUs {format_cpu_list(workers)}")
    if evidence:
        yield note(
            "The kernel does other work on claimed CPUs.",
            "each interrupt and each worker delays the program that runs on the claimed CPU",
            _remedy(config, managed=not workers),
            evidence,
        )


def _remedy(config: Config, *, managed: bool) -> str:
    """Returns the remedy for kernel work on claimed CPUs. ``managed`` is True if no kernel workers were found. In that
    case, the remaining interrupts are assumed to be managed interrupts, which cannot be moved.
    """
    if config.irqs == "keep":
        return "set irqs: move in driverConfig"
    if managed:
        return (
            "the backend moves interrupts within 30 s if hostInterrupts.mount is true in the chart, except managed "
            "ones: for these, boot with isolcpus=managed_irq,LIST (docs/exclusive.md)"
        )
    return "set hostInterrupts.mount: true in the chart, so that the backend can move them; see driver.status"


def _hugepages(cgroups: Cgroups) -> Iterator[Finding]:
    held = {key: pages for key, pages in (cgroups.host_pages or {}).items() if pages}
    if held:
        yield note(
            "Host processes use hugepages.",
            "these pages are excluded from the devices that claims can use",
            "find the processes: grep -l huge /proc/*/numa_maps; if they need the pages, allocate more for claims with "
            "dra-frontend provision (docs/memory.md)",
            [f"{pages} of {kubernetes_page_size(size)} on NUMA node {node}" for (node, size), pages in held.items()],
        )


def _space(run_directory: RunDirectory | Unread, claims: Claims | Unread) -> Iterator[Finding]:
    seen = [one for one in (run_directory, claims) if not isinstance(one, Unread)]
    evidence = dict.fromkeys(fact for one in seen for fact in _full(one.space))
    if evidence:
        yield problem(
            "A file system that the driver writes to is nearly full.",
            "claim files, the journal, sockets and enforcement records cannot be written, so no claim is prepared",
            "find and remove the files that are filling up this file system (often /run): df -h, df -i, du -x",
            evidence,
        )
    else:
        yield from (unknown(one) for one in (run_directory, claims) if isinstance(one, Unread))


def _full(space: Space) -> Iterator[str]:
    if space.free_bytes < _MIN_BYTES:
        yield f"{space.free_bytes >> 10} KiB are free on the file system of {space.path}"
    if space.free_files is not None and space.free_files < _MIN_FILES:
        yield f"{space.free_files} files can still be created on the file system of {space.path}"


def _own_files(open_files: tuple[int, int]) -> Iterator[Finding]:
    hard = open_files[1]
    if 0 <= hard < _MIN_OPEN:
        yield problem(
            f"A process in this container may have at most {hard} open files.",
            "the services raise their soft limit to the hard limit, and fail on a busy node if this limit is too low",
            f"set LimitNOFILE in the container runtime's unit to {_MIN_OPEN} or more, restart the runtime, and delete "
            "this pod",
        )


def _node_files(kernel: Kernel) -> Iterator[Finding]:
    used, limit = kernel.open_files
    if limit and used > _FULL * limit:
        what = f"{used} of {limit} files are open on this node."
        remedy = "find the process that leaks file descriptors, or raise fs.file-max with sysctl"
        yield problem(what, "once the limit is reached, no program can open files", remedy)


CHECKS: Final = (
    Check("host.daemons", "No host process can run on claimed CPUs.", ("cgroups", "service", "config"), _daemons),
    Check(
        "host.interrupts",
        "No interrupt arrives on claimed CPUs, and no unbound kernel worker runs there.",
        ("kernel", "service", "config"),
        _interrupts,
    ),
    Check("host.hugepages", "No host process uses hugepages.", ("cgroups",), _hugepages),
    Check(
        "host.space",
        "The file systems of the run directory and the CDI directory have free space.",
        ("run_directory", "claims"),
        _space,
        accepts_unread=True,
    ),
    Check(
        "host.own-files",
        f"A process in this container can open at least {_MIN_OPEN} files.",
        ("open_files",),
        _own_files,
    ),
    Check("host.node-files", "The node is not close to its open-file limit.", ("kernel",), _node_files),
)
