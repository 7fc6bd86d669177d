# SPDX-License-Identifier: Apache-2.0
"""What else is on the node: on claimed CPUs, in hugepages, and whether there is room to work. Pure."""

from collections.abc import Iterator
from typing import Final

from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import kubernetes_page_size

from numa_tools.doctor.facts import Cgroups, Claims, Kernel, RunDirectory, Service, Space
from numa_tools.doctor.model import Check, Finding, note, problem

_LEAST_BYTES: Final = 16 << 20
"""The journal has a quarter of a MiB, a record some KiB, the quarantine at most as much as this."""
_LEAST_FILES: Final = 1024
_LEAST_OPEN: Final = 4096
"""Of one process: a call of the kubelet, a connection and a watch need one each, and so do 500 cgroups."""
_FULL: Final = 0.9
_MOST_SHOWN: Final = 20


def _own_cpus(service: Service, *, without_kept: bool = False) -> frozenset[int]:
    """Returns the CPUs of claims whose containers run; ``without_kept`` those whose claim keeps interrupts out."""
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
    remedy = "boot Linux 6.7 or later, so that the kernel keeps them; or set hostSlices: true"
    if config.host_slices:
        remedy = "hostSlices: true should have moved them within 5 s: see driver.backend-problems and driver.enforced"
    for name, cpus in cgroups.slices.items():
        if both := cpus & ours:
            yield problem(
                f"Host processes of {name} may run on claimed CPUs {format_cpu_list(both)}.",
                "the container that claimed them is not alone",
                remedy,
            )


def _interrupts(kernel: Kernel, service: Service, config: Config) -> Iterator[Finding]:
    ours = _own_cpus(service, without_kept=True)
    there = [number for number, cpus in kernel.interrupts.items() if cpus & ours]
    if there:
        numbers = ", ".join(map(str, there[:_MOST_SHOWN])) + (", ..." if len(there) > _MOST_SHOWN else "")
        why = "irqs is leave" if config.irqs == "leave" else "managed ones cannot be moved, others are within 30 s"
        yield note(
            f"{len(there)} interrupts of devices arrive on claimed CPUs ({numbers}).",
            f"each holds up the program that claimed the CPU; {why}",
            "set irqs: move; for managed ones boot with isolcpus=managed_irq,LIST: docs/exclusive.md",
        )


def _workers(kernel: Kernel, service: Service, config: Config) -> Iterator[Finding]:
    both = kernel.workqueues & _own_cpus(service)
    if both and config.irqs == "move":
        why = "work of the kernel for others runs beside the program that claimed them"
        what = f"Unbound kernel workers may run on claimed CPUs {format_cpu_list(both)}."
        yield note(what, why, "set hostInterrupts.mount: true in the chart, so that the backend can move them")


def _hugepages(cgroups: Cgroups) -> Iterator[Finding]:
    for (numa_node, size), pages in (cgroups.host_pages or {}).items():
        if pages:
            yield note(
                f"{pages} hugepages of {kubernetes_page_size(size)} on NUMA node {numa_node} are in use by no pod.",
                "a process of the host holds them; they are left out of what claims may get",
                "look for it: grep -l huge /proc/*/numa_maps; allocate more (dra-frontend provision) if it needs them",
            )


def _hugepages_told(cgroups: Cgroups) -> Iterator[Finding]:
    if cgroups.controllers is not None and cgroups.host_pages is None:
        yield note(
            "The kernel does not say how many hugepages pods use.",
            "hugepages that processes of the host hold count as free, and claims may be promised them",
            "boot Linux 5.17 or later with the controller hugetlb",
        )


def _room(space: Space, what: str) -> Iterator[Finding]:
    if space.free_bytes < _LEAST_BYTES:
        left = f"{space.free_bytes >> 10} KiB are left for {space.path}."
        yield problem(left, what, "remove what fills the file system, often /run: df -h, du -x")
    if space.free_files is not None and space.free_files < _LEAST_FILES:
        left = f"{space.free_files} files can still be made in the file system of {space.path}."
        yield problem(left, what, "remove files that nobody needs: df -i")


def _run_space(run_directory: RunDirectory) -> Iterator[Finding]:
    what = "journal, sockets and enforcement records cannot be written on a full file system"
    yield from _room(run_directory.space, what)


def _cdi_space(claims: Claims) -> Iterator[Finding]:
    yield from _room(claims.space, "no claim is prepared where its file cannot be written")


def _own_files(open_files: tuple[int, int]) -> Iterator[Finding]:
    hard = open_files[1]
    if 0 <= hard < _LEAST_OPEN:
        yield problem(
            f"A process of this container may have {hard} files open at most.",
            "the services raise their own limit to the hard one; with fewer they fail on a busy node",
            "raise LimitNOFILE of the container runtime's unit",
        )


def _node_files(kernel: Kernel) -> Iterator[Finding]:
    used, most = kernel.open_files
    if most and used > _FULL * most:
        what = f"{used} of {most} files are open on this node."
        yield problem(what, "beyond that no program can open any", "find who leaks them; raise fs.file-max")


CHECKS: Final = (
    Check("host.daemons", "No host process may run on claimed CPUs.", ("cgroups", "service", "config"), _daemons),
    Check("host.interrupts", "No interrupt arrives on claimed CPUs.", ("kernel", "service", "config"), _interrupts),
    Check("host.workers", "No unbound kernel worker runs there.", ("kernel", "service", "config"), _workers),
    Check("host.hugepages", "No host process holds hugepages.", ("cgroups",), _hugepages),
    Check("host.hugepages-told", "The kernel says which hugepages pods use.", ("cgroups",), _hugepages_told),
    Check("host.run-space", "There is room in the run directory.", ("run_directory",), _run_space),
    Check("host.cdi-space", "There is room in the CDI directory.", ("claims",), _cdi_space),
    Check("host.own-files", f"A process may have {_LEAST_OPEN} files open.", ("open_files",), _own_files),
    Check("host.node-files", "The node is not short of open files.", ("kernel",), _node_files),
)
