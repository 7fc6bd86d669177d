# SPDX-License-Identifier: Apache-2.0
"""Random traces of a node against the frontend's claim core, with an oracle.

An input is a trace: its bytes choose the machine, the claims and the events, and nothing else is random. The frontends
run with their background tasks, on a simulated clock and with real files; the trace simulates the kubelet, the API
server, the backend, the administrator and the kernel. ``frontend_oracle`` contains the rules.
"""

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any, Final

from dra_frontend.api_server.errors import (
    ConflictError,
    ForbiddenError,
    KubeError,
    TooLargeError,
    UnavailableError,
    UnreadableError,
)
from dra_frontend.claims.journal import SLOT_BYTES
from dra_frontend.devices.model import CpuDevice
from hypothesis import strategies as st
from numa_contract.names import CPU_DRIVER, DRIVERS, MEMORY_DRIVER
from numa_node import backoff

from tests.fuzz.frontend_node import Node
from tests.fuzz.frontend_oracle import BrokenRuleError, Running, demand, key_of, read_files
from tests.fuzz.frontend_world import NODE_CPUS, PAGES, Claim, Instance
from tests.fuzz.target import Target
from tests.rigs import builders
from tests.rigs.builders import MI
from tests.rigs.simulation import Disk, simulate

MAX_BYTES: Final = 400
_MAX_STEPS: Final = 60
_MAX_CALLS: Final = 6
"""Maximum number of concurrent calls from the kubelet."""
_MAX_CLAIMS: Final = 8
"""Maximum number of claims that exist at the same time."""
_NUMA: Final = "resource.kubernetes.io/numaNode"
_FEWER_PAGES: Final = (PAGES, PAGES, PAGES * 3 // 4, PAGES // 4)
"""Sizes, in pages, to which a step may set the hugepage pools of the NUMA nodes."""
_SIZES: Final = (32, 64, 128, 200, 256, 400)
"""MiB of hugepages that a claim may request; a NUMA node has 512 MiB."""
_OFFLINE: Final = (frozenset[int](), frozenset({3}), frozenset({5}), frozenset({3, 7}))
"""Sets of CPUs that a step may take offline."""
_ERRORS: Final[tuple[type[KubeError], ...]] = (
    UnavailableError,
    ConflictError,
    ForbiddenError,
    UnreadableError,
    TooLargeError,
)


class Trace(Node):
    """A node on which a trace's steps are run."""

    async def run(self) -> None:
        """Runs the trace, then repairs all faults and runs the final checks."""
        await self.begin()
        for _ in range(self.input.number(6)):
            await self.do_pod()
        for _ in range(_MAX_STEPS):
            if self.input.is_read:
                break
            await self.step()
        await self.end()

    async def step(self) -> None:
        """Runs one step and checks the rules once its calls have returned or are in flight."""
        name = _TABLE[self.input.number(len(_TABLE))]
        self.steps.append(name)
        await getattr(self, f"do_{name}")()
        self.forget()
        if self.input.number(3) or len(self.calls) >= _MAX_CALLS:
            await self.drain()
        else:
            for _ in range(self.input.number(8)):
                await asyncio.sleep(0)
            await self.settle_calls()
        self.check()

    def check(self) -> None:
        """Checks the oracle's rules."""
        self.oracle.check()
        # One of two instances may have completed a release that the other one does not know of yet.
        releasing = self.journal.read().releasing.values()
        kept = {file.uid for file in releasing if file.driver == MEMORY_DRIVER and file.record is not None}
        self.oracle.check_pages({one.uid: one.pages for one in self.claims}, self.capacity(), kept)

    async def do_create(self) -> None:
        """Creates and allocates a claim that is reserved for a pod."""
        kind, node, size, other = [self.input.number(limit) for limit in (8, 2, len(_SIZES), 3)]
        if sum(one.exists for one in self.claims) >= _MAX_CLAIMS:
            return
        results, config, joined = self._results(kind, node, size, other)
        number = next(self.numbers)
        document = builders.claim(f"u{number}", *results, pods=(f"p{number}-0",), config=config)
        if joined:
            document["spec"] = {"devices": {"constraints": [{"matchAttribute": _NUMA}]}}
        if not self.oracle.over_allocating and not self._fits(results):
            return
        pages = {}
        for one in results:
            if one["device"].startswith("hugepages"):
                pages[one["device"]] = int(one["consumedCapacity"]["size"].removesuffix("Mi")) * MI
        drivers = tuple(driver for driver in DRIVERS if any(one["driver"] == driver for one in results))
        near = NODE_CPUS[node] if joined else NODE_CPUS[0] | NODE_CPUS[1]
        self.api.add(document)
        self.claims.append(Claim(f"u{number}", f"claim-u{number}", document, drivers, pages, near))

    def _results(self, kind: int, node: int, size: int, other: int) -> tuple[list[Any], list[Any], bool]:
        device = "cpudevmachine" if self.group_by == "machine" else f"cpudevnuma{node:03d}"
        huge = builders.memory(f"{_SIZES[size]}Mi", "huge", node, "hugepages-2m")
        cpus = builders.cpus(1 + other, "cpus", device)
        match kind:
            case 0 | 1:
                return [cpus], [], False
            case 2:
                return [builders.cpus(1, "a", device), builders.cpus(1 + other, "b", device)], [], False
            case 3 | 4:
                return [huge], [], False
            case 5:
                return [cpus], [builders.opaque({"sharing": "pod"})], False
            case 6:
                return [cpus, builders.memory("64Mi", "memory", node)], [], True
            case _:
                return [cpus, huge], [], True

    def _fits(self, results: list[dict[str, Any]]) -> bool:
        """Returns True if a scheduler that never over-allocates could allocate these results."""
        for wanted in results:
            key = wanted["driver"], wanted["pool"], wanted["device"]
            device = self.inventory.devices.get(key)
            used = sum(
                _amount(one)
                for document in [one.document for one in self.claims if one.name in self.api.documents]
                for one in (document["status"].get("allocation") or {}).get("devices", {}).get("results", [])
                if (one["driver"], one["pool"], one["device"]) == key
            )
            others = sum(_amount(one) for one in results if one["device"] == wanted["device"])
            if device is None or used + others > device.amount:
                return False
        return True

    async def do_prepare(self) -> None:
        """Prepares a claim, or several in one call, for the first time or again."""
        first = self.pick(lambda one: one.exists and not self.is_called(one, "unprepare"))
        instance = self.instance()
        if first is None:
            return
        driver = first.drivers[self.input.number(len(first.drivers))]
        claims = [first]
        if self.input.number(4) == 3:
            other = self.pick(lambda one: driver in one.drivers and not self.is_called(one, "unprepare"))
            claims += [other] if other and other is not first else []
        self.call("prepare", driver, tuple(claims), instance)

    async def do_prepare_all(self) -> None:
        """Starts a pod: both drivers are called for its claim."""
        claim, instance = self.pick(lambda one: not self.is_called(one)), self.instance()
        if claim is not None:
            for driver in claim.drivers:
                self.call("prepare", driver, (claim,), instance)

    async def do_pod(self) -> None:
        """Creates a pod, prepares its claim and starts its container."""
        await self.do_create()
        if self.claims and not self.is_called(claim := self.claims[-1]):
            for driver in claim.drivers:
                self.call("prepare", driver, (claim,), self.instance())
            await self.drain()
            if self.input.number(2):
                self._start(claim)

    async def do_unprepare(self) -> None:
        """Unprepares the claim of a deleted pod. Its container may still be running, or may still be reported even
        though it has exited.
        """
        claim = self.pick(lambda one: one.called and not self.is_called(one)) or self.pick()
        instance = self.instance()
        if claim is None or self.is_called(claim):
            return
        if self.input.number(4):
            self.oracle.running.pop(claim.uid, None)
            self._hold(self.input.number(3))
        for driver in claim.drivers:
            self.call("unprepare", driver, (claim,), instance)
        if claim.exists and self.input.number(3) == 0:
            await self.drain()
            self._delete(claim, self.input.number(3))

    async def do_cancel(self) -> None:
        """Cancels a call from the kubelet."""
        if self.calls:
            self.calls[self.input.number(len(self.calls))].task.cancel()

    def instance(self) -> Instance:
        """Returns the latest instance, unless the trace chooses another one."""
        return self.instances[self.input.number(8) % len(self.instances) if self.input.number(3) == 2 else -1]

    async def do_start(self) -> None:
        """Starts a container of a prepared claim with the environment in the claim's files."""
        claim = self.pick(lambda one: one.called and one.uid not in self.oracle.running and not self.is_called(one))
        if claim is not None:
            self._start(claim)

    def _start(self, claim: Claim) -> None:
        if self.active is None:
            return
        files = read_files(self.path / "cdi")
        keys = [(driver, claim.uid) for driver in claim.drivers]
        if all(key in self.oracle.promises and key in files and files[key].whole for key in keys):
            sets = {name: cpus for key in keys for name, cpus in files[key].by_request.items()}
            pod = claim.document["status"]["reservedFor"][0]["uid"]
            self.oracle.running[claim.uid] = Running(pod, sets, claim.pages)
            self._hold(self.input.number(3))

    async def do_stop(self) -> None:
        """Stops a container."""
        claim = self.pick(lambda one: one.uid in self.oracle.running)
        if claim is not None:
            del self.oracle.running[claim.uid]
            self._hold(self.input.number(3))

    def _hold(self, seconds: int) -> None:
        """Delays all backends' next reports by this many seconds, or sends them now if the delay is 0."""
        until = asyncio.get_running_loop().time() + seconds
        for instance in self.instances:
            instance.reports_held_until = until
            self.beat(instance)

    async def do_backend(self) -> None:
        """Stops a backend, or starts it as a new process that has reported nothing yet."""
        instance = self.instance()
        instance.backend_is_up = not instance.backend_is_up
        if not instance.backend_is_up and self.input.number(2):
            instance.frontend.backend.status = None
        instance.generation = 0
        instance.reported, instance.backend_runs = (0, {}), instance.backend_runs + 1
        instance.reads_from = asyncio.get_running_loop().time() + self.input.number(3)
        for one in self.instances:
            self.beat(one)

    async def do_wait(self) -> None:
        """Advances the clock by a few seconds."""
        await asyncio.sleep((0.1, 1, 2, 4, 12, 30)[self.input.number(6)])

    async def do_later(self) -> None:
        """Advances the clock far enough for every retry and for the comparison of all claims."""
        for instance in self.instances:
            instance.frontend.now += 700
        await asyncio.sleep(2 + self.input.number(8))

    # Losses: an administrator or a tool removes or damages files.

    def _lose_files(self, number: int, how: int) -> None:
        paths = sorted((self.path / "cdi").glob("dra.k8s.io-*.json"))
        for path in paths if number == 0 else paths[number - 1 : number]:
            self.oracle.damaged.add(key_of(path))
            match how:
                case 0:
                    path.unlink()
                case 1:
                    path.write_bytes(path.read_bytes()[:300])
                case 2:
                    path.write_text(path.read_text().replace('\\"driver\\"', '\\"pilot\\"'))
                case _:
                    path.write_bytes(b"")
        self.disk.changed()

    def _lose_journal(self, how: int) -> None:
        path = self.path / "claims.journal"
        if how == 0:
            path.unlink(missing_ok=True)
        elif path.exists():
            data = bytearray(path.read_bytes())
            slots = (0, SLOT_BYTES) if how == 1 else ((0,) if how == 2 else (SLOT_BYTES,))
            for slot in slots:
                data[slot + 64 : slot + 80] = bytes(16)
            path.write_bytes(data)
        self.oracle.lose_journal()
        for call in self.calls:
            call.journal_was_lost = True
        self.disk.changed()

    async def do_lose(self) -> None:
        """Removes or damages claim files while the frontends are running."""
        self._lose_files(self.input.number(5), self.input.number(4))

    async def do_lose_journal(self) -> None:
        """Removes or damages the journal while the frontends are running."""
        self._lose_journal(self.input.number(4))

    async def do_restart(self) -> None:
        """Kills all instances, may remove or damage their files, and starts a new instance."""
        what, which, how = self.input.number(6), self.input.number(5), self.input.number(4)
        for instance in self.instances:
            instance.dead, instance.memory = True, {}
        self.forget()
        if what in (1, 3):
            self._lose_files(which, how)
        if what in (2, 3):
            self._lose_journal(self.input.number(4))
        self.forget()
        for instance in list(self.instances):
            await instance.kill()
        self.instances.clear()
        await self.begin(self.input.number(24) if what == 5 else None)

    async def do_kill(self) -> None:
        """Schedules the death of an instance after a number of file operations."""
        self.instance().operations_left = self.input.number(24)

    async def do_second(self) -> None:
        """Performs half of an upgrade: starts a second instance next to the first, or stops the older of two."""
        if len(self.instances) < 2:
            await self.begin()
        else:
            self.instances[0].dead, self.instances[0].memory = True, {}
            await self.bury()

    # The API server and the scheduler.

    async def do_server(self) -> None:
        """Makes the API server fail some calls, slows it down, or repairs it."""
        kind = self.input.number(len(_ERRORS) + 2)
        self.api.error_type = _ERRORS[kind] if kind < len(_ERRORS) else None
        self.api.failures = (1, 3, 30)[self.input.number(3)]
        self.api.delay = (0.0, 0.0, 0.0, 0.0, 0.3, 0.3, 5.0, 30.0)[self.input.number(8)]
        self.api.endless = self.input.number(4) == 3

    async def do_delete(self) -> None:
        """Deletes or deallocates a claim, replaces it with another claim that has the same name, or makes it unreadable
        for a while.
        """
        claim, how = self.pick(lambda one: one.exists), self.input.number(6)
        if claim is None or self.api.documents.get(claim.name) is not claim.document:
            return
        if how >= 3:
            self.api.documents[claim.name] = {"metadata": claim.document["metadata"], "status": {"allocation": 3}}
        else:
            self._delete(claim, how)

    def _delete(self, claim: Claim, how: int) -> None:
        if self.api.documents.get(claim.name) is not claim.document:
            return
        claim.exists = False
        for driver in claim.drivers:
            self.oracle.withdraw((driver, claim.uid))
        self.api.forget(claim.uid, ("gone", "deallocated", "replaced")[how])
        if how == 2:
            claim.document["metadata"]["uid"] = f"new-{claim.uid}"

    async def do_mend(self) -> None:
        """Repairs the API server and makes every claim readable."""
        self.api.error_type, self.api.delay, self.api.endless = None, 0.0, False
        for claim in self.claims:
            if claim.exists:
                self.api.documents[claim.name] = claim.document

    async def do_share(self) -> None:
        """Adds a second pod to a claim's reservedFor."""
        claim = self.pick()
        if claim is not None and claim.exists:
            pods = claim.document["status"]["reservedFor"]
            pods.append({"resource": "pods", "name": "more", "uid": f"more-{len(pods)}"})

    async def do_hardware(self) -> None:
        """Takes CPUs offline or brings them online, and shrinks or grows hugepage pools."""
        self.oracle.note_capacity(self.capacity())
        self.offline, pages = (
            _OFFLINE[self.input.number(len(_OFFLINE))],
            _FEWER_PAGES[self.input.number(len(_FEWER_PAGES))],
        )
        if not self.on_demand:
            self.pages = pages, pages
            self.oracle.over_allocating |= pages < PAGES
        for instance in self.instances:
            instance.frontend.inventory = self.inventory

    # The end.

    async def end(self) -> None:
        """Repairs all faults. Checks that prepared claims are kept, and that everything is free once all claims are
        unprepared.
        """
        for one in self.instances:
            one.operations_left = None
        await self.drain()
        self.steps.append("end")
        await self.do_mend()
        self.offline, self.pages = _OFFLINE[0], (PAGES, PAGES)
        while len(self.instances) > 1:
            await self.do_second()
        # A failed list of claims is retried within a minute.
        await asyncio.sleep(70 if self.on_demand else 0)
        (instance,) = self.instances
        instance.backend_is_up = True
        instance.frontend.inventory = self.inventory
        self._hold(0)
        await self._later()
        self.check()
        if self.on_demand and not self.oracle.excused:
            self.oracle.check_pools(self.kernel.pages, 2 * MI)
        await self._prepare_again(instance)
        self.oracle.running.clear()
        self._hold(0)
        for claim in [one for one in self.claims if one.called]:
            for driver in claim.drivers:
                self.call("unprepare", driver, (claim,), instance)
        await self.drain()
        demand(not any(one.called for one in self.claims), "a claim cannot be unprepared")
        self.api.documents.clear()
        await self._later()
        self.check()
        self._check_free(instance)
        await self._check_all_can_be_claimed(instance)

    async def _later(self) -> None:
        """Waits until recovery, the list of all claims and the comparison of all claims are complete."""
        for number in range(20):
            for instance in self.instances:
                instance.frontend.now += 700
                if instance.frontend.recovery.must_list:
                    # The wait until the next list takes minutes, or an hour if the previous ones failed.
                    await instance.start(instance.frontend.recovery.list_all())
            await asyncio.sleep(4)
            await self.settle_calls()
            if number >= 2 and (self.api.documents or not read_files(self.path / "cdi")):
                break
        # The most recently released resources become free only after the backend has been notified.
        await asyncio.sleep(6)

    async def _prepare_again(self, instance: Instance) -> None:
        """Repeats Prepare for every claim whose CPUs or pages were not lost; the response must be the same."""
        surviving = [key for key, promise in self.oracle.promises.items() if promise.survives]
        before = len(self.steps)
        for driver, uid in surviving:
            self.call("prepare", driver, (self.claim(uid),), instance)
        await self.drain()
        failed = [text for text in self.steps[before:] if not text.endswith(": ok")]
        demand(not failed, f"claims that were prepared cannot be prepared again: {failed}")

    def _check_free(self, instance: Instance) -> None:
        ledger = instance.frontend.store.ledger
        files = sorted(read_files(self.path / "cdi"))
        demand(not files, f"files of claims that do not exist: {files}")
        left = (*ledger.files, *ledger.releasing, *ledger.absent, *ledger.held_cpus(), *ledger.claimed_bytes())
        demand(not left and not ledger.needs_listing, f"still allocated: {left}, unlisted {ledger.needs_listing}")

    async def _check_all_can_be_claimed(self, instance: Instance) -> None:
        for device in self.inventory.devices.values():
            if isinstance(device, CpuDevice):
                await self._claim_all(instance, CPU_DRIVER, builders.cpus(device.amount, "all", device.name))
            elif device.hugepages:
                size = f"{device.amount // MI}Mi"
                await self._claim_all(
                    instance, MEMORY_DRIVER, builders.memory(size, "all", device.numa_node, "hugepages-2m")
                )

    async def _claim_all(self, instance: Instance, driver: str, result: dict[str, Any]) -> None:
        uid = f"u{next(self.numbers)}"
        document = builders.claim(uid, result)
        self.api.add(document)
        near = NODE_CPUS[0] | NODE_CPUS[1]
        self.claims.append(Claim(uid, f"claim-{uid}", document, (driver,), {}, near))
        await asyncio.sleep(12 if self.on_demand else 0)
        self.call("prepare", driver, (self.claims[-1],), instance)
        await self.drain()
        demand((driver, uid) in self.oracle.promises, f"not everything is free: {self.steps[-1]}")


def _amount(result: dict[str, Any]) -> int:
    consumed = result["consumedCapacity"]
    if result["driver"] == CPU_DRIVER:
        return int(consumed["dra.cpu/cpu"])
    return int(consumed["size"].removesuffix("Mi")) * MI


_WEIGHTS: Final = {
    "create": 3,
    "pod": 8,
    "prepare": 6,
    "prepare_all": 6,
    "unprepare": 7,
    "start": 4,
    "stop": 2,
    "cancel": 1,
    "backend": 2,
    "wait": 4,
    "later": 3,
    "lose": 4,
    "lose_journal": 1,
    "restart": 5,
    "kill": 3,
    "second": 2,
    "server": 3,
    "delete": 2,
    "mend": 4,
    "share": 1,
    "hardware": 2,
}
_TABLE: Final = tuple(name for name, weight in _WEIGHTS.items() for _ in range(weight))


def trace(data: bytes) -> list[str]:
    """Runs a trace and returns its steps. Raises BrokenRuleError, or the exception that ended an essential task."""
    random.seed(0)
    backoff._JITTER.seed(0)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="trace", dir=shared if shared.is_dir() else None) as held:
        path = Path(held, "node")
        path.mkdir()
        disk = Disk(path)
        node = Trace(path, disk, data)
        try:
            simulate(disk, node.run())
        except Exception as error:
            raise BrokenRuleError(f"{error!r}\n" + "\n".join(node.steps)) from error
    return node.steps


def _parse(data: bytes) -> None:
    trace(data)


TARGETS: Final = (
    Target(
        "frontend-machine",
        _parse,
        st.binary(min_size=40, max_size=MAX_BYTES),
        milliseconds=3000,
        max_bytes=MAX_BYTES,
        examples=25,
    ),
)
