# SPDX-License-Identifier: Apache-2.0
"""Enforcement records: their content, when they are written, and how the containers' state is restored from them.

An enforcement record is a file with the claims that were applied to one container's cgroup. It is needed when another
source of this information is lost while a process of the container still runs:

* The claim's record disappears or is damaged. The container then becomes an *orphan*: the enforced claims stay in its
  entitlement, and no other container may use its CPUs, until its last process has exited.
* The backend restarts. The runtime lists the containers and their environment, but an orphan's environment alone is not
  sufficient, because it names claims without a valid record. ``restore`` adds the claims from the enforcement record.
* The runtime removes a container while no backend is connected, and one of its processes still exists. Only its
  enforcement record then shows that the container exists; ``find_lingering`` returns it, so that no other container
  gets its CPUs.

Since a record is enough to entitle its container to CPUs, records are kept in one of the backend's own directories,
where no pod can write. A record contains the cgroup's inode, which no other cgroup has until the next reboot. So a
record does not apply to another container that has the same id, for example one that was deliberately given this id. A
reboot removes all records, since the run directory is on a tmpfs by default.

A record is written by the job that has applied the settings of a starting container with a claim and has read them
back. It is written again, by the hook or an audit, if the claims, the ``answered`` mark or the fallback change. For a
container with claimed hugepages, a first record is written as early as CreateContainer. It contains only the mark,
since nothing has been applied yet.

If file descriptors or memory have run out, reading a record raises OSError instead of leaving the record out. A
container that was left out would not be tracked, and the next cleanup would remove its record.

``EnforcementRecords`` reads and writes the files; each of its methods blocks. ``Recorder`` decides on the event loop
when to do so, and calls these methods in threads.
"""

import asyncio
import contextlib
import errno
import logging
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Final, NamedTuple

from numa_contract.backend_codes import BackendCode
from numa_contract.cdi import request_env
from numa_contract.documents import parse_json
from numa_contract.errors import ContractError, MalformedError, cut_answer
from numa_contract.records import Document, check_version
from numa_node.files import is_shortage, read_regular, replace_file
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from nri_backend.claims.authorization import read_evidence
from nri_backend.claims.entitlement import HeldClaim
from nri_backend.containers.container import NO_EVIDENCE, Identity, Tracked
from nri_backend.containers.derived import Derived
from nri_backend.containers.lifecycle import ALIVE, Phase
from nri_backend.containers.state import NodeState
from nri_backend.node.cgroups import CgroupAccessError, CgroupTree
from nri_backend.nri.model import Pod
from nri_backend.problems import NO_PROBLEM, Problem, code_of, read_problem

DIRECTORY: Final = "enforcement-records"
PINS: Final = "kubelet-pins.json"
"""Name of the pins file, which is next to the directory of enforcement records."""
VERSION: Final = 1
MAX_BYTES: Final = 16 << 20
"""Maximum size of an enforcement record, for writes and reads. The claim records of 64 claims, with 32 requests and
metadata each, take 5 MB."""
MAX_PINS_BYTES: Final = 1 << 20
"""Maximum size of the pins file, sufficient for about 10,000 containers."""
MAX_AT_ONCE: Final = 64
"""Maximum number of records that one job writes; the rest are left to the next audit."""
Pins = Mapping[str, frozenset[str]]
"""For each container id, the kubelet's resource managers (``cpu``, ``memory``) that appear to use the static policy,
judging by the kubelet's requests for the container.
"""
# Format of the ids that runtimes generate. With any other id, the record's path could be outside the directory or
# invalid.
_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_log = logging.getLogger(__name__)


class EnforcementRecord(BaseModel):
    """The claims that were applied to one container's cgroup. Instances exist only while they are written or read."""

    model_config = ConfigDict({**Document.model_config, "frozen": False})

    version: int = VERSION
    container: str
    """ID of the container."""
    name: str = ""
    pod: Pod = Pod("", "", "", "", "")
    cgroup: str = ""
    pod_cgroup: str = ""
    inode: Annotated[int, Field(ge=0)]
    """Inode of the container's cgroup. 0 before the cgroup exists: nothing has been applied to it yet."""
    answered: bool = False
    """True if the limits that the runtime stores include the claimed hugepages, because this plugin added them in its
    answer.
    """
    claims: tuple[HeldClaim, ...] = ()
    fallback_reason: str = ""
    """Reason why the shared pool excludes the claimed CPUs even though the cgroup should be a partition; empty if there
    is no such fallback.
    """
    fallback_code: str = ""
    """Code of the problem in ``fallback_reason``, or empty. Records from older releases have none."""


