# SPDX-License-Identifier: Apache-2.0
"""What the link to the runtime and enforcement need from others, and tell them.

Every hook has a budget of 50 ms of our own time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from numa_contract.reports import ContainerReport

from nri_backend.nri.model import Adjustment, Container, Pod, Resources, Update


class ContainerHooks(Protocol):
    """The events of the runtime, in domain terms. A RefusedError fails the operation; nothing else may be raised."""

    async def synchronize(self, pods: Sequence[Pod], containers: Sequence[Container]) -> list[Update]:
        """The complete state of the runtime, once per connection, all chunks joined."""

    async def create_container(self, pod: Pod, container: Container) -> Adjustment:
        """A container is about to be created; answers when it may be."""

    async def start_container(self, pod: Pod, container: Container) -> None:
        """The container's cgroup exists and its first instruction has not run."""

    async def update_container(self, pod: Pod, container: Container, wanted: Resources) -> list[Update]:
        """The kubelet wants other resources; an update for this very container amends the request."""

    async def stop_container(self, pod: Pod, container: Container) -> list[Update]:
        """The container has ended; may come twice, or for one that never started."""

    async def remove_container(self, pod: Pod, container: Container) -> None:
        """The runtime forgets the container."""

    async def remove_pod(self, pod: Pod) -> None:
        """The runtime forgets the sandbox."""

    def disconnected(self) -> None:
        """The connection to the runtime is gone; nothing is known about containers until the next synchronize."""


@dataclass(frozen=True, slots=True)
class LinkStatus:
    """The connection to the runtime, as it is now."""

    connected: bool = False
    synchronized: bool = False
    """The runtime's snapshot was answered on this connection, and events flow."""
    epoch: int = 0
    """Counts connections; 0 before the first."""
    runtime_name: str = ""
    runtime_version: str = ""
    nri_version: str = ""
    """Empty for runtimes before NRI 0.12, which do not tell."""
    last_event: float | None = None
    """Monotonic time of the last call of the runtime."""
    last_end: str = ""
    """Why the connection before this one ended, or why the last attempt to connect failed."""


@dataclass(frozen=True, slots=True)
class Leadership:
    """The instance that holds the lock, as another one sees it."""

    fresh: bool
    """It serves the runtime and was heard of lately."""
    first: bool
    """The runtime asks it before this instance: it calls plugins in the order in which they came."""


class LinkObserver(Protocol):
    """Who wants to know how the runtime's calls go. Called on the event loop; must be quick and must not raise."""

    def link_changed(self, status: LinkStatus) -> None:
        """The connection came, was synchronised, or went."""

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """A call of the runtime was answered: ``ok``, ``refused``, ``timeout``, ``error`` or ``unimplemented``."""


class SilentObserver:
    """An observer that nobody listens to."""

    def link_changed(self, status: LinkStatus) -> None:
        """Ignores it."""

    def call_done(self, method: str, seconds: float, outcome: str) -> None:
        """Ignores it."""


class ReportSink(Protocol):
    """Takes reports for the frontend; returns at once."""

    def put(self, report: ContainerReport) -> None:
        """The latest about a container."""

    def delete(self, container_id: str) -> None:
        """The container is gone."""

    def forget_pod(self, pod_uid: str) -> None:
        """The pod is gone, and with it the attempts at its containers that were refused."""

    def replace(self, reports: Iterable[ContainerReport]) -> None:
        """The runtime has told its whole state: all containers that there are."""


class EnforcementObserver(Protocol):
    """Counts what enforcement does; telemetry.Telemetry is one."""

    def refused(self, reason: str) -> None:
        """A container was refused."""

    def repaired(self, kind: str, count: int = 1) -> None:
        """The audit found files wrong and wrote them."""

    def moved(self, seconds: float) -> None:
        """Containers without a claim were moved."""
