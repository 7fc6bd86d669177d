# SPDX-License-Identifier: Apache-2.0
"""A randomised state machine for the backend: an input is a trace of events on a node, and the oracle checks each step.

The first two bytes choose the kernel, the configuration and the thread delays. Each following group of four bytes is
one event: its kind, two arguments, and the time that passes after it. An event that is impossible is skipped, so every
input is a valid trace, and the same input always gives the same trace. ``python -m tests.fuzz --input FILE`` repeats a
failed trace. With ``TRACE=1`` in the environment, the events are printed.
"""

import errno
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from random import Random
from typing import Final

from hypothesis import strategies as st
from nri_backend.limits.runtime import cgroup_directory
from nri_backend.node.cgroups import EXCLUSIVE, PARTITION
from nri_backend.nri.model import RejectedError, Resources
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.records import Owner, PodReference

from tests.fuzz.backend_oracle import check_end, check_limits, check_settled, check_started, expected
from tests.fuzz.backend_world import CPUS, FULL, OWN_POD, PAGES, PODS, TICK, Box, Claim, PartitionKernel, World
from tests.fuzz.target import Target
from tests.fuzz.virtual_time import run
from tests.rigs.builders import MI, cpu_record, memory_record, mixed

EVENTS: Final = 48
"""Number of events in one trace."""
_BYTES: Final = 4
_HEAD: Final = 2
_PAUSES: Final = (0.0, 0.0, 0.0, 0.03, 0.03, TICK, TICK, FULL)
_DELAYS: Final = (None, None, 0.0, 0.0, 0.0005, 0.002)
_EXCLUSIVITY: Final = ("auto", "auto", "pool", "partition")
_ERRORS: Final = (errno.EPERM, errno.ENOSPC, errno.EBUSY, errno.EINVAL)
_CPU_KINDS: Final = ("exclusive", "exclusive", "exclusive", "isolated", "pod", "mixed")
_CPU_CLAIMS: Final = 5
_FILES: Final = ("cpuset.cpus", "cpuset.mems", PAGES, EXCLUSIVE, PARTITION)

_WEIGHTS: Final = {
    "prepare": 12,
    "run": 14,
    "create": 1,
    "start": 2,
    "stop": 3,
    "linger": 1,
    "remove": 2,
    "remove_pod": 1,
    "unprepare": 2,
    "damage": 1,
    "lose_all": 1,
    "add_user": 1,
    "foreign_write": 2,
    "kubelet_limit": 1,
    "update": 1,
    "offline": 2,
    "online": 2,
    "kill": 1,
    "begin": 5,
    "die_later": 1,
    "reconnect": 1,
    "refuse": 1,
    "heal": 2,
    "vanish": 1,
    "rest": 1,
}
_TABLE: Final = tuple(name for name, weight in _WEIGHTS.items() for _ in range(weight))


