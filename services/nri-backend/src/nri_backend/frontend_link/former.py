# SPDX-License-Identifier: Apache-2.0
"""How a frontend of release 0.1.0 is told: by epochs. For one release, while an upgrade passes through.

An epoch opens with a lease that says ``complete: false``, which makes that frontend forget all containers; then they
are listed in one request; a lease that says ``complete: true`` ends it. Each change begins a new one.
"""

import os
from typing import Final

from numa_contract.reports import BackendStatus, StateAnswer

from nri_backend.frontend_link.http import FrontendError, HttpConnection
from nri_backend.frontend_link.reports import Reports

FORMER_RENEW_SECONDS: Final = 1.0
"""Its lease is over after three."""


class FormerFrontend:
    """What it was told on one connection."""

    def __init__(self, http: HttpConnection) -> None:
        self._http = http
        self._told = -1
        self._epoch = ""

    async def tell(self, status: BackendStatus, reports: Reports) -> None:
        """Renews its lease, after a whole new epoch if containers have changed. Raises as HttpConnection does."""
        if (generation := reports.generation) != self._told:
            self._epoch = os.urandom(8).hex()
            await self._lease(status, complete=False)
            code, _ = await self._http.request("PUT", "/v1/containers", reports.containers())
            if not 200 <= code < 300:
                raise FrontendError(f"PUT /v1/containers was answered with status {code}")
            self._told = generation
        # Before the runtime has told its state, nobody can say that this is all.
        if not await self._lease(status, complete=generation > 0):
            self._told = -1

    async def _lease(self, status: BackendStatus, *, complete: bool) -> bool:
        told = status.model_copy(update={"epoch": self._epoch, "complete": complete})
        return (await self._http.ask(StateAnswer, "PUT", "/v1/backend", told.model_dump_json().encode())).known
