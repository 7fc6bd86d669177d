# SPDX-License-Identifier: Apache-2.0
"""Describes calls to the API server and limits their rate."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from dra_frontend.api_server.errors import InvalidError

Document = dict[str, Any]

_METHODS: Final = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``verb``, ``group`` and ``resource`` have the same meaning as in RBAC and determine the path.

    A subresource is appended to ``resource`` after a slash.
    """

    verb: str
    group: str
    resource: str
    name: str = ""
    namespace: str = ""
    query: dict[str, str] = field(default_factory=dict)
    body: Document | None = None
    merge: bool = False
    """True for a merge patch (RFC 7386), False for a server-side apply."""

    @property
    def media_type(self) -> str:
        """Media type of the body."""
        if self.verb != "patch":
            return "application/json"
        return "application/merge-patch+json" if self.merge else "application/apply-patch+yaml"

    @property
    def method(self) -> str:
        """HTTP method."""
        return _METHODS.get(self.verb, "GET")

    @property
    def path(self) -> str:
        """Path on the server. Raises InvalidError for a name that would result in a different path."""
        parts = ["apis", self.group, "v1"] if self.group else ["api", "v1"]
        if self.namespace:
            parts += ["namespaces", self._segment(self.namespace)]
        resource, slash, part = self.resource.partition("/")
        parts.append(resource)
        if self.name or self.verb in {"get", "update", "patch", "delete"}:
            parts += [self._segment(self.name), part] if slash else [self._segment(self.name)]
        return "/" + "/".join(parts)

    @property
    def operation(self) -> str:
        """Description of the call, for error messages."""
        target = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.resource}" + (f" {target}" if target else "")

    def _segment(self, name: str) -> str:
        if name in {"", ".", ".."}:
            raise InvalidError(self.operation, f"{name!r} is not a name")
        return quote(name, safe="")


class Pace:
    """Token bucket for a process's calls, which protects the API server from bugs in this driver.

    The limit is generous, since a burst of new pods causes one read for each claim. client-go's default of 5 calls per
    second would delay the pods.
    """

    def __init__(
        self, per_second: float = 50.0, burst: float = 100.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_second
        self._burst = burst
        self._clock = clock
        self._tokens = burst
        self._at = clock()

    def take(self) -> float:
        """Takes a token and returns how many seconds to wait before using it."""
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate) - 1
        self._at = now
        return max(0.0, -self._tokens / self._rate)

    async def acquire(self) -> None:
        """Waits for a token. A cancelled wait returns its token."""
        if not (wait := self.take()):
            return
        try:
            await asyncio.sleep(wait)
        except asyncio.CancelledError:
            self._tokens += 1
            raise
