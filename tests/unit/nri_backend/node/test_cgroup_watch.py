# SPDX-License-Identifier: Apache-2.0
"""The set of cgroups that a watch follows. Real events require a real kernel and are tested in tests/node."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nri_backend.node.cgroup_watch import CgroupWatch

FILE = "cgroup.events"


@pytest.fixture
async def watch(tmp_path: Path) -> AsyncIterator[CgroupWatch]:
    for path in ("a", "b"):
        (tmp_path / path).mkdir()
        (tmp_path / path / FILE).write_text("populated 1\nfrozen 0\n")
    watch = CgroupWatch(str(tmp_path), FILE, lambda content: b"populated 1" in content)
    watch.listen(lambda _: None)
    yield watch
    watch.close()


async def test_a_file_that_changed_before_the_watch_began_is_reported(watch: CgroupWatch, tmp_path: Path) -> None:
    (tmp_path / "b" / FILE).write_text("populated 0\nfrozen 0\n")
    assert watch.watch(["a", "b"]) == {"b"}
    assert watch.watch(["a", "b"]) == set(), "it is reported once"


async def test_a_missing_cgroup_is_left_out_and_retried(watch: CgroupWatch, tmp_path: Path) -> None:
    assert watch.watch(["a", "c"]) == set()
    assert not watch.watches(["a", "c"])
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / FILE).write_text("populated 1\n")
    watch.watch(["a", "c"])
    assert watch.watches(["a", "c"])


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_no_descriptor_is_left_open(watch: CgroupWatch) -> None:
    before = _open_files()
    for paths in (["a", "b"], ["b"], []):
        watch.watch(paths)
        await asyncio.sleep(0)
    assert _open_files() == before
