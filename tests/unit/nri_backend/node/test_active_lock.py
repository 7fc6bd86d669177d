# SPDX-License-Identifier: Apache-2.0
"""The election of the active instance, with real locks and files. The tests set the clock."""

import asyncio
import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.budgets import IDLE_SECONDS
from nri_backend.node.active_lock import ActiveLock, LockLostError
from nri_backend.node.heartbeat import HEARTBEAT_BYTES, HEARTBEAT_SECONDS, STALE_SECONDS, Heartbeat
from numa_node.files import locked
from numa_node.ticks import TICK_SECONDS

from tests.rigs.descriptors import descriptors_left


class Run:
    """A run directory and the instances that use it."""

    def __init__(self, root: Path, stack: contextlib.ExitStack) -> None:
        self.root = root
        self.own = root / "backend"
        self.own.mkdir()
        self.path = self.own / "active.lock"
        self.now = 1000.0
        self._stack = stack

    def instance(self, name: str, *, serving: bool = True) -> ActiveLock:
        """Returns an instance, which by default is synchronized with the runtime."""
        lock = ActiveLock(str(self.own), name, lambda: self.now)
        self._stack.callback(lock.close)
        lock.set_serving(serving=serving)
        return lock

    def pair(self) -> tuple[ActiveLock, ActiveLock]:
        """Returns an active instance, and a standby that has read its heartbeat."""
        one, two = self.instance("one"), self.instance("two")
        assert one.try_acquire()
        assert not two.try_acquire()
        return one, two

    def later(self, seconds: float, *beating: ActiveLock) -> None:
        """Advances the clock, and then has the given instances write their heartbeats."""
        self.now += seconds
        for lock in beating:
            lock.beat()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with contextlib.ExitStack() as stack:
        yield Run(tmp_path, stack)


def test_only_the_first_instance_is_active_until_it_releases_the_lock(run: Run) -> None:
    """The file contains the holder's heartbeat, which has a fixed length. Two instances are never active at the same
    time.
    """
    one, two = run.instance("a longer name"), run.instance("two")
    assert (one.active, one.fresh) == (False, False)
    assert one.try_acquire()
    assert (one.active, one.fresh) == (True, True)
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("a longer name", 1000.0, serving=True, since=1000.0)
    assert run.path.stat().st_size == HEARTBEAT_BYTES
    assert not two.try_acquire()
    assert (two.active, two.fresh) == (False, True)
    one.close()
    assert not one.active
    assert not two.leadership.is_self
    assert two.try_acquire()
    assert two.leadership.is_self
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("two", 1000.0, serving=True, since=1000.0)


def test_a_frozen_holder_is_replaced(run: Run) -> None:
    """A synchronized standby replaces the holder after three missed heartbeats. As long as the holder writes
    heartbeats, it stays active.
    """
    one, two = run.pair()
    for _ in range(10):
        run.later(TICK_SECONDS, one)
        assert not two.try_acquire()
        assert two.fresh
    run.later(STALE_SECONDS)
    assert not two.try_acquire()
    assert two.fresh
    run.later(0.1)
    assert not two.fresh
    assert two.try_acquire()
    assert (two.active, two.fresh, one.active, one.fresh) == (True, True, False, False)
    with pytest.raises(LockLostError, match="replaced"):
        one.check()
    two.check()
    assert Heartbeat.decode(run.path.read_bytes()) == Heartbeat("two", run.now, serving=True, since=1000.0)


def test_only_one_of_two_standbys_replaces_a_stale_holder(run: Run) -> None:
    """Both standbys have read the same stale heartbeat."""
    _, two = run.pair()
    three = run.instance("three")
    assert not three.try_acquire()
    run.later(STALE_SECONDS + 1)
    assert [two.try_acquire(), three.try_acquire()] == [True, False]
    assert not three.try_acquire()
    assert (two.active, three.active, three.fresh) == (True, False, True)


