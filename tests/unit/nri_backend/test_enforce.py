# SPDX-License-Identifier: Apache-2.0
"""What a container shall get."""

from hypothesis import given
from hypothesis import strategies as st
from nri_backend.containers import Adjustment, Resources
from nri_backend.enforce import (
    CgroupWants,
    Host,
    HugeWants,
    PodNote,
    adjustment,
    amendment,
    asked_limits,
    claimed_bytes,
    container_limits,
    cpu_wants,
    own_limit,
    pod_limits,
    stated_limits,
)
from nri_backend.holdings import Holding, assess, read_evidence
from numa_contract.records import AllocationRecord, Owner

from tests.fakes.claims import MI, cpu_record, env_of, files_of, memory_record

POOL = frozenset({0, 1})
HOST = Host(frozenset(range(8)), (2 * MI, 1 << 30))
TWO = 2 * MI


def holding(*records: AllocationRecord) -> Holding:
    """What a container of pod p1 holds with all requests of the records."""
    env = [entry for record in records for entry in env_of(record)]
    result = assess(read_evidence(env), Owner(pod_uid="p1", container="main"), files_of(*records), {})
    assert isinstance(result, Holding)
    return result


def test_a_plain_container_gets_the_pool_and_nothing_else() -> None:
    """Its mems and limits are the kubelet's affair."""
    assert adjustment(Holding(), POOL, {TWO: 4 * MI}) == Adjustment(Resources(cpus="0-1"))


def test_a_claim_container_gets_all_it_holds() -> None:
    """CPUs, mems, the union variable, and of hugepages what the kubelet stated plus what is claimed (B32, B33)."""
    held = holding(
        cpu_record("c", "a=2", "b=4-5"),
        memory_record("m", ("x", 1, 64 * MI, TWO), ("y", 0, 64 * MI, TWO)),
        memory_record("n", ("x", 1, 64 * MI, TWO)),
    )
    answer = adjustment(held, POOL, {TWO: 8 * MI, 1 << 30: 0})
    assert answer.env == {"DRA_CPUSET_c": "2,4-5"}
    assert answer.resources == Resources(cpus="2,4-5", mems="0-1", hugepage_limits={"2MB": 200 * MI, "1GB": 0})


def test_a_memory_claim_alone_stays_in_the_pool() -> None:
    """Memory says nothing about CPUs, and a runtime that states nothing gets the claimed sizes alone."""
    answer = adjustment(holding(memory_record("m", ("x", 1, 64 * MI, TWO))), POOL, {})
    assert answer.resources == Resources(cpus="0-1", mems="1", hugepage_limits={"2MB": 64 * MI})


def test_nothing_empty_is_ever_sent() -> None:
    """B37: an empty field means "no change"; without a pool nothing is said rather than something empty."""
    assert amendment(frozenset(), Holding(), frozenset(), {}) == Resources()


def test_an_update_mentions_hugepages_only_if_the_kubelet_did() -> None:
    """containerd appends hugepage limits, so an answer repeats them only when it must."""
    held = holding(memory_record("m", ("x", 1, 64 * MI, TWO)))
    assert amendment(frozenset({3}), held, POOL, {TWO: 0}) == Resources(cpus="3", mems="1")
    assert amendment(frozenset(), held, POOL, {TWO: MI * 2}, huge=True).hugepage_limits == {"2MB": 66 * MI}


def test_offline_cpus_are_configured_but_not_expected() -> None:
    """B51: the kernel gives a CPU back by itself when it is configured; a claim without any CPU left is the pool's."""
    host = Host(frozenset({0, 1, 2}))
    assert cpu_wants(frozenset({2, 3}), POOL, host, claims=True) == CgroupWants(frozenset({2, 3}), frozenset({2}))
    assert cpu_wants(frozenset({3}), POOL, host, claims=True) == CgroupWants(POOL, POOL, shared=True)


def test_limits_that_the_runtime_states() -> None:
    """Trap 3.14: sizes are spelled 2MB, 1GB; what is no size is left out."""
    assert stated_limits(Resources(hugepage_limits={"2MB": 5, "1GB": 0, "odd": 3})) == {TWO: 5, 1 << 30: 0}


def test_a_shared_claim_counts_once_for_its_pod() -> None:
    """Two containers that share a request have its pages once."""
    one, other = holding(memory_record("m", ("x", 1, 64 * MI, TWO))), holding(memory_record("n", ("x", 1, 2 * MI, TWO)))
    assert claimed_bytes([one, one, other]) == {TWO: 66 * MI}


def test_a_dropped_statement_is_bounded_by_the_pod() -> None:
    """Stock containerd hides the kubelet's limit: the pod's own stands in, which is 0 where none was asked for."""
    claimed = HugeWants({TWO: 64 * MI}, {TWO: 64 * MI})
    assert container_limits(claimed, {TWO: 0, 1 << 30: 0}) == {TWO: 64 * MI, 1 << 30: 0}
    assert container_limits(claimed, {TWO: 8 * MI, 1 << 30: 1 << 30}) == {TWO: 72 * MI, 1 << 30: 1 << 30}
    assert container_limits(claimed, {TWO: None}) == {TWO: 64 * MI}
    stated = HugeWants({TWO: 64 * MI}, {}, {TWO: 2 * MI})
    assert container_limits(stated, {TWO: 8 * MI, 1 << 30: 1 << 30}) == {TWO: 66 * MI, 1 << 30: 0}


def test_no_limit_stays_no_limit() -> None:
    """A pod that the kubelet does not limit is not limited by us."""
    assert pod_limits({TWO: None, 1 << 30: 0}, {TWO: MI, 1 << 30: 1 << 30}) == {TWO: None, 1 << 30: 1 << 30}


@given(
    st.integers(0, 8).map(lambda pages: pages * TWO),
    st.lists(st.integers(0, 4).map(lambda pages: pages * TWO), min_size=20, max_size=20),
    st.sets(st.integers(0, 19)),
)
def test_the_kubelets_value_is_never_lost(own: int, claims: list[int], resets: set[int]) -> None:
    """B34: over 20 starts the pod's limit is own plus claims, also when the kubelet writes its value in between."""
    note, current = None, own
    for turn, claimed in enumerate(claims):
        if turn in resets:
            current = own
        remembered = own_limit(current, note)
        assert remembered == own
        current = pod_limits({TWO: own}, {TWO: claimed})[TWO] or 0
        assert current == own + claimed
        note = PodNote(own, (current,))


def test_the_claims_part_is_taken_out_of_what_a_runtime_shows() -> None:
    """The rest is the kubelet's wish; without a rest nothing is known, and an answer that was not ours is untouched."""
    claimed = {TWO: 64 * MI}
    assert asked_limits({TWO: 66 * MI, 1 << 30: 0}, claimed) == {TWO: 2 * MI, 1 << 30: 0}
    assert asked_limits({TWO: 64 * MI}, claimed) == {}
    assert asked_limits({TWO: 2 * MI}, claimed) == {TWO: 2 * MI}
    assert asked_limits({TWO: 64 * MI}, {}) == {TWO: 64 * MI}
