# SPDX-License-Identifier: Apache-2.0
"""The allocator that selects a claim's CPUs."""

from dataclasses import dataclass, replace

import pytest
from dra_frontend.devices.cpu_groups import cpu_groups
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import CoreType, Machine
from dra_frontend.placement import allocator
from dra_frontend.placement.allocator import Layout, NoCpusError
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.records import CpuParameters

from tests.rigs.trees import NAMES, captured
from tests.strategies.machines import SYNTHETIC, Core, assemble, even_cores, machine, machines, odd_machines
from tests.strategies.wishes import (
    by,
    granularity,
    keeps,
    possible_by_counting,
    possible_by_trying,
    suitable_places,
    whole_cores,
    wishes,
)

NONE: frozenset[int] = frozenset()
CLAIMS_PER_MACHINE = 240


def allocate(
    offered: frozenset[int], taken: frozenset[int], count: int, found: Machine, wish: CpuParameters | None = None
) -> frozenset[int]:
    """Calls the allocator with the machine's layout."""
    return allocator.allocate(offered, taken, count, Layout.of(found), wish or CpuParameters())


def check(
    offered: frozenset[int], taken: frozenset[int], count: int, found: Machine, wish: CpuParameters
) -> frozenset[int] | None:
    """Checks that every result satisfies the invariants and does not depend on the order of the free CPUs."""
    answers = []
    for listed in (found, replace(found, cpus=dict(reversed(found.cpus.items())))):
        try:
            answers.append(allocate(offered, taken, count, listed, wish))
        except NoCpusError:
            answers.append(NONE)
    got, free = answers[0], set(offered - taken)
    assert answers == [got] * 2
    if not got:
        return None
    assert len(got) == count
    assert got <= free
    relaxed = wish.model_copy(update={"numa": "group"}) if wish.full_physical_cores else wish
    assert keeps(found, offered, set(got), relaxed)
    kept = suitable_places(found, free, wish)
    if wish.numa == "distribute":
        nodes = by(found, suitable_places(found, offered, wish), lambda c: c.numa_node)
        shares = [len(cpus & got) for cpus in nodes.values()]
        assert max(shares) - min(shares) <= granularity(found, kept, wish)
    alone = [
        kind
        for kind in by(found, offered, lambda c: c.core_type).values()
        if wish.numa == "group" and possible_by_counting(found, kind, kind & free, count, wish)
    ]
    assert not alone or any(got <= kind for kind in alone), (
        "the CPUs are of two core types, although one type has enough"
    )
    kept = next((kept & kind for kind in alone if got <= kind), kept)
    if wish.strategy == "spread" and wish.l3 != "required" and wish.numa == "group":
        assert len(by(found, got, lambda c: c.core)) == min(count, len(by(found, kept, lambda c: c.core)))
    return got


@settings(max_examples=300, deadline=None)
@given(odd_machines(), st.data(), wishes())
def test_cpus_are_found_exactly_when_a_suitable_set_exists(
    found: Machine, data: st.DataObject, wish: CpuParameters
) -> None:
    """The expected result is determined by trying all CPU sets on a small machine."""
    offered = data.draw(st.frozensets(st.sampled_from(sorted(found.online)), min_size=1, max_size=11))
    taken = data.draw(st.frozensets(st.sampled_from(sorted(offered))))
    free = set(offered - taken)
    count = data.draw(st.integers(1, len(offered)))
    got = check(offered, taken, count, found, wish)
    assert (got is not None) == possible_by_trying(found, offered, free, count, wish)
    assert (got is not None) == possible_by_counting(found, offered, free, count, wish), "the two oracles disagree"


@dataclass(frozen=True, slots=True)
class Ask:
    """A random claim, and the number of an older claim to release first, or None to release no claim."""

    group: int
    share: int
    wish: CpuParameters
    release: int | None


