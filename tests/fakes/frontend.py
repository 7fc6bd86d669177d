# SPDX-License-Identifier: Apache-2.0
"""The frontend's claims door over a directory, without kubelet, API server and sockets."""

import time
from pathlib import Path
from typing import Any

from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.inventory import Inventory
from dra_frontend.kubelet.values import ClaimName, Failure, Prepared
from numa_contract.reports import BackendStatus
from numa_node.file_lock import FileLock


class Frontend:
    """A frontend over one directory; like a new process each time it is made."""

    def __init__(self, path: Path, inventory: Inventory, *documents: dict[str, Any], enforced: bool = True) -> None:
        self.documents = {document["metadata"]["uid"]: document for document in documents}
        backend = BackendView(time.monotonic)
        if enforced:
            for _ in range(2):
                backend.renew(BackendStatus(instance="i", epoch="e", complete=True, active=True, synchronized=True))
        self.path = path / "cdi"
        self.directory = ClaimDirectory(self.path, path / "claims.journal", path / "bad")
        self.store = ClaimStore(self.directory, FileLock(path / "claims.lock"), backend)
        self._claims = NodeClaims(self, self.store, lambda: inventory, backend, self, backend_wait=0.01)

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Answers as the API server."""
        return next((d for d in self.documents.values() if d["metadata"]["name"] == name), None)

    async def recover(self) -> None:
        """Nothing is lost here."""

    def _name(self, uid: str) -> ClaimName:
        names = self.documents[uid]["metadata"]
        return ClaimName(names["namespace"], names["name"], uid)

    async def prepare(self, uid: str, driver: str = "dra.cpu") -> Prepared | Failure:
        """Asks as the kubelet."""
        return (await self._claims.prepare(driver, [self._name(uid)]))[uid]

    async def unprepare(self, uid: str, driver: str = "dra.cpu") -> Failure | None:
        """Gives back as the kubelet."""
        return (await self._claims.unprepare(driver, [self._name(uid)]))[uid]
