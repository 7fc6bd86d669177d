# SPDX-License-Identifier: Apache-2.0
"""Records which claims this node has prepared; all instances on the node share the journal (docs/adr/0004-journal.md).

The absence of a claim file does not prove that the claim was never prepared: the file may have been deleted. The
journal lists every claim that has a file, together with its CPUs, and every claim that was released but whose
containers may still be running, together with all its resources. A claim that the journal lists but that has no file is
lost, and recovery rebuilds its record.

The file has two slots of fixed size. Its disk space is allocated when it is created, so that it can be written even
when the disk is full. Writes alternate between the slots, in place:

  offset 0         header 64 B: magic, sequence n, length, CRC-32    one JSON document per line
  offset 256 KiB   header 64 B: magic, sequence n+1, length, CRC-32  one JSON document per line

A reader uses the valid slot with the higher sequence number. If an instance dies during a write, the checksum of that
slot is wrong and the other slot still contains the previous entries. The claims lock makes instances take turns;
each instance can tell from the sequence number and checksum whether another instance has written in the meantime.
"""

import errno
import json
import os
import re
import secrets
import stat
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from numa_contract.cdi import ClaimFile
from numa_contract.cpuset import MAX_CPU, format_cpu_list, parse_cpu_list
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_contract.names import ClaimKey, cdi_file_name
from numa_contract.records import parse_record
from numa_node.claim_directory import stamp_clock_ns

SLOT_BYTES: Final = 256 << 10
"""Size of a slot. A slot can hold about 2,300 claims with names and CPUs, or MAX_CLAIM_FILES claims without them."""
_SLOTS: Final = (0, SLOT_BYTES)
_MAX_CPUS: Final = 16 * (MAX_CPU + 1)
"""Maximum number of CPUs in all entries together. Each CPU in a machine appears in one or two entries. Without this
limit a slot could contain 20 million CPUs as ranges, which would take a gigabyte of memory.
"""
_MAGIC: Final = b"dra-driver-numa journal 1"
_HEADER: Final = 64
"""Length of a slot's header: magic, sequence number, length of the lines, and a CRC-32 over the sequence number and
lines.
"""
_HEAD: Final = re.compile(_MAGIC + rb" (\d+) (\d+) (\d+) *")
_encode = json.JSONEncoder(separators=(",", ":")).encode
_NO_CPUS: Final[Mapping[str, frozenset[int]]] = {}
_OPEN_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
Name = tuple[str, str]
"""A claim's namespace and name, or two empty strings if they are unknown."""


@dataclass(frozen=True, slots=True)
class JournalEntries:
    """The journal's contents."""

    expected: Mapping[ClaimKey, Name] = field(default_factory=dict)
    """Claims for which a file was written. If such a file is missing, its claim has been lost, not released."""
    releasing: Mapping[ClaimKey, ClaimFile] = field(default_factory=dict)
    """Claims that were released but whose containers may still be running."""
    needs_listing: bool = False
    """True if an earlier journal was lost and no instance has listed the cluster's claims since. The node may then have
    prepared claims that are missing from ``expected``.
    """
    cpus: Mapping[ClaimKey, Mapping[str, frozenset[int]]] = field(default_factory=dict)
    """The CPUs of each claim in ``expected``, by request, if known (``ClaimFile.cpus_by_request``)."""


