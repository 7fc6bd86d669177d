# SPDX-License-Identifier: Apache-2.0
"""What the frontend is to know of every container, kept as the bytes that are sent. Nothing here waits.

A generation counts the changes. The frontend answers which one it has, so that containers that it has already are left
out, and one that has not changed costs nothing but its place in the body.
"""

import json
import logging
from collections.abc import Callable, Iterable
from typing import Final

from numa_contract.reports import CONTAINERS, MAX_STATE_BYTES, BackendStatus, ContainerReport

MAX_REFUSED: Final = 64
"""Refused attempts that are kept. The kubelet makes a new one every few seconds to minutes, for each container."""
_log = logging.getLogger(__name__)


class Reports:
    """The sink of enforcement. ``changed`` is called after each change."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._containers: dict[str, bytes] = {}
        self._refused: dict[tuple[str, str], bytes] = {}
        """The latest attempt at a container that was refused at its creation, by pod and name, the oldest first."""
        self.generation = 0
        """Of all this; 0 before the runtime has told its state, when nobody knows which containers there are."""

    def put(self, report: ContainerReport) -> None:
        """Takes the latest report of a container.

        An attempt that was refused has an id that nobody hears of again. It stays until the pod is gone or the
        container was created: by the claims that it names the frontend sees that a record must be read again.
        """
        data = _bytes(report)
        attempt = (report.pod_uid, report.name)
        before = self._containers.get(report.id)
        # One that has ended is an earlier life of the same container.
        former = self._refused.pop(attempt, None) if report.alive else None
        if report.refused and report.state == "unknown" and before is None:
            self._refused[attempt] = data
            while len(self._refused) > MAX_REFUSED:
                del self._refused[next(iter(self._refused))]
            is_new = data != former
        else:
            self._containers[report.id] = data
            is_new = data != before or former is not None
        if is_new:
            self._change()

    def delete(self, container_id: str) -> None:
        """Forgets a container. Not the attempts at it: a runtime takes those back as soon as they are refused."""
        if self._containers.pop(container_id, None) is not None:
            self._change()

    def forget_pod(self, pod_uid: str) -> None:
        """Forgets the refused attempts of a pod that is gone."""
        gone = [attempt for attempt in self._refused if attempt[0] == pod_uid]
        for attempt in gone:
            del self._refused[attempt]
        if gone:
            self._change()

    def replace(self, reports: Iterable[ContainerReport]) -> None:
        """Takes the state of all containers; what it does not mention is gone, refused attempts included."""
        self._containers = {report.id: _bytes(report) for report in reports}
        self._refused.clear()
        self.generation += 1
        self._changed()

    def containers(self) -> bytes:
        """Returns all reports as a JSON list."""
        return b"[" + b",".join((*self._containers.values(), *self._refused.values())) + b"]"

    def body(self, status: BackendStatus, held: int) -> bytes:
        """Returns what is sent: the lease, and the containers unless the frontend has this generation (``held``).

        More than the frontend would read is not sent: it says then that containers are missing.
        """
        lease = status.model_copy(update={"generation": self.generation}).model_dump_json().encode()
        if held == self.generation:
            return lease
        body = lease[:-1] + f",{json.dumps(CONTAINERS)}:".encode() + self.containers() + b"}"
        if len(body) <= MAX_STATE_BYTES:
            return body
        _log.error("the containers are too many to be reported", extra={"bytes": len(body), "most": MAX_STATE_BYTES})
        return lease

    def _change(self) -> None:
        if self.generation:
            self.generation += 1
            self._changed()


def _bytes(report: ContainerReport) -> bytes:
    return report.model_dump_json().encode()
