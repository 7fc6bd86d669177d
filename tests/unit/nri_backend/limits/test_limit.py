# SPDX-License-Identifier: Apache-2.0
"""What is written over the kubelet's limits, and how it comes back."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.limit import CPU_MAX, Limit, Note, Raise, own_limit, plan, with_reservation

FILE = "memory.min"
OWN = st.none() | st.integers(0, 4)
RAISES = st.one_of(st.none(), st.integers(0, 4).map(lambda plus: Raise(plus=plus)), st.just(Raise(lifted=True)))


@dataclass
class Group:
    """One cgroup with one limit, and the notes on it."""

    limit: Limit
    notes: dict[str, Note] = field(default_factory=dict)

    def apply(self, raised: Raise | None, dies_after: int) -> None:
        """One job, which may die after each of its three steps."""
        made = plan({FILE: self.limit}, self.notes, {} if raised is None else {FILE: raised})
        self.notes = dict(made.ahead)
        if dies_after >= 1 and FILE in made.wanted:
            self.limit = made.wanted[FILE].limit
        if dies_after >= 2:
            self.notes = dict(made.after)


def over(own: Limit, raised: Raise | None) -> Limit:
    """What the limit has to be."""
    return own if raised is None else raised.over(own)


@given(OWN, st.lists(st.tuples(RAISES, st.integers(0, 2), st.booleans()), max_size=25))
def test_the_kubelets_value_is_never_lost(own: Limit, jobs: list[tuple[Raise | None, int, bool]]) -> None:
    """Raised, raised otherwise, given back, in any order, with crashes and a kubelet that writes again."""
    group = Group(own)
    for raised, dies_after, reset in jobs:
        if reset:
            group.limit = own
        group.apply(raised, dies_after)
        assert own_limit(group.limit, group.notes.get(FILE)) == own
        if dies_after:
            assert group.limit == over(own, raised)
    group.apply(None, dies_after=2)
    assert (group.limit, group.notes) == (own, {})


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=20))
def test_a_new_value_of_the_kubelet_is_taken_over(own: int, jobs: list[tuple[int, int]]) -> None:
    """In-place resize: whatever differs from what we wrote is the kubelet's, and the claims come on top of it."""
    group = Group(own)
    for change, plus in jobs:
        if change and group.limit is not None and own + change * 1000 != group.limit:
            own += change * 1000
            group.limit = own
        group.apply(Raise(plus=plus), dies_after=2)
        assert group.limit == own + plus


def test_no_limit_stays_no_limit() -> None:
    """A pod that the kubelet does not limit is not limited by us, and nothing has to be remembered of it."""
    made = plan({CPU_MAX: None, FILE: None}, {}, {CPU_MAX: Raise(lifted=True), FILE: Raise(plus=5)})
    assert [wanted.limit for wanted in made.wanted.values()] == [None, None]
    assert made.ahead == made.after == {}


def test_a_reservation_follows_its_limit() -> None:
    """What the kubelet left unlimited of the second file does not count."""
    made = plan({"hugetlb.2MB.max": 0}, {}, {"hugetlb.2MB.max": Raise(plus=7)})
    assert {file: wanted.limit for file, wanted in made.wanted.items()} == {
        "hugetlb.2MB.max": 7,
        "hugetlb.2MB.rsvd.max": 7,
    }
    assert with_reservation(FILE) == (FILE,)


def test_a_file_that_is_missing_is_wanted_by_who_needs_it() -> None:
    """So that the look finds it absent; a raise that is merely polite says nothing."""
    made = plan({}, {FILE: Note(1, (2,))}, {CPU_MAX: Raise(lifted=True), "memory.low": Raise(plus=3, needed=True)})
    assert {file: wanted.limit for file, wanted in made.wanted.items()} == {"memory.low": 3}
