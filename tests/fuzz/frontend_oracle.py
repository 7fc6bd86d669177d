# SPDX-License-Identifier: Apache-2.0
"""The rules that the frontend's claim core must obey in every trace, checked from the outside.

The oracle sees the responses to the kubelet, the running containers, and the claim files as the container runtime reads
them. It does not read the frontends' memory: the trace only tells it whether a claim's CPUs are still in the memory of
every live process or in the journal.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from numa_contract.cpuset import parse_cpu_list

Key = tuple[str, str]
"""Driver and UID of a claim."""
KINDS: Final = {"cpu": "dra.cpu", "memory": "dra.memory"}


class BrokenRuleError(AssertionError):
    """The frontend has broken a rule."""


def demand(holds: object, text: str) -> None:
    """Raises BrokenRuleError if the condition is false."""
    if not holds:
        raise BrokenRuleError(text)


@dataclass(frozen=True, slots=True)
class File:
    """A claim file as the container runtime reads it."""

    cpus: frozenset[int]
    by_request: Mapping[str, frozenset[int]]
    """CPUs, keyed by CDI device, in file order."""
    whole: bool
    """False if the record is damaged and only the environment can be read."""


def read_files(directory: Path) -> dict[Key, File]:
    """Returns the claim files that can be read as CDI."""
    found = {}
    for path in directory.glob("dra.k8s.io-*_claim-*.json"):
        if (file := _parse(path.read_bytes())) is not None:
            found[key_of(path)] = file
    return found


def key_of(path: Path) -> Key:
    """Returns the claim that a file belongs to."""
    kind, _, uid = path.stem.removeprefix("dra.k8s.io-").partition("_claim-")
    return KINDS[kind], uid


@lru_cache(4096)
def _parse(content: bytes) -> File | None:
    try:
        document = json.loads(content)
        sets = dict(_cpus_of(document))
    except (ValueError, KeyError, TypeError):
        return None
    return File(frozenset().union(*sets.values()), sets, _is_whole(document))


def _cpus_of(document: Any) -> Iterator[tuple[str, frozenset[int]]]:
    for device in document["devices"]:
        for entry in device["containerEdits"]["env"]:
            name, _, value = entry.partition("=")
            if name.startswith("DRA_CPUSET_"):
                yield device["name"], parse_cpu_list(value)


def _is_whole(document: Any) -> bool:
    try:
        return "driver" in json.loads(document["annotations"]["dra-driver-numa/record"])
    except (ValueError, KeyError, TypeError):
        return False


@dataclass(slots=True)
class Promise:
    """A claim whose last Prepare by its driver succeeded and that has not been unprepared since."""

    devices: tuple[object, ...]
    """The response to the kubelet."""
    cpus: frozenset[int]
    survives: bool
    """True while the claim's CPUs are recorded somewhere: in its file, in the memory of every live process, in the
    journal, or by a running container. If none of these is left, the claim may get other CPUs; its pages stay
    allocated.
    """
    pages: Mapping[str, int]
    """Bytes of hugepages, keyed by device."""
    near: frozenset[int]
    """CPUs that the claim's matchAttribute constraint allows."""


@dataclass(frozen=True, slots=True)
class Running:
    """A container that runs with a claim's environment."""

    pod: str
    cpus: Mapping[str, frozenset[int]]
    """CPUs, keyed by CDI device."""
    pages: Mapping[str, int]

    @property
    def all_cpus(self) -> frozenset[int]:
        """Returns the CPUs of all devices."""
        return frozenset().union(*self.cpus.values())


