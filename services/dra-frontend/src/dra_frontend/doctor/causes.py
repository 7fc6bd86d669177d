# SPDX-License-Identifier: Apache-2.0
"""Remedies for the problems that the backend reports, by the cause that the text names. Pure.

The backend reports sentences that begin with the effect and contain the cause. The remedy is that of the first row
below of which any words occur in the text, so causes in the pod and the kernel stand before their effects.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause."""

    words: tuple[str, ...]
    """Parts of texts; each of them names this cause."""
    remedy: str
    node: bool = False
    """Whether the limit is the node itself, so that no setting of the pod changes it."""


_WITHOUT: Final = "or set cpuExclusivity: pool in driverConfig to do without partitions (docs/security.md)"
_LOG: Final = "see the log of the container backend: kubectl logs POD -c backend"
CAUSES: Final = (
    Cause(
        ("although it has the capability SYS_ADMIN",),
        "let the security module allow the capability SYS_ADMIN and writes below /sys/fs/cgroup (the chart's values "
        f"appArmorProfile and selinuxType, such as spc_t), and a seccomp profile the call capset; {_WITHOUT}",
    ),
    Cause(
        ("capability SYS_ADMIN", "Enable partition not permitted"),
        "give the container backend the capability SYS_ADMIN: undo what removes it from the chart's pod (an admission "
        f"policy, a mutating webhook, a patch); {_WITHOUT}",
    ),
    Cause(("user namespace",), f"run the driver's pod in the user namespace of the node (hostUsers: true); {_WITHOUT}"),
    Cause(
        ("node is itself a container",),
        "use nodes that are not containers; until then hostSlices: true keeps host daemons off claimed CPUs",
        node=True,
    ),
    Cause(
        ("capability DAC_OVERRIDE", "Permission denied"),
        "give the container backend the capability DAC_OVERRIDE and uid 0, as the chart's pod has them: undo what "
        "removes them",
    ),
    Cause(
        ("Read-only file system", "read-only"),
        "mount the directory that is named read-write into the container backend (the chart's volumes cgroup and "
        "run-backend); if the node's own file system is read-only, see the kernel's log",
    ),
    Cause(
        ("Operation not permitted",),
        "mount the node's whole cgroup2 tree at cgroupRoot into the container backend (the chart's volume cgroup): the "
        "kernel lets a container write no file of its own cgroup",
    ),
    Cause(
        ("Linux 6.7",),
        "boot Linux 6.7 or later; until then hostSlices: true keeps host daemons off claimed CPUs",
        node=True,
    ),
    Cause(("No space left",), "make room in the file system of the directory that is named"),
    Cause(
        ("no cgroup has the CPUs",),
        "take these CPUs offline and online again: echo 0, then 1 > /sys/devices/system/cpu/cpuN/online",
    ),
    Cause(
        ("has not answered for",),
        "see dmesg for a task that hangs in the kernel; if it does not end, drain and reboot the node",
    ),
    Cause(
        ("controller is not in",),
        "write the missing controller to the cgroup.subtree_control that is named; see kernel.delegated",
    ),
    Cause(
        ("irqbalance", "interrupts"),
        "see docs/exclusive.md: let irqbalance serve its socket, or mount what moves interrupts (hostInterrupts.mount)",
    ),
    Cause(
        ("host daemons",),
        "see docs/exclusive.md, hostSlices; or set it to false",
    ),
    Cause(("no instance of nri-backend has enforced",), "see driver.enforced and driver.backend"),
    Cause(("of its claim is offline",), "take the CPUs online: echo 1 > /sys/devices/system/cpu/cpuN/online"),
    Cause(("claims hold every CPU",), "set reservedCPUs or minSharedCPUs, or delete a pod with a CPU claim"),
    Cause(
        ("belongs to container", "is recorded for", "names a request", "is not what the claim was given"),
        "give the pod that is named a claim of its own, or remove the variables of the driver from it",
    ),
    Cause(("has no record of it", "record cannot be read"), "see claims.recorded, claims.readable and api.reachable"),
)


def cause_of(text: str, otherwise: str = _LOG) -> Cause:
    """Returns the cause that a text of the backend names, or one whose remedy is ``otherwise``."""
    return next((one for one in CAUSES if any(word in text for word in one.words)), Cause((), otherwise))
