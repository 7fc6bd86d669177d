# SPDX-License-Identifier: Apache-2.0
"""Options for the fake API server, and the records that it keeps."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.apiserver_rules import GATES_OF_1_36
from tests.fakes.apiserver_store import Document, Resource


@dataclass(frozen=True)
class Served:
    """A request that was answered."""

    verb: str
    resource: str
    name: str
    code: int
    dry_run: bool = False
    agent: str = ""


@dataclass
class Fault:
    """A fault to inject into the next ``count`` requests.

    ``answer`` is the HTTP code of the response, ``hang`` to send no response, or ``drop`` to close the connection.
    If ``body`` is set, it is the body of the response.
    """

    count: int
    answer: str
    verb: str = ""
    resource: str = ""
    retry_after: int | None = None
    body: str | None = None
    agent: str = ""
    """User-Agent prefix of the affected clients."""


@dataclass
class Options:
    """The server's configuration."""

    gates: dict[str, bool] = field(default_factory=lambda: dict(GATES_OF_1_36))
    version: str = "1.36"
    """Kubernetes release, which determines the fields in slices and the drivers' permissions."""
    tokens: set[str] | None = None
    """Accepted bearer tokens; None accepts every client."""
    forbidden: set[tuple[str, str]] = field(default_factory=set)
    """(verb, resource) pairs that RBAC denies."""
    rules: list[Document] | None = None
    """Rules of the callers' ClusterRole; None allows everything."""
    node: str = ""
    """The node that the callers' tokens are bound to."""
    certificate: Path | None = None
    key: Path | None = None
    not_served: set[str] = field(default_factory=set)
    """API groups that the server does not serve: requests for them are answered with 404."""
    address: str = "127.0.0.1"
    """The address to listen on, which is also in the kubeconfig."""
    kubelets: dict[str, Document] = field(default_factory=dict)
    """KubeletConfiguration by node, for nodes whose kubelet serves ``proxy/configz``."""
    node_socket: Path | None = None
    """The socket of the fake node that runs commands in containers; see apiserver_exec."""


@dataclass(frozen=True)
class Target:
    """The object or collection that a request's path refers to."""

    resource: Resource
    namespace: str
    name: str
    part: str