class Machine:
    """Turns events into actions on the world, and runs the oracle after each event."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def event(self, data: bytes) -> None:
        """Carries out one event, advances the clock, and checks the node."""
        kind, first, second, pause = data
        name = _TABLE[kind % len(_TABLE)]
        if os.environ.get("TRACE"):
            print(name, first, second, _PAUSES[pause % len(_PAUSES)], flush=True)
        await getattr(self, name)(first, second)
        await self._let_pass(_PAUSES[pause % len(_PAUSES)])

    async def _let_pass(self, seconds: float) -> None:
        world = self.world
        await world.wait(seconds)
        world.sweep()
        if seconds >= TICK:
            check_settled(world)
        if seconds >= FULL:
            check_limits(world)

    # Claims.

    async def prepare(self, first: int, second: int) -> None:
        world, number = self.world, first % (_CPU_CLAIMS + PODS)
        if world.active is None:
            return
        uid = f"c{number}" if number < _CPU_CLAIMS else f"m{number - _CPU_CLAIMS}"
        claim, pod = (
            world.claims.get(uid),
            world.pod_uid(number % PODS if number < _CPU_CLAIMS else number - _CPU_CLAIMS),
        )
        announced, tick = claim is None or second & 0x80, world.tick
        if users := world.in_use(uid):
            self._prepare_again(world.claims[uid], users)
        elif number < _CPU_CLAIMS:
            self._prepare_cpus(uid, pod, first // 8, second)
        else:
            size = (1 + second % 4) * 2 * MI
            world.write_record(memory_record(uid, ("r", second % 2, size, 2 * MI), pods=(pod,), r={}))
        if announced:
            world.announce()
        world.shake(TICK if announced else tick, doubt=False)

    def _prepare_cpus(self, uid: str, pod: str, kind: int, second: int) -> None:
        free = sorted(CPUS - {0} - self.world.occupied(uid))
        if not free:
            return
        start = second % len(free)
        cpus = frozenset((free[start:] + free[:start])[: 1 + second // 8 % 3])
        name = _CPU_KINDS[kind % len(_CPU_KINDS)]
        isolation = "isolated" if name == "isolated" else "exclusive"
        request = f"r={format_cpu_list(cpus)}"
        record = cpu_record(uid, request, pods=(pod,), pool=name == "pod", isolation=isolation)
        self.world.write_record(mixed(record, "0-3") if name == "mixed" else record)

    def _prepare_again(self, claim: Claim, users: list[Box]) -> None:
        """Writes the claim's record again, with the owner that the backend reports."""
        record = claim.record
        assert record is not None
        holders = [box for box in users if claim.uid in box.held and record.reserves(box.pod.uid)]
        if holders and record.sharing != "pod":
            owner = Owner(pod_uid=holders[0].pod.uid, container=holders[0].container.name)
            record = record.model_copy(update={"owner": owner})
        self.world.write_record(record)

    def _claim(self, first: int, *, present: bool = True) -> Claim | None:
        found = [claim for claim in self.world.claims.values() if claim.present or not present]
        return found[first % len(found)] if found else None

    async def unprepare(self, first: int, second: int) -> None:
        if (claim := self._claim(first)) is not None:
            self.world.remove_file(claim)
            if second & 1:
                self.world.announce()
            self.world.shake(TICK, doubt=False)

    async def damage(self, first: int, _second: int) -> None:
        if (claim := self._claim(first)) is not None:
            self.world.damage_file(claim)
            self.world.shake(TICK, doubt=False)

    async def lose_all(self, _first: int, _second: int) -> None:
        for claim in self.world.claims.values():
            self.world.remove_file(claim)
        self.world.shake(TICK, doubt=False)

    async def add_user(self, first: int, second: int) -> None:
        """Adds another pod that uses the claim."""
        claim = self._claim(first)
        if claim is not None and claim.readable and claim.record is not None:
            uid = self.world.pod_uid(second % PODS)
            if not claim.record.reserves(uid):
                pods = (*claim.record.reserved_for, PodReference(uid=uid, name=uid))
                self.world.write_record(claim.record.model_copy(update={"reserved_for": pods[-2:]}))
                self.world.shake(TICK, doubt=False)

    # Containers.

    def _box(self, first: int, *phases: str) -> Box | None:
        found = [box for box in self.world.boxes.values() if box.phase in phases]
        return found[first % len(found)] if found else None

    async def create(self, first: int, second: int) -> Box | None:
        world, number = self.world, first % PODS
        claims = [f"c{number}", f"m{number}", f"c{number + PODS}"]
        named = [uid for bit, uid in enumerate(claims) if second >> bit & 1]
        if second & 0xC0 == 0xC0:
            named.append(f"c{(number + 1) % PODS}")
        known = [uid for uid in named if (claim := world.claims.get(uid)) is not None and claim.record is not None]
        box = world.describe(number, "ab"[first >> 2 & 1], known, forged=second & 0x38 == 0x38)
        earlier = [one for one in world.boxes.values() if one.user == box.user and one.phase in ("created", "running")]
        # If the kubelet was restarted before it started a container, it creates another container.
        if any(one.phase == "running" or not first & 0x40 for one in earlier):
            return None
        if not await self._answered("creation", box, partial(world.create, box)):
            return None
        for one in earlier:
            one.superseded = True
        return box

    async def _answered(self, what: str, box: Box, act: Callable[[], Awaitable[None]]) -> bool:
        """Has the backend decide whether a container may start, and compares the decision with the oracle's."""
        verdict, before, rejection = expected(self.world, box), self.world.active, None
        try:
            await act()
        except RejectedError as error:
            rejection = str(error)
        if rejection is not None:
            assert rejection.strip(), f"the {what} of {box.id} was rejected without a message"
            if before is not None and before.power.dead:
                # The instance died while it was moving other containers. A real instance would not have answered.
                verdict = None
            assert verdict is not True, f"the {what} of {box.id} was rejected without a valid reason: {rejection}"
            return False
        asked = before is not None and before is self.world.active
        assert verdict is not False or not asked, (
            f"the {what} of {box.id} was accepted although it must be rejected; claims: {[*box.named]}"
        )
        return True

    async def start(self, first: int, _second: int) -> None:
        box = self._box(first, "created")
        # The process that is waiting to be started is in the cgroup, so without the cgroup there is nothing to start.
        if box is not None and not box.superseded and self.world.exists(box):
            await self._started(box)

    async def _started(self, box: Box) -> None:
        world, before = self.world, self.world.active
        if await self._answered("start", box, partial(world.start, box)) and box.phase == "running":
            if before is not None and before is world.active and before.connected:
                check_started(world, box)
            else:
                world.shake(TICK)
        elif box.phase == "ended":
            world.shake(TICK)

    async def run(self, first: int, second: int) -> None:
        if (box := await self.create(first, second)) is not None:
            await self._started(box)

    async def stop(self, first: int, _second: int) -> None:
        if (box := self._box(first, "created", "running", "lingering")) is not None:
            await self.world.stop(box)
            self.world.shake(TICK)

    async def linger(self, first: int, _second: int) -> None:
        if (box := self._box(first, "running")) is not None:
            await self.world.stop(box, lingering=True)
            self.world.shake(TICK)

    async def remove(self, first: int, _second: int) -> None:
        if (box := self._box(first, "created", "running", "lingering", "ended", "ended")) is not None:
            await self.world.remove(box)
            self.world.shake(TICK)

    async def remove_pod(self, first: int, _second: int) -> None:
        await self.world.remove_pod(first % PODS)
        self.world.shake(TICK)

    async def vanish(self, first: int, second: int) -> None:
        if (box := self._box(first, "created", "running", "lingering")) is not None:
            if second & 1 and self.world.exists(box):
                self.world.begin_to_vanish(box)
                await self.world.wait(TICK)
            self.world.vanish(box)
            self.world.shake(FULL)

    async def update(self, first: int, second: int) -> None:
        if (box := self._box(first, "running")) is not None:
            wanted = Resources(cpus=("", "0-7", "1")[second % 3], hugepage_limits={"2MB": 0} if second & 8 else {})
            await self.world.update(box, wanted)
            self.world.shake(FULL)

    # Writes by other processes, changes to the machine, and events of the instances.

    async def foreign_write(self, first: int, second: int) -> None:
        world = self.world
        # The partition of an exited container is not repaired, because its last processes are being killed.
        if (box := self._box(first, "running")) is None or not world.exists(box):
            return
        cpus = frozenset(cpu for cpu in CPUS if second >> cpu & 1)
        texts = {"cpuset.cpus": format_cpu_list(cpus), "cpuset.mems": "0-1", PAGES: "0"}
        if isinstance(world.kernel, PartitionKernel):
            texts[PARTITION] = "member"
        name = list(texts)[first // 8 % len(texts)] if second % 4 == 0 else "cpuset.cpus"
        world.kernel.set(box.path, name, texts[name])
        world.shake(FULL if world.partitions or name != "cpuset.cpus" else world.tick)

    async def kubelet_limit(self, first: int, second: int) -> None:
        world = self.world
        paths = [path for path in world.limits if world.kernel.path(path).exists()]
        if paths:
            path = paths[first % len(paths)]
            world.limits[path] = str((0, 200, 500)[second % 3] * MI)
            world.kernel.set(path, PAGES, world.limits[path])
            world.shake(FULL)

    async def offline(self, first: int, second: int) -> None:
        gone = {1 + first % 7, 1 + second % 7} if second & 0x40 else {1 + first % 7}
        self.world.hotplug(self.world.online - gone)
        self.world.shake(FULL if self.world.partitions else self.world.tick)

    async def online(self, first: int, second: int) -> None:
        self.world.hotplug(CPUS if second & 0x40 else self.world.online | {1 + first % 7})
        self.world.shake(FULL if self.world.partitions else self.world.tick)

    async def kill(self, _first: int, _second: int) -> None:
        if self.world.instances:
            await self.world.bury(self.world.instances[0])

    async def begin(self, _first: int, _second: int) -> None:
        if len(self.world.instances) < 2:
            await self.world.begin()
            self.world.shake(FULL if self.world.partitions else self.world.tick)

    async def die_later(self, first: int, _second: int) -> None:
        if self.world.active is not None:
            self.world.active.power.left = first % 16

    async def reconnect(self, first: int, _second: int) -> None:
        if self.world.instances:
            instance = self.world.instances[first % len(self.world.instances)]
            instance.enforcer.disconnected()
            instance.connected = False
            await self.world.connect(instance)
            self.world.shake(FULL if self.world.partitions else self.world.tick)

    async def refuse(self, first: int, second: int) -> None:
        if (box := self._box(first, "created", "running")) is not None:
            own = box.pod.uid == OWN_POD
            path = cgroup_directory(box.pod.cgroup_parent) if own or second & 0x40 else box.path
            self.world.refuse(path, _FILES[second % len(_FILES)], _ERRORS[first % len(_ERRORS)])
            self.world.shake(TICK)

    async def heal(self, _first: int, _second: int) -> None:
        self.world.heal()
        self.world.shake(FULL)

    async def rest(self, _first: int, _second: int) -> None:
        """Only advances the clock."""

    async def end(self) -> None:
        """Removes every claim with its containers, and gives their CPUs to a new claim."""
        world = self.world
        world.heal()
        world.hotplug(CPUS)
        while world.active is None or world.active.power.left is not None or not world.active.connected:
            for instance in tuple(world.instances):
                await world.bury(instance)
            await world.begin()
        for box in tuple(world.boxes.values()):
            if box.phase == "lingering":
                world.vanish(box)
            if box.named or box.phase != "running" or not world.exists(box):
                await world.remove(box)
        for number in range(PODS):
            if any(user[0] == world.pod_uid(number) for user in world.phantoms):
                await world.remove_pod(number)
        for claim in world.claims.values():
            world.remove_file(claim)
        # In partition mode, containers without claims are audited every 60 s.
        await self._let_pass(FULL)
        await self._let_pass(60.0 if world.partitions else TICK)
        check_end(world)
        kind = _CPU_KINDS.index("pod" if world.config.cpu_exclusivity == "partition" else "exclusive")
        await self.prepare(kind * 8, 0x80)
        box = world.describe(0, "last", ["c0"])
        assert await self._answered("creation", box, partial(world.create, box))
        await self._started(box)


def _config(bits: int) -> Config:
    return Config(
        reserved_cpus=frozenset({0} if bits & 0x10 else ()),
        pool_growth="lazy" if bits & 8 else "immediate",
        hugepage_guard=bool(bits & 0x20),
        cpu_exclusivity=_EXCLUSIVITY[bits >> 1 & 3],
    )


def _delays(number: int) -> Iterator[float | None]:
    random = Random(number)
    while True:
        yield random.choice(_DELAYS) if number else 0.0


async def _play(data: bytes, root: Path) -> None:
    bits = data[0]
    async with World(root, _config(bits), partitions=bool(bits & 1)).running() as world:
        machine = Machine(world)
        await world.begin()
        own = world.describe(-1, "driver", ())
        await world.create(own)
        world.kernel.refused[own.path, "cpuset.cpus"] = errno.EPERM
        await world.start(own)
        for start in range(_HEAD, min(len(data), _HEAD + EVENTS * _BYTES) - _BYTES + 1, _BYTES):
            await machine.event(data[start : start + _BYTES])
        await machine.end()


def trace(data: bytes) -> None:
    """Runs a trace. Raises AssertionError if the backend breaks one of the oracle's rules."""
    data = data.ljust(_HEAD, b"\0")
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="b", dir=memory if memory.is_dir() else None) as root:
        run(partial(_play, data, Path(root)), _delays(data[1]))