class Journal:
    """Reads and writes the journal file. Every method blocks and requires the claims lock."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries = JournalEntries()
        self._lines = _Lines()
        self._stamp = (0, 0)
        """Sequence number and checksum of the slot that was last read or written."""
        self._former = (0, 0)
        """Sequence number and checksum of the other slot, which contains the previous entries, or (0, 0) if that slot
        is invalid.
        """
        self.problem = ""
        """Reason why the file could not be read or written, or "". While there is such a problem, the entries are kept
        in memory.
        """
        self.was_read = False
        """True once this instance has read entries. If it is False although an earlier instance ran, that instance's
        entries are lost.
        """
        self._unread = False
        """True if the last attempt to read the file failed. Another instance may have written entries that are unknown
        here.
        """
        self._seen: tuple[int, ...] = ()
        """The file's modification time, inode and device when the file was read. Empty if a later change to the file
        might not alter these values.
        """
        self.foreign = True
        """True if another instance may have written the journal, and therefore changed claims, since this instance last
        read it.
        """

    def is_current(self) -> bool:
        """Returns True if the file's modification time proves that the entries are current. Makes one system call."""
        try:
            return bool(self._seen) and not self.problem and _status_of(self._path.stat()) == self._seen
        except OSError:
            return False

    def read(self) -> JournalEntries:
        """Returns the file's entries, or the last known entries if the file cannot be read. Does not raise."""
        known, self._seen = self._stamp, ()
        try:
            descriptor = os.open(self._path, _OPEN_FLAGS | os.O_RDONLY)
            try:
                now_ns, status = stamp_clock_ns(), os.fstat(descriptor)
                self._read_slots(descriptor)
                self._unread = False
                if status.st_mtime_ns < now_ns:
                    self._seen = _status_of(status)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._unread = not isinstance(error, FileNotFoundError)
            self.problem = f"{self._path} cannot be read: {error.strerror}"
        self.foreign = self._stamp != known or bool(self.problem)
        return self._entries

    def _read_slots(self, descriptor: int) -> None:
        heads = [os.pread(descriptor, _HEADER, start) for start in _SLOTS]
        # Check the previously read slot as well, since it may have been damaged in the meantime.
        slots = _valid_slots(descriptor, heads)
        if not slots:
            self.problem = f"{self._path} is not a journal that this release can read"
            return
        stamp, data = slots[0]
        if stamp == self._stamp:
            return
        if stamp == self._former and all(map(any, heads)):
            # The newer slot has been damaged. Its entries are still in memory and must be written again, as after a
            # failed write. The file is not one that another instance has just created: in such a file, one slot would
            # contain only zeros.
            self._stamp, self._former = stamp, (0, 0)
            self.problem = f"{self._path} is damaged"
            return
        # The next write needs the sequence number even if the entries cannot be used.
        self._stamp, self._former = stamp, slots[1][0] if len(slots) > 1 else (0, 0)
        try:
            self._entries, self.was_read, self.problem = _parse(data), True, ""
        except MalformedError as error:
            self.problem = f"{self._path} is not a journal that this release can read: it {error.reason}"

    def write(self, entries: JournalEntries) -> None:
        """Writes the entries to the older slot, unless the file already contains them.

        If the write fails, sets ``problem``, and the next call retries. Does not raise. If another instance has written
        while the file could not be read here, nothing is written: the slot may contain releases that only that instance
        knows. The next read() then returns that instance's entries, as if this instance had crashed before the write.
        """
        if entries == self._entries and not self.problem:
            return
        self._entries, self._seen = entries, ()
        try:
            data = self._lines.dump(entries)
            sequence = self._stamp[0] + 1
            # The CRC also covers the sequence number, so a torn header cannot make an old slot look like the newest.
            checksum = zlib.crc32(data, sequence)
            slot = (b"%s %d %d %d" % (_MAGIC, sequence, len(data), checksum)).ljust(_HEADER) + data
            descriptor = self._open()
            try:
                if self._unread and self._has_unknown_entries(descriptor):
                    raise OSError(errno.EBUSY, "another instance has written it since it was last read")
                if os.pwrite(descriptor, slot, _SLOTS[sequence % 2]) != len(slot):
                    raise OSError(errno.ENOSPC, "only part of it was written")
            finally:
                os.close(descriptor)
        except OSError as error:
            self.problem = f"{self._path} cannot be written: {error.strerror}; the write will be retried"
        else:
            self._former, self._stamp = self._stamp, (sequence, checksum)
            self.problem = ""

    def _has_unknown_entries(self, descriptor: int) -> bool:
        """Returns True if the newest slot was written by another instance and has not been read by this one."""
        heads = [os.pread(descriptor, _HEADER, start) for start in _SLOTS]
        slots = _valid_slots(descriptor, heads)
        return bool(slots) and slots[0][0] not in (self._stamp, self._former)

    def _open(self) -> int:
        """Opens the file. Creates it if it is missing, is not a regular file, or has the wrong size."""
        try:
            descriptor = os.open(self._path, _OPEN_FLAGS | os.O_RDWR)
            status = os.fstat(descriptor)
            if stat.S_ISREG(status.st_mode) and status.st_size == 2 * SLOT_BYTES:
                return descriptor
            os.close(descriptor)
        except FileNotFoundError:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new_path = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(new_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, 2 * SLOT_BYTES)
            new_path.rename(self._path)
        except OSError:
            os.close(descriptor)
            new_path.unlink()
            raise
        return descriptor

    def clear_leftovers(self) -> None:
        """Removes temporary files left by an instance that died while creating the journal."""
        for path in self._path.parent.glob(f".{self._path.name}.*"):
            path.unlink(missing_ok=True)


def _valid_slots(descriptor: int, heads: Sequence[bytes]) -> list[tuple[tuple[int, int], bytes]]:
    """Returns each slot whose checksum is correct, newest first: its sequence number and checksum, and its lines.

    ``heads`` contains the headers of both slots.
    """
    matches = [(_HEAD.fullmatch(head), start) for head, start in zip(heads, _SLOTS, strict=True)]
    found = [(*map(int, match.groups()), start) for match, start in matches if match]
    return [
        ((sequence, checksum), data)
        for sequence, length, checksum, start in sorted(found, reverse=True)
        if zlib.crc32(data := os.pread(descriptor, min(length, SLOT_BYTES), start + _HEADER), sequence) == checksum
    ]


