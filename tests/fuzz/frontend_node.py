# SPDX-License-Identifier: Apache-2.0
"""A node with frontends, their backends and a kubelet, on a simulated clock."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final

from dra_frontend.claims.backend import read_state
from dra_frontend.claims.journal import Journal
from dra_frontend.claims.on_demand import HugepagesOnDemand
from dra_frontend.claims.store import ChangeFeed
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.devices.shortages import Shortages
from dra_frontend.kubelet.dra import ClaimName, ClaimResult, DraService
from dra_frontend.node.hugepage_pools import KernelPools
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_DRIVER
from numa_contract.reports import BackendStatus
from numa_node.ticks import each_tick

from tests.fuzz.frontend_oracle import BrokenRuleError, Key, Oracle, Promise, Running, demand, read_files
from tests.fuzz.frontend_world import PAGES, Claim, Input, Instance, Kernel, Server, config_of, inventory_of
from tests.rigs.frontend import Frontend
from tests.rigs.simulation import Disk, KilledError, Process

CALL_SECONDS: Final = 45.0
"""The kubelet's time limit for a call."""
_MAX_CLAIMS: Final = 8
"""A step can apply only to this many of the most recent claims."""


class _Time:
    """The time limit for a gRPC call."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def time_remaining(self) -> float:
        """Returns the number of seconds until the call's deadline."""
        return self._seconds


@dataclass(eq=False, slots=True)
class Call:
    """A call from the kubelet that is in progress."""

    kind: str
    driver: str
    claims: tuple[Claim, ...]
    instance: Instance
    task: "asyncio.Task[None]"
    journal_was_lost: bool = False
    """True if the journal was lost while the call was in flight. If the call had already written the claim's release to
    the journal, that entry was lost as well.
    """


