# SPDX-License-Identifier: Apache-2.0
"""A node for backend_machine.py: kernel, kubelet and container runtime around real instances of the backend.

The kernel is the tree from tests/rigs that behaves like cgroup2. The kubelet and the frontend prepare claims as their
contract requires: no CPU is in two claims while a container of one of them is running. The runtime calls every
connected instance, in the order in which they connected, and continues without an instance that dies during a call.
"""

import asyncio
import contextlib
import copy
import os
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from nri_backend.containers.state import NodeState
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.enforcement.reconciler import Deps
from nri_backend.enforcement.recorder import EnforcementRecord, EnforcementRecords, Pins
from nri_backend.limits.runtime import cgroup_directory
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.model import Host
from nri_backend.nri.model import Container, ContainerState, Pod, RejectedError, Resources, Update
from nri_backend.problems import NO_PROBLEM
from nri_backend.telemetry import Telemetry
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.names import cdi_file_name
from numa_contract.records import AllocationRecord
from numa_node.claim_directory import ClaimDirectory, stamp_clock_ns

from tests.rigs.builders import env_of, write_claim
from tests.rigs.containers import NO_SUCH_KERNEL, container, pod
from tests.rigs.kernel_tree import SIZES, KernelTree
from tests.rigs.partition_tree import PARTITION, PartitionTree

CPUS: Final = parse_cpu_list("0-7")
EFFECTIVE: Final = "cpuset.cpus.effective"
PAGES: Final = "hugetlb.2MB.max"
OWN_POD: Final = "own"
PODS: Final = 3
HOOK_SECONDS: Final = 1.5
TICK: Final = 2.05
"""A little longer than one audit tick."""
IDLE: Final = 6.05
"""A little longer than one tick on a node without claims."""
FULL: Final = 66.0
"""Seconds within which every instance completes a full audit and the repair that follows it. The plain files of the
simulated kernel cannot be polled, so only a full audit finds a partition that another process has broken.
"""
_BASE_NS: Final = stamp_clock_ns() + 3600 * 10**9


class KilledError(BaseException):
    """The instance died at this write."""


@dataclass(slots=True)
class Power:
    """Number of writes that the instance may still make; None means unlimited."""

    left: int | None = None
    dead: bool = False

    def spend(self) -> None:
        """Counts a write. Raises KilledError if the instance dies before it."""
        if self.left is not None:
            self.left -= 1
            self.dead |= self.left < 0
        if self.dead:
            raise KilledError


class PoolKernel(KernelTree):
    """A kernel that kills processes on request, as seen by an instance that may die at any write."""

    power = Power()

    def write(self, path: str, name: str, text: str) -> None:
        """Writes a file for the instance, unless the instance dies before this write. Writing ``cgroup.kill`` kills the
        processes.
        """
        self.power.spend()
        super().write(path, name, text)
        if name == "cgroup.kill":
            self.set(path, "cgroup.events", "populated 0\nfrozen 0")

    def seen_by(self, power: Power) -> "PoolKernel":
        """Returns the same tree as seen by one instance."""
        twin = copy.copy(self)
        twin.power = power
        return twin


class PartitionKernel(PoolKernel, PartitionTree):
    """A kernel that also supports cpuset partitions."""


class _Records(EnforcementRecords):
    power = Power()

    def write(self, records: Sequence[EnforcementRecord]) -> dict[str, OSError | None]:
        results: dict[str, OSError | None] = {}
        for record in records:
            self.power.spend()
            results |= super().write([record])
        return results

    def write_pins(self, pins: Pins) -> None:
        self.power.spend()
        super().write_pins(pins)


@dataclass(slots=True)
class Claim:
    """A claim and its file."""

    uid: str
    record: AllocationRecord | None = None
    """The last record, or None before the first Prepare."""
    readable: bool = False
    present: bool = False


