# SPDX-License-Identifier: Apache-2.0
"""How claims affect limits: hugepages, memory, CPU quota, protection in ancestors, and original limits."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.limits.claimed import (
    CPU_MAX,
    DesiredLimit,
    Limit,
    LimitIncrease,
    Note,
    ancestors,
    claimed_bytes,
    guard_limits,
    hugepage_files,
    hugepage_increases,
    hugepage_limits,
    original_limit,
    protections,
    raised_limits,
    requested_hugepages,
    unthrottled,
    with_reservation,
)
from nri_backend.limits.runtime import CpuLimit

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import entitlement_of

TWO, GIGA = 2 * MI, 1 << 30
MIN, LOW = "memory.min", "memory.low"


@pytest.mark.parametrize(
    ("requests", "limit", "free"),
    [
        (("a=2-3",), None, True),
        (("a=2-3",), CpuLimit(200_000), True),
        (("a=2-3",), CpuLimit(200_001), False),
        (("a=2-3",), CpuLimit(20_000, 10_000), True),
        (("a=2", "b=3"), CpuLimit(200_000), True),
    ],
)
def test_a_container_is_unthrottled_if_its_claim_covers_its_cpu_limit(
    requests: tuple[str, ...], limit: CpuLimit | None, free: bool
) -> None:
    """Two claimed CPUs cover a limit of up to two CPUs, for any period and any number of requests."""
    assert unthrottled(entitlement_of(cpu_record("c", *requests)), limit) is free


def test_a_container_is_throttled_if_any_request_keeps_the_quota() -> None:
    """The quota is kept with ``quota: keep``, with a value from a newer release, and for a container without CPU
    claims.
    """
    for word in ("keep", "half"):
        held = entitlement_of(cpu_record("c", "a=2-3"), cpu_record("d", "a=4", quota=word))
        assert not unthrottled(held, CpuLimit(1))
    assert not unthrottled(entitlement_of(memory_record("m", ("x", 1, MI, 4096))), None)


def limits(claimed: dict[int, int], stated: dict[int, int], pod_limits: dict[int, Limit]) -> dict[int, Limit]:
    """Returns a container's hugepage limits by page size."""
    wanted = hugepage_limits(claimed, stated, pod_limits)
    for size in pod_limits:
        assert len({wanted[file] for file in hugepage_files(size)}) == 1, "pages in use and reservations alike"
    return {size: wanted[hugepage_files(size)[0]].limit for size in pod_limits}


def test_a_shared_claim_counts_once_for_its_pod() -> None:
    """Two containers share one request. Partial pages do not count."""
    one = entitlement_of(memory_record("m", ("x", 1, 64 * MI, TWO)))
    other = entitlement_of(memory_record("n", ("x", 1, 2 * MI + 4096, TWO)))
    assert claimed_bytes([one, one, other]) == {TWO: 66 * MI}


def test_the_pods_limit_replaces_a_container_limit_that_the_runtime_dropped() -> None:
    """Stock containerd does not report the kubelet's limit.

    The pod's limit is 0 if no container asked for hugepages.
    """
    claimed = {TWO: 64 * MI}
    assert limits(claimed, {}, {TWO: 0, GIGA: 0}) == {TWO: 64 * MI, GIGA: 0}
    assert limits(claimed, {}, {TWO: 8 * MI, GIGA: GIGA}) == {TWO: 72 * MI, GIGA: GIGA}
    assert limits(claimed, {}, {TWO: None}) == {TWO: 64 * MI}
    assert limits(claimed, {TWO: 2 * MI}, {TWO: 8 * MI, GIGA: GIGA}) == {TWO: 66 * MI, GIGA: 0}


def test_only_files_of_claimed_page_sizes_are_needed() -> None:
    """For other page sizes, the files are written only if the kernel provides them."""
    wanted = hugepage_limits({TWO: TWO}, {}, {TWO: 0, GIGA: 0})
    assert {file for file, one in wanted.items() if one.needed} == set(hugepage_files(TWO))
    assert hugepage_increases({TWO: TWO}, [GIGA]) == {
        "hugetlb.2MB.max": LimitIncrease(amount=TWO, needed=True),
        "hugetlb.1GB.max": LimitIncrease(),
    }