def written(head: int, script: str) -> bytes:
    """Returns a trace given as events of the form ``name first second pause``. The pause is t for an audit tick, f for
    a full audit, or omitted. A number that is omitted is 0. A number chooses among the containers in the phase that the
    event requires, oldest first; 0 is the driver's own container.
    """
    events = [event.split() for event in script.split(";")]
    found = bytearray((head, 0))
    for name, *rest in events:
        pause = {"t": 5, "f": 7}.get(rest[-1] if rest else "", 0)
        numbers = [int(one) for one in rest if one.isdigit()]
        found += bytes((_TABLE.index(name), *(*numbers, 0, 0)[:2], pause))
    return bytes(found)


SCRIPTS: Final = (
    # Other containers leave a claim's CPUs and get them back.
    "run 0; prepare 1 8; run 1 1 t; run 2 0 t; stop 2 t; unprepare 0 t; rest f",
    "run 0; prepare 32 8; run 0 1 t; run 6 1 t; stop 1 t; run 1 t; stop 2 t; unprepare f",
    # A container was created before one of its pod's claims was prepared, and starts after the container that uses the
    # claim.
    "prepare 32 t; create 1 t; prepare 25 8 t; run 7 1 t; start f",
    # Hugepages: the pod's limit rises, and is lowered while a sibling is still running.
    "run 6 0 t; prepare 5 1; run 0 2 f; kubelet_limit 1 1 f; kill; begin f; stop 2 f; unprepare f",
    # A claim whose CPUs are offline, and a container that is started at the same time.
    "prepare 0; run 0 1 t; prepare 1 8; offline 0; run 1 1 t; online f",
    "prepare 0; offline 0 t; run 0 1 t; online f; prepare 1 8; run 0 1; run 1 1 t; offline 0 t",
    # Another writer moves a container to the CPUs of a claim whose container is being started.
    "run 0; prepare 1 8 t; foreign_write 1 255; run 1 1 t; rest f",
    "run 1; prepare 0 8; run 0 1 t; foreign_write 2 255 t; foreign_write 1 255 t",
    "prepare 5 0; run 0 2 t; foreign_write 9 4 f; foreign_write 17 4 f",
    # The files are lost while no backend is running, and a container is started before the next backend runs.
    "prepare 0 8; run 0 1 t; kill; lose_all; run 1; begin f; run 2 t",
    "prepare 0 8; kill; lose_all; run 0 1; begin f; prepare 0 8 t",
    # A container was started while no backend was running, after another one with the same claim.
    "prepare 0 8; run 0 1 t; kill; linger 1; run 6 1; begin f; vanish 1 f",
    # A container refers to another pod's claim, to a claim without a record, and to a claim that another container
    # owns.
    "prepare 1 8; run 0 192; run 1 57; run 1 1 t; run 4 1; unprepare t; create 4 1",
    # A process is left over from a removed container, or from a container whose cpuset another writer has just changed.
    "prepare 0 8; run 0 1 t; linger 1; unprepare; run 1 t; remove 1 t; run 2 t",
    "run 0 t; linger 1; prepare 1 8 t; run 1 1 t; remove 1; rest t",
    # A container's process remains while a sibling's cpuset invalidates the container's partition.
    "run 0; prepare 0 8; run 6 1 t; linger 2; foreign_write 1 255 f; run 1 t; vanish 2 f; run 2 t",
    "prepare 0 8; prepare 1 8; run 0 1; run 1 1; run 2 t; foreign_write 1 255; linger 1 f",
    # The kubelet is restarted before it starts a container, and creates it again; the backend is restarted as well.
    "prepare 24 8; create 0 1; run 66 1 t; kill; begin f; run 1 f",
    "prepare 24 8; create 0 1; kill; begin f; run 66 1 t; kill; begin f; run 1 f",
    # Writes fail while a container is being started and while others have to be moved.
    "prepare 0 8; create 0 1; refuse 1 0; start f; heal f; run 0 1",
    "prepare 5 1; create 0 2; refuse 1 67; start f; heal f; run 0 2 f",
    "run 1; refuse 1 0; prepare 0 8 t; run 0 1; heal f; run 0 1 f",
    # A standby takes over from an instance that dies during a write.
    "run 2; begin t; prepare 0 8; die_later 2; run 0 1 t; offline 0 t; kill; run 1 t; begin f",
    # Several kinds of claims side by side, and a sibling.
    "run 6; prepare 0 8; run 0 1 t; prepare 41 8; run 1 1 t; prepare 26; run 2 1 f; remove_pod 0 f",
)
"""Traces that together exercise every rule that the oracle checks."""


def _bytes(head: tuple[int, int], events: list[tuple[int, ...]]) -> bytes:
    return bytes(head) + bytes(byte for event in events for byte in event)


_events = st.lists(st.tuples(*repeat(st.integers(0, 255), _BYTES)), min_size=8, max_size=EVENTS)

TARGETS = [
    Target(
        "backend-machine",
        trace,
        st.builds(_bytes, st.tuples(st.integers(0, 63), st.integers(0, 255)), _events),
        milliseconds=2000,
        max_bytes=_HEAD + EVENTS * _BYTES,
        bombs=[written(head, script) for script in SCRIPTS for head in (0x10, 0x01)],
        examples=20,
        unit=_BYTES,
        head=_HEAD,
    )
]
