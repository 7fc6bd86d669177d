# SPDX-License-Identifier: Apache-2.0
"""Bringing hugepage pools to what is planned, on kernels that give less than they are asked for."""

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
    """A kernel with little memory in one piece: a pool grows to what is possible; compaction makes more possible."""

    possible: dict[tuple[int, int], int]
    """Pages by node and size."""
    gain: int = 0
    """Pages of every size that a compaction adds to what is possible on its node."""
    pools: dict[tuple[int, int], int] = field(default_factory=dict)
    acts: list[str] = field(default_factory=list)
    clock: float = 0.0
    broken: int = 0
    """A page size that cannot be allocated while the machine runs."""
    slow: float = 0.0
    """Seconds that a write takes."""

    def pages(self, node: int, page_bytes: int) -> int:
        """What the pool has."""
        return self.pools.get((node, page_bytes), 0)

    def resize(self, node: int, page_bytes: int, pages: int) -> None:
        """Gives what is possible, and calls that success."""
        self.acts.append(f"{node}/{page_bytes >> 20}M={pages}")
        self.clock += self.slow
        if page_bytes == self.broken:
            raise HostTreeError("/nr_hugepages", "cannot be written")
        self.pools[node, page_bytes] = min(pages, max(self.pages(node, page_bytes), self.possible[node, page_bytes]))

    def compact(self, node: int) -> None:
        """Brings free memory together."""
        self.acts.append(f"compact {node}")
        self.possible = {key: n + self.gain * (key[0] == node) for key, n in self.possible.items()}

    def sleep(self, seconds: float) -> None:
        """Lets time pass."""
        self.clock += seconds

    def provision(self, *targets: Target, seconds: float = 60.0) -> list[Row]:
        """Provisions by this kernel's clock."""
        return provision(targets, self, seconds, lambda: self.clock, self.sleep)


def target(wanted: int, page_bytes: int = M2, node: int = 0) -> Target:
    """A target."""
    return Target(page_bytes, node, wanted, "f")


def facts(rows: list[Row], *names: str) -> list[tuple[int | None, ...]]:
    """Some numbers of each row."""
    return [tuple(row[name] for name in names) for row in rows]


def test_pools_are_brought_to_their_targets() -> None:
    """What shrinks first, then what grows, large pages before small ones; the answer is in the order of the plan.

    A pool that has what is wanted is not written, so it may run at every start of a pod; a preview writes nothing.
    """
    kernel = Kernel({(0, M2): 100, (1, M2): 100, (0, G1): 2}, pools={(1, M2): 50})
    targets = [target(10), target(20, node=1), target(2, G1)]
    assert facts(kernel.provision(*targets), "before", "got", "short") == [(0, 10, 0), (50, 20, 0), (0, 2, 0)]
    assert kernel.acts == ["1/2M=20", "0/1024M=2", "0/2M=10"]
    kernel.acts.clear()
    assert facts(kernel.provision(*targets), "before", "got", "short") == [(10, 10, 0), (20, 20, 0), (2, 2, 0)]
    assert facts(preview(targets, kernel), "before", "got", "short") == [(n, None, None) for n in (10, 20, 2)]
    assert kernel.acts == []


def test_a_short_pool_is_compacted_and_tried_again() -> None:
    """Until it has everything; the time in between is short."""
    kernel = Kernel({(0, M2): 4}, gain=3)
    assert facts(kernel.provision(target(10)), "got", "short") == [(10, 0)]
    assert kernel.acts.count("compact 0") == 2
    assert kernel.clock < 2


def test_what_stays_short_is_told() -> None:
    """By page size and node, and the other pools have theirs; trying ends by itself."""
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


def test_a_size_that_cannot_be_written_does_not_stop_the_others() -> None:
    """Some kernels allocate 1 GiB pages at boot only; that is told beside what was done."""
    kernel = Kernel({(0, M2): 10, (0, G1): 1}, broken=G1)
    outcomes = kernel.provision(target(10), target(1, G1))
    assert facts(outcomes, "got", "short") == [(10, 0), (0, 1)]
    assert "short by 1: /nr_hugepages: cannot be written" in rows_table(outcomes)
    assert outcomes[1]["problem"] == "/nr_hugepages: cannot be written"


def test_much_is_asked_for_in_steps() -> None:
    """So that the clock is looked at: one write for all could last for minutes."""
    wanted = 5 * STEP_BYTES // G1 // 2
    kernel = Kernel({(0, G1): 1000}, slow=1.0)
    assert facts(kernel.provision(target(wanted, G1)), "got") == [(wanted,)]
    assert len(kernel.acts) == 3


def test_the_time_is_bounded() -> None:
    """When it is over the rest is short, whatever could still be had; a wait that would outlast it is not begun."""
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
def test_whatever_the_kernel_gives_is_reported_as_it_is(
    possible: dict[tuple[int, int], int], data: st.DataObject
) -> None:
    """Got is what the pools have at the end, never above what was wanted, and as much as was possible."""
    wanted = {key: data.draw(st.integers(0, 20)) for key in possible}
    kernel = Kernel(dict(possible), pools={key: data.draw(st.integers(0, 20)) for key in possible})
    had = dict(kernel.pools)
    targets = [target(count, size, node) for (node, size), count in wanted.items()]
    for (node, size), row in zip(wanted, kernel.provision(*targets), strict=True):
        key = (node, size)
        assert row["got"] == kernel.pools[key] == min(wanted[key], max(had[key], possible[key]))
        assert row["short"] == wanted[key] - kernel.pools[key]