@dataclass(slots=True)
class Oracle:
    """Records every successful Prepare and checks the rules."""

    directory: Path
    promises: dict[Key, Promise] = field(default_factory=dict)
    unprepared: set[Key] = field(default_factory=set)
    """Claims whose last call was a successful Unprepare."""
    leaving: set[Key] = field(default_factory=set)
    """Prepared claims that are being unprepared or deleted, but whose Unprepare has not succeeded yet."""
    running: dict[str, Running] = field(default_factory=dict)
    """Containers, keyed by the UID of their claim."""
    over_allocating: bool = False
    """True if the scheduler allocates more than the node has."""
    journal_was_lost: bool = False
    claim_was_lost: bool = False
    damaged: set[Key] = field(default_factory=set)
    """Claims whose files the trace has removed or damaged and that no frontend has rewritten since."""
    faults: list[str] = field(default_factory=list)
    _holders: dict[str, frozenset[str]] = field(default_factory=dict)
    """For each device, the UIDs of the claims that had hugepages from it at the last check."""
    _capacity: dict[str, int] = field(default_factory=dict)

    @property
    def excused(self) -> bool:
        """The only exception to the rule about hugepages: the files and the journal have been lost, and the scheduler
        over-allocates. In that case nothing on the node or in the cluster shows which of the allocated claims was
        prepared.
        """
        return self.over_allocating and self.journal_was_lost and self.claim_was_lost

    def lose_journal(self) -> None:
        """Records the loss of the journal. Without the journal, an allocated claim may be mistaken for a prepared
        one.
        """
        self.journal_was_lost = True
        self.unprepared.clear()

    def withdraw(self, key: Key) -> None:
        """Ends a promise because the claim is unprepared or deleted. The frontends release the claim later."""
        if self.promises.pop(key, None) is not None:
            self.leaving.add(key)

    def unprepare(self, key: Key) -> None:
        """Records a successful response to Unprepare."""
        self.unprepared.add(key)
        self.leaving.discard(key)

    def forget(self, remembered: Callable[[Key, frozenset[int]], bool]) -> None:
        """Marks the promises whose CPUs are no longer recorded anywhere.

        ``remembered`` is called with a claim and its CPUs. It returns True if every live process has these CPUs in
        memory, or if they are in the journal.
        """
        files = read_files(self.directory)
        for key, promise in self.promises.items():
            if promise.survives and not (key in files or remembered(key, promise.cpus) or key[1] in self.running):
                self.claim_was_lost = True
                promise.survives = False
                if key not in self.damaged:
                    self.faults.append(f"the file of {key} is gone, although only the frontends have written it")

    def answer(self, key: Key, promise: Promise) -> None:
        """Checks a successful response to Prepare."""
        file = read_files(self.directory).get(key)
        known = self.promises.get(key)
        self.unprepared.discard(key)
        promise.survives = file is not None and file.whole
        promise.cpus = file.cpus if file else frozenset()
        if known is not None:
            demand(
                known.devices == promise.devices, f"{key} got a different response: {known.devices}, {promise.devices}"
            )
            same = not (known.survives and promise.survives) or known.cpus == promise.cpus
            demand(same, f"{key} had CPUs {sorted(known.cpus)} and got {sorted(promise.cpus)}")
            if known.survives and not promise.survives:
                promise.survives, promise.cpus = True, known.cpus
        if promise.survives and key[1] not in self.running and known is None:
            demand(
                promise.cpus <= promise.near,
                f"{key} got {sorted(promise.cpus)}, but its constraint allows {sorted(promise.near)}",
            )
        self.promises[key] = promise
        self.leaving.discard(key)

    def note_capacity(self, capacity: Mapping[str, int]) -> None:
        """Records the node's capacity before it changes, because a claim may get its pages before the change and be
        checked only afterwards.
        """
        for device, size in capacity.items():
            self._capacity[device] = max(size, self._capacity.get(device, 0))

    def check_pages(
        self, sizes: Mapping[str, Mapping[str, int]], capacity: Mapping[str, int], kept: Collection[str]
    ) -> None:
        """Checks that no claim got hugepages that the node does not have or that belong to other claims.

        ``sizes`` contains each claim's bytes by device, and ``capacity`` the node's. The largest capacity since the
        last check applies, and claims that already have pages keep them. ``kept`` contains the UIDs of unprepared
        claims that keep their pages until the backend confirms that their containers have exited.

        If the file of a claim in ``leaving`` is lost, this check no longer finds the claim. However, a frontend that
        has the claim in memory does not free its pages and may write the file again. A claim that reappears in this way
        is not treated as new, unless another claim has been given pages of the device since the loss. The same applies
        to a released claim that a frontend has rebuilt because the journal was lost, if the rebuilt file is lost later.
        """
        files = [uid for driver, uid in read_files(self.directory) if driver == KINDS["memory"]]
        promised = [uid for driver, uid in self.promises if driver == KINDS["memory"]]
        uids = {*files, *promised, *self.running, *kept}
        for device, size in capacity.items():
            holders = {uid: sizes[uid][device] for uid in uids if device in sizes.get(uid, {})}
            former = self._holders.get(device, frozenset())
            new, total = holders.keys() - former, sum(holders.values())
            most = max(size, self._capacity.get(device, 0))
            demand(
                self.excused or not new or total <= most, f"{total} of {most} bytes of {device} are promised: {holders}"
            )
            lost = frozenset(uid for driver, uid in self.leaving | self.damaged if driver == KINDS["memory"])
            self._holders[device] = frozenset(holders) | (frozenset() if new else former & lost)
        self._capacity = dict(capacity)

    def check_pools(self, pages: Sequence[int], page_bytes: int) -> None:
        """Checks that the kernel has the pages that claims were given. ``pages`` is the number of pages that the kernel
        has on each NUMA node.
        """
        for node, made in enumerate(pages):
            device = f"hugepages-2m-numa{node:03d}"
            promised = sum(promise.pages.get(device, 0) for promise in self.promises.values())
            demand(
                promised <= made * page_bytes,
                f"{promised} bytes of {device} are promised, but the kernel has {made} pages",
            )

    def check(self) -> None:
        """Checks that no CPU belongs to several claims, that claims keep their files and CPUs, and that files of
        unprepared claims do not reappear.
        """
        demand(not self.faults, "; ".join(self.faults))
        files = read_files(self.directory)
        self.damaged -= {key for key, file in files.items() if file.whole}
        owners: defaultdict[int, dict[str, str]] = defaultdict(dict)
        for (_, uid), file in files.items():
            for cpu in file.cpus:
                owners[cpu][uid] = "a file"
        for uid, container in self.running.items():
            for cpu in container.all_cpus:
                owners[cpu][uid] = "a container"
        for key, promise in self.promises.items():
            found = files.get(key)
            if promise.survives and found is not None and found.whole:
                text = f"{key} had {sorted(promise.cpus)}, its file has {sorted(found.cpus)}"
                demand(found.cpus == promise.cpus, text)
            elif found is not None and found.whole:
                promise.cpus, promise.survives = found.cpus, True
            for cpu in promise.cpus if promise.survives else ():
                owners[cpu][key[1]] = "a promise"
        for cpu, holders in owners.items():
            demand(len(holders) < 2, f"CPU {cpu} belongs to several claims: {holders}")
        back = self.unprepared & files.keys()
        demand(not back, f"unprepared claims have files again: {sorted(back)}")