@dataclass(slots=True)
class Box:
    """A container, as seen by the runtime and the kernel."""

    container: Container
    pod: Pod
    path: str
    named: dict[str, AllocationRecord]
    """Records of the claims that the container's environment names, as they were when the container was created."""
    phase: str = "created"
    """``created``, ``running``, ``lingering`` (the runtime considers it exited, but a process remains) or ``ended``."""
    held: set[str] = field(default_factory=set)
    """Claims that an active instance has enforced for the container. The container keeps them while it is running."""
    forged: bool = False
    """True if its environment contains values that differ from the claims' values."""
    ended_before: object = None
    """The active instance that was notified of the container's end while one of its processes remained."""
    listed: bool = True
    """Whether the runtime still knows about the container."""
    superseded: bool = False
    """True if its pod has a later container with the same name, so the kubelet never starts this one."""
    may_run: bool = False
    """True if a runtime snapshot has listed the container as created. It may start without an event, so it keeps its
    claims.
    """

    @property
    def id(self) -> str:
        """Returns the container's id."""
        return self.container.id

    @property
    def user(self) -> tuple[str, str]:
        """Returns the pod and the name, which stay the same when the container is restarted."""
        return self.pod.uid, self.container.name


class Instance:
    """An instance of the backend and its tasks."""

    def __init__(self, world: "World") -> None:
        self.power = Power()
        self.tree = world.kernel.seen_by(self.power)
        records = _Records(str(world.root), self.tree)
        records.power = self.power
        deps = Deps(
            directory=ClaimDirectory(str(world.cdi), clock_ns=world.stamp_ns),
            tree=self.tree,
            read_host=world.read_host,
            enforcement_records=records,
            leadership=lambda: world.leadership(self),
            telemetry=Telemetry(),
            clock=asyncio.get_running_loop().time,
        )
        state = NodeState(world.config)
        state.set_host(world.read_host())
        self.enforcer = Enforcer(deps, state, OWN_POD)
        self.connected = False
        self.task = asyncio.create_task(self.enforcer.run_forever())

    async def bury(self) -> None:
        """Kills the instance, and closes the files that would otherwise stay open until its process exits."""
        self.power.dead = True
        self.task.cancel()
        await asyncio.wait({self.task})
        reconciler = self.enforcer.reconciler
        for detector in (*reconciler.detectors.values(), reconciler.group_detector):
            await detector.find_changed([])


