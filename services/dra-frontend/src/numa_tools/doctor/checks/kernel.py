# SPDX-License-Identifier: Apache-2.0
"""Checks that the kernel can enforce claims. This module does no I/O."""

from collections.abc import Iterator
from typing import Final, NamedTuple

from dra_frontend.devices.inventory import Inventory
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list

from numa_tools.doctor.facts import Cgroups, Kernel
from numa_tools.doctor.model import Check, Finding, Unread, facts_or_none, note, problem, unknown

_NEEDED: Final = ("cpuset", "cpu", "memory", "hugetlb")
_UNIFIED: Final = "boot the node with systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
_ACCOUNTING: Final = "memory_hugetlb_accounting"
_MOUNTED_BY_SYSTEMD: Final = frozenset({"nsdelegate", "memory_recursiveprot"})
_CGROUP_KILL_RELEASE: Final = (5, 14)
_BOOT: Final = "boot Linux 6.7 or later"
_HIDDEN: Final = "this kernel release provides them: see kernel.delegated and kernel.kubepods"


def _cgroup_v2(cgroups: Cgroups) -> Iterator[Finding]:
    if cgroups.controllers is None:
        why = "the driver enforces claims through files that exist only in cgroup v2"
        yield problem(f"{cgroups.root} is not a cgroup v2 tree: it has no cgroup.controllers.", why, _UNIFIED)
    elif missing := [one for one in _NEEDED if one not in cgroups.controllers]:
        yield problem(
            f"The cgroup v2 tree lacks controllers: {', '.join(missing)}.",
            "claim limits that depend on these controllers would not be enforced; without cpuset, the backend does not "
            "start",
            f"{_UNIFIED}, and without cgroup_disable= for these controllers; if the kernel was built without them, use "
            "one that has them",
        )


def _delegated(cgroups: Cgroups) -> Iterator[Finding]:
    groups = {"/": cgroups.delegated} | dict(cgroups.pods)
    for group, passed in groups.items() if cgroups.controllers is not None else ():
        missing = [one for one in _NEEDED if one in (cgroups.controllers or ()) and one not in passed]
        if missing:
            file = f"{cgroups.root}{group.rstrip('/')}/cgroup.subtree_control"
            yield problem(
                f"{file} does not enable {', '.join(missing)}.",
                "pods' cgroups lack the files of these controllers, and claims that need the files are rejected",
                f'write "{" ".join(f"+{one}" for one in missing)}" to this file; with --cgroups-per-qos, the '
                "kubelet does so itself",
            )


def _pods_group(cgroups: Cgroups) -> Iterator[Finding]:
    if cgroups.controllers is not None and not cgroups.pods:
        yield problem(
            f"{cgroups.root} has no kubepods cgroup.",
            "the backend does not find any containers, and pods' hugepages cannot be distinguished from the host's",
            "mount the node's cgroup2 tree there, or set cgroupRoot; the kubelet creates kubepods in the node's tree",
        )


def _hugetlb_accounting(cgroups: Cgroups) -> Iterator[Finding]:
    if _ACCOUNTING in cgroups.options:
        others = ",".join(sorted(cgroups.options & _MOUNTED_BY_SYSTEMD))
        yield problem(
            f"The cgroup v2 tree is mounted with {_ACCOUNTING}.",
            "hugepages would count as memory, so containers with hugepages would exceed a memory limit equal to the "
            "claimed amount and be killed",
            f"run mount -o {','.join(filter(None, ('remount', others)))} {cgroups.root} on the node at each boot "
            "before the kubelet starts; this drops the option, which recent releases of systemd set",
        )


def _release(kernel: Kernel, cgroups: Cgroups, config: Config, machine: Inventory | Unread) -> Iterator[Finding]:
    number = ".".join(map(str, kernel.release))
    if kernel.release < _CGROUP_KILL_RELEASE or not (cgroups.can_kill or cgroups.controllers is None):
        yield problem(
            f"The kernel, Linux {number}, has no cgroup.kill.",
            "the backend uses cgroup.kill (Linux 5.14) to kill containers that must not run, and does not start "
            "without it",
            _BOOT,
        )
        return
    lacking = list(_missing_files(cgroups, config, facts_or_none(machine)))
    if not lacking:
        yield from [unknown(machine)] if isinstance(machine, Unread) else ()
        return
    remedy = _BOOT if any(kernel.release < one.since for one in lacking) else _HIDDEN
    found = note
    if _EXCLUSIVE in lacking and config.cpu_exclusivity == "partition":
        remedy, found = f"{remedy}, or set cpuExclusivity: auto", problem
    elif _EXCLUSIVE in lacking and config.cpu_exclusivity == "auto" and not config.host_slices:
        remedy = f"{remedy}, or set hostSlices: true"
    effects = "; ".join(_effect(one, config) for one in lacking)
    evidence = [f"{one.text} (Linux {'.'.join(map(str, one.since))})" for one in lacking]
    yield found(f"The kernel, Linux {number}, lacks files that the driver uses.", effects, remedy, evidence)


class _MissingFiles(NamedTuple):
    """Files that a kernel does not provide."""

    text: str
    since: tuple[int, int]
    """First kernel release that has the files."""


