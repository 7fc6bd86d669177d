# SPDX-License-Identifier: Apache-2.0
"""Decides when a report is sent to the frontend and what it contains. This module does no I/O.

client.py describes the protocol.
"""

from collections.abc import Callable
from math import inf
from typing import Final

from numa_contract.reports import FORMER_RENEW_SECONDS, RENEW_SECONDS, BackendStatus, StateAnswer
from numa_node.ticks import TICK_SECONDS

from nri_backend.frontend_link.reports import Reports

_LATE_SECONDS: Final = 0.5
"""Tolerance for the age of a report. Regular reports are sent shortly after a tick, and the delay varies. Without the
tolerance, a report that is not due until the next tick could be considered overdue and sent one tick early.
"""


class Exchange:
    """Keeps track of the reports and answers on one connection. Times are in seconds on the monotonic clock."""

    def __init__(self, reports: Reports) -> None:
        self._reports = reports
        self._lease: BackendStatus | None = None
        """The status in the last report, without counters and metrics; None before the first report."""
        self._generation = 0
        """Generation of the containers' state in the last report."""
        self._acked = 0
        """Generation of the containers that the frontend has; 0 if all containers have to be sent."""
        self._reads_changes = False
        """True if the frontend's release can merge changes."""
        self._reported_at = -inf
        """Time of the last report."""
        self._measured_at = -inf
        """Time of the last report with counters and metrics."""

    @property
    def period(self) -> float:
        """Interval between reports while nothing changes, in seconds."""
        return RENEW_SECONDS if self._reads_changes else FORMER_RENEW_SECONDS

    def is_due(self, lease: BackendStatus, now: float, pause: float = TICK_SECONDS) -> bool:
        """Returns True if a report has to be sent. ``lease`` is the status without counters and metrics.

        ``pause`` is the time until the next call. A report is also due if the last one will be too old by then.
        """
        generation = self._reports.refresh()
        is_known = generation == self._generation == self._acked
        return lease != self._lease or not is_known or self._is_old(self._reported_at, now + pause)

    def next_body(self, lease: BackendStatus, status: Callable[[], BackendStatus], now: float) -> bytes:
        """Returns the body of the next request. ``status`` returns the status with counters and metrics."""
        sent = lease
        if not self._reads_changes or self._is_old(self._measured_at, now + TICK_SECONDS):
            sent, self._measured_at = status(), now
        self._lease, self._generation, self._reported_at = lease, self._reports.generation, now
        sent = sent.model_copy(update={"reported_at": now})
        return self._reports.body(sent, self._acked, reads_changes=self._reads_changes)

    def handle_answer(self, answer: StateAnswer) -> bool:
        """Handles the answer to the last request. Returns True if all containers have to be sent immediately.

        This is necessary if the request did not contain all of them, and the answer shows that the frontend has lost
        the containers that it had, or that it cannot merge the changes.
        """
        had_containers, is_known = self._acked > 0, answer.generation == self._generation
        self._acked = self._generation if is_known else 0
        self._reads_changes = answer.reads_changes
        return had_containers and not is_known

    def _is_old(self, at: float, then: float) -> bool:
        """Returns True if a report that was sent at time ``at`` will be too old at time ``then``."""
        return then > at + self.period + _LATE_SECONDS
