# SPDX-License-Identifier: Apache-2.0
"""Body of ``PUT /v1/backend``, which the backend sends: its lease, its metrics, and the state of all containers."""

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from numa_contract.errors import cut_answer
from numa_contract.records import CpuSet, Document

REPORT_VERSION: Final = 1
LEASE_SECONDS: Final = 10.0
"""Time without a report after which the lease expires."""
RENEW_SECONDS: Final = 6.0
"""Interval between reports from a backend whose state does not change.

If a report is lost, the backend notices after 2 s (its request timeout) and sends another one immediately. The sum of
this interval and the timeout must be below LEASE_SECONDS, so that the lease does not expire when one report is lost.
docs/adr/0031-changes-of-reports.md explains the value.
"""
FORMER_RENEW_SECONDS: Final = 2.0
"""Interval between reports to a frontend whose release does not accept ContainerChanges. Such a frontend closes
connections that are idle for 5 s.
"""
MAX_STATE_BYTES: Final = 4 << 20
"""Maximum size of a request body in bytes. The report of a node with 500 containers takes up 5 % of this limit."""
MAX_REPORTS: Final = 20_000
"""Maximum number of containers in one body. An invalid report can be two bytes long, but rejecting it takes a hundred
times as much CPU time as sending it.
"""
RECORDS_WAIT_SECONDS: Final = 25
"""Default of ``wait``: the time that ``GET /v1/records?after=`` waits for a change before it returns an empty list."""
MAX_RECORDS_WAIT_SECONDS: Final = 600
"""Maximum of ``wait``, in seconds."""
CONTAINERS: Final = "containers"
"""Key of the container reports in a body, at the same level as the fields of BackendStatus. Absent if the frontend
already has the reports.
"""
MAX_OBSERVED: Final = 512
"""Maximum number of changes in an Observation."""
MEASUREMENTS: Final = frozenset({"counters", "metrics", "observation"})
"""Fields of BackendStatus that a report may omit. A frontend that accepts ContainerChanges keeps their previous
values.
"""
CHANGES: Final = "changes"
"""Key of the ContainerChanges in a body. A body has this key, CONTAINERS, or neither."""


_MAX_PROBLEMS: Final = 64
_MAX_CODE: Final = 64
_MAX_PATH: Final = 4096
"""Maximum length of a path in the kernel."""
Text = Annotated[str, AfterValidator(cut_answer)]
"""Human-readable text. It is truncated to 1 KiB, because an overlong string from a different release should not make a
report invalid.
"""
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda value: _first(value, _MAX_PROBLEMS))]
"""List of strings. Only the first 64 are read."""
Code = Annotated[str, AfterValidator(lambda code: cut_answer(code[:_MAX_CODE]))]
"""A code of ``BackendCode``, or one from a newer release. It is truncated to 64 characters."""
Codes = Annotated[tuple[Code, ...], BeforeValidator(lambda value: _first(value, _MAX_PROBLEMS))]
"""List of codes. Only the first 64 are read."""
KernelPath = Annotated[str, AfterValidator(lambda path: path[:_MAX_PATH])]


def _first(value: object, limit: int) -> object:
    return value[:limit] if isinstance(value, list | tuple) else value


_StateWord = Literal["unknown", "created", "paused", "running", "stopped"]


def _read_state(value: object) -> object:
    # A newer backend may report other states. A container in an unknown state counts as alive.
    return "unknown" if isinstance(value, str) and value not in get_args(_StateWord) else value


ContainerState = Annotated[_StateWord, BeforeValidator(_read_state), WithJsonSchema({"type": "string"})]
"""Lifecycle state of a container. Unknown values are read as ``unknown``."""


class ClaimUse(Document):
    """A claim that a container uses or requests."""

    uid: str
    """UID of the claim."""
    driver: str
    """Name of the driver, ``dra.cpu`` or ``dra.memory``."""
    requests: tuple[str, ...] = ()
    """Base names of the requests that the container uses."""
    cpus: CpuSet = frozenset()
    """CPUs of the claim, in the kernel's list format. If the claim has no record, these are the CPUs that the
    container's environment lists and to which the container is pinned. Otherwise, the field is set only if the
    container may also use CPUs that belong to none of its claims.
    """