ASKS = st.lists(
    st.builds(
        Ask,
        st.integers(0, 1000),
        st.sampled_from([1, 1, 2, 2, 3, 4, 4, 5, 6, 8, 16, 33, 64, 100]),
        wishes(),
        st.none() | st.integers(0, 100),
    ),
    min_size=20,
    max_size=20,
)


def machine_named(name: str) -> Machine:
    """Returns a synthetic or captured machine by name."""
    return SYNTHETIC[name] if name in SYNTHETIC else discover(captured(name))


@pytest.mark.parametrize("name", [*SYNTHETIC, *NAMES])
@settings(max_examples=CLAIMS_PER_MACHINE // 20, deadline=None)
@given(ASKS, st.sampled_from(["numanode", "socket", "machine", "l3", "coretype"]))
def test_invariants_hold_for_any_history_on_every_machine(name: str, asks: list[Ask], group_by: str) -> None:
    """In any sequence of claims, each claim gets the requested number of CPUs from its group. These CPUs are disjoint
    from those of other claims and satisfy every parameter. No satisfiable claim is refused.
    """
    found = machine_named(name)
    groups = [group.cpus for group in cpu_groups(found, "grouped", group_by)]
    held: list[frozenset[int]] = []
    for ask in asks:
        if ask.release is not None and held:
            held.pop(ask.release % len(held))
        offered = groups[ask.group % len(groups)]
        taken = frozenset[int]().union(*held)
        got = check(offered, taken, ask.share, found, ask.wish)
        assert (got is not None) == possible_by_counting(found, offered, set(offered - taken), ask.share, ask.wish)
        if got is not None:
            held.append(got)
    assert sum(map(len, held)) == len(frozenset[int]().union(*held))


@given(machines(), st.data())
def test_a_claim_uses_no_more_l3_groups_than_necessary(found: Machine, data: st.DataObject) -> None:
    """On one NUMA node, the claim is spread over the minimum number of L3 groups. This is the number of groups that are
    needed if those with the most free CPUs are used first.
    """
    node = data.draw(st.sampled_from([node.cpus for node in found.numa_nodes.values() if node.cpus]))
    free = data.draw(st.frozensets(st.sampled_from(sorted(node)), min_size=1))
    count = data.draw(st.integers(1, len(free)))
    least, covered = 0, 0
    for cpus in sorted(by(found, free, lambda cpu: cpu.l3).values(), key=len, reverse=True):
        if covered < count:
            least, covered = least + 1, covered + len(cpus)
    assert len(by(found, allocate(free, NONE, count, found), lambda cpu: cpu.l3)) == least


@given(machines() | odd_machines(), st.data())
def test_a_claim_that_fits_into_one_group_is_not_spread(found: Machine, data: st.DataObject) -> None:
    """A claim that fits into one socket, into one of that socket's NUMA nodes, or into one L3 on that node is not
    spread over several. If all of the claim's CPUs have the same core type, only free CPUs of that type are considered.
    """
    free = data.draw(st.frozensets(st.sampled_from(sorted(found.online)), min_size=1))
    count = data.draw(st.integers(1, len(free)))
    got = allocate(free, NONE, count, found)
    kinds = {found.cpus[cpu].core_type for cpu in got}
    inside = frozenset(cpu for cpu in free if len(kinds) > 1 or found.cpus[cpu].core_type in kinds)
    for level in ("package", "numa_node", "l3"):
        # CPUs without an L3 share no cache, so they do not form a group.
        placed = frozenset(cpu for cpu in inside if getattr(found.cpus[cpu], level) is not None)
        places = by(found, placed, lambda cpu, level=level: getattr(cpu, level))  # type: ignore[misc] # bound at once
        if not any(len(cpus) >= count for cpus in places.values()):
            # If no group at this level can hold the claim, smaller levels are not checked. In particular, an L3 that
            # spans two NUMA nodes is not checked if neither node can hold the claim.
            break
        [place] = {getattr(found.cpus[cpu], level) for cpu in got}
        inside = frozenset(cpu for cpu in inside if getattr(found.cpus[cpu], level) == place)


@given(machines(), st.data())
def test_at_most_one_whole_core_is_split(found: Machine, data: st.DataObject) -> None:
    """If a claim fits into one L3, at most one of the cores that were entirely free is used only in part."""
    free = data.draw(st.frozensets(st.sampled_from(sorted(found.online)), min_size=1))
    sizes = by(found, free, lambda cpu: cpu.l3)
    count = data.draw(st.integers(1, max(map(len, sizes.values()))))
    got = allocate(free, NONE, count, found)
    assert sum(bool(core & got) and not core <= got for core in whole_cores(found, free)) <= 1


S4 = assemble(even_cores(1, 1, 1, 2, 2))
S4X = assemble(even_cores(1, 1, 1, 4, 1))
D8 = assemble([Core(package=core // 2, node=core // 2, l3=core // 2, threads=2) for core in range(4)])
QUAD = assemble(even_cores(1, 1, 4, 4, 1))
SMT = assemble(even_cores(1, 1, 2, 4, 2))
NODES = assemble(even_cores(1, 2, 2, 4, 1))


@pytest.mark.parametrize(
    ("found", "group", "gone", "counts", "expected"),
    [
        (S4, "0-3", "", [2], "0,2"),
        (S4, "0-3", "", [1, 1], "0,2"),
        (S4, "0-3", "0,2", [2], "1,3"),
        (S4, "0-3", "", [4], "0-3"),
        (S4X, "0-3", "", [4], "0-3"),
        (S4X, "0-3", "", [2], "0-1"),
        (D8, "0-1,4-5", "", [4], "0-1,4-5"),
        (D8, "2-3,6-7", "", [4], "2-3,6-7"),
        (D8, "0-1,4-5", "0,4", [2], "1,5"),
        (D8, "2-3,6-7", "2,6", [2], "3,7"),
        (D8, "0-1,4-5", "", [2], "0,4"),
        (D8, "2-3,6-7", "", [2], "2,6"),
        (QUAD, "1-15", "", [10], "1-2,4-11"),
        (SMT, "2-7,10-15", "", [6], "4-6,12-14"),
        (SMT, "1-7,9-15", "", [10], "1,4-7,9,12-15"),
        (NODES, "3-8,12", "", [2], "4-5"),
    ],
)
def test_the_test_vectors_of_dra_driver_cpu(
    found: Machine, group: str, gone: str, counts: list[int], expected: str
) -> None:
    """The allocator selects the CPU sets that dra-driver-cpu's tests expect."""
    offered = parse_cpu_list(group)
    taken = parse_cpu_list(gone)
    got: frozenset[int] = NONE
    for count in counts:
        got |= allocate(offered, taken | got, count, found)
    assert got == parse_cpu_list(expected)


TWO_SOCKETS = machine(sockets=2, cores_per_l3=4)
ONE_L3 = machine(sockets=1, cores_per_l3=4)
TWO_L3 = machine(sockets=1, l3s_per_node=2, cores_per_l3=4)
TWO_L3X = machine(sockets=1, l3s_per_node=2, cores_per_l3=4, threads=1)
MIXED = assemble([*[Core(l3=0, threads=2)] * 2, *[Core(l3=1, threads=1)] * 4])
SPREAD = CpuParameters(strategy="spread")


@pytest.mark.parametrize(
    ("found", "gone", "count", "wish", "expected"),
    [
        # Core IDs repeat on every socket. Even so, a claim that whole cores can satisfy exactly gets whole cores, all
        # on the device's NUMA node.
        (TWO_SOCKETS, "", 1, None, "0"),
        (TWO_SOCKETS, "0", 4, None, "1-2,9-10"),
        (TWO_SOCKETS, "0", 2, None, "1,9"),
        # The free thread of a partly used core is taken before a whole core is split.
        (ONE_L3, "0", 3, None, "1,4-5"),
        # The smallest group that can hold the claim is used, so larger ones stay whole.
        (TWO_L3, "0,8", 6, None, "1-3,9-11"),
        # Without the preference for a shared L3, a claim gets the lowest-numbered cores, whichever L3 they share.
        (TWO_L3X, "0-1", 4, None, "4-7"),
        (TWO_L3X, "0-1", 4, CpuParameters(l3="ignore"), "2-5"),
        # One thread of each core is taken first, and then the second threads.
        (ONE_L3, "", 3, SPREAD, "0-2"),
        (ONE_L3, "", 6, SPREAD, "0-5"),
        (ONE_L3, "0", 3, SPREAD, "1-3"),
        # If a single L3 is required, the allocator chooses the L3 in which the fewest cores have to provide both of
        # their threads.
        (MIXED, "", 4, CpuParameters(strategy="spread", l3="required"), "2-5"),
    ],
)
def test_the_cpus_that_a_claim_gets(
    found: Machine, gone: str, count: int, wish: CpuParameters | None, expected: str
) -> None:
    """The allocator chooses the suitable CPU set that leaves the most whole cores and groups for later claims."""
    offered = found.numa_nodes[0].cpus if found is TWO_SOCKETS else found.online
    assert format_cpu_list(allocate(offered, parse_cpu_list(gone), count, found, wish)) == expected


def test_distribute_splits_a_claim_evenly_across_nodes() -> None:
    """Shares are equal to within one CPU, or one core if whole cores are requested. The nodes with the most free CPUs
    get the larger shares.
    """
    found = machine(sockets=2, nodes_per_socket=2, cores_per_l3=4)
    distribute = CpuParameters(numa="distribute")
    whole = CpuParameters(numa="distribute", full_physical_cores=True)
    for taken, wish, shares in (
        ("", distribute, [3, 3, 2, 2]),
        ("0", distribute, [2, 3, 3, 2]),
        ("", whole, [4, 2, 2, 2]),
    ):
        got = allocate(found.online, parse_cpu_list(taken), 10, found, wish)
        assert [len(got & node.cpus) for node in found.numa_nodes.values()] == shares


WHOLE = CpuParameters(full_physical_cores=True)
WHOLE_L3 = CpuParameters(full_physical_cores=True, l3="required")


@pytest.mark.parametrize(
    ("wish", "count", "taken", "text"),
    [
        (CpuParameters(), 9, "", "9 CPUs requested, 8 free (0-7)"),
        (WHOLE, 3, "", "3 CPUs are not a whole number of physical cores; the next possible amount is 4"),
        (
            WHOLE,
            10,
            "",
            "(fullPhysicalCores: true), 8 free (0-7); the device's whole cores have at most 8 CPUs, free or taken",
        ),
        (
            WHOLE,
            6,
            "0,1",
            "6 CPUs requested (fullPhysicalCores: true), 6 free (2-7), of which 4 are suitable (2-3,6-7)",
        ),
        (
            CpuParameters(l3="required"),
            4,
            "0,2",
            "6 free (1,3-7); no single L3 group has that many (the largest has 3)",
        ),
        (
            WHOLE_L3,
            6,
            "",
            "l3: required), 8 free (0-7); the device's whole cores have at most 4 CPUs in one L3, free or taken",
        ),
        (
            CpuParameters(numa="distribute"),
            5,
            "0,1,4",
            "cannot be distributed evenly over the NUMA nodes; free and suitable: 1 on node 0, 4 on node 1",
        ),
        (
            CpuParameters(isolcpus="only"),
            1,
            "",
            "1 CPUs requested (isolcpus: only), 8 free (0-7), of which 0 are suitable",
        ),
        (
            CpuParameters(core_type="performance"),
            1,
            "0",
            "(coreType: performance), 7 free (1-7), of which 0 are suitable",
        ),
    ],
)
def test_a_refusal_contains_the_free_cpus(wish: CpuParameters, count: int, taken: str, text: str) -> None:
    """The message appears in the pod's events. It names the request, lists the free CPUs, and says why they do not
    suffice.
    """
    found = machine(sockets=1, nodes_per_socket=2)
    with pytest.raises(NoCpusError) as caught:
        allocate(found.online, parse_cpu_list(taken), count, found, wish)
    assert text in str(caught.value)


@pytest.mark.parametrize("whole", [False, True])
def test_a_feature_that_the_machine_lacks_is_named(whole: bool) -> None:
    """If the machine does not distinguish core types or has no L3, freeing CPUs would not help, but changing the
    parameter would.
    """
    found = machine(1, has_l3=False)
    untyped = "performance and efficiency cores cannot be distinguished by /sys/devices/cpu_core/cpus, "
    uncached = "; the device's CPUs have no L3 cache; use l3: preferred"
    for taken in (NONE, found.online):
        for name, value, text in (
            ("core_type", "performance", untyped),
            ("core_type", "efficiency", untyped),
            ("l3", "required", uncached),
        ):
            wish = CpuParameters.model_validate({name: value, "full_physical_cores": whole})
            with pytest.raises(NoCpusError, match=text):
                allocate(found.online, taken, 2, found, wish)


@given(st.sampled_from(sorted(SYNTHETIC)), st.data())
def test_the_suggested_multiple_can_be_allocated(name: str, data: st.DataObject) -> None:
    """An empty device can provide the amount that the refusal suggests, which is the next larger possible amount."""
    found = SYNTHETIC[name]
    count = data.draw(st.integers(1, len(found.cpus)))
    try:
        got = allocate(found.online, NONE, count, found, WHOLE)
    except NoCpusError as error:
        _, named, following = str(error).partition("the next possible amount is ")
        assume(named)
        assert len(allocate(found.online, NONE, int(following), found, WHOLE)) > count
    else:
        assert len(got) == count


HYBRID = assemble(
    [*[Core(threads=2, kind=CoreType.PERFORMANCE)] * 8, *[Core(kind=CoreType.EFFICIENCY)] * 16], adjacent=True
)
"""An i9-13900: CPUs 0-15 are threads of performance cores, and CPUs 16-31 are efficiency cores."""


@pytest.mark.parametrize(
    "wish",
    [
        CpuParameters(),
        CpuParameters(full_physical_cores=True),
        CpuParameters(strategy="spread"),
        CpuParameters(l3="required"),
    ],
)
def test_a_claim_gets_one_core_type_if_possible(wish: CpuParameters) -> None:
    """Performance cores are preferred. If neither type has enough CPUs left, the claim gets a mixture instead of being
    refused.
    """
    offered, held = HYBRID.online - {0, 1}, NONE
    for _ in range(6):
        got = allocate(offered, held, 4, HYBRID, wish)
        assert len({HYBRID.cpus[cpu].core_type for cpu in got}) == 1
        held |= got
    assert sum(cpu < 16 for cpu in held) == 12
    assert len({HYBRID.cpus[cpu].core_type for cpu in allocate(offered, held, 6, HYBRID, wish)}) == 2


def test_one_numa_node_takes_precedence_over_performance_cores() -> None:
    cores = [
        Core(node=n, package=n, l3=n, kind=kind)
        for n in (0, 1)
        for kind in (*[CoreType.PERFORMANCE] * 2, *[CoreType.EFFICIENCY] * 4)
    ]
    found = assemble(cores)
    assert allocate(found.online, NONE, 4, found) == {2, 3, 4, 5}
    assert allocate(found.online, NONE, 2, found) == {0, 1}


def test_numa_distribute_does_not_skip_a_node_without_one_core_type() -> None:
    """Every node contributes its share, so this claim gets cores of both types."""
    found = assemble(
        [*[Core(node=0, l3=0, kind=CoreType.PERFORMANCE)] * 4, *[Core(node=1, l3=1, kind=CoreType.EFFICIENCY)] * 4]
    )
    assert allocate(found.online, NONE, 4, found, CpuParameters(numa="distribute")) == {0, 1, 4, 5}