def test_no_lock_is_acquired_while_another_instance_is_taking_over(run: Run) -> None:
    """While takeover.lock is locked, neither a stale nor a free lock can be acquired."""
    one, two, three = (run.instance(name) for name in ("one", "two", "three"))
    assert one.try_acquire()
    run.later(STALE_SECONDS + 1)
    with (run.own / "takeover.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        assert not two.try_acquire()
        one.close()
        assert not three.try_acquire()
    assert three.try_acquire()


def test_a_standby_without_the_runtime_does_not_replace_a_stale_holder(run: Run) -> None:
    """Once the standby has reconnected, the holder gets another STALE_SECONDS to reconnect as well."""
    one, two = run.instance("one"), run.instance("two", serving=False)
    assert one.try_acquire()
    run.later(STALE_SECONDS + 100)
    assert not two.try_acquire()
    two.set_serving(serving=True)
    assert not two.try_acquire()
    run.later(STALE_SECONDS + 0.1)
    assert two.try_acquire()


def test_a_holder_that_has_lost_the_runtime_is_replaced(run: Run) -> None:
    """The holder reports the loss in its heartbeat. If the loss lasts less than STALE_SECONDS, as when the runtime
    restarts, it is ignored.
    """
    one, two = run.pair()
    one.set_serving(serving=False)
    assert not one.fresh
    run.later(STALE_SECONDS - 1, one)
    assert not two.try_acquire()
    assert not two.fresh
    one.set_serving(serving=True)
    run.later(STALE_SECONDS - 1)
    assert not two.try_acquire()
    assert two.fresh
    one.beat()
    assert not two.try_acquire()
    one.set_serving(serving=False)
    run.later(STALE_SECONDS, one)
    assert not two.try_acquire()
    run.later(0.1, one)
    assert two.try_acquire()


@pytest.mark.parametrize("since_heartbeat", [0.5, IDLE_SECONDS - 0.5])
def test_an_idle_holder_that_has_lost_the_runtime_is_replaced_as_soon_as_a_busy_one(
    run: Run, since_heartbeat: float
) -> None:
    """The holder is replaced STALE_SECONDS after it has reported the loss. It reports the loss immediately, even if its
    heartbeats are rare because the node is idle.

    Until the holder is replaced, no new claim can end the idle interval, because claims cannot be prepared while the
    connection to the runtime is lost.
    """
    one, two = run.pair()
    one.set_idle(idle=True)
    assert not two.try_acquire()
    run.later(since_heartbeat)
    one.set_serving(serving=False)
    run.later(STALE_SECONDS)
    assert not two.try_acquire()
    run.later(0.1)
    assert two.try_acquire()


def test_a_new_holder_has_time_to_connect_to_the_runtime(run: Run) -> None:
    """The holder has STALE_SECONDS to connect. This time starts when the standby first sees the holder, however long
    the standby has been waiting.
    """
    two = run.instance("two")
    run.later(STALE_SECONDS + 1)
    one = run.instance("one", serving=False)
    assert one.try_acquire()
    assert not two.try_acquire()
    run.later(STALE_SECONDS + 0.1, one)
    assert two.try_acquire()


def test_a_thawed_holder_that_was_not_replaced_continues(run: Run) -> None:
    """The holder's heartbeat does not count as fresh until it has been renewed."""
    one = run.instance("one")
    assert one.try_acquire()
    run.later(STALE_SECONDS + 60)
    assert (one.active, one.fresh) == (True, False)
    one.check()
    one.beat()
    assert one.fresh


def test_a_holder_whose_file_was_removed_has_lost_the_lock(run: Run) -> None:
    """The next instance creates and locks a new file."""
    one, two = run.pair()
    run.path.unlink()
    assert not one.active
    with pytest.raises(LockLostError, match="removed"):
        one.check()
    assert not two.try_acquire()
    assert two.try_acquire()


def test_a_holder_without_a_heartbeat_is_trusted(run: Run) -> None:
    """The disk may be full, or the holder may be about to write its heartbeat."""
    two = run.instance("two")
    with run.path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for _ in range(5):
            assert not two.try_acquire()
            assert two.fresh
            run.later(STALE_SECONDS)


def test_a_full_disk_does_not_stop_the_heartbeat(run: Run) -> None:
    """The heartbeat is written in place, so the file does not grow."""
    one = run.instance("one")
    assert one.try_acquire()
    size, blocks = run.path.stat().st_size, run.path.stat().st_blocks
    for _ in range(3):
        run.later(TICK_SECONDS, one)
    assert (run.path.stat().st_size, run.path.stat().st_blocks) == (size, blocks)
    assert {path.name for path in run.own.iterdir()} == {"active.lock", "takeover.lock"}


def test_a_new_file_left_by_a_dead_standby_does_not_prevent_a_takeover(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The leftover file is removed. As long as removing it fails, the takeover is retried, and the failure is logged
    once.
    """
    _, two = run.pair()
    (run.own / "active.lock.new").mkdir()
    run.later(STALE_SECONDS + 1)
    assert not any(two.try_acquire() for _ in range(5))
    assert [record.message for record in caplog.records] == ["the stale lock cannot be replaced"]
    (run.own / "active.lock.new").rmdir()
    (run.own / "active.lock.new").write_text("half")
    assert two.try_acquire()
    assert not (run.own / "active.lock.new").exists()


async def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    """acquire() raises an exception instead of waiting forever."""
    lock = ActiveLock(str(tmp_path / "absent"), "one")
    with pytest.raises(FileNotFoundError):
        await lock.acquire()


async def test_a_standby_waits_for_the_lock_and_then_renews_its_heartbeat(run: Run) -> None:
    """The standby, which is now active, renews its heartbeat on every tick until the lock file is removed."""
    one, two = run.pair()
    waiting = asyncio.create_task(two.acquire())
    await asyncio.sleep(1)
    assert not waiting.done()
    one.close()
    await waiting
    renewing = asyncio.create_task(two.renew_forever())
    for _ in range(3):
        run.now += 1
        await asyncio.sleep(1)
    beat = Heartbeat.decode(run.path.read_bytes())
    assert beat is not None
    assert replace(beat, at=0.0) == Heartbeat("two", 0.0, serving=True, since=1000.0)
    assert beat.at > 1000
    run.path.unlink()
    with pytest.raises(LockLostError):
        await renewing


@pytest.mark.parametrize("instance", ["u/1", "u" * 128 + "/0123abcd"])
@pytest.mark.parametrize("at", [0.0, 12345678.901234567, 1e9])
def test_a_heartbeat_decodes_to_the_same_value(instance: str, at: float) -> None:
    """The name of an instance in a pod with the longest possible UID fits into the fixed size."""
    heartbeat = Heartbeat(instance, at, serving=True, since=at)
    data = heartbeat.encode()
    assert len(data) == HEARTBEAT_BYTES
    assert Heartbeat.decode(data) == heartbeat


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"one/1\n", b"[" * HEARTBEAT_BYTES, b'{"at": NaN}', b'{"instance": "a", "at": 1}']
)
def test_other_data_decodes_to_none(data: bytes) -> None:
    assert Heartbeat.decode(data) is None


@pytest.mark.parametrize(
    ("age", "fresh"), [(0, True), (STALE_SECONDS, True), (STALE_SECONDS + 0.1, False), (-5, False)]
)
def test_a_heartbeat_is_fresh_for_stale_seconds_unless_it_is_from_the_future(age: float, fresh: bool) -> None:
    """A heartbeat from the future was written before a reboot, since the monotonic clock restarts on each boot."""
    assert Heartbeat("one", 1000 - age, serving=True).fresh(1000) is fresh


def test_polling_leaks_no_file_descriptors(run: Run) -> None:
    one, two = run.pair()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        two.try_acquire()
        one.check()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


async def test_a_standby_without_file_descriptors_waits_and_leaves_the_lock_to_others(run: Run) -> None:
    """The holder has exited, and the standby cannot open takeover.lock."""
    one, two = run.pair()
    one.close()
    with run.path.open() as file:
        with descriptors_left():
            waiting = asyncio.create_task(two.acquire())
            await asyncio.sleep(1)
            assert not waiting.done()
            assert locked(file.fileno())
        await asyncio.sleep(1)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)
    assert two.active


async def test_heartbeats_are_rare_on_an_idle_node(run: Run) -> None:
    """A standby waits for three missed heartbeats. When the interval between heartbeats changes, a heartbeat is written
    immediately.
    """
    one, two = run.pair()
    one.set_idle(idle=True)
    for _ in range(3):
        run.later(IDLE_SECONDS, one)
        assert not two.try_acquire()
        assert (one.fresh, two.fresh) == (True, True)
    run.later(3 * IDLE_SECONDS)
    assert not two.try_acquire()
    one.set_idle(idle=False)
    assert not two.try_acquire()
    run.later(STALE_SECONDS + 0.1)
    assert two.try_acquire()


async def test_a_pace_change_ends_the_wait_for_the_next_heartbeat(run: Run) -> None:
    """If the wait continued, the next heartbeat would come later than the new interval allows."""
    one, _ = run.pair()
    one.set_idle(idle=True)
    renewing = asyncio.create_task(one.renew_forever())
    await asyncio.sleep(0.01)
    run.now += 1
    one.set_idle(idle=False)
    for _ in range(4):
        await asyncio.sleep(1)
        run.now += 1
    beat = Heartbeat.decode(run.path.read_bytes())
    assert beat is not None
    assert (beat.every, beat.at >= 1003) == (TICK_SECONDS, True)
    assert HEARTBEAT_SECONDS == TICK_SECONDS
    renewing.cancel()


@pytest.mark.parametrize("every", ['"10"', "1.0", "61.0", "1e400", "null"])
def test_a_heartbeat_without_a_valid_pace_counts_as_one_from_a_busy_node(every: str) -> None:
    """Heartbeats from earlier releases contain no interval."""
    text = f'{{"instance": "a", "at": 1.0, "serving": true, "every": {every}}}'
    assert Heartbeat.decode(text.encode().ljust(HEARTBEAT_BYTES)) in (Heartbeat("a", 1.0, serving=True), None)
