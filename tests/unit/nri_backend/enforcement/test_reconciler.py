# SPDX-License-Identifier: Apache-2.0
"""The reconciler asks the kernel whether a process of a container lives."""

import errno
from pathlib import Path

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
    """An error such as EMFILE does not show an end and raises nothing. It is logged once until it is over."""
    tree, state = KernelTree(tmp_path / "cgroup"), NodeState()
    tree.make(CGROUP)
    deps = deps_of(ClaimDirectory(str(tmp_path)), tree, lambda: state.host)
    reconciler = Reconciler(state, deps, Signals())
    tracked = Tracked(Identity("c", "main", pod(), CGROUP), phase=Phase.ENDING)
    tree.set(CGROUP, "cgroup.events", "populated 0")
    for _ in range(2):
        caplog.clear()
        tree.unreadable[CGROUP, "cgroup.events"] = errno.EMFILE
        assert [await reconciler.populated(tracked) for _ in range(3)] == [True] * 3
        assert caplog.text.count("cannot tell whether") == 1
        tree.unreadable.clear()
        assert not await reconciler.populated(tracked)
