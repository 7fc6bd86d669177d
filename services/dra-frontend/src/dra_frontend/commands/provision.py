# SPDX-License-Identifier: Apache-2.0
"""Brings the kernel's hugepage pools to what is planned, and reports what the kernel really allocated.

The kernel allocates what it finds at that moment and calls that success: each write is followed by a read. Only
``dra-frontend provision`` writes to sysfs.
"""

import errno
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from numa_contract.pagesize import kubernetes_page_size, sysfs_page_size

from dra_frontend.commands.forms import table
from dra_frontend.commands.provision_plan import Target
from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY
from dra_frontend.node.host_tree import HostTree

Row = dict[str, Any]
"""What became of a target: ``pageSize``, ``node``; pages ``asked`` for, ``before``, ``got`` and ``short`` (both None
when nothing was tried); ``problem``, where there is one, says why the kernel could not be asked."""

# Between compactions of a node that yields nothing any more: what is in the way is mostly written back or freed soon.
WAITS: Final = (0.2, 0.5, 1.0, 2.0)
# The kernel does not look at the clock while it allocates, so it is asked for so much at a time.
STEP_BYTES: Final = 8 << 30
_WHOLE_MACHINE: Final = "/sys/kernel/mm/hugepages"
_COMPACT_ALL: Final = "/proc/sys/vm/compact_memory"


class KernelPools:
    """The pools in sysfs below a root."""

    def __init__(self, tree: HostTree) -> None:
        self._tree = tree
        self._reader = Reader(tree)

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the pages of a pool, without surplus ones, which vanish with their user."""
        directory = self._directory(node, page_bytes)
        total = self._reader.integer(f"{directory}/nr_hugepages")
        if total is None:
            raise HostTreeError(f"{directory}/nr_hugepages", "is missing")
        return total - (self._reader.integer(f"{directory}/surplus_hugepages") or 0)

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Asks for a pool of so many pages."""
        path = f"{self._directory(node, page_bytes)}/nr_hugepages"
        try:
            self._write(path, str(pages))
        except OSError as error:
            raise HostTreeError(path, write_fault(error, page_bytes)) from error

    def compact(self, node: int) -> None:
        """Compacts the node, or all of them if the kernel has no file for one; nothing if neither can be written."""
        for path in (f"{NODE_DIRECTORY}/node{node}/compact", _COMPACT_ALL):
            try:
                self._write(path, "1")
            except OSError:
                continue
            return

    def _directory(self, node: int, page_bytes: int) -> str:
        per_node = f"{NODE_DIRECTORY}/node{node}/hugepages"
        base = _WHOLE_MACHINE if self._reader.all_names(per_node) is None else per_node
        return f"{base}/{sysfs_page_size(page_bytes)}"

    def _write(self, path: str, text: str) -> None:
        # Never creates a file: in a captured tree, too, what the kernel does not have is not there.
        descriptor = os.open(Path(self._tree.real(path)), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)


def write_fault(error: OSError, page_bytes: int) -> str:
    """Returns why a pool cannot be resized, and what to do about it."""
    reason = f"cannot be written: {error.strerror}"
    if error.errno == errno.EINVAL:
        size = kubernetes_page_size(page_bytes)
        return f"{reason}; this kernel allocates pages of {size} at boot only (hugepagesz= and hugepages=)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{reason}; run as root with the host's {NODE_DIRECTORY} mounted read-write"
    return reason


def preview(targets: Sequence[Target], pools: KernelPools) -> list[Row]:
    """Returns what there is and what is requested; touches nothing."""
    return [_row(target, pools.pages(target.node, target.page_bytes), None) for target in targets]


def _row(target: Target, before: int, got: int | None, problem: str | None = None) -> Row:
    row = {
        "pageSize": kubernetes_page_size(target.page_bytes),
        "node": target.node,
        "asked": target.pages,
        "before": before,
        "got": got,
        "short": None if got is None else max(0, target.pages - got),
    }
    return row if problem is None else {**row, "problem": problem}


def provision(
    targets: Sequence[Target],
    pools: KernelPools,
    seconds: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Row]:
    """Brings every pool to its target as far as the kernel can, within ``seconds``; a pool that has it is not touched.

    A pool that cannot be written does not keep the others from theirs.
    """
    end = now() + seconds
    before = {target: pools.pages(target.node, target.page_bytes) for target in targets}
    problems: dict[Target, str] = {}
    # What shrinks makes room for the rest, and large pages need the memory that is in one piece.
    for target in sorted(targets, key=lambda each: (before[each] < each.pages, -each.page_bytes)):
        try:
            if before[target] > target.pages:
                pools.resize(target.node, target.page_bytes, target.pages)
            elif before[target] < target.pages:
                _grow(target, pools, lambda: end - now(), sleep)
        except HostTreeError as error:
            problems[target] = str(error)
    return [
        _row(target, before[target], pools.pages(target.node, target.page_bytes), problems.get(target))
        for target in targets
    ]


def _grow(target: Target, pools: KernelPools, left: Callable[[], float], sleep: Callable[[float], None]) -> None:
    step = max(1, STEP_BYTES // target.page_bytes)
    waits = iter(WAITS)
    has = pools.pages(target.node, target.page_bytes)
    while has < target.pages and left() > 0:
        pools.resize(target.node, target.page_bytes, min(target.pages, has + step))
        had, has = has, pools.pages(target.node, target.page_bytes)
        if has > had:
            continue
        wait = next(waits, None)
        if wait is None:
            return
        pools.compact(target.node)
        if wait > left():
            return
        sleep(wait)


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the rows, and the pages that are short in all."""
    missing = [row["short"] for row in rows]
    return {"pages": list(rows), "short": None if None in missing else sum(missing)}


def rows_table(rows: Sequence[Row]) -> str:
    """Returns a table for a person, one line for each page size and node."""
    lines = [["SIZE", "NODE", "ASKED", "BEFORE", "GOT", ""]]
    for row in rows:
        short = f"short by {row['short']}" if row["short"] else ""
        remark = ": ".join(filter(None, (short, row.get("problem"))))
        got = "-" if row["got"] is None else row["got"]
        lines.append([row["pageSize"], row["node"], row["asked"], row["before"], got, remark])
    return table(lines)