class _Content(NamedTuple):
    """The fields of a record that may change while its container is alive."""

    claims: tuple[HeldClaim, ...]
    answered: bool
    fallback_reason: str
    fallback_code: str


@dataclass(slots=True)
class _StartRecord:
    """A record that a start job writes in the worker's thread. Recorder.record() handles the result later."""

    content: _Content
    record: EnforcementRecord
    results: dict[str, OSError | None] | None = None
    """Results of EnforcementRecords.write(). None before the write, and empty once record() has handled them."""

    def write(self, records: "EnforcementRecords") -> None:
        """Writes the record. Blocks."""
        self.results = records.write([self.record])


class KubeletPins(Document):
    """The content of the pins file."""

    version: int = VERSION
    containers: dict[str, frozenset[str]] = Field(default_factory=dict)


def parse_enforcement_record(name: str, data: bytes) -> EnforcementRecord:
    """Parses a record. Raises ContractError if it is damaged, belongs to another container, or has an unsupported
    version.
    """
    document = parse_json(data, MAX_BYTES, "enforcement record", name)
    check_version("enforcement record", document, VERSION)
    try:
        record = EnforcementRecord.model_validate(document)
    except ValidationError as error:
        raise MalformedError("enforcement record", name, str(error)) from error
    if f"{record.container}.json" != name:
        raise MalformedError("enforcement record", name, "belongs to another container")
    return record


