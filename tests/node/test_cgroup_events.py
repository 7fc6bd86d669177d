# SPDX-License-Identifier: Apache-2.0
"""The backend's watch on cgroup files, with the events of a real kernel."""

import asyncio
import subprocess

import pytest
from nri_backend.node.cgroup_watch import CgroupWatch

from tests.fakes.waiting import PATIENCE
from tests.node.rig import kernel
from tests.node.rig.kernel import Cgroup

INTERVAL = 0.5
EXITING = Cgroup("/exiting")


@pytest.mark.core
def test_an_exit_shortly_after_another_event_is_reported() -> None:
    """A runtime may freeze a container's cgroup just before it kills the container. The exit of the last process must
    be reported even though no further event follows it.
    """
    EXITING.directory.mkdir()
    try:
        with subprocess.Popen(["sleep", "infinity"]) as process:
            try:
                EXITING.write("cgroup.procs", process.pid)
                asyncio.run(_freeze_and_kill(process))
            finally:
                EXITING.write("cgroup.freeze", 0)
                process.kill()
    finally:
        EXITING.directory.rmdir()


async def _freeze_and_kill(process: subprocess.Popen[bytes]) -> None:
    reports: asyncio.Queue[tuple[set[str], float]] = asyncio.Queue()
    clock = asyncio.get_running_loop().time
    watch = CgroupWatch(
        str(kernel.CGROUPS), "cgroup.events", lambda content: b"populated 1" in content, interval=INTERVAL
    )
    watch.listen(lambda paths: reports.put_nowait((paths, clock())))
    try:
        path = EXITING.path.lstrip("/")
        assert not watch.watch([path])
        async with asyncio.timeout(30 * PATIENCE):
            EXITING.write("cgroup.freeze", 1)
            first, frozen_at = await reports.get()
            process.kill()
            EXITING.write("cgroup.freeze", 0)
            second, ended_at = await reports.get()
        assert first == second == {path}
        assert EXITING.read("cgroup.events").splitlines()[0] == "populated 0"
        assert ended_at - frozen_at >= INTERVAL
    finally:
        watch.close()
