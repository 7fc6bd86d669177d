# SPDX-License-Identifier: Apache-2.0
"""Sets the kernel's hugepage pools to the planned sizes, and reports the pages that the kernel actually allocated.

Every write is followed by a read.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.hugepage_pools import KernelPools
from numa_contract.pagesize import kubernetes_page_size

from numa_tools.commands.forms import table
from numa_tools.commands.provision_plan import Target

Row = dict[str, Any]
"""Result for a target: ``pageSize``, ``node``, and the numbers of pages ``asked``, ``before``, ``got`` and ``short``.
``got`` and ``short`` are None if nothing was written. ``problem`` is present only if a file could not be written."""


def preview(targets: Sequence[Target], pools: KernelPools) -> list[Row]:
    """Returns the current and the requested numbers of pages without changing anything."""
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
    """Sets every pool to its target, or as close to it as the kernel can get within ``seconds``.

    A pool that already has its target size is not written to. If one pool cannot be resized, the other pools still are.
    """
    end = now() + seconds
    before = {target: pools.pages(target.node, target.page_bytes) for target in targets}
    problems: dict[Target, str] = {}
    # Pools that shrink come first, to make room for those that grow. Among the latter, pools of larger pages come
    # first, because large pages need contiguous memory.
    for target in sorted(targets, key=lambda each: (before[each] < each.pages, -each.page_bytes)):
        try:
            if before[target] > target.pages:
                pools.shrink(target.node, target.page_bytes, target.pages)
            elif before[target] < target.pages:
                pools.grow(target.node, target.page_bytes, target.pages, lambda: end - now(), sleep)
        except HostTreeError as error:
            problems[target] = str(error)
    return [
        _row(target, before[target], pools.pages(target.node, target.page_bytes), problems.get(target))
        for target in targets
    ]


def report(rows: Sequence[Row]) -> dict[str, Any]:
    """Returns the rows and their total number of missing pages."""
    missing = [row["short"] for row in rows]
    return {"pages": list(rows), "short": None if None in missing else sum(missing)}


def rows_table(rows: Sequence[Row]) -> str:
    """Formats the rows as a table with one line for each page size and NUMA node."""
    lines = [["SIZE", "NODE", "ASKED", "BEFORE", "GOT", ""]]
    for row in rows:
        short = f"short by {row['short']}" if row["short"] else ""
        remark = ": ".join(filter(None, (short, row.get("problem"))))
        got = "-" if row["got"] is None else row["got"]
        lines.append([row["pageSize"], row["node"], row["asked"], row["before"], got, remark])
    return table(lines)