class ClaimIdentity(Document):
    """Identity of a claim for one driver."""

    uid: str
    """UID of the claim."""
    driver: str
    """Name of the driver, ``dra.cpu`` or ``dra.memory``."""


class ContainerReport(Document):
    """One container as the backend sees it in the runtime and the kernel."""

    version: int = REPORT_VERSION
    """Version of the format."""
    id: str
    """ID of the container in the runtime."""
    name: Text
    """Name of the container in its pod."""
    pod_uid: str
    """UID of the pod."""
    pod_namespace: Text
    """Namespace of the pod."""
    pod_name: Text
    """Name of the pod."""
    state: ContainerState = "unknown"
    """State of the container: ``created``, ``paused``, ``running``, ``stopped``, or ``unknown``. A process of the
    container may be running in any state except ``stopped``.
    """
    claims: tuple[ClaimUse, ...] = ()
    """Claims whose record allows this container to use them."""
    unknown_claims: tuple[ClaimUse, ...] = ()
    """Claims that the container's environment names but that have no record, or whose record does not list this pod."""
    refused_claims: tuple[ClaimIdentity, ...] = ()
    """Claims that the container's environment names but that the container may not use, for any reason. Empty unless
    the container was refused. The container does not use any of them.
    """
    cpus: CpuSet = frozenset()
    """CPUs of the container as last read from ``cpuset.cpus.effective``, in the kernel's list format; empty if the file
    could not be read. The CPUs are read from ``cpuset.cpus`` instead if the kernel keeps containers off other
    containers' CPUs on this node, and this container has no claimed CPUs or also uses the shared pool.
    """
    exclusivity: Text = ""
    """Mechanism that keeps other processes off the container's CPUs: ``partition`` or ``isolated`` (the kernel), or
    ``pool`` (the driver); empty without a claim.
    """
    fallback_reason: Text = ""
    """Reason why the claims are enforced by the shared pool even though the kernel could enforce them; empty
    otherwise.
    """
    fallback_code: Code = ""
    """Code for the cause, with the same values as the ``cause`` field of ``/v1/status``; empty if there is no cause or
    the backend is too old to send its code.
    """
    pool_requested_by: Text = ""
    """Setting in the container's claims that requests enforcement by the shared pool even though the kernel could
    enforce the claims; empty if there is none.
    """
    mems: CpuSet = frozenset()
    """NUMA nodes whose memory the container may use, as last read from ``cpuset.mems.effective``, in the kernel's list
    format."""
    limits: dict[str, Text] = Field(default_factory=dict)
    """Limits that are set for the container's claims: contents of the cgroup files as last read, keyed by file name, in
    bytes or in the kernel's format for the file. ``max`` means no limit.
    """
    cgroup: KernelPath = ""
    """Path of the container's cgroup under the cgroup root."""
    refused: Text = ""
    """Reason why the container was refused; empty if it was not."""
    refused_code: Code = ""
    """Code for the cause, with the same values as the ``cause`` field of ``/v1/status``; empty if there is no cause or
    the backend is too old to send its code.
    """
    memory_kills: int = 0
    """Number of the container's processes that the kernel has killed because the container was out of memory; counted
    only if the container uses a memory claim.
    """

    @property
    def named_claims(self) -> frozenset[str]:
        """UIDs of all claims that the container uses or requests, or that it was not allowed to use."""
        used = {use.uid for use in (*self.claims, *self.unknown_claims)}
        return frozenset(used.union(one.uid for one in self.refused_claims))

    @property
    def alive(self) -> bool:
        """True if one of the container's processes may still be running."""
        return self.state != "stopped"


