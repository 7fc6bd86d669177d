# SPDX-License-Identifier: Apache-2.0
"""Brings the kernel's hugepage pools to what is planned, and reports what the kernel really allocated.

Each write is followed by a read.
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
"""What became of a target: ``pageSize``, ``node``; pages ``asked`` for, ``before``, ``got`` and ``short`` (both None
when nothing was tried); ``problem``, where there is one, says why the kernel could not be asked."""


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
