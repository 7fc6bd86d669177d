# SPDX-License-Identifier: Apache-2.0
"""What the backend tells the frontend in ``PUT /v1/backend``: its lease, its metrics, the state of all containers."""

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from numa_contract.errors import cut_answer
from numa_contract.records import CpuSet, Document

REPORT_VERSION: Final = 1
LEASE_SECONDS: Final = 10.0
"""After so much silence the lease is over."""
RENEW_SECONDS: Final = 2.0
"""The longest silence of a backend that lives."""
MAX_STATE_BYTES: Final = 4 << 20
"""Of one body: a node with 500 containers needs a twentieth of it."""
RECORDS_WAIT_SECONDS: Final = 25.0
"""How long ``GET /v1/records?after=`` waits for a change before it answers without one."""
CONTAINERS: Final = "containers"
"""The key of the containers' reports beside the fields of BackendStatus. Absent when the frontend has them already."""


_MAX_PROBLEMS: Final = 64
_MAX_PATH: Final = 4096
"""Length of a path in the kernel."""
Text = Annotated[str, AfterValidator(cut_answer)]
"""A text for people. It is cut to 1 KiB, since a longer one of another release is no reason to reject a report."""
Texts = Annotated[tuple[Text, ...], BeforeValidator(lambda value: _first(value, _MAX_PROBLEMS))]
"""Texts of which at most 64 are read."""
KernelPath = Annotated[str, AfterValidator(lambda path: path[:_MAX_PATH])]


def _first(value: object, most: int) -> object:
    return value[:most] if isinstance(value, list | tuple) else value


_StateWord = Literal["unknown", "created", "paused", "running", "stopped"]


def _read_state(value: object) -> object:
    # A newer backend may know more states; a container in one of them is alive as far as anybody here can tell.
    return "unknown" if isinstance(value, str) and value not in get_args(_StateWord) else value


ContainerState = Annotated[_StateWord, BeforeValidator(_read_state, json_schema_input_type=str)]
"""Where a container is in its life; a word that this release does not know is read as ``unknown``."""


class ClaimUse(Document):
    """A claim, and those of its requests, that a container holds or says it holds."""

    uid: str
    driver: str
    requests: tuple[str, ...] = ()
    cpus: CpuSet = frozenset()
    """Of a claim without a record those that the environment names and the container is really pinned to. Of others
    only where the container has CPUs beside those of its claims, too."""


class ClaimIdentity(Document):
    """A claim, for one driver."""

    uid: str
    driver: str


class ContainerReport(Document):
    """One container as the runtime and the kernel show it to the backend."""

    version: int = REPORT_VERSION
    id: str
    name: Text
    pod_uid: str
    pod_namespace: Text
    pod_name: Text
    state: ContainerState = "unknown"
    claims: tuple[ClaimUse, ...] = ()
    """Claims whose record allows this container."""
    unknown_claims: tuple[ClaimUse, ...] = ()
    """Claims that the environment names and for which there is no record, or none that names the pod."""
    refused_claims: tuple[ClaimIdentity, ...] = ()
    """Claims that the environment names and that the container may not use, for any reason; empty unless the container
    was refused. It holds nothing of them."""
    cpus: CpuSet = frozenset()
    """``cpuset.cpus.effective`` as last read; empty when it could not be read.

    Of a container without claimed CPUs, or with the shared pool beside them, where the kernel keeps it off those of
    others: what ``cpuset.cpus`` allows."""
    exclusivity: Text = ""
    """Who keeps others off its CPUs: ``partition`` or ``isolated`` (the kernel), or ``pool``; empty without a claim."""
    pooled: Text = ""
    """Reason why that is the pool although the kernel could enforce it; empty otherwise."""
    pool_requested: Text = ""
    """Setting of its claims that asks for the pool, if the kernel could enforce them without it."""
    mems: CpuSet = frozenset()
    limits: dict[str, Text] = Field(default_factory=dict)
    """Limits that its claims have set, as last read: the files of its cgroup by name, ``max`` is none."""
    cgroup: KernelPath = ""
    """Path below the cgroup root."""
    refused: Text = ""
    """Why the container was refused, when it was."""
    memory_kills: int = 0
    """How many of its processes the kernel has killed for want of memory; counted where a memory claim is held."""

    @property
    def named_claims(self) -> frozenset[str]:
        """UIDs of all claims that the container holds, asks for or was refused."""
        used = {use.uid for use in (*self.claims, *self.unknown_claims)}
        return frozenset(used.union(one.uid for one in self.refused_claims))

    @property
    def alive(self) -> bool:
        """Whether a process of it may still run."""
        return self.state != "stopped"