def test_claimed_bytes_are_subtracted_from_the_limits_shown_by_the_runtime() -> None:
    """The difference is the kubelet's limit.

    A page size whose limit equals the claimed bytes is left out. A limit below the claimed bytes is returned unchanged.
    """
    claimed = {TWO: 64 * MI}
    assert requested_hugepages({TWO: 66 * MI, GIGA: 0}, claimed) == {TWO: 2 * MI, GIGA: 0}
    assert requested_hugepages({TWO: 64 * MI}, claimed) == {}
    assert requested_hugepages({TWO: 2 * MI}, claimed) == {TWO: 2 * MI}
    assert requested_hugepages({TWO: 64 * MI}, {}) == {TWO: 64 * MI}


RSVD = {size: hugepage_files(size)[1] for size in (TWO, GIGA)}


@pytest.mark.parametrize(
    ("stated", "pod_limits", "guarded"),
    [
        (False, {TWO: 0, GIGA: 0}, {TWO, GIGA}),
        (False, {TWO: 8 * MI, GIGA: 0}, {GIGA}),
        (False, {TWO: None, GIGA: 0}, {GIGA}),
        (False, {}, set()),
        (True, {TWO: 8 * MI, GIGA: GIGA}, {TWO, GIGA}),
    ],
)
def test_the_guard_forbids_reservations_without_a_hugepage_limit(
    stated: bool, pod_limits: dict[int, Limit], guarded: set[int]
) -> None:
    """If the runtime sends no limits, the pod's limit is used instead: a pod that may use pages is not guarded."""
    wanted = guard_limits((TWO, GIGA), dict.fromkeys(RSVD.values()), lambda: pod_limits, supplied=stated)
    assert wanted == {RSVD[size]: DesiredLimit(0) for size in guarded}


def test_a_guard_in_force_does_not_read_the_pods_limits() -> None:
    """Once the guard's limits are set, the audit does not have to read files for every pod. For a page size without a
    reservation file, pages cannot be reserved, and no guard is required.
    """

    def never() -> dict[int, Limit]:
        raise AssertionError("the limits of the pod were read")

    assert guard_limits((TWO, GIGA), {RSVD[TWO]: 0}, never, supplied=False) == {}


def test_protection_is_summed_up_in_every_ancestor() -> None:
    """The root cgroup is left out. A claim shared by two containers counts once."""
    assert ancestors("kubelet/kubepods/pod1/c1") == ("kubelet/kubepods/pod1", "kubelet/kubepods", "kubelet")
    assert ancestors("") == ancestors("top") == ()
    found = protections(
        [
            ("k/b/p1/c1", {(MIN, "m1", "x"): 5, (LOW, "m2", "x"): 3}),
            ("k/b/p1/c2", {(MIN, "m1", "x"): 5}),
            ("k/g2/c3", {(MIN, "m3", "x"): 2}),
            ("k/p4/c4", {}),
        ]
    )
    below = {MIN: LimitIncrease(amount=5, needed=True), LOW: LimitIncrease(amount=3, needed=True)}
    assert found == {
        "k/b/p1": below,
        "k/b": below,
        "k/g2": {MIN: LimitIncrease(amount=2, needed=True)},
        "k": {MIN: LimitIncrease(amount=7, needed=True), LOW: LimitIncrease(amount=3, needed=True)},
    }


OWN = st.none() | st.integers(0, 4)
ADDED = st.builds(LimitIncrease, amount=st.integers(0, 4), counted=st.integers(0, 4))
RAISES = st.one_of(st.none(), ADDED, st.just(LimitIncrease(lifted=True)))


@dataclass
class Group:
    """A cgroup with one limit and the original limits stored for it."""

    limit: Limit
    notes: dict[str, Note] = field(default_factory=dict)

    def apply(self, raised: LimitIncrease | None, dies_after: int, *, lower: bool = True) -> None:
        """Runs one job, which may crash after any of its three steps."""
        raises = {} if raised is None else {MIN: raised}
        wanted, self.notes, after = raised_limits({MIN: self.limit}, self.notes, raises, lower=lower)
        if dies_after >= 1 and MIN in wanted:
            self.limit = wanted[MIN].limit
        if dies_after >= 2:
            self.notes = after