class MetricSample(Document):
    """One time series of a metric."""

    labels: tuple[str, ...] = ()
    """Values of the labels, in the order of the metric's label names."""
    value: float = 0.0
    """Value, in the unit that the suffix of the metric's name indicates (such as ``_seconds``); for a histogram, the
    sum of all observations.
    """
    counts: tuple[int, ...] = ()
    """Number of observations in each bucket of a histogram, not cumulative; the last bucket is for observations above
    the largest bound."""


class Metric(Document):
    """One metric of the backend, as the frontend serves it."""

    name: str
    """Name of the metric without the prefix ``dra_numa_backend_``, and without ``_total``."""
    help: str = ""
    """Help text of the metric."""
    kind: str = "gauge"
    """Type of the metric: ``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...] = ()
    """Names of the labels."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets in the metric's unit, ascending, without infinity."""
    samples: tuple[MetricSample, ...] = ()
    """Time series of the metric."""


class ContainerChanges(Document):
    """Containers that have changed since an earlier report of the same instance.

    They are sent only if the reader has acknowledged the containers of that report. A reader that no longer has those
    containers, or that would not have ``total`` containers after merging the changes, ignores the changes. Its answer
    then contains the generation that it still has, and the sender sends all containers.
    """

    since: int
    """Generation of the earlier report."""
    total: int
    """Total number of containers after the changes."""
    removed: tuple[str, ...] = ()
    """IDs of containers that no longer exist. They are removed before ``containers`` are added."""
    containers: tuple[ContainerReport, ...] = ()
    """Containers that are new or have changed. New containers are added after all others, in the order of this list."""


class ObservedChange(Document):
    """A file on the node that the backend would write if ``enforcement`` were ``enforce``."""

    cgroup: KernelPath = ""
    """Path of the cgroup under the cgroup root; empty if the file does not belong to a cgroup."""
    file: KernelPath
    """Name of the file in the cgroup, such as ``cpuset.cpus``, or its absolute path if it belongs to no cgroup."""
    present: Text = ""
    """Current content in the kernel's format for the file: a list of CPUs or NUMA nodes, a number of bytes, or ``max``.
    Empty if the file is empty or cannot be read.
    """
    desired: Text = ""
    """Content that would be written, in the same format."""
    reason: Text = ""
    """Reason for the change. It names the container by its name and its pod's namespace and name."""


class Observation(Document):
    """Changes that the backend would make to files on the node. It makes none, because ``enforcement`` is
    ``observe``.
    """

    total: int = 0
    """Number of files that would change."""
    cgroup_files: int = 0
    """Number of cgroup files that would change. The other files control the CPU affinity of interrupts and
    kernel workers.
    """
    complete: bool = False
    """True if all containers that the runtime listed were compared."""
    changes: Annotated[tuple[ObservedChange, ...], BeforeValidator(lambda value: _first(value, MAX_OBSERVED))] = ()
    """The first 512 changes, sorted by cgroup and file."""


