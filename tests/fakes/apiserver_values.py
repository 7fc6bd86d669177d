# SPDX-License-Identifier: Apache-2.0
"""What can be asked of the fake API server, and what it remembers."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.apiserver_rules import GATES_OF_1_36
from tests.fakes.apiserver_store import Document, Resource


@dataclass(frozen=True)
class Served:
    """One request that was answered."""

    verb: str
    resource: str
    name: str
    code: int
    dry_run: bool = False
    agent: str = ""


@dataclass
class Fault:
    """What happens to the next ``count`` requests: an HTTP code, or ``hang`` / ``drop`` of the connection.

    With a ``body`` the answer is that text, whatever it is.
    """

    count: int
    answer: str
    verb: str = ""
    resource: str = ""
    retry_after: int | None = None
    body: str | None = None
    agent: str = ""
    """Beginning of the User-Agent of whom it happens to."""


@dataclass
class Options:
    """How this server is set up."""

    gates: dict[str, bool] = field(default_factory=lambda: dict(GATES_OF_1_36))
    version: str = "1.36"
    """Release of Kubernetes, as far as it matters for the fields of slices and the rights of drivers."""
    tokens: set[str] | None = None
    """Accepted bearer tokens; None lets everybody in."""
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """(verb, resource) that RBAC denies."""
    rules: list[Document] | None = None
    """Those of the ClusterRole that callers have; None lets everybody do everything."""
    node: str = ""
    """That the callers' tokens are bound to."""
    certificate: Path | None = None
    key: Path | None = None
    not_served: set[str] = field(default_factory=set)
    """API groups that answer 404."""
    address: str = "127.0.0.1"
    """Where it listens, also in its kubeconfig."""
    kubelets: dict[str, Document] = field(default_factory=dict)
    """KubeletConfiguration by node, for those whose kubelet answers ``proxy/configz``."""
    node_socket: Path | None = None
    """Where who plays the node executes commands in containers; see apiserver_exec."""


@dataclass(frozen=True)
class Target:
    """What the path of a request names."""

    resource: Resource
    namespace: str
    name: str
    part: str
