# SPDX-License-Identifier: Apache-2.0
"""Who of several instances acts. Time is set by the tests; locks and files are real."""

import asyncio
import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.node.active_lock import ActiveLock, LockLostError
from nri_backend.node.heartbeat import SIZE, STALE_SECONDS, Heartbeat
from numa_node.ticks import TICK_SECONDS


class Run:
    """A run directory, and instances on it."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self.root = root
        self.own = root / "backend"
        self.own.mkdir()
        self.path = self.own / "active.lock"
        self.now = 1000.0
        self._stack = stack

    def instance(self, name: str, *, serving: bool = True) -> ActiveLock:
        """An instance that is synchronised with the runtime."""
        lock = ActiveLock(str(self.own), name, lambda: self.now)
        self._stack.callback(lock.close)
        lock.serve(serving=serving)
        return lock

    def pair(self) -> tuple[ActiveLock, ActiveLock]:
        """An active instance, and a standby that has seen it."""
        one, two = self.instance("one"), self.instance("two")
        assert one.attempt()
        assert not two.attempt()
        return one, two

    def later(self, seconds: float, *beating: ActiveLock) -> None:
        """Time passes, in which these instances stamp."""
        self.now += seconds
        for lock in beating:
            lock.beat()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run directory."""
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)


def test_the_first_one_is_active_and_the_second_waits(run: Run) -> None:
    """A free lock is taken at once; the file says by whom, in a line of fixed length. Never two at once."""
    one, two = run.instance("a longer name"), run.instance("two")
    assert (one.active, one.fresh) == (False, False)
    assert one.attempt()
    assert (one.active, one.fresh) == (True, True)
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("a longer name", 1000.0, serving=True, since=1000.0)
    assert run.path.stat().st_size == SIZE
    assert not two.attempt()
    assert (two.active, two.fresh) == (False, True)
    one.close()
    assert not one.active
    assert not two.leadership.own
    assert two.attempt()
    assert two.leadership.own
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("two", 1000.0, serving=True, since=1000.0)


@pytest.mark.fault("backend A6", "frontend A1")
def test_a_frozen_holder_is_replaced(run: Run) -> None:
    """It stays as long as it stamps. Three beats missed, and a standby that serves the runtime has its place."""
    one, two = run.pair()
    for _ in range(10):
        run.later(TICK_SECONDS, one)
        assert not two.attempt()
        assert two.fresh
    run.later(STALE_SECONDS)
    assert not two.attempt()
    assert two.fresh
    run.later(0.1)
    assert not two.fresh
    assert two.attempt()
    assert (two.active, two.fresh, one.active, one.fresh) == (True, True, False, False)
    with pytest.raises(LockLostError, match="replaced"):
        one.check()
    two.check()
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("two", run.now, serving=True, since=1000.0)


def test_of_two_standbys_one_wins(run: Run) -> None:
    """Both see the same stale stamp; the second one finds a fresh one."""
    _, two = run.pair()
    three = run.instance("three")
    assert not three.attempt()
    run.later(STALE_SECONDS + 1)
    assert [two.attempt(), three.attempt()] == [True, False]
    assert not three.attempt()
    assert (two.active, three.active, three.fresh) == (True, False, True)


def test_whoever_is_taking_over_is_alone(run: Run) -> None:
    """While another instance has the turn, nobody gets the lock, whether it is free or stale."""
    one, two, three = (run.instance(name) for name in ("one", "two", "three"))
    assert one.attempt()
    run.later(STALE_SECONDS + 1)
    with (run.own / "takeover.lock").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        assert not two.attempt()
        one.close()
        assert not three.attempt()
    assert three.attempt()


def test_a_standby_without_the_runtime_takes_nothing_over(run: Run) -> None:
    """It could not do better, and when it comes back it gives the holder the same time."""
    one, two = run.instance("one"), run.instance("two", serving=False)
    assert one.attempt()
    run.later(STALE_SECONDS + 100)
    assert not two.attempt()
    two.serve(serving=True)
    assert not two.attempt()
    run.later(STALE_SECONDS + 0.1)
    assert two.attempt()


@pytest.mark.fault("backend A6")
def test_a_holder_that_has_lost_the_runtime_is_replaced(run: Run) -> None:
    """It stamps that it does not serve; a short loss, as both have when the runtime restarts, changes nothing."""
    one, two = run.pair()
    one.serve(serving=False)
    assert not one.fresh
    run.later(STALE_SECONDS - 1, one)
    assert not two.attempt()
    assert not two.fresh
    one.serve(serving=True)
    run.later(STALE_SECONDS - 1)
    assert not two.attempt()
    assert two.fresh
    one.beat()
    assert not two.attempt()
    one.serve(serving=False)
    run.later(STALE_SECONDS, one)
    assert not two.attempt()
    run.later(0.1, one)
    assert two.attempt()


