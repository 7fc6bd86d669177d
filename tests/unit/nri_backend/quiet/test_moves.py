# SPDX-License-Identifier: Apache-2.0
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.quiet.moves import Cpus, Moved, Sets, Store, plan, reduced, without

ONLINE = frozenset(range(8))
ALL = frozenset(range(12))  # four of them are offline
NONE: Cpus = frozenset()
some = st.frozensets(st.sampled_from(sorted(ALL)), min_size=1)
claimed = st.frozensets(st.sampled_from(sorted(ONLINE)))


def cpus(*numbers: int) -> Cpus:
    return frozenset(numbers)


def test_what_is_left_is_kept() -> None:
    """A set loses the taken CPUs; where none is left that is online, it gets all others, or stays as it is."""
    assert reduced(ALL, cpus(2, 3), ONLINE, elsewhere=True) == ALL - {2, 3}
    assert reduced(cpus(1), cpus(2, 3), ONLINE, elsewhere=True) == {1}
    assert reduced(cpus(2, 9), cpus(2, 3), ONLINE, elsewhere=True) == ONLINE - {2, 3}
    assert reduced(cpus(2), cpus(2, 3), ONLINE, elsewhere=False) == {2}
    assert reduced(cpus(2), ONLINE, ONLINE, elsewhere=True) == {2}
    assert reduced(NONE, cpus(2, 3), ONLINE, elsewhere=False) == ONLINE - {2, 3}
    assert reduced(NONE, NONE, ONLINE, elsewhere=False) == NONE


def test_one_that_nobody_moved_is_not_touched() -> None:
    """Neither where it is on other CPUs, nor where there are no claims."""
    assert not plan({"a": cpus(0, 1)}, {}, cpus(2), ONLINE).writes
    assert not plan({"a": cpus(0, 1)}, {}, NONE, ONLINE).writes


def test_a_change_of_somebody_else_is_respected() -> None:
    """What he wrote stays at the end; where it is on claimed CPUs, it is moved and told."""
    store = {"a": Moved(former=ALL, known=(ALL, cpus(0, 1)))}
    assert plan({"a": cpus(5)}, store, NONE, ONLINE) == plan({"a": cpus(5)}, {}, NONE, ONLINE)
    moved = plan({"a": cpus(2, 5)}, store, cpus(2), ONLINE)
    assert moved.returned == ("a",)
    assert moved.after["a"].former == {2, 5}


def test_what_is_gone_is_forgotten() -> None:
    """An interrupt that was freed leaves nothing behind."""
    assert not plan({}, {"a": Moved(former=ALL, known=(cpus(0),))}, cpus(1), ONLINE).after


def test_a_write_that_fails_changes_nothing() -> None:
    """What was kept before stays; of one that was never moved nothing is kept."""
    store = {"a": Moved(former=ALL, known=(ALL, ALL - {2}))}
    says = {"a": ALL - {2}, "b": ALL}
    planned = plan(says, store, cpus(3), ONLINE)
    assert planned.writes.keys() == {"a", "b"}
    assert without(planned.after, store, planned.writes) == store


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[Cpus, dict[str, Cpus], int]]:
    """Claimed CPUs, what somebody else writes before, and after how many writes of ours we die."""
    step = st.tuples(claimed, st.dictionaries(st.sampled_from("abc"), some, max_size=1), st.integers(0, 4))
    return draw(st.lists(step, max_size=6))


def run(says: dict[str, Cpus], store: Store, taken: Cpus, writes: int = 99) -> Store:
    """One look, that dies after so many writes."""
    planned = plan(says, store, taken, ONLINE)
    says.update(list(planned.writes.items())[:writes])
    if writes >= len(planned.writes):
        return planned.after
    return planned.before if planned.writes else store


@given(st.fixed_dictionaries(dict.fromkeys("abc", some)), steps())
def test_everything_comes_back(first: Sets, history: list[tuple[Cpus, dict[str, Cpus], int]]) -> None:
    """Whatever claims come and go, whoever dies meanwhile: at the end each says what it would have said without us."""
    says, expected = dict(first), dict(first)
    store: Store = {}
    for taken, foreign, writes in history:
        for name, value in foreign.items():
            if name not in store or value not in store[name].known:  # else nobody could tell
                says[name] = expected[name] = value
        store = run(says, store, taken, writes)
    assert not run(says, store, NONE)
    assert says == expected


@given(st.fixed_dictionaries(dict.fromkeys("abc", some)), steps())
def test_nothing_else_is_touched(first: Sets, history: list[tuple[Cpus, dict[str, Cpus], int]]) -> None:
    """What never was on claimed CPUs is never written; what is left alone has nothing on claimed CPUs, if it can."""
    says = dict(first)
    store: Store = {}
    for taken, _, _ in history:
        written = plan(says, store, taken, ONLINE).writes.keys()
        assert written <= {name for name, now in says.items() if now & taken} | store.keys()
        store = run(says, store, taken)
        assert taken == ONLINE or all(now.isdisjoint(taken) for now in says.values())
        assert all(now & ONLINE for name, now in says.items() if now != first[name])
