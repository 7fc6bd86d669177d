# SPDX-License-Identifier: Apache-2.0
"""Resizes the kernel's hugepage pools. Only this module writes to sysfs (commands ``provision``, ``serve-hugepages``).

A write to nr_hugepages succeeds even if the kernel can allocate only some of the pages, so each write is followed by a
read. To grow a pool, pages are requested in steps; whenever a step yields nothing, the node's memory is compacted and
the step is repeated after a delay. With ``enforcement: observe`` nothing is written, and any attempt to resize a pool
raises HostTreeError.
"""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from numa_contract.pagesize import kubernetes_page_size, sysfs_page_size

from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY
from dra_frontend.node.host_tree import HostTree

# Delays in seconds after successive compactions. A compaction follows each step that yields no new pages. Pages that
# block the allocation are usually written back or freed soon.
WAITS: Final = (0.2, 0.5, 1.0, 2.0)
# The kernel's allocation has no timeout, so at most this many bytes are requested at a time.
STEP_BYTES: Final = 8 << 30
_WHOLE_MACHINE: Final = "/sys/kernel/mm/hugepages"
OBSERVE_REASON: Final = "this node only observes (enforcement: observe)"
_COMPACT_ALL: Final = "/proc/sys/vm/compact_memory"


class KernelPools:
    """The kernel's hugepage pools, in sysfs under a given root."""

    def __init__(self, tree: HostTree, *, observes: bool = False) -> None:
        self._tree = tree
        self._observes = observes
        self._reader = Reader(tree)

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the number of pages in a pool, excluding surplus pages, which the kernel frees after use."""
        directory = self._directory(node, page_bytes)
        total = self._reader.integer(f"{directory}/nr_hugepages")
        if total is None:
            raise HostTreeError(f"{directory}/nr_hugepages", "is missing")
        return total - (self._reader.integer(f"{directory}/surplus_hugepages") or 0)

    def check(self, node: int, page_bytes: int) -> None:
        """Opens the file that resizes a pool, but writes nothing. Raises HostTreeError if the file cannot be opened."""
        path = f"{self._directory(node, page_bytes)}/nr_hugepages"
        try:
            os.close(os.open(Path(self._tree.real(path)), os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            raise HostTreeError(path, write_fault(error, page_bytes)) from error

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Requests the given number of pages for a pool. Raises HostTreeError if the file cannot be written."""
        path = f"{self._directory(node, page_bytes)}/nr_hugepages"
        try:
            self._write(path, str(pages))
        except OSError as error:
            raise HostTreeError(path, write_fault(error, page_bytes)) from error

    def shrink(self, node: int, page_bytes: int, pages: int) -> None:
        """Requests a smaller pool. Raises HostTreeError if the file cannot be written."""
        self.resize(node, page_bytes, pages)

    def compact(self, node: int) -> None:
        """Compacts one NUMA node's memory, or the memory of all nodes if the kernel has no file for a single node.
        Ignores errors.
        """
        for path in (f"{NODE_DIRECTORY}/node{node}/compact", _COMPACT_ALL):
            try:
                self._write(path, "1")
            except OSError:
                continue
            return

    def grow(
        self,
        node: int,
        page_bytes: int,
        pages: int,
        left: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Grows a pool to the given number of pages. Stops early if the kernel finds no more pages, or if ``left``,
        which returns the remaining seconds, returns 0 or less.
        """
        step = max(1, STEP_BYTES // page_bytes)
        waits = iter(WAITS)
        has = self.pages(node, page_bytes)
        while has < pages and left() > 0:
            self.resize(node, page_bytes, min(pages, has + step))
            had, has = has, self.pages(node, page_bytes)
            if has > had:
                continue
            wait = next(waits, None)
            if wait is None:
                return
            self.compact(node)
            if wait > left():
                return
            sleep(wait)

    def _directory(self, node: int, page_bytes: int) -> str:
        per_node = f"{NODE_DIRECTORY}/node{node}/hugepages"
        base = _WHOLE_MACHINE if self._reader.all_names(per_node) is None else per_node
        return f"{base}/{sysfs_page_size(page_bytes)}"

    def _write(self, path: str, text: str) -> None:
        if self._observes:
            raise OSError(errno.EROFS, OBSERVE_REASON, path)
        # Opened without O_CREAT, so that a file that is missing from a captured tree is not created there.
        descriptor = os.open(Path(self._tree.real(path)), os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
        try:
            os.write(descriptor, f"{text}\n".encode())
        finally:
            os.close(descriptor)


def write_fault(error: OSError, page_bytes: int) -> str:
    """Returns the reason why a pool cannot be resized, with a remedy."""
    reason = f"cannot be written: {error.strerror}"
    if error.strerror == OBSERVE_REASON:
        return reason
    if error.errno == errno.EINVAL:
        size = kubernetes_page_size(page_bytes)
        return f"{reason}; this kernel allocates {size} pages only at boot (hugepagesz= and hugepages=)"
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return f"{reason}; run as root with the host's {NODE_DIRECTORY} mounted read-write"
    return reason
