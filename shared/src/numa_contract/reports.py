# SPDX-License-Identifier: Apache-2.0
"""What the backend tells the frontend: its lease, and every container it knows."""

from typing import Annotated, Final, Literal, get_args

from pydantic import BeforeValidator, Field

from numa_contract.records import CpuSet, Document

REPORT_VERSION: Final = 1
LEASE_SECONDS: Final = 3.0
"""A lease that was not renewed for this long is dead."""
RENEW_SECONDS: Final = 1.0


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
    """For a claim without a record: the CPUs that the environment names and the container is really pinned to."""


class ContainerReport(Document):
    """One container as the runtime and the kernel show it to the backend."""

    version: int = REPORT_VERSION
    id: str
    name: str
    pod_uid: str
    pod_namespace: str
    pod_name: str
    state: ContainerState = "unknown"
    claims: tuple[ClaimUse, ...] = ()
    """Claims whose record allows this container."""
    unknown_claims: tuple[ClaimUse, ...] = ()
    """Claims that the environment names and for which there is no record, or none that names the pod."""
    cpus: CpuSet = frozenset()
    """``cpuset.cpus.effective`` as last read; empty when it could not be read."""
    mems: CpuSet = frozenset()
    limits: dict[str, str] = Field(default_factory=dict)
    """Limits that its claims have set, as last read: the files of its cgroup by name, ``max`` is none."""
    cgroup: str = ""
    """Path below the cgroup root."""
    refused: str = ""
    """Why the container was refused, when it was."""
    memory_kills: int = 0
    """How many of its processes the kernel has killed for want of memory; counted where a memory claim is held."""

    @property
    def alive(self) -> bool:
        """Whether a process of it may still run."""
        return self.state != "stopped"


class BackendStatus(Document):
    """The backend's lease: sent every second, dead after LEASE_SECONDS."""

    version: int = REPORT_VERSION
    software: str = ""
    instance: str
    epoch: str
    """A new one at every start and every (re)connection; a full resend of the containers follows it."""
    complete: bool = False
    """Whether that resend has been done: only then does silence about a container mean that there is none."""
    active: bool = False
    """Whether this instance holds the active lock and enforces."""
    synchronized: bool = False
    """Whether the runtime has sent its state and delivers events."""
    runtime: str = ""
    pool: CpuSet = frozenset()
    """CPUs that containers without a claim may use."""
    problems: tuple[str, ...] = ()
    counters: dict[str, float] = Field(default_factory=dict)
