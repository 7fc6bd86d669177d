# SPDX-License-Identifier: Apache-2.0
"""Remedies for the problems that the driver reports, by status code. This module does no I/O.

The service reports each problem and warning with a ``StatusCode``, and the backend reports the cause of each problem
and of each rejected container as a ``BackendCode``. The remedy depends only on the code. Messages are displayed
but never parsed: they contain user-chosen names and values, and their wording changes between releases.
"""

from dataclasses import dataclass
from typing import Final

from numa_contract.backend_codes import BackendCode, known_code
from numa_contract.state.status import Notice, StatusCode


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause that the backend reports, with its remedy."""

    remedy: str
    kernel: bool = False
    """True if the node's kernel is the cause. In that case, changing the pod's settings does not help."""


_OR_POOL_MODE: Final = "or set cpuExclusivity: pool in driverConfig to do without partitions (docs/security.md)"
_LOG: Final = "see the backend container's log: kubectl logs POD -c backend"
REFUSED_REMEDY: Final = f"fix the cause given in the message; {_LOG}"
"""Remedy for a rejected container if the cause of the rejection has no remedy of its own."""
_ENFORCE: Final = "set enforcement: enforce in driverConfig once you are happy with the changes that /v1/backend lists"
_DAC_OVERRIDE: Final = Cause(
    "give the backend container the DAC_OVERRIDE capability and uid 0, as in the chart's pod: remove whatever drops "
    "the capability or changes the uid; if the container has both, configure SELinux or AppArmor to allow the access "
    "(selinuxType and appArmorProfile)"
)
_INTERRUPTS: Final = Cause(
    "mount the named file's directory read-write into the backend container: for /proc/irq and the workqueues, use the "
    "chart's irq and workqueue volumes (hostInterrupts.mount: true); for interrupts.json, use its run-backend volume; "
    "or set irqs: keep"
)
_HOST_DAEMONS: Final = Cause("see hostSlices in docs/exclusive.md, or set it to false")
_OWN_CLAIM: Final = Cause("give the named pod its own claim, or remove the driver's environment variables from it")
CAUSES: Final = {
    BackendCode.USER_NAMESPACE: Cause(
        "remove whatever sets hostUsers: false on the driver's pod (an admission policy, a mutating webhook, a "
        "patch), or "
        f"set hostUsers: true there; {_OR_POOL_MODE}"
    ),
    BackendCode.SECURITY_MODULE: Cause(
        "configure SELinux or AppArmor to let the backend write to cgroups: set the chart's selinuxType value to a "
        "type that may do so, such as spc_t, or load a profile that allows writes under /sys/fs/cgroup and set "
        "appArmorProfile; "
        f"{_OR_POOL_MODE}"
    ),
    BackendCode.SYS_ADMIN_IN_EFFECT: Cause(
        "change the backend container's seccomp profile to allow capget and capset, as RuntimeDefault does"
    ),
    BackendCode.SYS_ADMIN_MISSING: Cause(
        "give the backend container the SYS_ADMIN capability: remove whatever drops it from the chart's pod (an "
        f"admission policy, a mutating webhook, a patch); {_OR_POOL_MODE}"
    ),
    BackendCode.DAC_OVERRIDE_MISSING: _DAC_OVERRIDE,
    BackendCode.PERMISSION_DENIED: _DAC_OVERRIDE,
    BackendCode.NODE_IS_CONTAINER: Cause(
        "use a node that is not itself a container if the kernel must keep other processes off claimed CPUs",
        kernel=True,
    ),
    BackendCode.KERNEL_TOO_OLD: Cause("boot Linux 6.7 or later", kernel=True),
    BackendCode.CLAIMS_DIRECTORY_MISSING: Cause(
        "mount the node's cdiDir into the backend container (the chart's cdi volume), or correct cdiDir"
    ),
    BackendCode.CLAIM_FILES_UNREADABLE: Cause("see claims.readable and claims.directory"),
    BackendCode.HOST_UNREADABLE: Cause(
        "mount the node's /sys into the backend container under the host root, and see config.machine"
    ),
    BackendCode.READ_ONLY_FILE_SYSTEM: Cause(
        "mount the named directory read-write into the backend container: use the chart's cgroup and "
        "run-backend volumes and, for /proc/irq and the workqueues, its irq and workqueue volumes "
        "(hostInterrupts.mount: true); "
        "if the node's own file system is read-only, check the kernel's log"
    ),
    BackendCode.OPERATION_NOT_PERMITTED: Cause(
        "mount the node's whole cgroup2 tree at cgroupRoot into the backend container (the chart's cgroup volume): the "
        "kernel does not let a container write to the files of its own cgroup"
    ),
    BackendCode.NO_SPACE_LEFT: Cause("free space on the named directory's file system"),
    BackendCode.ENFORCEMENT_NOT_RECORDED: Cause(f"see driver.run-directory and host.space; {_LOG}"),
    BackendCode.CPUS_LOST: Cause(
        "drain and reboot the node: no cgroup has the named CPUs, and the kernel may panic (docs/exclusive.md)"
    ),
    BackendCode.KERNEL_CALL_HANGS: Cause(
        "check dmesg for a task that is stuck in the kernel; if it stays stuck, drain and reboot the node"
    ),
    BackendCode.CONTROLLER_MISSING: Cause(
        "write the missing controller to the named cgroup.subtree_control; see kernel.delegated"
    ),
    BackendCode.INTERRUPTS_NOT_MOVED: _INTERRUPTS,
    BackendCode.KERNEL_WORKERS_STAY: _INTERRUPTS,
    BackendCode.INTERRUPTS_MOVED_BACK: Cause(
        "let irqbalance open its socket, as it does by default, or set IRQBALANCE_BANNED_CPULIST: docs/exclusive.md"
    ),
    BackendCode.HOST_DAEMONS_NOT_MOVED: _HOST_DAEMONS,
    BackendCode.HOST_DAEMONS_STAY: _HOST_DAEMONS,
    BackendCode.NOT_ENFORCED: Cause("run dra-frontend doctor: see driver.status"),
    BackendCode.NODE_OBSERVES: Cause(_ENFORCE),
    BackendCode.CLAIMED_CPUS_OFFLINE: Cause("bring the CPUs online: echo 1 > /sys/devices/system/cpu/cpuN/online"),
    BackendCode.NO_SHARED_CPUS: Cause("set reservedCPUs or withheldCPUs, or delete a pod with a CPU claim"),
    BackendCode.CLAIM_IN_USE: _OWN_CLAIM,
    BackendCode.CLAIM_NOT_RESERVED: _OWN_CLAIM,
    BackendCode.VARIABLES_FORGED: _OWN_CLAIM,
    BackendCode.CLAIM_NOT_RECORDED: Cause(
        "run dra-frontend doctor: see claims.recorded, claims.readable and api.reachable"
    ),
}
"""Causes that have their own remedy, by code."""
WITHOUT_REMEDY: Final = frozenset(
    {
        BackendCode.CGROUP_FILE_REFUSED,
        BackendCode.CGROUP_UNKNOWN,
        BackendCode.CLAIMED_CPUS_OCCUPIED,
        BackendCode.CLAIM_UNSUPPORTED,
        BackendCode.INTERNAL_ERROR,
        BackendCode.PARTITION_REFUSED,
        BackendCode.SETTINGS_NOT_APPLIED,
        BackendCode.VARIABLES_MALFORMED,
    }
)
"""Causes without a remedy in this table. Their messages give some details, and the log gives more."""


def cause_of(code: str, default: str = _LOG) -> Cause:
    """Returns the cause for a backend code, or a cause with the remedy ``default`` if the code has no entry here."""
    known = known_code(code)
    return CAUSES.get(BackendCode(known), Cause(default)) if known else Cause(default)


_BACKEND_LOG: Final = f"{_LOG} (--previous if it has restarted)"
_FRONTEND_LOG: Final = "see the frontend container's log: kubectl logs POD -c frontend"
COVERED_BY_CHECKS: Final = frozenset(
    {
        StatusCode.BACKEND_NOT_CONNECTED,  # runtime.nri
        StatusCode.CONFIGURATION_DOES_NOT_FIT,  # config.fits
        StatusCode.CONTAINER_REFUSED,  # claims.refused
        StatusCode.CPUS_KEPT_BY_POOL,  # claims.kept-by-kernel
        StatusCode.FILE_UNUSABLE,  # claims.readable, claims.apart
        StatusCode.NO_PARTITIONS,  # driver.exclusivity
        StatusCode.NO_RESERVED_CPUS,  # kubelet.reserved-cpus
        StatusCode.STATIC_MANAGER,  # kubelet.cpu-manager, kubelet.memory-manager
    }
)
"""Codes for which another check reports a finding with more evidence."""
_REMEDIES: Final = {
    StatusCode.BACKEND_NOT_REPORTED: _BACKEND_LOG,
    StatusCode.BACKEND_SILENT: _BACKEND_LOG,
    StatusCode.BACKEND_INCOMPLETE: f"wait a few seconds; if it persists, {_LOG}",
    StatusCode.BACKEND_REPORT_UNREADABLE: "use images from the same release: see driver.versions",
    StatusCode.NO_BACKEND_ENFORCES: (
        "a standby takes over within 30 s; if none does, delete the driver's pods on this node"
    ),
    StatusCode.MACHINE_UNREADABLE: "see config.machine",
    StatusCode.NOTHING_OFFERED: "see config.fits",
    # The kubelet.registration check finds no problem even if the sockets are in a directory that the kubelet does not
    # read.
    StatusCode.NOT_REGISTERED: (
        "if it persists for a minute, set kubeletRootDir in driverConfig to the kubelet's --root-dir; see "
        "kubelet.registration, and the kubelet's log: journalctl -u kubelet on the node"
    ),
    StatusCode.SOCKET_NOT_PLACED: "remove whatever occupies the named path; see driver.pod for the mounts",
    StatusCode.SLICES_NOT_PUBLISHED: "see api.reachable, api.served and api.rights",
    StatusCode.FEATURE_GATE_MISSING: "see api.gates",
    StatusCode.RUN_DIRECTORY_UNUSABLE: (
        "mount the node's runDir read-write into the frontend container (the chart's run volume); see host.space"
    ),
    StatusCode.CLAIMS_DIRECTORY_UNUSABLE: "see claims.directory and driver.pod",
    StatusCode.JOURNAL_UNUSABLE: "see driver.journal and host.space",
    StatusCode.DEVICE_UNHEALTHY: (
        "restore the missing resources (CPUs, nr_hugepages), or delete a pod that uses the device; for hardware "
        "errors, drain the pods that use it and replace the hardware: docs/live-machine.md"
    ),
    StatusCode.CLAIM_NOT_ENFORCED: (
        f"if all CPUs of the claim are offline, see claims.online; otherwise the audit enforces the claim again within "
        f"60 s; if the problem persists, {_LOG}"
    ),
    StatusCode.POD_INCOMPLETE: "see driver.pod",
    StatusCode.ERRORS_UNREADABLE: "see docs/live-machine.md for the counters that the driver reads",
    StatusCode.HOST_HUGEPAGES_UNKNOWN: (
        "see kernel.release and kernel.kubepods; set hostHugepages.detect: true in the chart to mount the cgroup tree"
    ),
    StatusCode.KUBELET_RESERVE_UNKNOWN: (
        "set reservedMemory in driverConfig; see api.rights for the permission to get nodes"
    ),
    StatusCode.MAPPING_UNSUPPORTED: "see api.gates and kubelet.gates",
    StatusCode.SLICE_LISTS_REFUSED: "see api.gates",
    StatusCode.SLICE_FIELDS_DROPPED: "see api.gates",
    StatusCode.CONDITIONS_DROPPED: (
        "enable the feature gate DRADeviceBindingConditions in the API server and the scheduler, or remove "
        "hugepagesOnDemand from driverConfig"
    ),
    StatusCode.HUGEPAGES_UNAVAILABLE: (
        "free memory on the named NUMA node, or reserve the pages at boot; if the helper is not responding, see "
        "the hugepages container's log (docs/memory.md)"
    ),
    StatusCode.OBSERVE_MODE: _ENFORCE,
    StatusCode.SETTING_RENAMED: "use the current name in driverConfig, since a later release may reject the old one",
    StatusCode.TASK_FAILING: _FRONTEND_LOG,
}


def remedy_of(notice: Notice) -> str:
    """Returns the remedy for a problem or warning that the service reports, even if its code is from a newer
    release.
    """
    if notice.code == StatusCode.BACKEND_PROBLEM or known_code(notice.code):
        return cause_of(notice.code).remedy
    return next((remedy for code, remedy in _REMEDIES.items() if code == notice.code), _FRONTEND_LOG)
