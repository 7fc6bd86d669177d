# SPDX-License-Identifier: Apache-2.0
"""Resizing hugepage pools as planned, on kernels that may provide fewer pages than requested."""

from dataclasses import dataclass, field

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.hugepage_pools import STEP_BYTES, KernelPools
from hypothesis import given
from hypothesis import strategies as st
from numa_tools.commands.provision import Row, preview, provision, report, rows_table
from numa_tools.commands.provision_plan import Target

M2, G1 = 2 << 20, 1 << 30


@dataclass
class Kernel(KernelPools):
    """A kernel with little contiguous memory: a pool grows as far as possible, and compaction makes room for more
    pages.
    """

    possible: dict[tuple[int, int], int]
    """Number of pages that can be allocated, by NUMA node and page size."""
    gain: int = 0
    """Number of additional pages of each size that can be allocated on a node after one compaction."""
    pools: dict[tuple[int, int], int] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)
    clock: float = 0.0
    broken: int = 0
    """A page size that cannot be allocated at run time."""
    slow: float = 0.0
    """Duration of a write in seconds."""

    def pages(self, node: int, page_bytes: int) -> int:
        """Returns the number of pages in the pool."""
        return self.pools.get((node, page_bytes), 0)

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Allocates as many pages as possible and reports success, as the kernel does."""
        self.acts.append(f"{node}/{page_bytes >> 20}M={pages}")
        self.clock += self.slow
        if page_bytes == self.broken:
            raise HostTreeError("/nr_hugepages", "cannot be written")
        self.pools[node, page_bytes] = min(pages, max(self.pages(node, page_bytes), self.possible[node, page_bytes]))

    def compact(self, node: int) -> None:
        """Compacts the node's memory."""
        self.acts.append(f"compact {node}")
        self.possible = {key: n + self.gain * (key[0] == node) for key, n in self.possible.items()}

    def sleep(self, seconds: float) -> None:
        """Advances the clock."""
        self.clock += seconds

    def provision(self, *targets: Target, seconds: float = 60.0) -> list[Row]:
        """Provisions pools with this kernel's clock."""
        return provision(targets, self, seconds, lambda: self.clock, self.sleep)


def target(wanted: int, page_bytes: int = M2, node: int = 0) -> Target:
    """Returns a target."""
    return Target(page_bytes, node, wanted, "f")


def facts(rows: list[Row], *names: str) -> list[tuple[int | None, ...]]:
    """Returns the numbers in each row of the report."""
    return [tuple(row[name] for name in names) for row in rows]


def test_pools_are_resized_to_their_targets() -> None:
    """Pools that shrink come first, followed by those that grow, large pages before small ones. The rows are in the
    same order as the plan. A pool that already has its target size is not written to, so the command may run whenever
    a pod starts, and a dry run writes nothing.
    """
    kernel = Kernel({(0, M2): 100, (1, M2): 100, (0, G1): 2}, pools={(1, M2): 50})
    targets = [target(10), target(20, node=1), target(2, G1)]
    assert facts(kernel.provision(*targets), "before", "got", "short") == [(0, 10, 0), (50, 20, 0), (0, 2, 0)]
    assert kernel.acts == ["1/2M=20", "0/1024M=2", "0/2M=10"]
    kernel.acts.clear()
    assert facts(kernel.provision(*targets), "before", "got", "short") == [(10, 10, 0), (20, 20, 0), (2, 2, 0)]
    assert facts(preview(targets, kernel), "before", "got", "short") == [(n, None, None) for n in (10, 20, 2)]
    assert kernel.acts == []


def test_a_pool_short_of_pages_is_retried_after_compaction() -> None:
    """Retries follow in quick succession until the pool is complete."""
    kernel = Kernel({(0, M2): 4}, gain=3)
    assert facts(kernel.provision(target(10)), "got", "short") == [(10, 0)]
    assert kernel.acts.count("compact 0") == 2
    assert kernel.clock < 2


def test_pools_that_remain_short_are_reported() -> None:
    """Pools that remain short are reported by page size and node. The other pools reach their targets, and the retries
    end.
    """
    kernel = Kernel({(0, M2): 4, (1, M2): 100})
    outcomes = kernel.provision(target(10), target(10, node=1))
    assert kernel.clock < 5
    assert report(outcomes) == {
        "pages": [
            {"pageSize": "2Mi", "node": 0, "asked": 10, "before": 0, "got": 4, "short": 6},
            {"pageSize": "2Mi", "node": 1, "asked": 10, "before": 0, "got": 10, "short": 0},
        ],
        "short": 6,
    }
    assert [line.split() for line in rows_table(outcomes).splitlines()] == [
        ["SIZE", "NODE", "ASKED", "BEFORE", "GOT"],
        ["2Mi", "0", "10", "0", "4", "short", "by", "6"],
        ["2Mi", "1", "10", "0", "10"],
    ]


def test_a_page_size_that_cannot_be_written_does_not_stop_the_others() -> None:
    """Some kernels can allocate 1 GiB pages only at boot. The error is reported together with the other results."""
    kernel = Kernel({(0, M2): 10, (0, G1): 1}, broken=G1)
    outcomes = kernel.provision(target(10), target(1, G1))
    assert facts(outcomes, "got", "short") == [(10, 0), (0, 1)]
    assert "short by 1: /nr_hugepages: cannot be written" in rows_table(outcomes)
    assert outcomes[1]["problem"] == "/nr_hugepages: cannot be written"


def test_large_pools_are_resized_in_steps() -> None:
    """The deadline is checked between steps, because writing all pages at once could take minutes."""
    wanted = 5 * STEP_BYTES // G1 // 2
    kernel = Kernel({(0, G1): 1000}, slow=1.0)
    assert facts(kernel.provision(target(wanted, G1)), "got") == [(wanted,)]
    assert len(kernel.acts) == 3


def test_the_total_time_is_bounded() -> None:
    """After the deadline, the remaining pools are reported as short, even if pages were available. The command does not
    start a wait that would exceed the deadline.
    """
    kernel = Kernel({(0, G1): 1000}, slow=10.0)
    assert facts(kernel.provision(target(1000, G1), seconds=25), "got") == [(3 * STEP_BYTES // G1,)]
    assert kernel.clock == 30
    stuck = Kernel({(0, M2): 0}, slow=0.5)
    stuck.provision(target(10), seconds=0.6)
    assert (stuck.clock, stuck.acts) == (0.5, ["0/2M=10", "compact 0"])
    for seconds in (0.0, -1.0):
        idle = Kernel({(0, M2): 10})
        assert facts(idle.provision(target(10), seconds=seconds), "short") == [(10,)]
        assert idle.acts == []


@given(
    st.dictionaries(st.tuples(st.integers(0, 3), st.sampled_from([M2, G1])), st.integers(0, 20), min_size=1), st.data()
)
def test_the_report_contains_the_actual_number_of_pages(
    possible: dict[tuple[int, int], int], data: st.DataObject
) -> None:
    """The reported number is the pool's final size. It never exceeds the target, and it includes every page that could
    be allocated.
    """
    wanted = {key: data.draw(st.integers(0, 20)) for key in possible}
    kernel = Kernel(dict(possible), pools={key: data.draw(st.integers(0, 20)) for key in possible})
    had = dict(kernel.pools)
    targets = [target(count, size, node) for (node, size), count in wanted.items()]
    for (node, size), row in zip(wanted, kernel.provision(*targets), strict=True):
        key = (node, size)
        assert row["got"] == kernel.pools[key] == min(wanted[key], max(had[key], possible[key]))
        assert row["short"] == wanted[key] - kernel.pools[key]
