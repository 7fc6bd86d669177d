# SPDX-License-Identifier: Apache-2.0
"""Remedies for what the driver reports: by the code of a problem, and by the cause that a text names. Pure.

The service reports problems and warnings with a code (``/v1/status``). Those of the backend have one code for all; the
backend reports sentences that begin with the effect and contain the cause. A remedy belongs to the cause, so a text
gets the remedy of the first row below of which a phrase occurs in it. A row whose text contains the phrase of another
row comes before that row.

The sentences also contain names and values that users choose, and these must not select a row. Names of pods, claims,
namespaces, containers and variables contain no space, so each phrase has at least two words, and the backend writes no
word of a phrase next to a name. Values of variables, names of files and error texts are quoted; quoted parts are
removed before the text is compared.
"""

import re
from dataclasses import dataclass
from typing import Final

from numa_contract.state.status import Notice, StatusCode


@dataclass(frozen=True, slots=True)
class Cause:
    """One cause."""

    phrases: tuple[str, ...]
    """Parts of the backend's or the kernel's sentences, each of at least two words. Any of them identifies it."""
    remedy: str
    kernel: bool = False
    """Whether the node's kernel is the limit, which no setting of the pod changes."""


_WITHOUT: Final = "or set cpuExclusivity: pool in driverConfig to do without partitions (docs/security.md)"
_LOG: Final = "see the log of the container backend: kubectl logs POD -c backend"
REFUSED: Final = "change what the message names; see the log of the container backend: kubectl logs POD -c backend"
"""Remedy for a container that was refused, if no cause is known."""
# A quote inside a word is an apostrophe. The end of a quoted part is missing in a text that was cut.
_QUOTED: Final = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z))""", re.DOTALL)
CAUSES: Final = (
    Cause(
        ("runs in a user namespace",),
        "take back what gives the driver's pod hostUsers: false (an admission policy, a mutating webhook, a patch), or "
        f"set hostUsers: true there; {_WITHOUT}",
    ),
    Cause(
        ("although it has the capability SYS_ADMIN",),
        "let SELinux or AppArmor allow it: set the chart's value selinuxType to a type that may write cgroups, such as "
        f"spc_t, or load a profile that allows writes below /sys/fs/cgroup and set appArmorProfile; {_WITHOUT}",
    ),
    Cause(
        ("is in effect all the time",),
        "let the seccomp profile of the container backend allow capget and capset, as RuntimeDefault does",
    ),
    Cause(
        ("lacks the capability SYS_ADMIN", "Enable partition not permitted"),
        "give the container backend the capability SYS_ADMIN: take back what removes it from the chart's pod (an "
        f"admission policy, a mutating webhook, a patch); {_WITHOUT}",
    ),
    Cause(
        ("lacks the capability DAC_OVERRIDE", "Permission denied"),
        "give the container backend the capability DAC_OVERRIDE and uid 0, as the chart's pod has them: take back what "
        "removes them; where it has both, let SELinux or AppArmor allow it (selinuxType and appArmorProfile)",
    ),
    Cause(
        ("is itself a container",),
        "use a node that is not a container if the kernel must keep others off claimed CPUs",
        kernel=True,
    ),
    Cause(
        ("does not exist, so no claim is known",),
        "mount the node's cdiDir into the container backend (the chart's volume cdi), or correct cdiDir",
    ),
    Cause(
        ("interrupts are not moved", "unbound kernel workers stay"),
        "mount the directory of the file that is named read-write into the container backend: the chart's volumes irq "
        "and workqueue (hostInterrupts.mount: true) for /proc/irq and the workqueues, run-backend for interrupts.json; "
        "or set irqs: leave",
    ),
    Cause(
        ("Read-only file system",),
        "mount the directory that is named read-write into the container backend (the chart's volumes cgroup and "
        "run-backend); if the node's own file system is read-only, see the kernel's log",
    ),
    Cause(
        ("Operation not permitted",),
        "mount the node's whole cgroup2 tree at cgroupRoot into the container backend (the chart's volume cgroup): the "
        "kernel lets a container write no file of its own cgroup",
    ),
    Cause(("boot Linux 6.7",), "boot Linux 6.7 or later", kernel=True),
    Cause(("No space left",), "make room in the file system of the directory that is named"),
    Cause(
        ("no cgroup has the CPUs",),
        "drain and reboot the node: its kernel has lost the CPUs and may panic (docs/exclusive.md)",
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
        ("moves interrupts back",),
        "let irqbalance serve its socket, as it does by default, or set IRQBALANCE_BANNED_CPULIST: docs/exclusive.md",
    ),
    Cause(
        ("host daemons are not moved", "moves host daemons back", "host daemons stay on claimed"),
        "see docs/exclusive.md, hostSlices; or set it to false",
    ),
    Cause(("no instance of nri-backend has enforced",), "run dra-frontend doctor: see driver.status"),
    Cause(("of its claim is offline",), "take the CPUs online: echo 1 > /sys/devices/system/cpu/cpuN/online"),
    Cause(("claims hold every CPU",), "set reservedCPUs or minSharedCPUs, or delete a pod with a CPU claim"),
    Cause(
        ("belongs to container", "is recorded for", "names a request", "is not what the claim was given"),
        "give the pod that is named a claim of its own, or remove the variables of the driver from it",
    ),
    Cause(
        ("has no record of it", "record cannot be read"),
        "run dra-frontend doctor: see claims.recorded, claims.readable and api.reachable",
    ),
)


def cause_of(text: str, otherwise: str = _LOG) -> Cause:
    """Returns the cause that a text of the backend names, or a cause with the remedy ``otherwise`` if there is none."""
    plain = _QUOTED.sub("''", text)
    return next((one for one in CAUSES if any(phrase in plain for phrase in one.phrases)), Cause((), otherwise))


_BACKEND_LOG: Final = f"{_LOG} (--previous if it has restarted)"
_FRONTEND_LOG: Final = "see the log of the container frontend: kubectl logs POD -c frontend"
EXPLAINED: Final = frozenset(
    {
        StatusCode.BACKEND_NOT_CONNECTED,  # runtime.nri
        StatusCode.CONFIGURATION_DOES_NOT_FIT,  # config.fits
        StatusCode.CONTAINER_REFUSED,  # claims.refused
        StatusCode.CPUS_KEPT_BY_POOL,  # claims.kept-by-kernel
        StatusCode.FILE_UNUSABLE,  # claims.readable, claims.apart
        StatusCode.NO_PARTITIONS,  # driver.exclusivity
        StatusCode.STATIC_MANAGER,  # kubelet.cpu-manager, kubelet.memory-manager
    }
)
"""Codes for which another check has a finding with more evidence."""
_REMEDIES: Final = {
    StatusCode.BACKEND_NOT_REPORTED: _BACKEND_LOG,
    StatusCode.BACKEND_SILENT: _BACKEND_LOG,
    StatusCode.BACKEND_INCOMPLETE: f"wait some seconds; if it lasts, {_LOG}",
    StatusCode.BACKEND_REPORT_UNREADABLE: "use images of one release: see driver.versions",
    StatusCode.NO_BACKEND_ENFORCES: (
        "a standby takes over within 6 s; if none does, delete the driver's pods on this node"
    ),
    StatusCode.MACHINE_UNREADABLE: "see config.machine",
    StatusCode.NOTHING_OFFERED: "see config.fits",
    StatusCode.NOT_REGISTERED: "see kubelet.registration",
    StatusCode.SOCKET_NOT_PLACED: "free the path that is named; see driver.pod for the mounts",
    StatusCode.SLICES_NOT_PUBLISHED: "see api.reachable, api.served and api.rights",
    StatusCode.FEATURE_GATE_MISSING: "see api.gates",
    StatusCode.RUN_DIRECTORY_UNUSABLE: (
        "mount the node's runDir read-write into the container frontend (the chart's volume run); see host.space"
    ),
    StatusCode.CLAIMS_DIRECTORY_UNUSABLE: "see claims.directory and driver.pod",
    StatusCode.JOURNAL_UNUSABLE: "see driver.journal and host.space",
    StatusCode.DEVICE_UNHEALTHY: "drain the pods that use it, and replace or repair the hardware: docs/live-machine.md",
    StatusCode.CLAIM_NOT_ENFORCED: f"the audit repairs it within 20 s; if it lasts, {_LOG}",
    StatusCode.POD_INCOMPLETE: "see driver.pod",
    StatusCode.ERRORS_UNREADABLE: "see docs/live-machine.md for the counters that are read",
    StatusCode.HOST_HUGEPAGES_UNKNOWN: (
        "see kernel.release and kernel.kubepods; hostHugepages.detect: true in the chart mounts the cgroup tree"
    ),
    StatusCode.KUBELET_RESERVE_UNKNOWN: "set reservedMemory in driverConfig; see api.rights for the right to get nodes",
    StatusCode.MAPPING_UNSUPPORTED: "see api.gates and kubelet.gates",
    StatusCode.SLICE_LISTS_REFUSED: "see api.gates",
    StatusCode.SLICE_FIELDS_DROPPED: "see api.gates",
    StatusCode.CONDITIONS_DROPPED: (
        "switch on the feature gate DRADeviceBindingConditions of the API server and the scheduler, or remove "
        "hugepagesOnDemand from driverConfig"
    ),
    StatusCode.HUGEPAGES_UNAVAILABLE: (
        "free memory of the NUMA node that is named, or set the pages at boot; if the helper does not answer, see the "
        "log of the container hugepages (docs/memory.md)"
    ),
    StatusCode.TASK_FAILING: _FRONTEND_LOG,
}


def remedy_of(notice: Notice) -> str:
    """Returns the remedy for a problem or warning that the service reports, also for a code of a newer release."""
    if notice.code == StatusCode.BACKEND_PROBLEM:
        return cause_of(notice.text).remedy
    return next((remedy for code, remedy in _REMEDIES.items() if code == notice.code), _FRONTEND_LOG)
