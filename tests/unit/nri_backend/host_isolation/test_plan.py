# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.host_isolation.plan import (
    Affinities,
    Cpus,
    OriginalAffinity,
    Originals,
    plan_eviction,
    reduced_affinity,
    revert_failed,
)

ONLINE = frozenset(range(8))
ALL = frozenset(range(12))  # four of them are offline
NONE: Cpus = frozenset()
some = st.frozensets(st.sampled_from(sorted(ALL)), min_size=1)
claimed = st.frozensets(st.sampled_from(sorted(ONLINE)))


def cpus(*numbers: int) -> Cpus:
    return frozenset(numbers)


def stored(original: Cpus, *expected: Cpus) -> OriginalAffinity:
    return OriginalAffinity.model_construct(original=original, expected=expected)


def test_an_affinity_loses_the_cpus_to_vacate() -> None:
    """If no online CPU remains in the affinity, a relocatable object gets all online CPUs that need not be vacated. The
    affinity of an object that is not relocatable stays unchanged.
    """
    assert reduced_affinity(ALL, cpus(2, 3), ONLINE, may_relocate=True) == ALL - {2, 3}
    assert reduced_affinity(cpus(1), cpus(2, 3), ONLINE, may_relocate=True) == {1}
    assert reduced_affinity(cpus(2, 9), cpus(2, 3), ONLINE, may_relocate=True) == ONLINE - {2, 3}
    assert reduced_affinity(cpus(2), cpus(2, 3), ONLINE, may_relocate=False) == {2}
    assert reduced_affinity(cpus(2), ONLINE, ONLINE, may_relocate=True) == {2}
    assert reduced_affinity(NONE, cpus(2, 3), ONLINE, may_relocate=False) == ONLINE - {2, 3}
    assert reduced_affinity(NONE, NONE, ONLINE, may_relocate=False) == NONE


def test_movables_on_other_cpus_are_not_written() -> None:
    assert not plan_eviction({"a": cpus(0, 1)}, {}, cpus(2), ONLINE).writes
    assert not plan_eviction({"a": cpus(0, 1)}, {}, NONE, ONLINE).writes


def test_an_affinity_written_by_another_program_becomes_the_original() -> None:
    """The new affinity is restored once there are no CPUs to vacate. If it contains CPUs to vacate, the object is moved
    and counted as contested.
    """
    originals = {"a": stored(ALL, ALL, cpus(0, 1))}
    without_claims = plan_eviction({"a": cpus(5)}, originals, NONE, ONLINE)
    assert without_claims == plan_eviction({"a": cpus(5)}, {}, NONE, ONLINE)
    moved = plan_eviction({"a": cpus(2, 5)}, originals, cpus(2), ONLINE)
    assert moved.contested == ("a",)
    assert moved.after_writes["a"].original == {2, 5}


def test_a_freed_interrupts_original_is_dropped() -> None:
    assert not plan_eviction({}, {"a": stored(ALL, cpus(0))}, cpus(1), ONLINE).after_writes


def test_a_failed_write_leaves_the_stored_original_unchanged() -> None:
    """A movable object that has never been moved gets no entry."""
    originals = {"a": stored(ALL, ALL, ALL - {2})}
    current = {"a": ALL - {2}, "b": ALL}
    plan = plan_eviction(current, originals, cpus(3), ONLINE)
    assert plan.writes.keys() == {"a", "b"}
    assert revert_failed(plan.after_writes, originals, plan.writes) == originals


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Cpus, dict[str, Cpus], int]]:
    """Draws, for each pass, the claimed CPUs, the value that another program writes beforehand, and the number of
    writes after which the pass is killed.
    """
    step = st.tuples(claimed, st.dictionaries(st.sampled_from("abc"), some, max_size=1), st.integers(0, 4))
    return draw(st.lists(step, max_size=6))


def run(current: dict[str, Cpus], originals: Originals, claimed_cpus: Cpus, writes: int = 99) -> Originals:
    """Runs one pass that is killed after the given number of writes. Returns the stored originals."""
    plan = plan_eviction(current, originals, claimed_cpus, ONLINE)
    current.update(list(plan.writes.items())[:writes])
    if writes >= len(plan.writes):
        return plan.after_writes
    return plan.before_writes if plan.writes else originals


@given(st.fixed_dictionaries(dict.fromkeys("abc", some)), steps())
def test_every_original_affinity_is_eventually_restored(
    first: Affinities, history: list[tuple[Cpus, dict[str, Cpus], int]]
) -> None:
    """Whatever is claimed and whenever a pass is killed, each movable object ends up as it would be without the
    backend.
    """
    current, expected = dict(first), dict(first)
    originals: Originals = {}
    for claimed_cpus, foreign, writes in history:
        for name, value in foreign.items():
            # A write of the expected affinity by another program cannot be distinguished from one by the backend.
            if name not in originals or value not in originals[name].expected:
                current[name] = expected[name] = value
        originals = run(current, originals, claimed_cpus, writes)
    assert not run(current, originals, NONE)
    assert current == expected


@given(st.fixed_dictionaries(dict.fromkeys("abc", some)), steps())
def test_objects_that_never_used_claimed_cpus_are_never_written(
    first: Affinities, history: list[tuple[Cpus, dict[str, Cpus], int]]
) -> None:
    """After each pass, no movable object uses claimed CPUs, unless all CPUs are claimed, and each object that was
    changed has an online CPU.
    """
    current = dict(first)
    originals: Originals = {}
    for claimed_cpus, _, _ in history:
        written = plan_eviction(current, originals, claimed_cpus, ONLINE).writes.keys()
        assert written <= {name for name, now in current.items() if now & claimed_cpus} | originals.keys()
        originals = run(current, originals, claimed_cpus)
        assert claimed_cpus == ONLINE or all(now.isdisjoint(claimed_cpus) for now in current.values())
        assert all(now & ONLINE for name, now in current.items() if now != first[name])
