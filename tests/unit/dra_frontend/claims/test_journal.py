# SPDX-License-Identifier: Apache-2.0
"""The journal that all instances on a node share: which failures it survives, and which entries it always retains."""

import json
import os
import tempfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.claims.journal import SLOT_BYTES, Journal, JournalEntries
from hypothesis import example, given
from hypothesis import strategies as st
from numa_contract.cdi import ClaimFile
from numa_contract.names import DRIVERS
from numa_node.claim_directory import MAX_CLAIM_FILES

from tests.rigs.builders import record
from tests.rigs.descriptors import descriptors_left
from tests.rigs.frontend import full_disk

A, B = ("dra.cpu", "a"), ("dra.memory", "b")
NAMES = {A: ("ns", "claim-a"), B: ("other", "claim-b")}
LEAVING = {A: ClaimFile.of(record("a"))}
CPUS = {A: {"": frozenset({1, 2})}, ("dra.cpu", "c"): {"x": frozenset({3}), "y": frozenset({0, 5})}}
NAMELESS = {B: ClaimFile(*B, None, frozenset({4, 5}), memory={"hugepages-2m-numa000": 1 << 21})}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Returns the path to the journal."""
    return tmp_path / "run" / "claims.journal"


def test_each_write_contains_the_current_names_cpus_and_releases(path: Path) -> None:
    """The lines for unchanged entries are reused, and a change to any part of an entry is written."""
    journal = Journal(path)
    for entries in (
        JournalEntries(NAMES, LEAVING, cpus=CPUS),
        JournalEntries(NAMES | {A: ("ns", "renamed")}, LEAVING, cpus=CPUS),
        JournalEntries(NAMES, LEAVING, cpus=CPUS | {A: {"": frozenset({7})}}),
        JournalEntries(NAMES, {A: ClaimFile.of(record("a", frozenset({9})))}, cpus={}),
        JournalEntries({B: NAMES[B]}, {}, cpus=CPUS),
        JournalEntries(NAMES, NAMELESS, cpus=CPUS),
    ):
        journal.write(entries)
        read = Journal(path).read()
        present_cpus = {key: cpus for key, cpus in entries.cpus.items() if key in entries.expected}
        assert (read.expected, read.cpus) == (entries.expected, present_cpus)
        assert {key: file.cpus for key, file in read.releasing.items()} == {
            key: file.cpus for key, file in entries.releasing.items()
        }


def test_entries_written_while_the_file_could_not_be_read_are_not_overwritten(path: Path) -> None:
    """The second instance has no free descriptor when it reads the journal, but has one again when it writes."""
    first, second = Journal(path), Journal(path)
    first.write(JournalEntries(NAMES))
    second.read()
    first.write(JournalEntries({B: NAMES[B]}, LEAVING))
    with descriptors_left():
        assert second.read() == JournalEntries(NAMES)
    second.write(JournalEntries(NAMES | {("dra.cpu", "c"): ("ns", "claim-c")}))
    assert second.problem
    for one in (first, second, Journal(path)):
        assert one.read().releasing.keys() == {A}
        assert not one.problem
    second.write(JournalEntries({B: NAMES[B]}))
    assert first.read() == JournalEntries({B: NAMES[B]})


def test_an_instance_can_write_its_own_entries_after_a_failed_read(path: Path) -> None:
    """No other instance has written in the meantime."""
    journal = Journal(path)
    journal.write(JournalEntries(NAMES))
    with descriptors_left():
        journal.read()
    journal.write(JournalEntries(NAMES, LEAVING))
    assert not journal.problem
    assert Journal(path).read().releasing.keys() == {A}


def test_another_instance_reads_the_written_entries(path: Path) -> None:
    """The journal contains the names of claims with files and the records of claims that are being released. Each
    instance sees the other instance's writes.
    """
    first, second = Journal(path), Journal(path)
    assert (first.read(), first.was_read) == (JournalEntries(), False)
    first.write(JournalEntries(NAMES, LEAVING | NAMELESS))
    read = second.read()
    assert (read.expected, second.was_read, second.problem) == (NAMES, True, "")
    assert read.releasing[A].record == record("a")
    assert (read.releasing[B].cpus, read.releasing[B].memory) == ({4, 5}, {"hugepages-2m-numa000": 1 << 21})
    second.write(JournalEntries({A: NAMES[A]}))
    assert first.read() == JournalEntries({A: NAMES[A]})
    first.write(JournalEntries({A: NAMES[A]}, needs_listing=True))
    assert second.read() == JournalEntries({A: NAMES[A]}, needs_listing=True)
    second.write(JournalEntries({A: NAMES[A]}))
    assert not first.read().needs_listing
    assert first.foreign
    first.read()
    assert not first.foreign


@pytest.mark.parametrize("names", [("ns", "claim"), ("n" * 60, "c" * 250)], ids=["whole", "without names"])
def test_the_cpus_of_claims_are_read_back_as_they_were_written(path: Path, names: tuple[str, str]) -> None:
    """The CPUs are read back even for claims whose names did not fit. For a claim that is not in the journal, no CPUs
    are read.
    """
    present = dict.fromkeys([*CPUS, *[("dra.cpu", f"{n:036d}") for n in range(2000)]], names)
    Journal(path).write(JournalEntries(present, cpus=CPUS))
    read = Journal(path).read()
    assert (read.expected.keys(), read.cpus) == (present.keys(), CPUS)
    assert read.expected[A] == (names if len(names[0]) < 60 else ("", ""))


def test_cpus_that_do_not_fit_are_left_out_while_their_claims_stay(path: Path) -> None:
    """The machine has 3,840 CPUs, allocated to 120 claims with 32 one-CPU requests each and with the longest possible
    request names.
    """
    requests = [f"{n:063d}" for n in range(32)]
    cpus = {
        ("dra.cpu", f"{claim:036d}"): {name: frozenset({32 * claim + n}) for n, name in enumerate(requests)}
        for claim in range(120)
    }
    journal = Journal(path)
    journal.write(JournalEntries(dict.fromkeys(cpus, NAMES[A]), LEAVING, cpus=cpus))
    read = Journal(path).read()
    assert (journal.problem, read.expected.keys(), read.cpus) == ("", cpus.keys(), {})
    assert read.releasing[A].cpus == {1, 2}


def test_the_file_has_a_fixed_size_and_is_written_in_place(path: Path) -> None:
    """The space is allocated when the file is created, so a disk that fills up later does not prevent writes."""
    journal = Journal(path)
    journal.write(journal.read())
    status = path.stat()
    assert status.st_blocks * 512 >= status.st_size == 2 * SLOT_BYTES
    with full_disk(2 * SLOT_BYTES):
        for number in range(5):
            journal.write(JournalEntries({("dra.cpu", str(number)): ("ns", "c")}, LEAVING))
            assert journal.problem == ""
    assert path.stat().st_ino == status.st_ino
    assert Journal(path).read().expected == {("dra.cpu", "4"): ("ns", "c")}
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@given(st.integers(0, SLOT_BYTES), st.binary(max_size=40))
@example(27, b"")  # the new sequence number is followed by the old length and checksum
def test_a_crash_during_a_write_leaves_the_previous_slot_intact(end: int, garbage: bytes) -> None:
    """If the entries in the new slot have not reached the disk completely, the previous slot is read. Either way,
    the next write succeeds.
    """
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "journal"
        journal = Journal(path)
        for present in ({A: NAMES[A]}, NAMES):
            journal.write(JournalEntries(present))
        before = path.read_bytes()
        journal.write(JournalEntries(NAMES, LEAVING))
        written = (path.read_bytes()[SLOT_BYTES : SLOT_BYTES + end] + garbage)[:SLOT_BYTES]
        path.write_bytes(before[:SLOT_BYTES] + written + before[SLOT_BYTES + len(written) :])
        again = Journal(path)
        assert again.read() in (JournalEntries(NAMES), JournalEntries(NAMES, LEAVING))
        again.write(JournalEntries({B: NAMES[B]}))
        assert Journal(path).read() == JournalEntries({B: NAMES[B]})


def test_a_failed_write_is_retried_later(path: Path) -> None:
    """If the disk is full when the service starts, no partial file remains, and the journal is written as soon as there
    is space.
    """
    journal = Journal(path)
    with full_disk():
        journal.write(JournalEntries(NAMES, LEAVING))
        assert "cannot be written" in journal.problem
        assert journal.read() == JournalEntries(NAMES, LEAVING)
        assert list(path.parent.iterdir()) == []
    assert journal.foreign, "the journal still counts as written by another instance"
    journal.write(journal.read())
    assert (journal.problem, Journal(path).read().expected) == ("", NAMES)


@pytest.mark.parametrize("offset", [0, 64], ids=["header", "entries"])
@pytest.mark.parametrize("slots", [(0,), (SLOT_BYTES,), (0, SLOT_BYTES)], ids=["first", "second", "both"])
@pytest.mark.parametrize("writes", [2, 3])
def test_a_slot_that_is_damaged_after_it_was_read_is_written_again(
    path: Path, writes: int, slots: tuple[int, ...], offset: int
) -> None:
    """The latest entries survive, not those in the older slot. The next write stores them again, although they have not
    changed.
    """
    journal = Journal(path)
    for number in range(writes):
        journal.write(JournalEntries({("dra.cpu", str(number)): ("ns", "c")}))
    reader = Journal(path)
    latest = reader.read()
    data = bytearray(path.read_bytes())
    for slot in slots:
        data[slot + offset : slot + offset + 16] = bytes(16)
    path.write_bytes(data)
    for one in (journal, reader):
        assert one.read() == latest
        one.write(latest)
        assert one.problem == ""
        assert Journal(path).read() == latest
    journal.write(JournalEntries(NAMES))
    assert reader.read() == Journal(path).read() == JournalEntries(NAMES)


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 2 * SLOT_BYTES, b"dra-driver-numa journal 1 x y z", b"[]"])
def test_an_invalid_journal_is_replaced(path: Path, content: bytes) -> None:
    """Nothing is read from an invalid journal, and this process's entries overwrite it."""
    path.parent.mkdir()
    path.write_bytes(content)
    journal = Journal(path)
    assert (journal.read(), journal.was_read) == (JournalEntries(), False)
    assert "is not a journal" in journal.problem
    journal.write(JournalEntries(NAMES))
    assert Journal(path).read() == JournalEntries(NAMES)


