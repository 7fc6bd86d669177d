# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel can do what claims promise. Pure."""

from collections.abc import Iterator
from typing import Final

from dra_frontend.devices.inventory import Inventory
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list

from numa_tools.doctor.facts import Cgroups, Kernel
from numa_tools.doctor.model import Check, Finding, note, problem

_NEEDED: Final = ("cpuset", "cpu", "memory", "hugetlb")
_UNIFIED: Final = "boot the node with systemd.unified_cgroup_hierarchy=1 and cgroup_no_v1=all"
_TUNING: Final = "take them out of the boot option, or out of reservedCPUs"


def _version_two(cgroups: Cgroups) -> Iterator[Finding]:
    if cgroups.controllers is None:
        why = "claims are enforced by files that only cgroup v2 has"
        yield problem(f"{cgroups.root} is not a cgroup v2 tree: it has no cgroup.controllers.", why, _UNIFIED)


def _controllers(cgroups: Cgroups) -> Iterator[Finding]:
    missing = [one for one in _NEEDED if one not in (cgroups.controllers or _NEEDED)]
    if missing:
        why = "limits of claims that need them would not hold; without cpuset the backend does not start"
        yield problem(f"The cgroup v2 tree has no controller {', '.join(missing)}.", why, _UNIFIED)


def _delegated(cgroups: Cgroups) -> Iterator[Finding]:
    groups = {"/": cgroups.passed_on} | dict(cgroups.pods)
    for group, passed in groups.items() if cgroups.controllers is not None else ():
        missing = [one for one in _NEEDED if one in (cgroups.controllers or ()) and one not in passed]
        if missing:
            file = f"{cgroups.root}{group.rstrip('/')}/cgroup.subtree_control"
            yield problem(
                f"{file} does not hand on {', '.join(missing)}.",
                "the cgroups of pods have no files of these controllers, and claims that need them are refused",
                f'write "{" ".join(f"+{one}" for one in missing)}" to it; the kubelet does so with --cgroups-per-qos',
            )


def _pods_group(cgroups: Cgroups) -> Iterator[Finding]:
    if cgroups.controllers is not None and not cgroups.pods:
        yield problem(
            f"{cgroups.root} has no kubepods group.",
            "the backend looks for containers there, and hugepages of pods cannot be told from those of the host",
            "mount the node's cgroup2 tree there, or set cgroupRoot; a kubelet makes the group",
        )


def _hugetlb_accounting(cgroups: Cgroups) -> Iterator[Finding]:
    if "memory_hugetlb_accounting" in cgroups.options:
        yield problem(
            "The cgroup v2 tree is mounted with memory_hugetlb_accounting.",
            "hugepages would count as memory, so that a limit of the claimed bytes kills containers with hugepages",
            "take the option out of the node's mount options and remount",
        )


def _release(kernel: Kernel, cgroups: Cgroups) -> Iterator[Finding]:
    if kernel.release < (5, 14) or not (cgroups.can_kill or cgroups.controllers is None):
        yield problem(
            f"The kernel is Linux {kernel.release[0]}.{kernel.release[1]}, or hides cgroup.kill.",
            "a container that must not run is killed through cgroup.kill, of Linux 5.14; the backend does not start",
            "boot a newer kernel",
        )


def _partitions(kernel: Kernel, cgroups: Cgroups, config: Config) -> Iterator[Finding]:
    if config.cpu_exclusivity == "pool" or cgroups.controllers is None or cgroups.partitions:
        return
    what = f"This kernel ({kernel.release[0]}.{kernel.release[1]}) cannot keep CPUs for one container by itself."
    why = "cpuset.cpus.exclusive is missing, of Linux 6.7"
    if config.cpu_exclusivity == "partition":
        why = f"{why}; with cpuExclusivity partition every CPU claim for one container is refused"
        yield problem(what, why, "boot Linux 6.7 or later, or set cpuExclusivity: auto")
    elif config.host_slices:
        why = f"{why}; the shared pool keeps containers off claimed CPUs, and hostSlices keeps host daemons off"
        yield note(what, why, "boot Linux 6.7 or later")
    else:
        why = f"{why}; the shared pool keeps containers off claimed CPUs, host daemons stay on them"
        yield note(what, why, "boot Linux 6.7 or later, or set hostSlices: true")


