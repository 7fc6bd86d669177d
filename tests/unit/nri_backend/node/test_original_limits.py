# SPDX-License-Identifier: Apache-2.0
"""Storage of original limits as attributes of cgroups, in a real directory tree."""

import os
from pathlib import Path

from nri_backend.node.original_limits import OriginalLimits


def test_original_limits_are_stored_on_the_cgroup_of_the_pod(tmp_path: Path) -> None:
    """Another instance finds them.

    A new pod with the same path has none, and storing an empty mapping removes the attribute.
    """
    (tmp_path / "pod").mkdir()
    store, originals = OriginalLimits(str(tmp_path)), {"cpu.max": (None, 5, 6), "hugetlb.1GB.max": (0, 1 << 30)}
    store.store("pod", {})
    store.store("pod", originals)
    assert OriginalLimits(str(tmp_path)).load("pod") == originals
    store.store("pod", {})
    assert (os.listxattr(tmp_path / "pod"), store.load("pod")) == ([], {})
    store.store("pod", originals)
    (tmp_path / "pod").rmdir()
    (tmp_path / "pod").mkdir()
    assert store.load("pod") == {}


def test_original_limits_are_kept_in_memory_if_attributes_cannot_be_set(tmp_path: Path) -> None:
    store = OriginalLimits(str(tmp_path))
    store.store("absent", {"cpu.max": (0, 1)})
    assert store.load("absent") == {"cpu.max": (0, 1)}
    store.forget("absent")
    assert store.load("absent") == {}