class EnforcementRecords:
    """The directory with one file for each container with claims, and the pins file next to it."""

    def __init__(self, directory: str, tree: CgroupTree) -> None:
        self._path = f"{directory}/{DIRECTORY}"
        self._pins = f"{directory}/{PINS}"
        self._tree = tree

    def write(self, records: Sequence[EnforcementRecord]) -> dict[str, OSError | None]:
        """Writes records. If a record names a cgroup, the record's inode is first set to the cgroup's current inode.

        The result maps each container id to the error, or to None if the record was written. A record that is too large
        to be read back is not written, and is treated as an error. Records whose cgroup is gone, and records with
        invalid ids, are skipped and are not in the result.
        """
        results: dict[str, OSError | None] = {}
        for record in records:
            inode = self._tree.inode(record.cgroup) if record.cgroup else record.inode
            if inode is None or not _ID.fullmatch(record.container):
                continue
            path = f"{self._path}/{record.container}.json"
            record.inode = inode
            try:
                data = record.model_dump_json().encode()
                if len(data) > MAX_BYTES:
                    raise OSError(errno.EFBIG, f"would be {len(data)} bytes long, more than {MAX_BYTES}", path)
                try:
                    replace_file(path, data, 0o600)
                except FileNotFoundError:
                    # This is the first record, or another process has removed the directory.
                    os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
                    replace_file(path, data, 0o600)
                results[record.container] = None
            except OSError as error:
                results[record.container] = error
        return results

    def load(self, cgroups: Mapping[str, str]) -> dict[str, EnforcementRecord]:
        """Returns the enforcement records that apply to the containers' current cgroups. ``cgroups`` maps container ids
        to cgroups.

        Missing and unreadable records are left out. Raises OSError if file descriptors or memory have run out.
        """
        records = {container_id: self._read(container_id) for container_id in cgroups}
        return {i: one for i, one in records.items() if one and (one.inode == 0 or self._applies(one, cgroups[i]))}

    def load_live(self, known: set[str]) -> list[EnforcementRecord]:
        """Returns the records of containers that have a process, except those whose id is in ``known``.

        Raises OSError if file descriptors or memory have run out.
        """
        records = filter(None, map(self._read, self._ids() - known))
        return [
            one
            for one in records
            if one.cgroup and one.inode and self._applies(one, one.cgroup) and self._is_populated(one.cgroup)
        ]

    def retain(self, container_ids: Collection[str], starting: Collection[str] = ()) -> set[str]:
        """Removes temporary files left by a crash, and all records except those of the given containers. Returns the
        ids of the remaining records.

        Files of containers in ``starting`` are kept, including those of containers that are added to it during this
        call: their records and temporary files may be written at the same time.
        """
        kept = {f"{container_id}.json" for container_id in container_ids}
        names: set[str] = set()
        with contextlib.suppress(OSError):
            names.update(os.listdir(self._path))  # noqa: PTH208
        for name in names - kept:
            if name.removeprefix(".").partition(".")[0] in starting:
                continue
            # If one entry, such as a stray directory, cannot be removed, the others are still removed.
            with contextlib.suppress(OSError):
                os.unlink(f"{self._path}/{name}")  # noqa: PTH108
        try:
            return self._ids()
        except OSError:
            return set()

    def load_pins(self) -> Pins:
        """Returns the stored pins, or an empty mapping if there is no readable file.

        Raises OSError if file descriptors or memory have run out.
        """
        try:
            document = parse_json(read_regular(self._pins, MAX_PINS_BYTES), MAX_PINS_BYTES, "kubelet pins", PINS)
            check_version("kubelet pins", document, VERSION)
            return KubeletPins.model_validate(document).containers
        except FileNotFoundError:
            return {}
        except (OSError, ContractError, ValidationError) as error:
            _check_shortage(error)
            _log.warning("cannot read kubelet pins", extra={"error": str(error)})
            return {}

    def write_pins(self, pins: Pins) -> None:
        """Replaces the stored pins. Raises OSError."""
        os.makedirs(self._path, mode=0o700, exist_ok=True)  # noqa: PTH103
        replace_file(self._pins, KubeletPins(containers=dict(pins)).model_dump_json().encode(), 0o600)

    def _ids(self) -> set[str]:
        """Returns the ids of the containers that have a record.

        Raises OSError if file descriptors or memory have run out.
        """
        try:
            names = os.listdir(self._path)  # noqa: PTH208
        except OSError as error:
            _check_shortage(error)
            return set()
        return {name.removesuffix(".json") for name in names if not name.startswith(".")}

    def _read(self, container_id: str) -> EnforcementRecord | None:
        """Returns a container's record, or None if it does not exist or cannot be read.

        Raises OSError if file descriptors or memory have run out.
        """
        if not _ID.fullmatch(container_id):
            return None
        name = f"{container_id}.json"
        try:
            return parse_enforcement_record(name, read_regular(f"{self._path}/{name}", MAX_BYTES))
        except FileNotFoundError:
            return None
        except (OSError, ContractError) as error:
            _check_shortage(error)
            _log.warning("cannot read enforcement record", extra={"id": container_id, "error": str(error)})
            return None

    def _applies(self, record: EnforcementRecord, cgroup: str) -> bool:
        """Returns True if a record belongs to this cgroup, or if this cannot be determined because a mount hides the
        cgroup tree.
        """
        inode = self._tree.inode(cgroup)
        return inode == record.inode or (inode is None and not self._tree.is_mounted())

    def _is_populated(self, cgroup: str) -> bool:
        try:
            return self._tree.populated(cgroup)
        except CgroupAccessError:
            return True


