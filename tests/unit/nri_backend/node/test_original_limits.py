# SPDX-License-Identifier: Apache-2.0
"""Original limits on cgroups, on a real directory tree."""

import os
from pathlib import Path

from nri_backend.node.original_limits import OriginalLimits


def test_notes_live_on_the_pods_cgroup(tmp_path: Path) -> None:
    """A restart of ours finds them; a new pod of the same path does not, nor one of which nothing is noted any more."""
    (tmp_path / "pod").mkdir()
    store, notes = OriginalLimits(str(tmp_path)), {"cpu.max": (None, 5, 6), "hugetlb.1GB.max": (0, 1 << 30)}
    store.store("pod", {})
    store.store("pod", notes)
    assert OriginalLimits(str(tmp_path)).load("pod") == notes
    store.store("pod", {})
    assert (os.listxattr(tmp_path / "pod"), store.load("pod")) == ([], {})
    store.store("pod", notes)
    (tmp_path / "pod").rmdir()
    (tmp_path / "pod").mkdir()
    assert store.load("pod") == {}


def test_without_attributes_memory_has_to_do(tmp_path: Path) -> None:
    """Where no attribute can be stored the notes are kept in memory, until the pod goes."""
    store = OriginalLimits(str(tmp_path))
    store.store("absent", {"cpu.max": (0, 1)})
    assert store.load("absent") == {"cpu.max": (0, 1)}
    store.forget("absent")
    assert store.load("absent") == {}