class BackendStatus(Document):
    """The backend's lease. The backend reports after each change, and at least every 6 s (every 2 s if the frontend is
    from an older release); each report renews the lease. The lease expires 10 s after the last report.
    """

    version: int = REPORT_VERSION
    """Version of the format."""
    software: Text = ""
    """Version of the backend."""
    instance: str
    """ID of the backend instance; it changes when the process restarts."""
    generation: int = 0
    """Generation of the containers' state: a number that grows each time a container's report changes; 0 before the
    runtime has sent its state.
    """
    reported_at: float | None = None
    """Time of the report, in seconds of the node's monotonic clock (``CLOCK_MONOTONIC``). A report that is older than
    the last one received was overtaken in transit and is ignored. Null if the backend does not send it.
    """
    records: int | None = None
    """Generation of the claim records that the backend had read when it made this report; null if it has read none. A
    claim that was released in this generation or earlier is in use only if a container names it.
    """
    active: bool = False
    """True if this backend holds the active lock and enforces claims (or only observes, if ``enforcement`` is
    ``observe``).
    """
    enforced: bool = True
    """True if a backend on this node holds the lock, serves the runtime, and has renewed its heartbeat recently."""
    synchronized: bool = False
    """True if the runtime has sent its state and delivers events."""
    runtime: Text = ""
    """Name and version of the container runtime; empty while it is not connected."""
    request_timeout: float | None = None
    """Seconds after which the runtime abandons a hook; null if the runtime does not report the timeout (before NRI 0.6,
    or not connected).
    """
    registration_timeout: float | None = None
    """Seconds after which the runtime abandons a plugin's registration; null if the runtime does not report the
    timeout.
    """
    pool: CpuSet = frozenset()
    """CPUs of the shared pool, which containers without a CPU claim may use, in the kernel's list format."""
    partitioned: CpuSet = frozenset()
    """CPUs that the kernel isolates for containers with claims, as cpuset partitions, in the kernel's list format."""
    exclusivity: Text = ""
    """Mechanism that keeps other processes off claimed CPUs on this node: ``partition`` (the kernel) or ``pool`` (the
    driver). A container's report contains the value for its own CPUs. Empty if the backend does not report it.
    """
    exclusivity_reason: Text = ""
    """Reason why the pool isolates claimed CPUs even though the configuration allows or requires partitions, and the
    remedy; empty if there is no such reason. If there is one and ``cpuExclusivity`` is ``partition``, CPU claims that a
    single container uses are refused.
    """
    exclusivity_code: Code = ""
    """Code for the cause, with the same values as the ``cause`` field of ``/v1/status``; empty if there is no cause or
    the backend is too old to send its code.
    """
    kubelet_pins: Texts = ()
    """The kubelet's static managers that appear to be in use: ``cpu`` if the requests for containers specify CPUs, and
    ``memory`` if they specify NUMA nodes. The values may also come from another NRI plugin.
    """
    problems: Texts = ()
    """Current enforcement failures: one sentence each, with the remedy."""
    problem_codes: Codes = ()
    """Codes of the problems' causes, in the order of ``problems``. An older backend sends none."""
    observation: Observation | None = None
    """Changes that the backend would make; null unless ``enforcement`` is ``observe``. If a report omits it, the
    previous report's value remains valid.
    """
    counters: dict[str, float] = Field(default_factory=dict)
    """Number of events since the backend started, by kind, such as ``repaired_cpus``. If a report omits them, the
    numbers from the previous report remain valid.
    """
    metrics: tuple[Metric, ...] = ()
    """The backend's metrics. If a report omits them, the metrics from the previous report remain valid. ``GET
    /v1/backend`` does not contain them; ``/metrics`` does.
    """

    @property
    def coded_problems(self) -> tuple[tuple[str, str], ...]:
        """Problems with their codes. A code is "" if the backend sent none."""
        codes = (*self.problem_codes, *("" for _ in self.problems))
        return tuple(zip(codes, self.problems, strict=False))


class StateAnswer(Document):
    """The answer to a report from the backend."""

    instance: str
    """ID of the frontend instance; it changes when the process restarts."""
    generation: int
    """Generation of the containers' state that the frontend last received from this backend; 0 if it has received none.
    If this is not the current generation, the backend sends the containers.
    """
    reads_changes: bool = False
    """True if the frontend accepts reports that contain only the containers that have changed, and reports without
    counters and metrics. False if the frontend is from an older release."""


class RecordChange(Document):
    """A claim record that appeared, changed or disappeared."""

    generation: int
    """Generation of the records after this change."""
    change: str
    """Kind of the change: ``prepared``, ``updated``, ``restored``, ``released``, ``quarantined`` or ``lost``."""
    driver: str
    """Name of the driver, ``dra.cpu`` or ``dra.memory``."""
    uid: str
    """UID of the claim."""


class RecordsAnswer(Document):
    """Changes to claim records."""

    generation: int
    """Current generation of the records. It grows with every change, even across restarts of the frontend."""
    changes: tuple[RecordChange, ...] = ()
    """Changes since the requested generation, as far back as the frontend retains them."""