_EXCLUSIVE: Final = _MissingFiles("no cgroup has cpuset.cpus.exclusive", (6, 7))
_NUMA_STAT: Final = _MissingFiles("pods' cgroups have no hugetlb.*.numa_stat", (5, 17))


def _missing_files(cgroups: Cgroups, config: Config, machine: Inventory | None) -> Iterator[_MissingFiles]:
    """Yields the files that do not exist in the cgroup tree."""
    if cgroups.controllers is None:
        return
    if config.cpu_exclusivity != "pool" and not cgroups.partitions:
        yield _EXCLUSIVE
    # The page sizes are known only if the inventory could be read. Hugepages can be counted only if the hugetlb
    # controller is available.
    if machine is not None and cgroups.host_pages is None and "hugetlb" in cgroups.controllers:
        yield _NUMA_STAT


def _effect(lacking: _MissingFiles, config: Config) -> str:
    """Describes the effect of the missing files."""
    if lacking is _NUMA_STAT:
        return "hugepages used by host processes count as free and may be allocated to claims"
    if config.cpu_exclusivity == "partition":
        return "with cpuExclusivity: partition, every CPU claim for one container is refused"
    daemons = "and hostSlices keeps host daemons off" if config.host_slices else "but host daemons stay on them"
    return f"the shared pool keeps containers off claimed CPUs, {daemons}"


def _reserved(machine: Inventory, kernel: Kernel) -> Iterator[Finding]:
    reserved = machine.reserved_cpus
    options = {"isolcpus": machine.machine.isolcpus & reserved, "nohz_full": kernel.nohz_full & reserved}
    effects = {
        "isolcpus": "the kernel does not balance load on these CPUs: system threads stay on the CPU where they start",
        "nohz_full": "nohz_full slows down short-lived system threads, and these CPUs run no timers for other CPUs",
    }
    found = {option: cpus for option, cpus in options.items() if cpus}
    if found:
        yield problem(
            f"CPUs reserved for the system are in {' and '.join(found)}.",
            "; ".join(effects[option] for option in found),
            f"remove them from {' and '.join(found)} or from reservedCPUs",
            [f"{option} contains reserved CPUs {format_cpu_list(cpus)}" for option, cpus in found.items()],
        )


def _isolated_offered(machine: Inventory) -> Iterator[Finding]:
    if both := machine.machine.isolcpus - machine.reserved_cpus - machine.withheld_cpus:
        yield note(
            f"CPUs {format_cpu_list(both)} are in isolcpus and available to claims.",
            "a program that does not pin its threads runs on only one of them, and the kernel allows them in a cpuset "
            "partition only for claims with isolation: isolated",
            "set isolcpus: only or never in claims, or boot without isolcpus and use isolation: isolated instead",
        )


def _offloaded(kernel: Kernel, machine: Inventory) -> Iterator[Finding]:
    # nohz_full implies rcu_nocbs (Documentation/timers/no_hz.rst).
    if late := machine.machine.isolcpus - kernel.rcu_nocbs - kernel.nohz_full:
        yield note(
            f"CPUs {format_cpu_list(late)} are in isolcpus, but neither in rcu_nocbs nor in nohz_full.",
            "RCU callbacks run on these CPUs and interrupt the isolated program",
            "add them to rcu_nocbs",
        )


def _clocksource(kernel: Kernel) -> Iterator[Finding]:
    if kernel.clocksource in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield problem(
            f"The kernel's clock source is {kernel.clocksource}.",
            "reading the clock takes a microsecond or more and requires a lock that all CPUs share, which slows down "
            "claimed CPUs",
            "look in the kernel's log for the reason tsc was rejected; boot with tsc=reliable if the machine's tsc is "
            "known to be reliable",
        )


CHECKS: Final = (
    Check(
        "kernel.cgroup-v2",
        f"The cgroup tree is version 2 and has the controllers {', '.join(_NEEDED)}.",
        ("cgroups",),
        _cgroup_v2,
    ),
    Check(
        "kernel.delegated",
        "The root cgroup and the pods' cgroups enable these controllers.",
        ("cgroups",),
        _delegated,
    ),
    Check("kernel.kubepods", "The kubelet creates the pods' cgroups in this tree.", ("cgroups",), _pods_group),
    Check("kernel.hugetlb-accounting", "Hugepages do not count as memory.", ("cgroups",), _hugetlb_accounting),
    Check(
        "kernel.release",
        "The kernel can kill a cgroup (Linux 5.14), report the hugepages of pods by NUMA node (5.17) and, if the "
        "configuration requires it, isolate a container's CPUs (6.7).",
        ("kernel", "cgroups", "config"),
        _release,
        optional_reads=("machine",),
    ),
    Check("kernel.reserved-cpus", "No reserved CPU is in isolcpus or nohz_full.", ("machine", "kernel"), _reserved),
    Check(
        "kernel.isolcpus-offered", "No CPU that is available to claims is in isolcpus.", ("machine",), _isolated_offered
    ),
    Check("kernel.rcu-nocbs", "RCU callbacks do not run on CPUs in isolcpus.", ("kernel", "machine"), _offloaded),
    Check("kernel.clocksource", "The clock source is cheap to read.", ("kernel",), _clocksource),
)
