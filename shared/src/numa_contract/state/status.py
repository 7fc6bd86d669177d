# SPDX-License-Identifier: Apache-2.0
"""``/v1/status``: the driver's health on this node, with a code for each problem."""

from enum import StrEnum
from typing import Final

from pydantic import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from numa_contract.backend_codes import BackendCode
from numa_contract.models import attribute_docs
from numa_contract.state.base import StateDocument


class StatusCode(StrEnum):
    """Codes of problems and warnings. The meaning of a code never changes; the messages are meant for humans and may
    change."""

    # Problems with the service and its link to the backend.
    SERVICE_DOWN = "ServiceDown"
    """The service is not responding on its state socket. Only ``dra-frontend status`` reports it."""
    BACKEND_NOT_REPORTED = "BackendNotReported"
    """The backend in this pod has not reported since the frontend started."""
    BACKEND_SILENT = "BackendSilent"
    """The backend in this pod has sent no report for 10 s."""
    BACKEND_NOT_CONNECTED = "BackendNotConnected"
    """The backend in this pod is not connected to the container runtime."""
    BACKEND_INCOMPLETE = "BackendIncomplete"
    """The backend in this pod has not yet reported every container."""
    BACKEND_REPORT_UNREADABLE = "BackendReportUnreadable"
    """A container's report cannot be read."""
    NO_BACKEND_ENFORCES = "NoBackendEnforces"
    """No backend on this node holds the active lock and serves the runtime, so no claim can be prepared."""
    BACKEND_PROBLEM = "BackendProblem"
    """The backend reports an enforcement problem, either without a code for the cause or with a code that this release
    does not know. The message comes from the backend.
    """
    MACHINE_UNREADABLE = "MachineUnreadable"
    """Information about the machine cannot be read; the result of the last successful read stays in use."""
    NOTHING_OFFERED = "NothingOffered"
    """A driver offers no device, because a setting cannot be applied on this machine. Subject: the driver."""
    NOT_REGISTERED = "NotRegistered"
    """A driver is not registered with the kubelet. Subject: the driver."""
    SOCKET_NOT_PLACED = "SocketNotPlaced"
    """A driver's socket for the kubelet was removed and cannot be created again. Subject: the driver."""
    SLICES_NOT_PUBLISHED = "ResourceSlicesNotPublished"
    """A driver's ResourceSlices have not been written. If this is a warning, slices were written earlier but are now
    outdated, because later writes have failed. Subject: the driver."""
    FEATURE_GATE_MISSING = "FeatureGateMissing"
    """The API server drops the fields of ``DRAConsumableCapacity``, so nothing is published. Subject: the driver."""
    RUN_DIRECTORY_UNUSABLE = "RunDirectoryUnusable"
    """The state socket or its link cannot be created in the run directory."""
    CLAIMS_DIRECTORY_UNUSABLE = "ClaimsDirectoryUnusable"
    """The CDI directory cannot be read or was replaced on the host."""
    JOURNAL_UNUSABLE = "JournalUnusable"
    """The journal of prepared claims cannot be read or written."""
    # Problems with claims, containers and devices.
    FILE_UNUSABLE = "ClaimFileUnusable"
    """A file in the CDI directory is unusable; ``/v1/quarantine`` lists such files. Subject: the file's name."""
    FILE_MISSING = "ClaimFileMissing"
    """The file of a prepared claim is gone. Subject: the claim, ``namespace/name``. Only ``dra-frontend status``
    reports it, while the service is down."""
    DEVICE_UNHEALTHY = "DeviceUnhealthy"
    """A device is unhealthy. Subject: the device."""
    CONTAINER_REFUSED = "ContainerRefused"
    """The backend has refused to create or start a container. Subject: the container,
    ``namespace/pod/container``."""
    CLAIM_NOT_ENFORCED = "ClaimNotEnforced"
    """A claim's ``Enforced`` condition is ``False`` for a reason other than a rejected container. Subject: the claim,
    ``namespace/name``.
    """
    CPUS_KEPT_BY_POOL = "CPUsKeptByPool"
    """The kernel has refused a partition for a container's CPUs, so the shared pool enforces its claim. Subject: the
    container, ``namespace/pod/container``."""
    # Warnings. The driver works despite them.
    POD_INCOMPLETE = "PodIncomplete"
    """The pod lacks a directory, a mount or a token. While the service is down, this is reported as a problem if it
    keeps the service from starting, else as a warning."""
    CONFIGURATION_DOES_NOT_FIT = "ConfigurationDoesNotFit"
    """The configuration names CPUs or memory that the machine does not have, or leaves nothing to publish."""
    ERRORS_UNREADABLE = "HardwareErrorsUnreadable"
    """A counter of hardware errors cannot be read."""
    HOST_HUGEPAGES_UNKNOWN = "HostHugepagesUnknown"
    """The hugepages that processes outside of pods use cannot be determined, so they are treated as free."""
    KUBELET_RESERVE_UNKNOWN = "KubeletReserveUnknown"
    """The Node object does not show how much memory the kubelet reserves, or cannot be read."""
    STATIC_MANAGER = "KubeletManagerStatic"
    """The kubelet's static CPU or memory manager, or another NRI plugin, also assigns CPUs or NUMA nodes."""
    NO_PARTITIONS = "PartitionsUnavailable"
    """The configuration allows cpuset partitions, but this node cannot create any."""
    MAPPING_UNSUPPORTED = "NodeAllocatableMappingUnsupported"
    """The API server or the kubelet does not support ``publishNodeAllocatableResourceMapping``. Subject: the driver."""
    SLICE_LISTS_REFUSED = "ResourceSliceListsRefused"
    """The API server rejects list attributes, so the devices are published without them. Subject: the driver."""
    SLICE_FIELDS_DROPPED = "ResourceSliceFieldsDropped"
    """The API server has dropped or changed fields of the devices. Subject: the driver."""
    CONDITIONS_DROPPED = "BindingConditionsUnsupported"
    """The API server does not support binding conditions, so devices for ``hugepagesOnDemand`` are not published.
    Subject: the driver.
    """
    HUGEPAGES_UNAVAILABLE = "HugepagesUnavailable"
    """Hugepages on demand cannot be allocated, so the device is tainted. Subject: the device."""
    OBSERVE_MODE = "ObserveMode"
    """``enforcement`` is ``observe``: the driver changes nothing on the node, and refuses claims."""
    NO_RESERVED_CPUS = "NoReservedCPUs"
    """``reservedCPUs`` is empty, so claims may get the CPUs on which the system runs."""
    SETTING_RENAMED = "SettingRenamed"
    """The configuration contains the former name of a setting or of a value. The former name is still accepted."""
    TASK_FAILING = "TaskFailing"
    """A task in the frontend has failed and is being retried. Subject: the task."""