class Node:
    """The node. The bytes of a trace choose its configuration."""

    def __init__(self, path: Path, disk: Disk, data: bytes) -> None:
        self.path, self.disk, self.input = path, disk, Input(data)
        self.api = Server()
        self.group_by = ("numanode", "machine")[self.input.number(2)]
        self.oracle = Oracle(path / "cdi", over_allocating=bool(self.input.number(2)))
        self.metadata = self.input.number(4) == 3
        self.on_demand = self.input.number(4) == 3
        self.config = config_of(self.group_by, self.on_demand)
        self.offline, self.pages = frozenset[int](), (PAGES, PAGES)
        self.kernel = Kernel(path.parent / "host")
        self.journal = Journal(path / "claims.journal")
        """Reader of the journal that the instances share. If the file is damaged, it keeps the last entries that it has
        read.
        """
        self.instances: list[Instance] = []
        self.claims: list[Claim] = []
        """Every claim in the trace, including those that are gone."""
        self.calls: list[Call] = []
        self.numbers = count(1)
        self.lives = count(1)
        self.steps: list[str] = []
        self.broken: BrokenRuleError | None = None
        """A rule that was broken by a response to the kubelet."""
        disk.after_job = self._after_job

    # The frontends.

    @property
    def inventory(self) -> Inventory:
        """Returns the node's current devices."""
        return inventory_of(self.config, self.offline, self.kernel.pages if self.on_demand else self.pages)

    async def begin(self, operations: int | None = None) -> None:
        """Starts an instance. ``operations`` is the number of file operations after which it is killed."""
        more: dict[str, Any] = {"enforced": False, "metadata": self.metadata, "config": self.config, "wait": 20.0}
        made = Frontend(self.path, self.inventory, api=self.api, **more)
        instance = Instance(made)
        life = next(self.lives)
        made.backend.clock = asyncio.get_running_loop().time
        made.store.change_feed = ChangeFeed(life * 1_000_000)
        made.reconciler._clock = lambda: made.now
        instance.operations_left = operations
        self.instances.append(instance)
        starting = instance.start(made.store.start())
        await asyncio.wait([starting])
        if instance.dead:
            await self.bury()
            return
        starting.result()
        self.beat(instance)
        works = [
            made.recovery.run(),
            made.reconciler.run_reports(),
            made.reconciler.run_scans(),
            each_tick(made.reconciler.sweep_next),
        ]
        if self.on_demand:
            pools = KernelPools(self.kernel.tree)
            books = lambda: made.store.ledger, lambda: made.inventory
            clock = asyncio.get_running_loop().time
            pages = HugepagesOnDemand(self.api, pools, *books, self.config, Shortages(clock), clock=clock)
            works += [pages.claims.follow(), each_tick(pages.provide)]
        instance.essential = [instance.start(work) for work in works]
        instance.start(each_tick(partial(self._beat, instance)))

    def _after_job(self, process: Process) -> None:
        """Updates ``process.memory``, the test's copy of the CPUs that a process has in memory. If the process is dead,
        clears the copy, and has the oracle mark the claims whose CPUs are now lost.
        """
        assert isinstance(process, Instance)
        if process.dead:
            process.memory = {}
            self.forget()
        else:
            seen = process.memory | {key: file.cpus for key, file in read_files(self.path / "cdi").items()}
            process.memory = {key: cpus for key, cpus in seen.items() if key not in self.oracle.unprepared}

    def forget(self) -> None:
        """Has the oracle mark the claims whose CPUs are no longer recorded anywhere."""
        alive = [one for one in self.instances if not one.dead]

        def remembered(key: Key, cpus: frozenset[int]) -> bool:
            # Either of two processes may get the next call, so both must have these CPUs in memory. A process that
            # started after the file was lost does not know the CPUs, and a process that has not read the files since an
            # earlier loss may have other CPUs in memory.
            if alive and all(one.memory.get(key) == cpus for one in alive):
                return True
            requests = Journal(self.path / "claims.journal").read().cpus.get(key, {})
            return frozenset[int]().union(*requests.values()) == cpus != frozenset()

        self.oracle.forget(remembered)

    async def bury(self) -> None:
        """Removes killed instances and starts one if none remains, as the kubelet restarts a container."""
        for instance in [one for one in self.instances if one.dead]:
            await instance.kill()
            self.instances.remove(instance)
            self.forget()
        if not self.instances:
            await self.begin()
        for instance in self.instances:
            self.beat(instance)

    # The backends.

    @property
    def active(self) -> Instance | None:
        """Returns the instance whose backend is enforcing claims: the oldest instance with a running backend."""
        return next((one for one in self.instances if not one.dead and one.backend_is_up), None)

    async def _beat(self, instance: Instance) -> None:
        self.beat(instance)

    def beat(self, instance: Instance) -> None:
        """Renews the lease of the instance's backend. Also sends the reports of all containers, unless the backend's
        reports are delayed.
        """
        if not instance.backend_is_up or instance.dead:
            return
        made, reports = instance.frontend, None
        made.inventory = self.inventory
        now = asyncio.get_running_loop().time()
        if instance.generation == 0 or now >= instance.reports_held_until:
            instance.generation += 1
            instance.read_generation = made.store.change_feed.generation if now >= instance.reads_from else None
            reports = self._reports()
        active = self.active
        status = BackendStatus(
            instance=f"backend-{id(instance)}-{instance.backend_runs}",
            generation=instance.generation,
            records=instance.read_generation,
            active=instance is active,
            enforced=active is not None,
            synchronized=True,
        )
        if reports is None:
            made.backend.renew(status)
        else:
            _report(instance, status, {report["id"]: report for report in reports})
        made.backend.notify_change()

    def _reports(self) -> list[dict[str, Any]]:
        files = {key for key, file in read_files(self.path / "cdi").items() if file.whole}
        reports = []
        for uid, container in self.oracle.running.items():
            uses: dict[str, list[dict[str, Any]]] = {"claims": [], "unknownClaims": []}
            for driver in self.claim(uid).drivers:
                names = {device: device.removeprefix(f"claim-{uid}").removeprefix("-") for device in container.cpus}
                if (driver, uid) in files:
                    requests = [name for name in names.values() if name] if driver == CPU_DRIVER else []
                    uses["claims"].append({"uid": uid, "driver": driver, "requests": requests})
                elif driver == CPU_DRIVER:
                    for device, cpus in container.cpus.items():
                        named = [names[device]] if names[device] else []
                        shown = {"requests": named, "cpus": format_cpu_list(cpus)}
                        uses["unknownClaims"].append({"uid": uid, "driver": driver} | shown)
                else:
                    uses["unknownClaims"].append({"uid": uid, "driver": driver})
            known = {"id": f"c-{uid}", "name": "work", "podUid": container.pod, "podNamespace": "ns", "podName": "p"}
            limits = {"hugetlb.2MB.max": str(sum(container.pages.values()))} if container.pages else {}
            more = {"cpus": format_cpu_list(container.all_cpus), "mems": _mems(container), "limits": limits}
            reports.append(known | more | uses | {"state": "running"})
        return reports

    # The kubelet.

    def claim(self, uid: str) -> Claim:
        """Returns the claim with this UID."""
        return next(one for one in self.claims if one.uid == uid)

    def pick(self, fits: Callable[[Claim], object] = lambda _: True) -> Claim | None:
        """Returns one of the last claims that the step can apply to, or None."""
        recent = [one for one in self.claims if fits(one)][-_MAX_CLAIMS:]
        return recent[self.input.number(len(recent))] if recent else None

    def is_called(self, claim: Claim, kind: str = "") -> bool:
        """Returns True if a call for the claim is in flight."""
        return any(claim in call.claims and kind in ("", call.kind) for call in self.calls)

    def call(self, kind: str, driver: str, claims: tuple[Claim, ...], instance: Instance) -> None:
        """Starts a call from the kubelet."""
        call = Call(kind, driver, claims, instance, None)  # type: ignore[arg-type]
        seconds = (CALL_SECONDS, CALL_SECONDS, CALL_SECONDS, 5.0)[self.input.number(4)]
        call.task = instance.start(self._run(call, seconds))
        self.calls.append(call)
        for claim in claims:
            key = driver, claim.uid
            claim.called.add(driver)
            if kind == "prepare":
                self.oracle.unprepared.discard(key)
            else:
                self.oracle.withdraw(key)

    async def _run(self, call: Call, seconds: float) -> None:
        time = asyncio.get_running_loop().time
        began = time()
        names = tuple(ClaimName("ns", one.name, one.uid) for one in call.claims)
        service = DraService(call.driver, call.instance.frontend.claims)
        answers = await service.run_call(call.kind, names, _Time(seconds))  # type: ignore[arg-type]
        if call.instance.dead:
            return  # The trace killed the process before the response was sent.
        try:
            demand(time() - began <= seconds, f"{call.kind} took {time() - began} of {seconds} s")
            for claim in call.claims:
                self._answered(call, claim, answers[claim.uid])
        except BrokenRuleError as error:
            self.broken = self.broken or error

    def _answered(self, call: Call, claim: Claim, answer: ClaimResult) -> None:
        key, text = (call.driver, claim.uid), answer.error
        self.steps.append(f"{call.kind} {key}: {text or 'ok'}")
        if text is not None:
            demand(claim.name in text, f"{call.kind} of {key} failed without the claim's name in the message: {text}")
            demand("internal error" not in text and "report this bug" not in text, text)
        elif call.kind == "unprepare":
            claim.called.discard(call.driver)
            # If the journal was lost during the call, the release may have been lost with it, so this response is not
            # recorded.
            if not call.journal_was_lost:
                self.oracle.unprepare(key)
        else:
            demand(answer.devices, f"{key} was prepared without devices")
            near = claim.near if call.driver == CPU_DRIVER else frozenset()
            promise = Promise(answer.devices, frozenset(), True, claim.pages_of(call.driver), near)
            if claim.exists:
                self.oracle.answer(key, promise)

    def capacity(self) -> dict[str, int]:
        """Returns the capacity of each hugepage device in bytes."""
        devices = self.inventory.devices.values()
        found = {one.name: one.amount for one in devices if isinstance(one, MemoryDevice) and one.hugepages}
        return {f"hugepages-2m-numa{node:03d}": 0 for node in range(2)} | found

    async def drain(self) -> None:
        """Waits until every call from the kubelet has returned."""
        while self.calls:
            tasks = [call.task for call in self.calls]
            done, _ = await asyncio.wait(tasks, timeout=2 * CALL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            demand(done, "a call does not end")
            await self.settle_calls()
        await self.settle_calls()

    async def settle_calls(self) -> None:
        """Checks calls that have returned, and tasks that must keep running."""
        if self.broken:
            raise self.broken
        for call in [one for one in self.calls if one.task.done()]:
            self.calls.remove(call)
            with suppress(asyncio.CancelledError, KilledError):
                self._raise(call.task, call.instance)
        for instance in self.instances:
            for task in instance.essential:
                if task.done() and not instance.dead:
                    self._raise(task, instance)
                    raise BrokenRuleError(f"an essential task ended: {task}")
        if any(one.dead for one in self.instances):
            await self.bury()

    def _raise(self, task: "asyncio.Task[Any]", instance: Instance) -> None:
        if instance.dead:
            task.cancelled() or task.exception()
            return
        task.result()


def _report(instance: Instance, status: BackendStatus, containers: dict[str, Any]) -> None:
    """Sends the containers that have changed, or all of them if the frontend cannot merge changes.

    A container that has exited and been started again since the last report is removed, and then added at the end.
    """
    view, (since, before) = instance.frontend.backend, instance.reported
    kept = [name for name in before if name in containers]
    removed = [name for name in before if name not in containers or kept != [*containers][: len(kept)]]
    before = {name: report for name, report in before.items() if name not in removed}
    changed = [report for name, report in containers.items() if before.get(name) != report]
    changes = {"since": since, "total": len(containers), "removed": removed, "containers": changed}
    for body in ({"changes": changes}, {"containers": [*containers.values()]}):
        view.renew(*read_state(json.dumps(json.loads(status.model_dump_json()) | body).encode()))
        if view.generation == status.generation:
            break
    demand(view.complete, "the backend's reports are not complete")
    demand([*view.containers] == [*containers], "merged reports have other containers, or another order")
    instance.reported = status.generation, containers


def _mems(container: Running) -> str:
    return format_cpu_list(int(device[-3:]) for device in container.pages)