class MetricSample(Document):
    """One time series of a metric."""

    labels: tuple[str, ...] = ()
    """Values, in the order of the metric's label names."""
    value: float = 0.0
    """Of a histogram the sum of all observations."""
    counts: tuple[int, ...] = ()
    """Observations of a histogram by bucket, not cumulative; the last one is of those above the largest bound."""


class Metric(Document):
    """One metric of the backend, as the frontend serves it."""

    name: str
    """Without the prefix ``dra_numa_backend_``, and without ``_total``."""
    help: str = ""
    kind: str = "gauge"
    """``counter``, ``gauge`` or ``histogram``."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without infinity."""
    samples: tuple[MetricSample, ...] = ()


class BackendStatus(Document):
    """The backend's lease. It is renewed by each report, at least every RENEW_SECONDS."""

    version: int = REPORT_VERSION
    software: Text = ""
    instance: str
    generation: int = 0
    """Of the containers' state: another one whenever a report changed. 0 before the runtime has told its state."""
    records: int | None = None
    """The generation of records that was heard of before this was said: a claim that was released by then and that no
    container names has none. None while nothing is heard."""
    active: bool = False
    """Whether this instance holds the active lock and enforces."""
    enforced: bool = True
    """Whether some instance on the node holds the lock, serves the runtime and has stamped its heartbeat lately."""
    synchronized: bool = False
    """Whether the runtime has sent its state and delivers events."""
    runtime: Text = ""
    request_timeout: float | None = None
    """Seconds that the runtime gives a hook; None where it does not say (before NRI 0.6, or not connected)."""
    registration_timeout: float | None = None
    """Seconds that it gives a plugin to register."""
    pool: CpuSet = frozenset()
    """CPUs that containers without a claim may use."""
    partitioned: CpuSet = frozenset()
    """CPUs that the kernel keeps for claim containers, as cpuset partitions."""
    exclusivity: Text = ""
    """What keeps other processes off claimed CPUs on this node: ``partition`` (the kernel) or ``pool``; the report of a
    container has the answer for its own CPUs. Empty from a backend that does not report it."""
    exclusivity_reason: Text = ""
    """Why that is the pool although the configuration allows or demands partitions, with the remedy; else empty.

    With ``cpuExclusivity: partition`` CPU claims for one container are then refused."""
    kubelet_pins: Texts = ()
    """The kubelet's managers that are static, or in whose place another NRI plugin assigns CPUs or NUMA nodes to
    containers: ``cpu``, ``memory``."""
    problems: Texts = ()
    counters: dict[str, float] = Field(default_factory=dict)
    metrics: tuple[Metric, ...] = ()


class StateAnswer(Document):
    """The frontend's answer to a lease."""

    instance: str
    generation: int
    """Of the containers' state that the frontend has of this backend; 0: none."""


class RecordChange(Document):
    """A record that appeared, changed or went."""

    generation: int
    change: str
    """``prepared``, ``updated``, ``restored``, ``released``, ``quarantined`` or ``lost``."""
    driver: str
    uid: str


class RecordsAnswer(Document):
    """What is new about records."""

    generation: int
    """Grows with every change, over restarts of the frontend, too."""
    changes: tuple[RecordChange, ...] = ()
    """Those after the generation that was asked for, as far back as they are remembered."""