def test_a_new_holder_has_time_to_serve(run: Run) -> None:
    """Whoever was waiting while nobody was active gives it as long as one that serves no more."""
    two = run.instance("two")
    run.later(STALE_SECONDS + 1)
    one = run.instance("one", serving=False)
    assert one.attempt()
    assert not two.attempt()
    run.later(STALE_SECONDS + 0.1, one)
    assert two.attempt()


def test_a_thawed_holder_that_nobody_replaced_goes_on(run: Run) -> None:
    """Its own word does not count until it has stamped again."""
    one = run.instance("one")
    assert one.attempt()
    run.later(STALE_SECONDS + 60)
    assert (one.active, one.fresh) == (True, False)
    one.check()
    one.beat()
    assert one.fresh


def test_a_removed_file_is_noticed_by_its_holder(run: Run) -> None:
    """A holder whose file was removed must not go on: the next instance locks another file."""
    one, two = run.pair()
    run.path.unlink()
    assert not one.active
    with pytest.raises(LockLostError, match="removed"):
        one.check()
    assert not two.attempt()
    assert two.attempt()


def test_a_holder_without_a_stamp_is_trusted(run: Run) -> None:
    """It may have found the disk full, or be about to stamp: the lock alone counts then."""
    two = run.instance("two")
    with run.path.open("w") as unstamped:
        fcntl.flock(unstamped, fcntl.LOCK_EX)
        for _ in range(5):
            assert not two.attempt()
            assert two.fresh
            run.later(STALE_SECONDS)


def test_a_full_disk_does_not_stop_the_heartbeat(run: Run) -> None:
    """The stamp is written in place; no file grows."""
    one = run.instance("one")
    assert one.attempt()
    size, blocks = run.path.stat().st_size, run.path.stat().st_blocks
    for _ in range(3):
        run.later(TICK_SECONDS, one)
    assert (run.path.stat().st_size, run.path.stat().st_blocks) == (size, blocks)
    assert {path.name for path in run.own.iterdir()} == {"active.lock", "takeover.lock"}


def test_what_is_in_the_way_of_a_take_over(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """What a standby left that died right then is removed; what cannot be is logged once, and tried again."""
    _, two = run.pair()
    (run.own / "active.lock.new").mkdir()
    run.later(STALE_SECONDS + 1)
    assert not any(two.attempt() for _ in range(5))
    assert [record.message for record in caplog.records] == ["the stale lock cannot be replaced"]
    (run.own / "active.lock.new").rmdir()
    (run.own / "active.lock.new").write_text("half")
    assert two.attempt()
    assert not (run.own / "active.lock.new").exists()


async def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """Without a directory to share there is no leader; nobody waits for ever."""
    lock = ActiveLock(str(tmp_path / "absent"), "one")
    with pytest.raises(FileNotFoundError):
        await lock.acquired()


async def test_waiting_and_keeping(run: Run) -> None:
    """The standby tries until the lock is free; then it stamps every other second, and ends when its file is gone."""
    one, two = run.pair()
    waiting = asyncio.create_task(two.acquired())
    await asyncio.sleep(1)
    assert not waiting.done()
    one.close()
    await waiting
    keeping = asyncio.create_task(two.keep())
    for _ in range(3):
        run.now += 1
        await asyncio.sleep(1)
    beat = Heartbeat.decode(run.path.read_bytes())
    assert beat is not None
    assert replace(beat, at=0.0) == Heartbeat("two", 0.0, serving=True, since=1000.0)
    assert beat.at > 1000
    run.path.unlink()
    with pytest.raises(LockLostError):
        await keeping


@pytest.mark.parametrize("instance", ["u/1", "u" * 128 + "/0123abcd"])
@pytest.mark.parametrize("at", [0.0, 12345678.901234567, 1e9])
def test_a_stamp_is_read_as_it_was_written(instance: str, at: float) -> None:
    """Every instance that there can be, of a pod with the longest UID, fits the one size."""
    heartbeat = Heartbeat(instance, at, serving=True, since=at)
    data = heartbeat.encode()
    assert len(data) == SIZE
    assert Heartbeat.decode(data) == heartbeat


@pytest.mark.parametrize("data", [b"", b"\xff", b"one/1\n", b"[" * SIZE, b'{"at": NaN}', b'{"instance": "a", "at": 1}'])
def test_what_is_no_stamp_is_none(data: bytes) -> None:
    """Nothing that lies in the file can end its reader."""
    assert Heartbeat.decode(data) is None


@pytest.mark.parametrize(
    ("age", "fresh"), [(0, True), (STALE_SECONDS, True), (STALE_SECONDS + 0.1, False), (-5, False)]
)
def test_a_stamp_from_the_future_is_of_an_earlier_boot(age: float, fresh: bool) -> None:
    """The monotonic clock begins anew with each boot."""
    assert Heartbeat("one", 1000 - age, serving=True).fresh(1000) is fresh


def test_descriptors_are_given_back(run: Run) -> None:
    """A standby that polls for days opens nothing that it does not close."""
    one, two = run.pair()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        two.attempt()
        one.check()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
