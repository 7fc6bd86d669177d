# SPDX-License-Identifier: Apache-2.0
"""What the frontend knows of its backend: the lease, and the containers reported in the lease's epoch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from numa_contract.reports import LEASE_SECONDS, BackendStatus, ContainerReport


def _attempt(report: ContainerReport) -> tuple[str, str] | None:
    # A state alone says nothing: a newer backend may know more of them, and they are read as unknown here.
    refused = report.state == "unknown" and report.refused
    return (report.pod_uid, report.name) if refused else None


@dataclass(slots=True)
class BackendView:
    """The latest status and reports. A new epoch empties the reports; its full resend fills them again."""

    clock: Callable[[], float]
    status: BackendStatus | None = None
    containers: dict[str, ContainerReport] = field(default_factory=dict)
    _renewed: float = 0.0

    def renew(self, status: BackendStatus) -> bool:
        """Takes a lease; returns False when its epoch is new here, so that the backend sends everything again."""
        known = self.status is not None and (self.status.instance, self.status.epoch) == (status.instance, status.epoch)
        if not known:
            self.containers.clear()
            # "Complete" speaks of reports that were sent to somebody else, or before a restart of ours.
            status = status.model_copy(update={"complete": False})
        self.status = status
        self._renewed = self.clock()
        return known

    def take(self, report: ContainerReport) -> None:
        """Takes a report; of attempts at a container that were refused at its creation, the last one stays.

        The kubelet tries again for days, and CRI-O tells nobody that a refused one is gone.
        """
        if attempt := _attempt(report):
            for former in [one.id for one in self.containers.values() if _attempt(one) == attempt]:
                del self.containers[former]
        self.containers[report.id] = report

    @property
    def age(self) -> float | None:
        """Seconds since the lease was renewed; None before the first one."""
        return None if self.status is None else self.clock() - self._renewed

    @property
    def problem(self) -> str:
        """Why no claim may be prepared now; empty when the backend enforces, or stands by while another one does."""
        if self.status is None:
            return "nri-backend has not reported yet; see the log of its container"
        if self.clock() - self._renewed > LEASE_SECONDS:
            return f"nri-backend has been silent for {self.clock() - self._renewed:.0f} s; is its container running?"
        if not self.status.synchronized:
            return "nri-backend is not connected to the container runtime; is NRI switched on there?"
        if not self.status.complete:
            return "nri-backend has not yet reported every container"
        return ""

    @property
    def live(self) -> bool:
        """Whether claims may be prepared."""
        return not self.problem

    @property
    def leads(self) -> bool:
        """Whether this pod is the active one of the node: its backend holds the lock and its lease is live."""
        return self.live and self.status is not None and self.status.active