PREVENTS_PREPARE: Final = frozenset(
    {
        StatusCode.BACKEND_NOT_REPORTED,
        StatusCode.BACKEND_SILENT,
        StatusCode.BACKEND_NOT_CONNECTED,
        StatusCode.BACKEND_INCOMPLETE,
        StatusCode.BACKEND_REPORT_UNREADABLE,
        StatusCode.NO_BACKEND_ENFORCES,
    }
)
"""Codes of the problems during which no claim can be prepared."""


class Notice(StateDocument):
    """A problem or a warning."""

    code: str
    """Code of the problem or warning, for programs: one of the codes listed with this field, or one of the codes of
    ``cause`` for a problem that the backend reports. A newer release may add codes.
    """
    cause: str = ""
    """Code for the cause that the backend reports for ``CPUsKeptByPool``, ``ContainerRefused`` and
    ``PartitionsUnavailable``; empty for other codes, and if the backend has sent no code or one that this release does
    not know."""
    subject: str = ""
    """Object that the problem or warning concerns, in the form that is documented for the code; empty if it concerns
    the whole node or service.
    """
    text: str
    """Human-readable description of the problem or warning: one sentence, in most cases with the remedy."""
    unready: bool = False
    """True if the pod is not ready because of this problem."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> JsonSchemaValue:
        """Returns the schema with the meaning of each code. The schema allows other codes, which newer releases may
        add.
        """
        reference = super().__get_pydantic_json_schema__(schema, handler)
        properties = handler.resolve_ref_schema(reference)["properties"]
        for field, codes in (("code", StatusCode), ("cause", BackendCode)):
            docs = attribute_docs(codes)
            properties[field]["x-codes"] = {str(code): docs[code.name] for code in codes}
        return reference


class StatusDocument(StateDocument):
    """Health of the driver on this node."""

    node: str
    """Name of the node."""
    version: str
    """Version of the frontend."""
    backend_version: str
    """Version of the backend; empty before its first report."""
    runtime: str
    """Name and version of the container runtime; empty if it is not known."""
    ready: bool
    """True if the pod is ready. A problem makes the pod unready after 10 s, and the pod is ready again 2 s after its
    last problem has ended."""
    live: bool
    """True if a backend on this node enforces claims, and the reports are complete and at most 10 s old. Prepare can
    still fail for other reasons.
    """
    problems: tuple[Notice, ...]
    """Problems that make the pod unready, then all other problems. Some problems that make a ready pod unready, such as
    a missing registration or an unusable journal, are listed only after they have lasted for 10 s.
    """
    warnings: tuple[Notice, ...]
    """Conditions that an operator should know about even though the driver is working."""
    left_out: int = 0
    """Number of omitted problems and warnings: at most 100 of each are listed."""
