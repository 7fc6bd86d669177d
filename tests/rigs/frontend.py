# SPDX-License-Identifier: Apache-2.0
"""A frontend's claim handling with a real directory, but without a kubelet, an API server or sockets. Each object acts
as a new process.
"""

import asyncio
import resource
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dra_frontend.api_server.errors import KubeError, UnavailableError
from dra_frontend.api_server.other_devices import OtherDeviceReader
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimFiles
from dra_frontend.claims.journal import Journal
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.claims.reconciler import Reconciler
from dra_frontend.claims.recovery import Recovery
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.kubelet.dra import ClaimName, ClaimResult
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus, ContainerReport
from numa_node.claim_directory import ClaimDirectory
from numa_node.files import FileLock

from tests.rigs.builders import NODE, report
from tests.strategies.machines import machine


class Claims:
    """A fake API server that stores ResourceClaims."""

    def __init__(self, *documents: dict[str, Any]) -> None:
        self.documents: dict[str, dict[str, Any]] = {}
        self.error: KubeError | None = None
        """Error that every call fails with."""
        self.no_lists = False
        self.lists: list[str] = []
        """Namespaces that were listed; "" is the whole cluster."""
        self.read: list[str] = []
        """Claims that were read, by name."""
        self.slices: list[dict[str, Any]] = []
        """ResourceSlices of other drivers."""
        self.claim_observers: list[Callable[[dict[str, Any]], object]] = []
        """Same as in KubeClient."""
        for document in documents:
            self.add(document)

    def add(self, document: dict[str, Any]) -> ClaimName:
        """Stores a claim and returns its name."""
        meta = document["metadata"]
        self.documents[meta["name"]] = document
        return ClaimName(meta["namespace"], meta["name"], meta["uid"])

    def forget(self, uid: str, how: str) -> None:
        """Changes a claim in the way that ``how`` selects: deletes it, replaces it with another claim of the same name,
        allocates it on another node, or deallocates it.
        """
        document = self.documents[f"claim-{uid}"]
        if how == "gone":
            del self.documents[f"claim-{uid}"]
        elif how == "elsewhere":
            terms = document["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
            terms[0]["matchFields"][0]["values"] = ["node-b"]
        elif how == "deallocated":
            del document["status"]["allocation"]
        else:
            document["metadata"]["uid"] = "new"
        if how == "unreadable namesake":
            document["status"]["allocation"]["devices"] = "none"

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the claim, unless the server is unavailable."""
        self.read.append(name)
        if self.error is not None:
            raise self.error
        document = self.documents.get(name)
        if document is not None:
            for observe in self.claim_observers:
                asyncio.get_running_loop().call_soon(observe, document)
        return document

    async def list_claims(self, namespace: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Lists claims, unless the server is unavailable or configured to fail."""
        self.lists.append(namespace)
        if self.error is not None or self.no_lists:
            raise self.error or UnavailableError("list resourceclaims", "too many requests")
        for one in self.documents.values():
            if not namespace or one["metadata"]["namespace"] == namespace:
                yield one

    async def list_slices_of(self, driver: str, node_name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Lists a driver's slices for a node, or, if the name is empty, its slices that are not tied to one node.
        Raises an error if the server is unavailable.
        """
        if self.error is not None:
            raise self.error
        for one in self.slices:
            if (one["spec"]["driver"], one["spec"].get("nodeName", "")) == (driver, node_name):
                yield one


ALL_CHANGES = 2**62
"""The generation that a backend reports if it always reads changed claim records immediately."""


class Frontend:
    """One frontend instance. By default its backend is enforcing claims, and CPU 0 of a small machine is reserved."""

    def __init__(
        self,
        path: Path,
        inventory: Inventory | None = None,
        *documents: dict[str, Any],
        api: Claims | None = None,
        enforced: bool = True,
        active: bool = True,
        metadata: bool = False,
        config: Config | None = None,
        wait: float = 0.05,
    ) -> None:
        self.root, self.path = path, path / "cdi"
        self.api = api or Claims(*documents)
        self.now = 1000.0
        self.config = config or Config(reserved_cpus=frozenset({0}), publish_node_allocatable_resource_mapping=True)
        self.inventory = inventory or build_inventory(machine(), self.config, NODE)
        self.backend = BackendView(time.monotonic)
        self.metadata_failures: list[str] = []
        self.files = ClaimFiles(self.path, path / "quarantine")
        self.journal = Journal(path / "claims.journal")
        told = MetadataFiles(str(path / "plugins"), enabled=metadata, on_failure=self.metadata_failures.append)
        self.store = ClaimStore(self.files, self.journal, FileLock(path / "claims.lock"), self.backend, told)
        self.counted = False
        """Whether the kubelet adds claims to limits."""
        parts = (self.api, self.store, self, self.backend, self.config, self, told)
        self.recovery = Recovery(NODE, *parts, clock=lambda: self.now)
        self.reconciler = Reconciler(NODE, self.api, self.store, self.backend)
        self.claims = NodeClaims(
            claim_reader=self.api,
            other_devices=OtherDeviceReader(self.api, NODE, seconds=0.5),
            kubelet=self,
            devices=self,
            store=self.store,
            metadata=told,
            backend=self.backend,
            recovery=self.recovery,
            config=self.config,
            backend_wait=wait,
        )
        if enforced:
            self.enforce(active=active)

    async def counts_claims(self, _driver: str) -> bool:
        """Returns True if the kubelet adds the claimed amounts to the limits of pods and containers."""
        return self.counted

    def enforce(self, *, active: bool = True, complete: bool = True) -> None:
        """Renews the backend's lease. With ``complete=False`` the reports are from an earlier generation."""
        status = BackendStatus(
            instance="i",
            generation=1 if complete else 2,
            records=ALL_CHANGES,
            active=active,
            synchronized=True,
        )
        self.backend.renew(status, [] if complete and not self.backend.generation else None)
        self.changed()

    def changed(self) -> None:
        """Handles a new report from the backend."""
        self.backend.notify_change()

    def report(self, **values: Any) -> ContainerReport:
        """Reports a container."""
        told = report(**values)
        self.backend.containers = {**self.backend.containers, told.id: told}
        self.changed()
        return told

    async def prepare(self, uid: str, driver: str = "dra.cpu") -> ClaimResult:
        """Prepares claims as the kubelet does."""
        return (await self.claims.prepare(driver, [self.name(uid)]))[uid]

    async def unprepare(self, uid: str, driver: str = "dra.cpu") -> ClaimResult:
        """Unprepares claims as the kubelet does."""
        return (await self.claims.unprepare(driver, [self.name(uid)]))[uid]

    def name(self, uid: str) -> ClaimName:
        """Returns the reference that the kubelet uses for a claim."""
        documents = [d for d in self.api.documents.values() if isinstance(d.get("metadata"), dict)]
        known = (d["metadata"] for d in documents if d["metadata"].get("uid") == uid)
        return next((ClaimName(m["namespace"], m["name"], uid) for m in known), ClaimName("ns", f"claim-{uid}", uid))

    async def scan(self) -> None:
        """Scans all files, as happens every second."""
        await self.store.transact(lambda _: None, thorough=True)

    def record(self, uid: str, driver: str = "dra.cpu") -> AllocationRecord:
        """Returns the claim's record."""
        record = self.store.ledger.record(driver, uid)
        assert record is not None
        return record

    def cpus(self, uid: str) -> frozenset[int]:
        """Returns the CPUs in the claim's record, or an empty set without a record."""
        record = self.store.ledger.record("dra.cpu", uid)
        return record.cpus_of() if record else frozenset()

    def file(self, uid: str, driver: str = "dra.cpu") -> Path:
        """Returns the claim's CDI file."""
        return self.path / cdi_file_name(driver, uid)

    def remove_journaled_cpus(self) -> None:
        """Removes the CPUs from the journal, as if it had been lost and rebuilt from the listed claims."""
        journal = Journal(self.root / "claims.journal")
        journal.write(replace(journal.read(), cpus={}))

    def damage(self, uid: str, driver: str = "dra.cpu") -> None:
        """Makes the record unreadable; the part that the runtime reads stays intact."""
        self.file(uid, driver).write_text(self.file(uid, driver).read_text().replace('\\"driver\\"', '\\"pilot\\"'))


@contextmanager
def full_disk(max_bytes: int = 0) -> Iterator[None]:
    """Limits the file size of this process, so writes raise OSError and reads succeed."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def on_disk(path: Path) -> dict[str, frozenset[int]]:
    """Returns the CPUs of each claim as another process reads them from a frontend's directory."""
    files: Iterable[ClaimFile] = ClaimDirectory(str(path / "cdi")).refresh(thorough=True).files.values()
    return {file.uid: file.cpus for file in files}
