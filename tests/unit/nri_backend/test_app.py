# SPDX-License-Identifier: Apache-2.0
import asyncio
import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from nri_backend.app import (
    MAX_PROBLEMS,
    Backend,
    EssentialTaskError,
    _essential,
    _log_exclusivity,
    finish_threads,
    main,
    run,
)
from nri_backend.node.active_lock import ActiveLock
from nri_backend.node.host import HostError
from nri_backend.node.preflight import PreflightError
from nri_backend.node.privileges import Privileges
from nri_backend.nri.model import LinkStatus
from nri_backend.problems import NO_PROBLEM, Problem
from nri_backend.settings import load_settings
from numa_contract import __version__
from numa_contract.backend_codes import BackendCode


def lock(tmp_path: Path) -> ActiveLock:
    return ActiveLock(str(tmp_path / "locks"), "u/1")


def build(tmp_path: Path, held: ActiveLock | None = None, privileges: Privileges = Privileges()) -> Backend:  # noqa: B008
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "online").write_text("0-3\n")
    places = (f"--host-root={tmp_path}", f"--cgroup-root={tmp_path}/cgroup", f"--cdi-dir={tmp_path}/cdi")
    settings = load_settings([*places, f"--run-dir={tmp_path}/run", "--reserved-cpus=0"], {"POD_UID": "u"})
    return Backend(settings, held or lock(tmp_path), privileges)