def test_a_fifo_or_a_symlink_in_the_journals_place_is_replaced(path: Path) -> None:
    """Reading neither blocks on the FIFO nor follows the symlink. The next write replaces it with a regular file."""
    path.parent.mkdir()
    for target in ("", "/dev/zero", path.name):
        path.unlink(missing_ok=True)
        if target:
            path.symlink_to(target)
        else:
            os.mkfifo(path)
        journal = Journal(path)
        assert journal.read() == JournalEntries()
        assert journal.problem


def test_names_are_left_out_first_if_not_all_entries_fit(path: Path) -> None:
    """The short names of 2,000 claims fit. Names can be requested from the API server again, whereas UIDs, CPUs and
    hugepages are retained, because claims must not lose them.
    """
    many = {("dra.cpu", f"01234567-89ab-cdef-0123-{n:012d}"): (f"namespace-{n}", f"claim-{n}") for n in range(2000)}
    journal = Journal(path)
    journal.write(JournalEntries(many, LEAVING))
    assert Journal(path).read().expected == many
    keys = [(driver, f"01234567-89ab-cdef-0123-{n:012d}") for n in range(MAX_CLAIM_FILES // 2) for driver in DRIVERS]
    more = dict.fromkeys(keys, ("n" * 60, "c" * 200))
    journal.write(JournalEntries(more, LEAVING))
    read = Journal(path).read()
    assert read.expected == dict.fromkeys(more, ("", ""))
    assert (read.releasing[A].record, read.releasing[A].cpus) == (None, {1, 2})
    journal.write(JournalEntries({("dra.cpu", f"{n:0100d}"): ("", "") for n in range(4000)}))
    assert "more claims than the journal has room for" in journal.problem


def replace_slot(path: Path, sequence: int, entries: list[Any]) -> None:
    """Writes entries to the slot for a sequence number, as some other program might."""
    line = b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
    slot = (b"dra-driver-numa journal 1 %d %d %d" % (sequence, len(line), zlib.crc32(line, sequence))).ljust(64) + line
    assert len(slot) <= SLOT_BYTES
    data, start = bytearray(path.read_bytes()), SLOT_BYTES * (sequence % 2)
    data[start : start + len(slot)] = slot
    path.write_bytes(data)


MANY = [f"{first}-8191" for first in range(1, 1600)]


@pytest.mark.parametrize(
    "entries",
    [
        [["dra.cpu", "a", "ns", "n", {text: text for text in MANY}]],
        [["dra.cpu", text, "ns", "n", {"": text}] for text in MANY],
        [{"driver": "dra.cpu", "uid": text, "cpus": text, "memory": {}} for text in MANY],
    ],
    ids=["requests of a claim", "claims", "releases"],
)
def test_more_cpus_than_any_machine_has_are_not_read(path: Path, entries: list[Any]) -> None:
    """Expanding a list of that many CPUs would take a gigabyte of memory. The list is skipped: this process overwrites
    it with its own entries, which the next instance can read.
    """
    journal = Journal(path)
    journal.write(JournalEntries(NAMES))
    replace_slot(path, 2, entries)
    tracemalloc.start()
    read = journal.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32 << 20
    assert (read, journal.foreign) == (JournalEntries(NAMES), True)
    assert "contains more than 131072 CPUs" in journal.problem
    fresh = Journal(path)
    assert (fresh.read(), fresh.was_read) == (JournalEntries(), False)
    journal.write(read)
    assert (journal.problem, Journal(path).read()) == ("", JournalEntries(NAMES))


def test_entries_that_cannot_come_from_a_claim_file_are_skipped(path: Path) -> None:
    """If the entries were read, their CPUs would stay allocated forever, or their negative byte counts would allow
    another claim to get too many bytes.
    """
    Journal(path).write(JournalEntries(NAMES))
    gone = {"driver": "dra.memory", "uid": "m", "cpus": "", "memory": {"memory-numa000": -(1 << 40)}}
    entries: list[Any] = [["dra.gpu", "u", "ns", "n", {"": "1"}], ["dra.cpu", "../u", "ns", "n", {"": "2"}], gone]
    entries += [{**gone, "driver": "dra.gpu", "memory": {}}, {**gone, "uid": "", "memory": {}}]
    replace_slot(path, 2, [["dra.cpu", "a", "ns", "claim-a"], *entries])
    assert Journal(path).read() == JournalEntries({A: NAMES[A]})


def test_entries_from_a_newer_release_are_skipped(path: Path) -> None:
    """Each entry is on a separate line, so the remaining ones can still be parsed."""
    journal = Journal(path)
    journal.write(JournalEntries(NAMES))
    entries = [["dra.cpu", "a", "ns", "claim-a", {"": "1-2"}, "more"], {"invention": 1}, ["x"], 3]
    entries += [{"record": {"version": 99}}]
    held = {"driver": "dra.cpu", "uid": "b", "cpus": "0", "memory": {}}
    entries += [held | {"cpus": [0]}, held | {"memory": [5]}]
    replace_slot(path, 2, entries)
    assert Journal(path).read() == JournalEntries({A: NAMES[A]}, cpus={A: CPUS[A]})