def _status_of(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_ino, status.st_dev


class _Lines:
    """Serializes entries as lines. A write changes only one or two entries, so the previous lines are cached."""

    def __init__(self) -> None:
        self._expected: dict[ClaimKey, tuple[Name, Mapping[str, frozenset[int]], bytes]] = {}
        """Each claim's name, CPUs and line. The line is reused if the name is the same and the CPUs are the same
        object.
        """
        self._releasing: dict[ClaimKey, tuple[ClaimFile, bytes]] = {}

    def dump(self, entries: JournalEntries) -> bytes:
        """Returns one line for each entry. If the lines do not fit, omits names and records, then the claims' CPUs.

        A claim's CPU lists include its requests' names, whose number and length the claim's author controls. If the
        claim's file is lost, even a line without CPUs proves that the claim was prepared. Raises OSError if even the
        shortest lines do not fit.
        """
        head = _line({"unlisted": True}) if entries.needs_listing else b""
        data = b"".join([head, *self._whole(entries)])
        for listed in (True, False):
            if len(data) <= SLOT_BYTES - _HEADER:
                return data
            data = b"".join([head, *_short_lines(entries, listed=listed)])
        if len(data) <= SLOT_BYTES - _HEADER:
            return data
        raise OSError(errno.EFBIG, "there are more claims than the journal has room for")

    def _whole(self, entries: JournalEntries) -> list[bytes]:
        expected, releasing = self._expected, self._releasing
        self._expected, self._releasing = {}, {}
        for key, name in entries.expected.items():
            cpus = entries.cpus.get(key, _NO_CPUS)
            known = expected.get(key)
            if known is None or known[1] is not cpus or known[0] != name:
                known = name, cpus, _expected_line(key, name, cpus)
            self._expected[key] = known
        for key, file in entries.releasing.items():
            former = releasing.get(key)
            if former is None or former[0] is not file:
                former = file, _line(_releasing_value(file, whole=True))
            self._releasing[key] = former
        lines = [line for _, _, line in self._expected.values()]
        return lines + [line for _, line in self._releasing.values()]


def _short_lines(entries: JournalEntries, *, listed: bool) -> list[bytes]:
    """Returns the lines without names and records, and without CPUs unless ``listed``."""
    cpus = entries.cpus if listed else {}
    lines = [_expected_line(key, ("", ""), cpus.get(key, _NO_CPUS)) for key in entries.expected]
    return lines + [_line(_releasing_value(file, whole=False)) for file in entries.releasing.values()]


def _line(value: Any) -> bytes:
    return _encode(value).encode() + b"\n"


def _expected_line(key: ClaimKey, name: Name, cpus: Mapping[str, frozenset[int]]) -> bytes:
    lists = {request: format_cpu_list(numbers) for request, numbers in cpus.items()}
    return _line([*key, *name, lists] if lists else [*key, *name])


def _releasing_value(file: ClaimFile, *, whole: bool) -> dict[str, Any]:
    if whole and file.record is not None:
        return {"record": file.record.model_copy(update={"metadata": {}}).model_dump(mode="json")}
    return {"driver": file.driver, "uid": file.uid, "cpus": format_cpu_list(file.cpus), "memory": dict(file.memory)}


def _parse(data: bytes) -> JournalEntries:
    """Parses a slot's lines. Raises MalformedError if the lines contain more CPUs than a machine can have."""
    expected: dict[ClaimKey, Name] = {}
    cpus: dict[ClaimKey, dict[str, frozenset[int]]] = {}
    releasing: dict[ClaimKey, ClaimFile] = {}
    needs_listing, left = False, _MAX_CPUS
    for line in data.splitlines():
        # A line that cannot be parsed was written by a newer release and is skipped. A line whose driver or UID cannot
        # occur in a claim file's name is also skipped: nothing would ever remove such an entry, and its CPUs would stay
        # allocated.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            value = parse_json(line, SLOT_BYTES, "journal", "entry")
            if isinstance(value, list):
                driver, uid, namespace, name = map(str, value[:4])
                cdi_file_name(driver, uid)
                expected[driver, uid] = namespace, name
                if len(value) > 4:
                    cpus[driver, uid], left = _cpu_lists(value[4], left)
            elif "unlisted" in value:
                needs_listing = value["unlisted"] is True
            else:
                file = _releasing(value)
                cdi_file_name(file.driver, file.uid)
                releasing[file.driver, file.uid] = file
                left -= len(file.cpus)
        if left < 0:
            raise MalformedError("journal", "", f"contains more than {_MAX_CPUS} CPUs")
    return JournalEntries(expected, releasing, needs_listing, cpus)


def _cpu_lists(lists: Any, left: int) -> tuple[dict[str, frozenset[int]], int]:
    """Returns the CPUs by request, and ``left`` minus the number of these CPUs. Stops once the difference is
    negative.
    """
    found = {}
    for request, text in lists.items():
        found[str(request)] = parse_cpu_list(text)
        left -= len(found[str(request)])
        if left < 0:
            break
    return found, left


def _releasing(value: Any) -> ClaimFile:
    if "record" in value:
        return ClaimFile.of(parse_record(value["record"]))
    memory = {str(device): int(size) for device, size in value["memory"].items()}
    if min(memory.values(), default=0) < 0:
        raise ValueError("the memory size is negative and would count as free memory for other claims")
    return ClaimFile(str(value["driver"]), str(value["uid"]), None, parse_cpu_list(value["cpus"]), memory=memory)