class Recorder:
    """Writes enforcement records, and reads them when the runtime lists its containers."""

    def __init__(self, state: NodeState, records: EnforcementRecords) -> None:
        self.problem = NO_PROBLEM
        """Reason why enforcement records cannot be written; empty if they can."""
        self._state = state
        self._records = records
        self._written: dict[str, _Content] = {}
        """Contents of the written records, by container."""
        self._answered: set[str] = set()
        """Containers for which the limits that the runtime stores include the claimed hugepages.

        ``RuntimeLimits.include_claims``, by contrast, refers to the limits in the state. After this instance has
        answered a request, the limits in the state are still those of the request, until the runtime lists the
        container again.
        """
        self._pins: Pins = {}
        """The content of the pins file."""
        self._pins_fail = False
        self._live_pins = Derived(state, lambda: _live_pins(state))
        self._turn = asyncio.Lock()
        """Serializes writes with remove_untracked(): the list of containers to retain must not be older than a
        record.
        """
        self._starting: dict[str, _StartRecord] = {}
        """Records that start jobs write. These jobs do not hold ``_turn``; instead, remove_untracked() retains the
        files of these containers."""

    @property
    def has_written(self) -> bool:
        """True if enforcement records that this instance has written or read may still exist. They may also belong to
        containers that are no longer tracked; remove_untracked() removes those.
        """
        return bool(self._written)

    async def record_answer(self, tracked: Tracked) -> None:
        """Records that CreateContainer has been answered with limits that include the claimed hugepages. The runtime
        stores these limits.
        """
        self._answered.add(tracked.id)
        record = EnforcementRecord(container=tracked.id, inode=0, answered=True)
        async with self._turn:
            # An error is not reported here: the record is written again when the container starts.
            await asyncio.to_thread(self._records.write, [record])

    def record_resize(self, tracked: Tracked) -> None:
        """Records that an update was answered with limits that include the claimed hugepages."""
        self._answered.add(tracked.id)

    def start_writer(self, tracked: Tracked, *, partition: bool) -> Callable[[], None]:
        """Returns a blocking function that writes a starting container's record once its plan has been applied.

        With ``partition``, the plan makes the container a partition, so the record contains no fallback. The next call
        to record() handles the result of the write.
        """
        content = self._content(tracked, tracked.entitlement.claims, NO_PROBLEM if partition else tracked.fallback)
        if not content.claims or self._written.get(tracked.id) == content:
            return lambda: None
        new = self._starting[tracked.id] = _StartRecord(content, _record_of(tracked.identity, content))
        return partial(new.write, self._records)

    def _content(self, tracked: Tracked, claims: tuple[HeldClaim, ...], fallback: Problem) -> _Content:
        answered = tracked.runtime_limits.include_claims or tracked.id in self._answered
        return _Content(claims, answered, str(fallback), fallback.code or "")

    async def record(self, containers: Iterable[Tracked], *, every: bool = False) -> None:
        """Writes the record of each container with enforced claims, if it has changed since the last write.

        A failed write is reported as a problem and retried by the next audit. ``every`` means that ``containers`` are
        all containers on the node. Only then does success clear the problem, since the problem may concern any
        container, including one that has exited.
        """
        new: dict[str, _Content] = {}
        records: list[EnforcementRecord] = []
        for one in containers:
            content, started = self._content(one, one.enforced_claims, one.fallback), self._starting.get(one.id)
            if started is not None and started.results == {one.id: None}:
                # The start job has already written this record. A record that it failed to write is written below.
                self._written[one.id], started.results = started.content, {}
            if one.enforced_claims and self._written.get(one.id) != content:
                new[one.id] = content
                records.append(_record_of(one.identity, content))
        results: dict[str, OSError | None] = {}
        if records:
            async with self._turn:
                results = await asyncio.to_thread(self._records.write, records[:MAX_AT_ONCE])
                self._written |= {i: new[i] for i, error in results.items() if error is None}
        if errors := [error for error in results.values() if error is not None]:
            if not self.problem:
                _log.warning("cannot write enforcement records", extra={"error": str(errors[0])})
            text = cut_answer(f"enforcement records cannot be written: {errors[0]}")
            self.problem = Problem(text, code_of(errors[0], BackendCode.ENFORCEMENT_NOT_RECORDED))
        elif every and len(new) <= MAX_AT_ONCE:
            self.problem = NO_PROBLEM

    async def restore(self, containers: Sequence[Tracked]) -> list[Tracked]:
        """Returns the containers with the state that was restored from their enforcement records.

        The restored state consists of the enforced claims and the ``answered`` mark. The stored pins are also added:
        they cannot be derived from the runtime's list, because the cpusets in it already include this plugin's answers.
        Raises OSError if file descriptors or memory have run out; the caller must then try again.
        """
        evident = {one.id: one.identity.cgroup for one in containers if one.identity.evidence != NO_EVIDENCE}
        found = await asyncio.to_thread(self._records.load, evident)
        self._pins = await asyncio.to_thread(self._records.load_pins)
        self._answered.update(i for i, record in found.items() if record.answered)
        claims = {i: tuple(map(self._shared, record.claims)) for i, record in found.items()}
        self._written |= {
            i: _Content(claims[i], record.answered, record.fallback_reason, record.fallback_code)
            for i, record in found.items()
            if record.inode
        }
        return [self._restored(tracked, claims.get(tracked.id, ())) for tracked in containers]

    async def find_lingering(self, listed: Iterable[Tracked]) -> list[Tracked]:
        """Returns containers that are neither listed nor tracked but still have a process.

        No instance has seen these containers exit, and only their enforcement records show that they exist. Raises
        OSError if file descriptors or memory have run out; the caller must then try again.
        """
        known = {tracked.id for tracked in (*listed, *self._state)}
        return [_lingering(record) for record in await asyncio.to_thread(self._records.load_live, known)]

    async def recorded_fallback(self, tracked: Tracked) -> Problem:
        """Returns the reason why the active instance has not made a container's cgroup a partition and the shared pool
        excludes the claimed CPUs instead. Returns NO_PROBLEM if there is no such fallback, or if that cannot be read.
        """
        try:
            found = await asyncio.to_thread(self._records.load, {tracked.id: tracked.identity.cgroup})
        except OSError:
            return NO_PROBLEM
        record = found.get(tracked.id)
        return read_problem(record.fallback_reason, record.fallback_code) if record else NO_PROBLEM

    async def remove_untracked(self) -> None:
        """Removes the records of containers that are no longer tracked.

        A record that was deleted by another process is written again by the next audit.
        """
        async with self._turn:
            # A container is added to the state before its start job begins.
            tracked = {tracked.id for tracked in self._state}
            self._starting = {i: one for i, one in self._starting.items() if one.results is None and i in tracked}
            present = await asyncio.to_thread(self._records.retain, tracked, self._starting)
        self._written = {i: content for i, content in self._written.items() if i in present}
        # The state is read again, since a container may have been created in the meantime.
        self._answered.intersection_update(tracked.id for tracked in self._state)

    async def store_pins(self) -> None:
        """Stores the pins of live containers if they have changed; a failed write is retried at the next audit.

        Does nothing until the runtime has listed its containers, since the stored pins of these containers would
        otherwise be lost.
        """
        pins = self._live_pins.value
        if not self._state.containers_listed or pins == self._pins:
            return
        try:
            await asyncio.to_thread(self._records.write_pins, pins)
        except OSError as error:
            if not self._pins_fail:
                _log.warning("cannot store kubelet pins", extra={"error": str(error)})
            self._pins_fail = True
            return
        self._pins, self._pins_fail = pins, False

    def _shared(self, held: HeldClaim) -> HeldClaim:
        # Most enforcement records contain the claim record unchanged. Sharing the object saves memory: a second copy of
        # 250 claim records takes 5 MB. If the container uses all of the claim's requests, the computed share is reused
        # as well: computing it again for each container would delay the answer to Synchronize.
        known = self._state.claims.known.get(held.key)
        if isinstance(known, HeldClaim) and known == held:
            return known
        file = self._state.files.get(held.key)
        return replace(held, record=file.record) if file and file.record == held.record else held

    def _restored(self, tracked: Tracked, enforced: tuple[HeldClaim, ...]) -> Tracked:
        # If an enforcement record could not be written, only the state contains the enforced claims.
        before = self._state.containers.get(tracked.id)
        enforced = enforced or (before.enforced_claims if before else ())
        answered = tracked.id in self._answered or tracked.runtime_limits.include_claims
        answered = answered or (before is not None and before.runtime_limits.include_claims)
        pins = tracked.runtime_limits.kubelet_pins | self._pins.get(tracked.id, frozenset())
        runtime_limits = replace(tracked.runtime_limits, include_claims=answered, kubelet_pins=pins)
        return replace(tracked, enforced_claims=enforced, runtime_limits=runtime_limits)


def _check_shortage(error: Exception) -> None:
    """Raises the error again if file descriptors or memory have run out, since the file itself may be readable."""
    if isinstance(error, OSError) and is_shortage(error):
        raise error


def _live_pins(state: NodeState) -> Pins:
    return {
        one.id: one.runtime_limits.kubelet_pins
        for one in state
        if one.phase in ALIVE and one.runtime_limits.kubelet_pins
    }


def _record_of(identity: Identity, content: _Content) -> EnforcementRecord:
    return EnforcementRecord(
        container=identity.id,
        name=identity.name,
        pod=identity.pod,
        cgroup=identity.cgroup,
        pod_cgroup=identity.pod_cgroup,
        inode=0,
        **content._asdict(),
    )


def _lingering(record: EnforcementRecord) -> Tracked:
    """Restores, from its enforcement record, a container that the runtime no longer lists."""
    env = [
        f"{name}={value}"
        for held in record.claims
        for request in held.requests
        for name, value in request_env(held.record, request).items()
    ]
    identity = Identity(
        record.container, record.name, record.pod, record.cgroup, record.pod_cgroup, evidence=read_evidence(env)
    )
    return Tracked(identity, phase=Phase.LINGERING, enforced_claims=record.claims)