class World:
    """The node. Its methods are actions of the node's components; none of them checks the backend."""

    def __init__(self, root: Path, config: Config, *, partitions: bool) -> None:
        self.root, self.cdi, self.config = root, root / "cdi", config
        self.cdi.mkdir()
        self.kernel: PoolKernel = (PartitionKernel if partitions else PoolKernel)(root / "cgroup")
        self.partitions = partitions
        self.online = CPUS
        self.claims: dict[str, Claim] = {}
        self.boxes: dict[str, Box] = {}
        self.generations = [0] * PODS
        self.limits: dict[str, str] = {}
        """The limit on 2 MiB pages that the kubelet last wrote for each pod, by cgroup."""
        self.errors: set[tuple[str, str]] = set()
        """Path and name of each file that refuse() applies to."""
        self.instances: list[Instance] = []
        self.active: Instance | None = None
        self.phantoms: set[tuple[str, str]] = set()
        """Pod and name of containers whose creation one instance has accepted and another has rejected."""
        self.unquiet = 0.0
        """Seconds that must pass before the backend can be expected to have handled all events."""
        self.doubt = 0.0
        """Seconds that must pass before a rejection counts as a fault."""
        self._stamps = self._ids = 0
        self._specs: dict[tuple[str, str], tuple[tuple[str, ...], bool]] = {}
        """For each container, by pod and name: its claims, and whether its variables are forged."""

    # The kernel and the machine.

    @property
    def by_kernel(self) -> bool:
        """Returns True if claims become partitions."""
        return self.partitions and self.config.cpu_exclusivity != "pool"

    def read_host(self) -> Host:
        """Returns the machine as an instance reads it."""
        return Host(self.online, SIZES, self.partitions, NO_PROBLEM if self.partitions else NO_SUCH_KERNEL)

    def stamp_ns(self) -> int:
        """Returns the timestamp that a file written now would get, according to the loop's clock."""
        return _BASE_NS + int(asyncio.get_running_loop().time() * 1e9) + self._stamps

    def hotplug(self, online: frozenset[int]) -> None:
        """Takes CPUs offline or brings them back."""
        self.online = online
        for tree in (self.kernel, *(instance.tree for instance in self.instances)):
            tree.online = format_cpu_list(online)
        for top in self.kernel.children(""):
            self.kernel.settle(top)

    def exists(self, box: Box) -> bool:
        """Returns True if the container's cgroup exists."""
        return self.kernel.path(box.path).exists()

    def living(self) -> list[Box]:
        """Returns the containers with a running process."""
        return [
            box
            for box in self.boxes.values()
            if box.phase in ("running", "lingering")
            and self.exists(box)
            and "populated 1" in self.kernel.get(box.path, "cgroup.events")
        ]

    def cpus(self, box: Box) -> frozenset[int]:
        """Returns the CPUs that the kernel allows a container to run on."""
        return parse_cpu_list(self.kernel.get(box.path, EFFECTIVE))

    def refuse(self, path: str, name: str, number: int) -> None:
        """Makes all instances' writes to a file fail."""
        self.kernel.refused[path, name] = number
        self.errors.add((path, name))

    def heal(self) -> None:
        """Undoes refuse()."""
        for error in self.errors:
            self.kernel.refused.pop(error, None)
        self.errors.clear()

    def shake(self, seconds: float = TICK, *, doubt: bool = True) -> None:
        """Records that the backend needs time to handle an event; with ``doubt``, it may reject containers
        during that time.
        """
        self.unquiet = max(self.unquiet, seconds)
        self.doubt = max(self.doubt, seconds if doubt else 0.0)

    @property
    def tick(self) -> float:
        """Returns the number of seconds within which a tick finds changes that no event reports (docs/adr/0032)."""
        claims = any(claim.present for claim in self.claims.values())
        return TICK if claims or any(box.named and box.phase != "ended" for box in self.boxes.values()) else IDLE

    # The kubelet and the frontend.

    def pod_uid(self, number: int) -> str:
        """Returns the UID of the pod that currently has this index."""
        return f"p{number}g{self.generations[number]}"

    def occupied(self, uid: str) -> frozenset[int]:
        """Returns the CPUs of other claims and of running containers."""
        taken = [claim.record for claim in self.claims.values() if claim.uid != uid and claim.present]
        taken += [one for box in self.boxes.values() if box.phase != "ended" for one in box.named.values()]
        return frozenset[int]().union(*(record.cpus_of() for record in taken if record is not None))

    def in_use(self, uid: str) -> list[Box]:
        """Returns the containers that name a claim and have not exited."""
        return [box for box in self.boxes.values() if box.phase != "ended" and uid in box.named]

    def write_record(self, record: AllocationRecord) -> None:
        """Writes a claim's file."""
        uid = record.claim.uid
        write_claim(self.cdi, record)
        self.claims[uid] = Claim(uid, record, readable=True, present=True)
        self._stamp()

    def remove_file(self, claim: Claim) -> None:
        """Removes a claim's file if it exists."""
        if claim.present and claim.record is not None:
            (self.cdi / cdi_file_name(claim.record.driver, claim.uid)).unlink()
            claim.present = claim.readable = False
            self._stamp()
        if self.unquiet:
            # Without claims, the backend finds unnoticed changes only on the next idle tick.
            self.shake(self.tick, doubt=False)

    def damage_file(self, claim: Claim) -> None:
        """Makes the record in a claim's file unreadable; the environment in it stays readable."""
        if claim.present and claim.record is not None:
            path = self.cdi / cdi_file_name(claim.record.driver, claim.uid)
            text = path.read_text().replace('"dra-driver-numa/record": "{', '"dra-driver-numa/record": "?{')
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text)
            temporary.rename(path)
            claim.readable = False
            self._stamp()

    def _stamp(self) -> None:
        self._stamps += 1
        os.utime(self.cdi, ns=(self.stamp_ns(), self.stamp_ns()))

    def announce(self) -> None:
        """Notifies all instances that records have changed, as the frontend does."""
        for instance in self.instances:
            instance.enforcer.records_changed()

    # The container runtime.

    def leadership(self, asking: Instance) -> Leadership:
        """Returns the lock state that an instance sees."""
        active = self.active
        if active is None or active not in self.instances or asking not in self.instances:
            return Leadership(fresh=False, first=False)
        return Leadership(fresh=True, first=self.instances.index(active) < self.instances.index(asking))

    async def bury(self, instance: Instance) -> None:
        """Kills an instance; the instance that connected next takes over."""
        self.shake()
        self.instances.remove(instance)
        await instance.bury()
        if self.active is instance:
            self.active = None
            for heir in self.instances[:1]:
                await self.activate(heir)

    async def activate(self, instance: Instance) -> None:
        """Gives an instance the lock."""
        self.active = instance
        await self._survive(instance, instance.enforcer.activate())

    async def connect(self, instance: Instance) -> None:
        """Sends an instance the runtime's state."""
        known = [box for box in self.boxes.values() if box.listed]
        for box in known:
            box.may_run = box.may_run or box.phase == "created"
        states = {"created": ContainerState.CREATED, "running": ContainerState.RUNNING}
        listed = [replace(box.container, state=states.get(box.phase, ContainerState.STOPPED)) for box in known]
        pods = {box.pod.id: box.pod for box in known}
        updates = await self._survive(instance, instance.enforcer.synchronize(list(pods.values()), listed))
        instance.connected = True
        self._apply(updates or [])

    async def begin(self) -> None:
        """Starts an instance, which connects and becomes active if no other one is."""
        instance = Instance(self)
        self.instances.append(instance)
        await asyncio.sleep(0)
        await self.connect(instance)
        if self.active is None:
            await self.activate(instance)

    async def _survive(self, instance: Instance, work: Any) -> Any:
        try:
            return await work
        except KilledError:
            if instance in self.instances:
                await self.bury(instance)
            return None

    async def _ask(self, hook: str, of: Pod, *args: Any) -> AsyncIterator[Any]:
        """Yields the response of each instance to a hook. Raises RejectedError, or AssertionError for any other
        error.
        """
        for instance in tuple(self.instances):
            if not instance.connected:
                continue
            try:
                async with asyncio.timeout(HOOK_SECONDS):
                    yield await getattr(instance.enforcer, hook)(of, *args)
            except KilledError:
                if instance in self.instances:
                    await self.bury(instance)
            except TimeoutError as error:
                raise RejectedError(f"{hook} was not answered in time") from error
            except RejectedError:
                raise
            except Exception as error:
                raise AssertionError(f"{hook} raised {error!r}") from error

    def describe(self, number: int, name: str, uids: Iterable[str], *, forged: bool = False) -> Box:
        """Returns a container that is about to be created. With ``forged``, its pod's author has changed the variables.

        Each attempt to create the same container uses the claims and the variables of the first attempt, because a
        pod's spec is constant.
        """
        of = pod(OWN_POD if number < 0 else self.pod_uid(number))
        uids, forged = self._specs.setdefault((of.uid, name), (tuple(uids), forged))
        named = {uid: record for uid in uids if (record := self.claims[uid].record) is not None}
        env = [entry for record in named.values() for entry in env_of(record)]
        if forged:
            env = [f"{entry.partition('=')[0]}=0-7" for entry in env]
        self._ids += 1
        one = container(f"c{self._ids}", *env, of=of.uid, name=name)
        one = replace(one, pod_id=of.id)
        return Box(one, of, cgroup_directory(one.cgroups_path), named, forged=forged)

    async def create(self, box: Box) -> None:
        """Creates a container, and its cgroup with the values from the response. Raises RejectedError."""
        one = box.container
        for instance in tuple(self.instances):
            if not instance.connected:
                continue
            try:
                async with asyncio.timeout(HOOK_SECONDS):
                    answer = await instance.enforcer.create_container(box.pod, one)
            except KilledError:
                if instance in self.instances:
                    await self.bury(instance)
                continue
            except TimeoutError as error:
                raise RejectedError("CreateContainer was not answered in time") from error
            self.phantoms.add(box.user)
            env = (*one.env, *(f"{key}={value}" for key, value in answer.env.items()))
            one = replace(one, env=env, resources=_merged(one.resources, answer.resources))
        self.phantoms.discard(box.user)
        box.container = replace(one, state=ContainerState.CREATED)
        self.boxes[box.id] = box
        self._make_cgroups(box)

    def _make_cgroups(self, box: Box) -> None:
        parent = cgroup_directory(box.pod.cgroup_parent)
        if not self.kernel.path(parent).exists():
            self.kernel.make(parent)
            self.kernel.set(parent, PAGES, "0")
            self.kernel.set(parent, "hugetlb.1GB.max", "0")
            self.limits[parent] = "0"
        self.kernel.make(box.path)
        self._write(box, box.container.resources)

    def _write(self, box: Box, resources: Resources) -> None:
        # Stock containerd applies CPUs and mems but drops hugepage limits.
        for name, text in (("cpuset.cpus", resources.cpus), ("cpuset.mems", resources.mems)):
            if text and self.exists(box):
                self.kernel.set(box.path, name, text)

    def _apply(self, updates: Iterable[Update]) -> None:
        for update in updates:
            if (box := self.boxes.get(update.container_id)) is not None:
                stored = _merged(box.container.resources, update.resources)
                box.container = replace(box.container, resources=stored)
                self._write(box, update.resources)

    async def start(self, box: Box) -> None:
        """Starts a container. Raises RejectedError if the start is rejected; the container has then exited."""
        try:
            async for _ in self._ask("start_container", box.pod, box.container):
                pass
        except RejectedError:
            self.vanish(box)
            box.phase = "ended"
            raise
        if self.exists(box):
            box.phase = "running"

    async def update(self, box: Box, wanted: Resources) -> None:
        """Updates a container's resources as the kubelet does."""
        async for updates in self._ask("update_container", box.pod, box.container, wanted):
            for update in updates:
                wanted = _merged(wanted, update.resources)
        self._apply([Update(box.id, wanted)])

    def begin_to_vanish(self, box: Box) -> None:
        """Kills all of a container's processes and removes its partition, as the kernel does before it removes a
        cgroup.
        """
        self.kernel.set(box.path, "cgroup.events", "populated 0\nfrozen 0")
        if self.partitions:
            self.kernel.set(box.path, PARTITION, "member")

    def vanish(self, box: Box) -> None:
        """Kills all of a container's processes and removes its cgroup; the runtime does not send an event."""
        if self.exists(box):
            self.kernel.remove(box.path)

    async def stop(self, box: Box, *, lingering: bool = False) -> None:
        """Stops a container. With ``lingering``, one of its processes cannot be killed yet."""
        if not lingering:
            self.vanish(box)
        box.phase = "lingering" if lingering and box.phase == "running" else "ended"
        if box.phase == "ended":
            self.vanish(box)
        box.ended_before = self.active
        async for _ in self._ask("stop_container", box.pod, box.container):
            pass

    async def remove(self, box: Box) -> None:
        """Removes a container from the runtime's list, whether or not it has exited."""
        if box.phase in ("created", "running"):
            await self.stop(box)
        box.listed = False
        async for _ in self._ask("remove_container", box.pod, box.container):
            pass
        self.sweep()

    async def remove_pod(self, number: int) -> None:
        """Removes a pod with all of its containers; another pod gets its index."""
        uid = self.pod_uid(number)
        members = [box for box in self.boxes.values() if box.pod.uid == uid]
        for box in members:
            await self.remove(box)
            self.vanish(box)
        of = pod(uid)
        async for _ in self._ask("remove_pod", of):
            pass
        if self.kernel.path(cgroup_directory(of.cgroup_parent)).exists():
            self.kernel.remove(cgroup_directory(of.cgroup_parent))
        self.phantoms = {user for user in self.phantoms if user[0] != uid}
        self.sweep()
        self.generations[number] += 1

    def sweep(self) -> None:
        """Removes the containers that neither the runtime nor the kernel knows about."""
        for box in tuple(self.boxes.values()):
            if box.phase == "lingering" and not self.exists(box):
                box.phase = "ended"
            if box.phase == "ended" and not box.listed:
                del self.boxes[box.id]

    async def wait(self, seconds: float) -> None:
        """Advances the clock. Raises AssertionError if a task of a live instance has stopped."""
        await asyncio.sleep(seconds)
        for instance in tuple(self.instances):
            if not instance.task.done():
                continue
            error = None if instance.task.cancelled() else instance.task.exception()
            assert isinstance(error, KilledError), f"the enforcement task has ended: {error!r}"
            await self.bury(instance)
        self.unquiet = 0.0 if seconds >= self.unquiet else self.unquiet
        self.doubt = 0.0 if seconds >= self.doubt else self.doubt

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["World"]:
        """Yields the world, and kills all instances at the end of the block."""
        try:
            yield self
        finally:
            self.active = None
            for instance in tuple(self.instances):
                self.instances.remove(instance)
                await instance.bury()


def _merged(first: Resources, then: Resources) -> Resources:
    return replace(
        first,
        cpus=then.cpus or first.cpus,
        mems=then.mems or first.mems,
        hugepage_limits={**first.hugepage_limits, **then.hugepage_limits},
    )
