# SPDX-License-Identifier: Apache-2.0
"""What a call to the API server is, and what its failure means; no I/O."""

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    InvalidError,
    KubeError,
    NotFoundError,
    NotServedError,
    UnavailableError,
    WatchExpiredError,
)

__all__ = ["Call", "Document", "Pace", "lines", "server_version", "translate", "watch_failure"]

Document = dict[str, Any]

_METHODS: Final = {"create": "POST", "update": "PUT", "delete": "DELETE"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``verb``, ``group`` and ``resource`` are RBAC's words; the path follows from them."""

    verb: str
    group: str
    resource: str
    name: str = ""
    namespace: str = ""
    query: dict[str, str] = field(default_factory=dict)
    body: Document | None = None
    url: str = ""
    """A path of its own, beside the API's objects: what RBAC calls a nonResourceURL."""

    @property
    def method(self) -> str:
        """The HTTP method."""
        return _METHODS.get(self.verb, "GET")

    @property
    def path(self) -> str:
        """The path on the server. Raises InvalidError for a name that would make it the path of something else."""
        if self.url:
            return self.url
        parts = ["apis", self.group, "v1"] if self.group else ["api", "v1"]
        if self.namespace:
            parts += ["namespaces", self._segment(self.namespace)]
        parts.append(self.resource)
        if self.name or self.verb in {"get", "update", "delete"}:
            parts.append(self._segment(self.name))
        return "/" + "/".join(parts)

    @property
    def operation(self) -> str:
        """The call in words, for errors."""
        target = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource}" + (f" {target}" if target else "")

    def _segment(self, name: str) -> str:
        if name in {"", ".", ".."}:
            raise InvalidError(self.operation, f"{name!r} is not a name")
        return quote(name, safe="")


class Pace:
    """Token bucket over all calls of a process: a bug of ours must not become the API server's problem.

    Generous, since a burst of pods needs one claim read each; client-go's default of 5 a second would delay them.
    """

    def __init__(
        self, per_second: float = 50.0, burst: float = 100.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def delay(self) -> float:
        """Takes a token and returns the seconds to wait before using it."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._tokens / self._rate)


async def lines(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Splits a stream into lines without a limit of length: a slice of 128 devices passes any default buffer."""
    rest = bytearray()
    async for chunk in chunks:
        start = len(rest)
        rest += chunk
        while (end := rest.find(b"\n", start)) >= 0:
            line = bytes(rest[:end])
            del rest[: end + 1]
            start = 0
            if line.strip():
                yield line


def server_version(document: Document) -> tuple[int, int]:
    """Returns (major, minor) of a server's answer to /version; (0, 0) where it does not tell."""
    numbers = [re.match(r"\d+", str(document.get(key, ""))) for key in ("major", "minor")]
    major, minor = (int(number[0]) if number else 0 for number in numbers)  # vendors write "36+"
    return major, minor


def translate(call: Call, code: int, body: bytes | str, headers: dict[str, str]) -> KubeError:
    """Makes an error of ours of an HTTP answer that is not a success."""
    status = _status(body)
    said = status.get("message") or f"HTTP {code}"
    if code in {401, 403}:
        return ForbiddenError(call.operation, said, _remedy(call, code))
    if code == 404:
        return _not_found(call, status, said)
    if code == 409:
        return ConflictError(call.operation, said)
    if code == 410:
        return WatchExpiredError(call.operation, said)
    if 400 <= code < 500 and code not in {408, 429}:
        return InvalidError(call.operation, said)
    return UnavailableError(call.operation, said, _retry_after(headers))


def watch_failure(call: Call, status: Document) -> KubeError:
    """Makes an error of an ERROR event: a Status in the stream, the HTTP answer was 200 long ago."""
    return translate(call, int(status.get("code") or 500), json.dumps(status), {})


def _status(body: bytes | str) -> Document:
    try:
        document = json.loads(body)
    except ValueError:
        return {}
    return document if isinstance(document, dict) and document.get("kind") == "Status" else {}


def _not_found(call: Call, status: Document, said: str) -> KubeError:
    details = status.get("details") or {}
    if status.get("reason") == "NotFound" and call.name and details.get("name") == call.name:
        return NotFoundError(call.operation, said)
    where = f"{call.group}/v1" if call.group else "v1"
    return NotServedError(call.operation, f"{said}; is {where} served? Kubernetes 1.34 or later is needed")


def _remedy(call: Call, code: int) -> str:
    if code == 401:
        return "the token or certificate is not accepted: check the kubeconfig or the service account of the pod"
    if call.url:
        return f'grant the service account nonResourceURLs: ["{call.url}"], verbs: ["{call.verb}"] in a ClusterRole'
    return (
        f'grant the service account apiGroups: ["{call.group}"], resources: ["{call.resource}"], '
        f'verbs: ["{call.verb}"] in its ClusterRole'
    )


def _retry_after(headers: dict[str, str]) -> float | None:
    text = next((value for key, value in headers.items() if key.lower() == "retry-after"), "")
    return float(text) if text.isdigit() else None