def _isolated_reserves(machine: Inventory) -> Iterator[Finding]:
    if both := machine.machine.isolated & machine.reserved_cpus:
        yield problem(
            f"CPUs {format_cpu_list(both)} are reserved for the system and in isolcpus.",
            "the kernel balances no load there: all system threads that start on one of them stay on it",
            _TUNING,
        )


def _isolated_offered(machine: Inventory) -> Iterator[Finding]:
    if both := machine.machine.isolated - machine.reserved_cpus - machine.withheld_cpus:
        yield note(
            f"CPUs {format_cpu_list(both)} are in isolcpus, and claims may get them.",
            "a program that does not pin its threads runs on one CPU there, and only isolated claims can keep them",
            "let claims say isolated: only or never, or boot without isolcpus: isolation: isolated does the same",
        )


def _tickless_reserves(kernel: Kernel, machine: Inventory) -> Iterator[Finding]:
    if both := kernel.nohz_full & machine.reserved_cpus:
        yield problem(
            f"CPUs {format_cpu_list(both)} are reserved for the system and in nohz_full.",
            "without a tick the many short threads of the system cost more there, and timers of others have no home",
            _TUNING,
        )


def _offloaded(kernel: Kernel, machine: Inventory) -> Iterator[Finding]:
    # nohz_full implies it (Documentation/timers/no_hz.rst).
    if late := machine.machine.isolated - kernel.rcu_nocbs - kernel.nohz_full:
        yield note(
            f"CPUs {format_cpu_list(late)} are in isolcpus, but neither in rcu_nocbs nor in nohz_full.",
            "callbacks of RCU run there, between the instructions of the program that wants to be alone",
            "add them to rcu_nocbs",
        )


def _clocksource(kernel: Kernel) -> Iterator[Finding]:
    if kernel.clocksource in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield problem(
            f"The kernel keeps time by {kernel.clocksource}.",
            "reading the clock takes a microsecond and more, and a lock of all CPUs: claimed CPUs are not quiet",
            "look in the kernel's log for why tsc was given up; tsc=reliable where the machine is known to be sound",
        )


CHECKS: Final = (
    Check("kernel.cgroup-v2", "The cgroup tree is version 2.", ("cgroups",), _version_two),
    Check("kernel.controllers", f"It has the controllers {', '.join(_NEEDED)}.", ("cgroups",), _controllers),
    Check("kernel.delegated", "Root and pods' groups hand these controllers on.", ("cgroups",), _delegated),
    Check("kernel.kubepods", "The tree is the one that the kubelet puts pods into.", ("cgroups",), _pods_group),
    Check("kernel.hugetlb-accounting", "Hugepages do not count as memory.", ("cgroups",), _hugetlb_accounting),
    Check("kernel.release", "The kernel can kill a cgroup (Linux 5.14).", ("kernel", "cgroups"), _release),
    Check(
        "kernel.partitions",
        "The kernel can keep CPUs for one container (Linux 6.7), where the configuration wants it to.",
        ("kernel", "cgroups", "config"),
        _partitions,
    ),
    Check("kernel.isolcpus-reserves", "No reserved CPU is in isolcpus.", ("machine",), _isolated_reserves),
    Check("kernel.isolcpus-offered", "No CPU that claims may get is in isolcpus.", ("machine",), _isolated_offered),
    Check("kernel.nohz-full", "No reserved CPU is in nohz_full.", ("kernel", "machine"), _tickless_reserves),
    Check("kernel.rcu-nocbs", "RCU callbacks leave CPUs in isolcpus alone.", ("kernel", "machine"), _offloaded),
    Check("kernel.clocksource", "The clock is one that is cheap to read.", ("kernel",), _clocksource),
)
