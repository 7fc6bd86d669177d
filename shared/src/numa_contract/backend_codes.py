# SPDX-License-Identifier: Apache-2.0
"""Machine-readable codes for the causes of problems that the backend reports. The text that is reported with a
code is meant for people and may change.
"""

from enum import StrEnum
from typing import Final


class BackendCode(StrEnum):
    """Codes for the causes of problems: why the backend cannot fully enforce claims, or why it rejects a container. The
    meaning of a code never changes.
    """

    # The backend's container.
    SYS_ADMIN_MISSING = "SysAdminMissing"
    """The backend lacks the capability ``SYS_ADMIN``, without which the kernel creates no partitions."""
    SYS_ADMIN_IN_EFFECT = "SysAdminInEffect"
    """The backend cannot drop ``SYS_ADMIN`` from its effective capabilities, so the capability is always effective."""
    DAC_OVERRIDE_MISSING = "DacOverrideMissing"
    """The backend lacks the capability ``DAC_OVERRIDE``."""
    USER_NAMESPACE = "UserNamespace"
    """The backend runs in a user namespace, where the kernel creates no partitions."""
    SECURITY_MODULE = "SecurityModule"
    """The kernel denies partitions to the backend even though the backend has the capability ``SYS_ADMIN``."""
    CLAIMS_DIRECTORY_MISSING = "ClaimsDirectoryMissing"
    """The CDI directory does not exist in the backend's container."""
    # The machine and its kernel.
    NODE_IS_CONTAINER = "NodeIsContainer"
    """The node is itself a container, where the kernel creates no partitions."""
    KERNEL_TOO_OLD = "KernelTooOld"
    """The kernel is too old: it does not support partitions, or it lacks a cgroup file that the backend needs."""
    CPUS_LOST = "CPUsLost"
    """The kernel has lost CPUs: the CPUs of a removed partition are in no cgroup. The backend creates no more
    partitions.
    """
    KERNEL_CALL_HANGS = "KernelCallHangs"
    """A kernel call has not returned for several seconds."""
    HOST_UNREADABLE = "HostUnreadable"
    """The backend cannot read the machine's CPUs and hugepage sizes, and keeps using the values that it last read."""
    # Files.
    PERMISSION_DENIED = "PermissionDenied"
    """The kernel returned EACCES: a capability is missing, or a security module denies access."""
    OPERATION_NOT_PERMITTED = "OperationNotPermitted"
    """The kernel returned EPERM, as it does if a process writes to the cgroup files of its own container."""
    READ_ONLY_FILE_SYSTEM = "ReadOnlyFileSystem"
    """A file is on a file system that is mounted read-only."""
    NO_SPACE_LEFT = "NoSpaceLeft"
    """The file system that holds the file is full."""
    CONTROLLER_MISSING = "ControllerMissing"
    """A controller is not enabled for a cgroup, so one of the cgroup's files does not exist."""
    CGROUP_FILE_REFUSED = "CgroupFileRefused"
    """A cgroup file cannot be read or written for a reason that has no code of its own, or its content cannot be
    parsed."""
    CLAIM_FILES_UNREADABLE = "ClaimFilesUnreadable"
    """The backend cannot read the CDI directory or a file in it."""
    ENFORCEMENT_NOT_RECORDED = "EnforcementNotRecorded"
    """The backend cannot write its enforcement records."""
    # State of cgroups, interrupts and host daemons.
    SETTINGS_NOT_APPLIED = "SettingsNotApplied"
    """A cgroup does not have the settings that were written to it."""
    CGROUP_UNKNOWN = "CgroupUnknown"
    """The runtime reports no cgroup for a container or its pod, or a cgroup that the backend cannot find."""
    PARTITION_REFUSED = "PartitionRefused"
    """The kernel does not accept a cgroup as a partition."""
    INTERRUPTS_NOT_MOVED = "InterruptsNotMoved"
    """The backend cannot move interrupts off claimed CPUs."""
    KERNEL_WORKERS_STAY = "KernelWorkersStay"
    """The backend cannot keep unbound kernel workers off claimed CPUs."""
    INTERRUPTS_MOVED_BACK = "InterruptsMovedBack"
    """Another process moves interrupts back to claimed CPUs."""
    HOST_DAEMONS_NOT_MOVED = "HostDaemonsNotMoved"
    """The backend cannot move host daemons off claimed CPUs."""
    HOST_DAEMONS_STAY = "HostDaemonsStay"
    """Host daemons stay on claimed CPUs, since all CPUs that the daemons' slice allows are claimed."""
    INTERNAL_ERROR = "InternalError"
    """An unexpected exception occurred in the backend. The backend's log contains the details."""
    # Rejections of containers.
    VARIABLES_MALFORMED = "VariablesMalformed"
    """The container's variables with the driver's prefixes are malformed, or there are too many of them."""
    VARIABLES_FORGED = "VariablesForged"
    """The container's variables for a claim do not match the claim's record."""
    CLAIM_NOT_RECORDED = "ClaimNotRecorded"
    """This node has no record of a claim that a container uses, or the record cannot be read."""
    CLAIM_NOT_RESERVED = "ClaimNotReserved"
    """The claim is not reserved for the container's pod."""
    CLAIM_IN_USE = "ClaimInUse"
    """The claim belongs to another container."""
    CLAIM_UNSUPPORTED = "ClaimUnsupported"
    """This node or its runtime cannot enforce the claim."""
    CLAIMED_CPUS_OFFLINE = "ClaimedCPUsOffline"
    """All CPUs of the claim are offline."""
    CLAIMED_CPUS_OCCUPIED = "ClaimedCPUsOccupied"
    """Another container still runs on the claim's CPUs."""
    NO_SHARED_CPUS = "NoSharedCPUs"
    """All CPUs on the node are claimed, so none is left for a container without a claim."""
    NOT_ENFORCED = "NotEnforced"
    """No instance of the backend has enforced the container's claims."""
    NODE_OBSERVES = "NodeObserves"
    """``enforcement`` is ``observe``, so no claim is enforced."""


_KNOWN: Final = frozenset(map(str, BackendCode))


def known_code(code: str) -> str:
    """Returns the code if this release knows it, else the empty string."""
    return code if code in _KNOWN else ""
