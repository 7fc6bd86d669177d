# SPDX-License-Identifier: Apache-2.0
"""What a container shall get."""

from nri_backend.claims.entitlement import Entitlement
from nri_backend.containers.answers import adjustment, amendment
from nri_backend.limits.cpu_quota import CpuLimit
from nri_backend.limits.stated import Stated, stated
from nri_backend.limits.wants import CgroupWants, Host, cpuset_part
from nri_backend.nri.model import Adjustment, MemoryPolicy, Resources

from tests.rigs.claims import MI, cpu_record, entitlement_of, memory_record

POOL = frozenset({0, 1})
TWO = 2 * MI


def test_a_plain_container_gets_the_pool_and_nothing_else() -> None:
    """Its mems and limits are the kubelet's affair."""
    assert adjustment(Entitlement(), POOL, Stated({TWO: 4 * MI}, CpuLimit(50_000), 1 << 30)) == Adjustment(
        Resources(cpus="0-1")
    )


def test_a_claim_container_gets_all_it_holds() -> None:
    """CPUs, mems, the union variable, and of hugepages what the kubelet stated plus what is claimed."""
    held = entitlement_of(
        cpu_record("c", "a=2", "b=4-5"),
        memory_record("m", ("x", 1, 64 * MI, TWO), ("y", 0, 64 * MI, TWO)),
        memory_record("n", ("x", 1, 64 * MI, TWO)),
    )
    answer = adjustment(held, POOL, Stated({TWO: 8 * MI, 1 << 30: 0}))
    assert answer.env == {"DRA_CPUSET_c": "2,4-5"}
    assert answer.resources == Resources(cpus="2,4-5", mems="0-1", hugepage_limits={"2MB": 200 * MI, "1GB": 0})


def test_a_memory_claim_alone_stays_in_the_pool() -> None:
    """Memory says nothing about CPUs, and a runtime that states nothing gets the claimed sizes alone."""
    answer = adjustment(entitlement_of(memory_record("m", ("x", 1, 64 * MI, TWO))), POOL, Stated())
    assert answer.resources == Resources(cpus="0-1", mems="1", hugepage_limits={"2MB": 64 * MI})


def test_nothing_empty_is_ever_sent() -> None:
    """An empty field means "no change"; without a pool nothing is said rather than something empty."""
    assert amendment(Entitlement(), frozenset(), Stated()) == Resources()


def test_an_update_mentions_hugepages_only_if_the_kubelet_did() -> None:
    """containerd appends hugepage limits, so an answer repeats them only when it must."""
    held = entitlement_of(memory_record("m", ("x", 1, 64 * MI, TWO)), cpu_record("c", "cpus=3"))
    assert amendment(held, POOL, Stated({TWO: 0})) == Resources(cpus="3", mems="1")
    assert amendment(held, POOL, Stated({TWO: MI * 2}), huge=True).hugepage_limits == {"2MB": 66 * MI}


def test_offline_cpus_are_configured_but_not_expected() -> None:
    """The kernel gives a CPU back by itself when it is configured; a claim without any CPU left is the pool's."""
    host = Host(frozenset({0, 1, 2}))
    one, two = frozenset({2, 3}), frozenset({3})
    node = frozenset({1})
    assert cpuset_part(one, node, POOL, host, claims=True) == CgroupWants(one, frozenset({2}), mems=node)
    assert cpuset_part(two, node, POOL, host, claims=True) == CgroupWants(POOL, POOL, shared=True, mems=node)


def test_a_quota_that_the_claim_covers_is_answered_away() -> None:
    """The runtime is told that there is none; what it has not, and what exceeds the claim, is not mentioned."""
    held = entitlement_of(cpu_record("c", "a=2-3"))
    assert adjustment(held, POOL, Stated(cpu=CpuLimit(200_000))).resources.cpu_quota == -1
    assert adjustment(held, POOL, Stated(cpu=CpuLimit(200_001))).resources.cpu_quota is None
    assert adjustment(held, POOL, Stated()).resources == Resources(cpus="2-3")


def test_a_memory_limit_of_the_claim_is_answered_unless_the_pods_is_lower() -> None:
    """Both were asked for, so the lower one holds."""
    held = entitlement_of(memory_record("m", ("x", 1, 64 * MI, 4096), x={"limit": "claim"}))
    assert adjustment(held, POOL, Stated()).resources.memory_limit == 64 * MI
    assert adjustment(held, POOL, Stated(memory=65 * MI)).resources.memory_limit == 64 * MI
    assert adjustment(held, POOL, Stated(memory=64 * MI)).resources.memory_limit is None
    assert adjustment(held, POOL, Stated(memory=2 * MI)).resources.memory_limit is None


def test_a_soft_binding_is_a_policy_and_no_cpuset() -> None:
    """The process may leave the node when it is full."""
    held = entitlement_of(memory_record("m", ("x", 1, 64 * MI, 4096), x={"binding": "preferred"}))
    policy = MemoryPolicy("preferred", frozenset({1}))
    assert adjustment(held, POOL, Stated()) == Adjustment(Resources(cpus="0-1"), memory_policy=policy)


def test_what_an_update_does_not_mention_stays_stated() -> None:
    """A kubelet's update holds only what changes; a quota of -1 is no limit."""
    before = Stated({TWO: 8, 1 << 30: 0}, CpuLimit(50_000), 1 << 30)
    assert before.updated(Resources()) == before
    wanted = Resources(cpu_quota=-1, memory_limit=5, hugepage_limits={"2MB": 3})
    assert before.updated(wanted) == Stated({TWO: 3, 1 << 30: 0}, None, 5)
    assert stated(Resources(cpu_quota=7, cpu_period=9)) == Stated(cpu=CpuLimit(7, 9))
