# SPDX-License-Identifier: Apache-2.0
"""Interface to the part of the service's state that the state endpoint serves."""

from collections.abc import Sequence
from typing import Protocol

from numa_contract.state.status import Notice

from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Offer


class StateSource(Protocol):
    """The part of the service's state that the state endpoint serves. It is read on each request."""

    node: str
    instance: str
    watch: MachineWatch
    offer: Offer
    store: ClaimStore
    backend: BackendView

    def handle_report(self) -> None:
        """Notifies the other parts of the service that the backend has sent a new report. The state endpoint calls this
        method after each report.
        """

    def update_readiness(self) -> Sequence[Notice]:
        """Updates the pod's readiness with the current problems, and logs changes.

        Returns the problems that make the pod unready. The sequence is empty if the pod is ready.
        """

    def warnings(self) -> Sequence[Notice]:
        """Returns conditions that an operator should know about even though the service is ready."""

    def metrics(self) -> bytes:
        """Returns the metrics in the Prometheus text format."""