@given(OWN, st.lists(st.tuples(RAISES, st.integers(0, 2), st.booleans()), max_size=25))
def test_the_kubelets_limit_survives_any_raises_and_crashes(
    own: Limit, jobs: list[tuple[LimitIncrease | None, int, bool]]
) -> None:
    """The limit is raised, changed and restored in any order, with crashes and with resets by the kubelet."""
    group = Group(own)
    for raised, dies_after, reset in jobs:
        if reset:
            group.limit = own
        group.apply(raised, dies_after)
        assert original_limit(group.limit, group.notes.get(MIN)) == own
        if dies_after:
            assert group.limit == (own if raised is None else raised.apply_to(own))
    group.apply(None, dies_after=2)
    assert (group.limit, group.notes) == (own, {})


@given(OWN, ADDED, ADDED)
def test_a_limit_is_only_raised_while_claims_are_unknown(own: Limit, before: LimitIncrease, now: LimitIncrease) -> None:
    """The kubelet's limit is remembered and restored once all claims are known."""
    group = Group(own)
    group.apply(before, dies_after=2)
    raised = group.limit
    for _ in range(2):
        group.apply(now, dies_after=2, lower=False)
        assert group.limit == (None if own is None else max(raised or 0, now.apply_to(own) or 0))
    group.apply(now, dies_after=2)
    assert group.limit == now.apply_to(own)
    group.apply(None, dies_after=2)
    assert (group.limit, group.notes) == (own, {})


@given(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=20))
def test_a_limit_changed_by_the_kubelet_becomes_the_original_limit(own: int, jobs: list[tuple[int, int]]) -> None:
    """The kubelet changes the limit during an in-place resize. A value that the backend has not written comes from the
    kubelet, so the claims are added to it.
    """
    group = Group(own)
    for change, plus in jobs:
        if change and group.limit is not None and own + change * 1000 != group.limit:
            own += change * 1000
            group.limit = own
        group.apply(LimitIncrease(amount=plus), dies_after=2)
        assert group.limit == own + plus


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_claims_that_the_kubelet_has_counted_are_not_added_again(spec: int, counted: int, others: int) -> None:
    """If all of the pod's claims are in use, the limit does not depend on whether the kubelet or the backend adds them.
    It is never lower than the claims in use.
    """
    claimed = counted + others
    by_us = LimitIncrease(amount=claimed).apply_to(spec)
    assert LimitIncrease(amount=claimed, counted=counted).apply_to(spec + counted) == by_us
    for in_use in range(claimed):
        assert (
            spec + in_use
            <= (LimitIncrease(amount=in_use, counted=counted).apply_to(spec + counted) or 0)
            <= (by_us or 0)
        )


def test_the_reservation_limit_equals_the_limit_on_pages_in_use() -> None:
    """The value that the kubelet left in the reservation file is ignored."""
    made, _, _ = raised_limits({"hugetlb.2MB.max": 0}, {}, {"hugetlb.2MB.max": LimitIncrease(amount=7)})
    assert {file: wanted.limit for file, wanted in made.items()} == dict.fromkeys(hugepage_files(TWO), 7)
    assert with_reservation(MIN) == (MIN,)


def test_a_reservation_is_not_lowered_while_claims_are_unknown() -> None:
    """The container with the unknown claim may have reserved more than its pod's limit."""
    made, _, _ = raised_limits({"hugetlb.2MB.max": 0}, {}, {"hugetlb.2MB.max": LimitIncrease(amount=7)}, lower=False)
    assert all(made[file].met_by(None) and not made[file].met_by(6) for file in hugepage_files(TWO))


def test_a_plan_contains_a_missing_file_only_if_a_raise_is_needed() -> None:
    """If a limit must be raised, the plan includes the limit's file even if it is missing, so that the next read
    reports the file as missing. Otherwise, a missing file is skipped.
    """
    made, _, _ = raised_limits(
        {}, {MIN: (1, 2)}, {CPU_MAX: LimitIncrease(lifted=True), LOW: LimitIncrease(amount=3, needed=True)}
    )
    assert {file: wanted.limit for file, wanted in made.items()} == {LOW: 3}
