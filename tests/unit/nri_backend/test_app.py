# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
from pathlib import Path

import pytest
from nri_backend.app import MAX_PROBLEMS, Backend, EssentialTaskError, _essential, main, run
from nri_backend.node.active_lock import ActiveLock
from nri_backend.node.host import HostError
from nri_backend.node.preflight import PreflightError
from nri_backend.nri.hooks import LinkStatus
from nri_backend.settings import load_settings
from numa_contract import __version__


def build(tmp_path: Path) -> Backend:
    cpus = tmp_path / "sys/devices/system/cpu"
    cpus.mkdir(parents=True)
    (cpus / "online").write_text("0-3\n")
    settings = load_settings(
        [f"--host-root={tmp_path}", f"--cdi-dir={tmp_path}/cdi", f"--run-dir={tmp_path}/run", "--reserved-cpus=0"],
        {"POD_UID": "u"},
    )
    return Backend(settings, ActiveLock(str(tmp_path / "lock"), "u/1"), "u/1")


def page(backend: Backend, name: str) -> tuple[int, str]:
    status, _, body = backend.pages()[name]()
    return status, body.decode()


def test_building_opens_nothing(tmp_path: Path) -> None:
    """Nothing is written and nothing is connected before it runs."""
    build(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sys"]


def test_not_ready_says_why(tmp_path: Path) -> None:
    """Readiness is about the runtime alone, and names the socket that does not answer."""
    backend = build(tmp_path)
    assert page(backend, "/healthz") == (200, "ok\n")
    status, text = page(backend, "/readyz")
    assert status == 503
    assert "/var/run/nri/nri.sock: no connection yet" in text


def test_metrics_show_the_pool(tmp_path: Path) -> None:
    """The gauges come from the state of enforcement: online CPUs without the reserved one."""
    status, text = page(build(tmp_path), "/metrics")
    assert status == 200
    assert "\ndra_numa_backend_pool_cpus 3.0\n" in text
    assert f'dra_numa_backend_build_info{{version="{__version__}"}} 1.0' in text
    assert "_created" not in text


def test_the_lease_tells_the_state(tmp_path: Path) -> None:
    """The lease carries epoch and completeness of the telling, the pool and the software."""
    status = build(tmp_path)._status("e1", True)
    assert (status.instance, status.epoch, status.complete) == ("u/1", "e1", True)
    assert (status.active, status.synchronized, status.software) == (False, False, __version__)
    assert status.pool == {1, 2, 3}
    assert len(status.problems) <= MAX_PROBLEMS


def test_each_synchronisation_is_an_epoch(tmp_path: Path) -> None:
    """A connection that was synchronised begins a telling, one that is lost ends it; repeated news change nothing."""
    backend = build(tmp_path)
    epochs = [backend._outbox.epoch]
    for status in (
        LinkStatus(connected=True),
        LinkStatus(connected=True, synchronized=True),
        LinkStatus(connected=True, synchronized=True),
        LinkStatus(),
        LinkStatus(last_end="cannot connect"),
        LinkStatus(connected=True, synchronized=True),
    ):
        backend.link_changed(status)
        epochs.append(backend._outbox.epoch)
    news = [one != other for one, other in itertools.pairwise(epochs)]
    assert news == [False, True, False, True, False, True]


async def test_a_task_that_ends_is_named(tmp_path: Path) -> None:
    """A task that should never end ends the process; the error says which one it was."""

    async def ends() -> None:
        return

    async def fails() -> None:
        raise ValueError("broken")

    with pytest.raises(EssentialTaskError, match="the task reports ended"):
        await _essential("reports", ends())
    with pytest.raises(ValueError, match="broken") as caught:
        await _essential("events", fails())
    assert caught.value.__notes__ == ["in the task events"]


async def test_a_node_that_is_not_set_up(tmp_path: Path) -> None:
    """Preflight comes first: nothing is made on a node where this program could not work."""
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
def test_wrong_usage_is_exit_2(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on standard error, which names the command, and exit 2."""
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("nri-backend: ")
    assert said.count("\n") == 1
    assert expected in said
