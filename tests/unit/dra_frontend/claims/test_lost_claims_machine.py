# SPDX-License-Identifier: Apache-2.0
"""Random traces of a node that loses claim files. The oracle knows which claims the kubelet considers prepared."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
from dra_frontend.api_server.errors import UnavailableError

from tests.rigs.builders import claim, memory
from tests.rigs.frontend import Claims, Frontend

DRIVER = "dra.memory"
STEPS = 40
POOL = 512
"""Size in MiB of the hugepage pool that all claims share."""
OPERATIONS = {
    "prepare": 5,
    "unprepare": 2,
    "lose": 2,
    "restart": 2,
    "recover": 2,
    "start": 1,
    "stop": 1,
    "scan": 1,
    "server": 1,
    "spoil": 1,
}


class Machine:
    """A node with its kubelet and its API server. The scheduler allocates more pages than the node has."""

    def __init__(self, path: Path, seed: int) -> None:
        self.random, self.path = Random(seed), path
        self.sizes = {f"u{n}": self.random.choice([32, 64, 128, 256, 400]) for n in range(6)}
        wishes = {uid: memory(f"{size}Mi", "m", 0, "hugepages-2m") for uid, size in self.sizes.items()}
        self.documents = {uid: claim(uid, wish) for uid, wish in wishes.items()}
        self.api = Claims(*self.documents.values())
        self.promised: set[str] = set()
        """Claims that have been prepared and not unprepared."""
        self.running: set[str] = set()

    async def begin(self) -> None:
        """Starts the first frontend process, or the successor of a process that has exited."""
        self.node = Frontend(self.path, api=self.api)
        self.node.recovery.patience = self.node.claims.report_wait = 0.001
        await self.node.store.start()
        self.report()

    def report(self, *late: str) -> None:
        """Renews the backend's reports. ``late`` contains claims whose container has exited but is still in the
        backend's last report.
        """
        self.node.backend.containers = {}
        for uid in sorted({*self.running, *late}):
            use = [{"uid": uid, "driver": DRIVER, "requests": ["m"]}]
            known = {"claims": use} if self.node.store.ledger.record(DRIVER, uid) else {"unknownClaims": use}
            limits = {"hugetlb.2MB.max": str(self.sizes[uid] << 20)}
            self.node.report(id=f"c-{uid}", limits=limits, mems="0", **known)
        self.node.enforce()

    async def recover(self) -> None:
        """Advances the time until every lost claim is due for recovery."""
        self.node.now += 700
        await self.node.recovery.run_round()

    async def step(self) -> None:
        """Runs one random step."""
        operation = self.random.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        await getattr(self, f"do_{operation}")(self.random.choice(list(self.sizes)))

    async def do_prepare(self, uid: str) -> None:
        """Has the kubelet prepare a claim, for the first time or again."""
        if (await self.node.prepare(uid, DRIVER)).error is None:
            self.promised.add(uid)

    async def do_unprepare(self, uid: str) -> None:
        """Has the kubelet unprepare a claim, possibly while the backend's last report still contains its container."""
        if uid in self.running:
            return
        late = [uid] if uid in self.promised and self.random.random() < 0.5 else []
        self.report(*late)
        if (await self.node.unprepare(uid, DRIVER)).error is None:
            self.promised.discard(uid)
        for _ in late:
            await self.recover()
        self.report()

    async def do_lose(self, uid: str) -> None:
        """Removes a claim's file while the process is running."""
        self.node.file(uid, DRIVER).unlink(missing_ok=True)

    async def do_restart(self, _: str) -> None:
        """Stops the process, removes some files, and starts a new process."""
        for uid in self.sizes:
            if self.random.random() < 0.4:
                self.node.file(uid, DRIVER).unlink(missing_ok=True)
        await self.begin()

    async def do_recover(self, _: str) -> None:
        """Advances the time until lost claims are due for recovery."""
        await self.recover()

    async def do_start(self, uid: str) -> None:
        """Starts a container that uses a prepared claim."""
        self.running |= {uid} & self.promised
        self.report()

    async def do_stop(self, uid: str) -> None:
        """Stops a container."""
        self.running.discard(uid)
        self.report()

    async def do_scan(self, _: str) -> None:
        """Scans all files."""
        await self.node.scan()

    async def do_server(self, _: str) -> None:
        """Makes the API server unavailable or available again."""
        self.api.error = None if self.api.error else UnavailableError("get resourceclaims", "refused")

    async def do_spoil(self, uid: str) -> None:
        """Makes a claim on the API server unreadable or readable again."""
        name, good = f"claim-{uid}", self.documents[uid]
        odd: dict[str, Any] = {"metadata": good["metadata"], "status": {"allocation": 3}}
        self.api.documents[name] = odd if self.api.documents[name] is good else good

    def check(self) -> None:
        """Checks that no page is allocated twice, and that a claim has a record only if the kubelet has prepared it."""
        assert sum(self.sizes[uid] for uid in self.promised) <= POOL
        recorded = {uid for uid in self.sizes if self.node.store.ledger.record(DRIVER, uid)}
        assert recorded <= self.promised

    async def settle(self) -> None:
        """Clears all faults and checks that every prepared claim gets its record back."""
        self.api.error = None
        self.api.documents = {f"claim-{uid}": document for uid, document in self.documents.items()}
        for _ in range(3):
            self.report()
            await self.recover()
        assert {uid for uid in self.sizes if self.node.store.ledger.record(DRIVER, uid)} == self.promised
        assert self.node.store.ledger.unresolved(DRIVER, ignoring="") == []


@pytest.mark.parametrize("seed", range(25))
async def test_hugepages_are_allocated_once_and_every_claim_gets_its_record_back(tmp_path: Path, seed: int) -> None:
    """Claims may be lost in any order, as long as the journal is intact."""
    machine = Machine(tmp_path, seed)
    await machine.begin()
    for _ in range(STEPS):
        await machine.step()
        machine.check()
    await machine.settle()
