# SPDX-License-Identifier: Apache-2.0
"""``/v1/version``, ``/v1/backend`` and errors: the service itself and its link to the backend."""

from pydantic import ConfigDict

from numa_contract.reports import BackendStatus, ContainerChanges, ContainerReport
from numa_contract.state.base import StateDocument


class FormatsDocument(StateDocument):
    """Versions of the formats of records, reports and documents."""

    record: int
    """Version of claim records, in ``/v1/claims`` and in the claims' CDI files."""
    report: int
    """Version of the backend's reports: the lease in ``/v1/backend``, and ``/v1/containers``."""
    state: int
    """Version of all other documents of the state endpoint."""


class VersionDocument(StateDocument):
    """Versions of the software and of its documents."""

    version: str
    """Version of the frontend."""
    node: str
    """Name of the node."""
    instance: str
    """ID of the frontend instance: the pod's UID and a random part. It changes when the process restarts."""
    formats: FormatsDocument
    """Versions of the formats of records, reports and documents."""


class BackendDocument(StateDocument):
    """The backend's last report, and whether any backend on this node enforces claims."""

    live: bool
    """True if a backend on this node enforces claims, and the reports are complete and at most 10 s old. Prepare can
    still fail for other reasons.
    """
    problem: str
    """Reason why ``live`` is false; empty if it is true."""
    age: float | None = None
    """Seconds since the backend's last report; null before the first one."""
    status: BackendStatus | None = None
    """The backend's last report; null before the first one."""


class BackendReport(BackendStatus):
    """A report from the backend: its lease, its metrics and, if the containers' state has changed, either all
    containers or only the changed ones.
    """

    model_config = ConfigDict(defer_build=True)

    containers: tuple[ContainerReport, ...] | None = None
    """All containers on the node; omitted if the frontend has their current state, or the state to which ``changes``
    apply.
    """
    changes: ContainerChanges | None = None
    """Containers that have changed; omitted if ``containers`` is present. Sent only to a frontend whose last
    answer had ``readsChanges`` set to true.
    """


class ErrorDocument(StateDocument):
    """Body of the answer to a failed request."""

    detail: str
    """Reason, in one sentence."""