def test_the_lease_contains_the_backends_state(tmp_path: Path) -> None:
    """The lease contains the pool, the software versions and the counters. Building the app creates no files or
    sockets, and the app is not ready until it is connected to the runtime.
    """
    backend = build(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sys"]
    assert not backend.ready()
    status = backend.status()
    assert (status.instance, status.software, status.pool) == ("u/1", __version__, {1, 2, 3})
    assert (status.active, status.enforced, status.synchronized) == (False, False, False)
    assert status.kubelet_pins == ()
    assert len(status.problems) <= MAX_PROBLEMS
    metrics = {metric.name: metric.samples for metric in status.metrics}
    assert metrics["pool_cpus"][0].value == 3
    assert metrics["build_info"][0].labels == (__version__,)


NO_SYS_ADMIN = Problem("no SYS_ADMIN", BackendCode.SYS_ADMIN_MISSING)


@pytest.mark.parametrize(("obstacle", "mode"), [(NO_SYS_ADMIN, "pool"), (NO_PROBLEM, "partition")])
def test_the_lease_reports_the_mode_and_its_reason(obstacle: Problem, mode: str, tmp_path: Path) -> None:
    """On a kernel with partitions, the process's privileges determine the mode. A missing DAC_OVERRIDE is a problem in
    either mode.
    """
    group = tmp_path / "cgroup/kubepods"
    group.mkdir(parents=True)
    (group / "cpuset.cpus.exclusive").touch()
    missing = Problem("no DAC_OVERRIDE", BackendCode.DAC_OVERRIDE_MISSING)
    status = build(tmp_path, privileges=Privileges(lambda: obstacle, (missing,))).status()
    assert (status.exclusivity, status.exclusivity_reason) == (mode, obstacle)
    assert status.exclusivity_code == (BackendCode.SYS_ADMIN_MISSING if obstacle else "")
    assert status.coded_problems == ((BackendCode.DAC_OVERRIDE_MISSING, "no DAC_OVERRIDE"),)


def test_an_old_kernel_is_reported_as_the_reason_before_any_privilege(tmp_path: Path) -> None:
    """On an old kernel, granting a capability would not help."""
    (tmp_path / "cgroup/kubepods").mkdir(parents=True)
    backend = build(tmp_path, privileges=Privileges(lambda: NO_SYS_ADMIN))
    assert "Linux 6.7" in backend.status().exclusivity_reason


def test_the_backend_reports_enforcement_only_while_it_is_synchronized(tmp_path: Path) -> None:
    """Other instances consider the holder to be enforcing claims only while it is synchronized with the runtime."""
    (tmp_path / "locks").mkdir()
    with contextlib.closing(lock(tmp_path)) as held:
        backend = build(tmp_path, held)
        assert held.try_acquire()
        for synchronized in (False, True, True, False):
            backend.link_changed(LinkStatus(connected=True, synchronized=synchronized))
            assert backend.status().enforced is synchronized


def test_nothing_is_moved_off_claimed_cpus_once_the_lock_is_lost(tmp_path: Path) -> None:
    """A frozen instance that resumes has been replaced, but does not know it yet."""
    (tmp_path / "locks").mkdir()
    with contextlib.closing(lock(tmp_path)) as held:
        backend = build(tmp_path, held)
        backend._enforcer.state.replace_containers(())
        backend._enforcer.signals.active = True
        assert held.try_acquire()
        assert backend._host_isolation._desired_for_slices() is not None
        (tmp_path / "locks/active.lock").unlink()
        assert backend._host_isolation._desired_for_slices() is None


@pytest.mark.parametrize(
    ("configured", "text"),
    [
        ("auto", "claims are enforced by the shared pool, not by cpuset partitions"),
        ("partition", "CPU claims for a single container are refused"),
    ],
)
def test_the_log_explains_the_effect_of_missing_partitions(
    configured: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With cpuExclusivity: partition, the pool is not used as a fallback."""
    _log_exclusivity("no SYS_ADMIN", configured)
    (record,) = caplog.records
    assert (record.levelname, record.message.startswith(text)) == ("WARNING", True)


async def test_the_error_names_a_task_that_ends(tmp_path: Path) -> None:
    """If a task that must never end does end, the process exits, and the error names the task."""

    async def ends() -> None:
        return

    async def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(EssentialTaskError, match="the task reports ended"):
        await _essential("reports", ends())
    with pytest.raises(ValueError, match="broken") as caught:
        await _essential("records", fails())
    assert caught.value.__notes__ == ["in the task records"]


async def test_the_active_lock_is_released_after_the_last_write(tmp_path: Path) -> None:
    """A cancelled task leaves its thread running. Another instance must not become active before the thread's write,
    which would otherwise overwrite a value from that instance.
    """
    held, other = lock(tmp_path), ActiveLock(str(tmp_path / "locks"), "u/2")
    (tmp_path / "locks").mkdir()
    assert held.try_acquire()
    threads, write = ThreadPoolExecutor(2), threading.Event()
    threads.submit(write.wait, 30)

    async def shut_down() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.callback(held.close)
            stack.push_async_callback(finish_threads, threads, 60)

    ending = asyncio.create_task(shut_down())
    await asyncio.wait({ending}, timeout=0.1)
    early = ending.done(), other.try_acquire()
    write.set()
    await ending
    assert early == (False, False)
    assert other.try_acquire()


async def test_a_hung_thread_does_not_keep_the_active_lock(tmp_path: Path) -> None:
    """A kernel call can hang forever, and another instance must be able to enforce claims."""
    threads, hung = ThreadPoolExecutor(1), threading.Event()
    threads.submit(hung.wait, 30)
    await finish_threads(threads, 0.05)
    hung.set()


async def test_nothing_is_created_on_a_node_that_fails_the_preflight(tmp_path: Path) -> None:
    """The preflight checks run first, so nothing is created on a node on which the backend could not work."""
    arguments = [f"--{name}={tmp_path}/{name}" for name in ("run-dir", "cgroup-root", "host-root")]
    settings = load_settings([*arguments, "--bind-address=off"], {"POD_UID": "u"})
    with pytest.raises(PreflightError, match=r"cgroup\.controllers does not exist"):
        await run(settings)
    assert not (tmp_path / "run-dir").exists()
    (tmp_path / "cgroup-root").mkdir()
    (tmp_path / "cgroup-root/cgroup.controllers").write_text("cpuset")
    with pytest.raises(HostError, match="--host-root"):
        await run(settings)
    asyncio.get_running_loop().remove_signal_handler(15)
    asyncio.get_running_loop().remove_signal_handler(2)


@pytest.mark.parametrize(
    ("arguments", "expected"), [(["--nonsense"], "unrecognized"), (["--config=/absent"], "absent")]
)
def test_wrong_usage_exits_with_status_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is a single line on standard error and names the command."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("nri-backend: ")
    assert said.count("\n") == 1
    assert expected in said
