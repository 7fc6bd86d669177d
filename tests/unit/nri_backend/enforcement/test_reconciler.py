# SPDX-License-Identifier: Apache-2.0
"""The reconciler asks the kernel whether a container still has a running process."""

import asyncio
import errno
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from nri_backend.containers.container import Identity, Tracked
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.enforcement.reconciler import Reconciler, Signals
from numa_node.claim_directory import ClaimDirectory

from tests.rigs.containers import pod
from tests.rigs.enforcement import deps_of
from tests.rigs.kernel_tree import KernelTree

CGROUP = "kubepods/pod1/c1"


async def test_a_container_whose_cgroup_cannot_be_read_counts_as_alive(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error such as EMFILE is not evidence that the container has exited, and no exception is raised. The error is
    logged only once while it persists.
    """
    tree, state = KernelTree(tmp_path / "cgroup"), NodeState()
    tree.make(CGROUP)
    deps = deps_of(ClaimDirectory(str(tmp_path)), tree, lambda: state.host)
    reconciler = Reconciler(state, deps, Signals())
    tracked = Tracked(Identity("c", "main", pod(), CGROUP), phase=Phase.ENDING)
    tree.set(CGROUP, "cgroup.events", "populated 0")
    for _ in range(2):
        caplog.clear()
        tree.unreadable[CGROUP, "cgroup.events"] = errno.EMFILE
        assert [await reconciler.populated([tracked]) for _ in range(3)] == [[True]] * 3
        assert caplog.text.count("cannot tell whether") == 1
        tree.unreadable.clear()
        assert await reconciler.populated([tracked]) == [False]


class CountingExecutor(ThreadPoolExecutor):
    """An executor that counts the calls that it runs."""

    calls = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        """Counts the call."""
        self.calls += 1
        return super().submit(*args, **kwargs)


async def test_one_thread_reads_whether_many_containers_have_exited(tmp_path: Path) -> None:
    """Synchronize waits for these reads. Switching to a thread takes 20 times as long as a single read."""
    tree, state = KernelTree(tmp_path / "cgroup"), NodeState()
    for number in range(20):
        path = f"{CGROUP}-{number}"
        tree.make(path)
        tree.set(path, "cgroup.events", f"populated {number % 2}")
        state.put(Tracked(Identity(f"c{number}", "main", pod(), path), phase=Phase.LINGERING))
    state.put(Tracked(Identity("unknown", "main", pod()), phase=Phase.ENDING))
    executor = CountingExecutor()
    asyncio.get_running_loop().set_default_executor(executor)
    deps = deps_of(ClaimDirectory(str(tmp_path)), tree, lambda: state.host)
    await Reconciler(state, deps, Signals()).reap([one.id for one in state])
    assert executor.calls == 1
    assert {one.id: one.phase for one in state} == {
        **{f"c{number}": Phase.LINGERING for number in range(1, 20, 2)},
        "unknown": Phase.STOPPED,
    }
