# SPDX-License-Identifier: Apache-2.0
"""Combined effect of a container's claims: memory binding, limits and protection, mounts, and the partition type."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import Claims, authorize, read_evidence
from nri_backend.claims.entitlement import Entitlement, HeldClaim, MemoryGrant, entitlement_from, share_of
from nri_backend.limits.claimed import DesiredLimit, memory_limits
from nri_backend.nri.model import MemoryPolicy
from numa_contract.cpuset import format_cpu_list
from numa_contract.records import AllocationRecord, CpuParameters, MemoryMount, Owner, PoolCpus

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record
from tests.rigs.containers import entitlement_of

PLAIN, TWO = 4096, 2 * MI


def grant(*parts: tuple[str, int, int, int], **parameters: Any) -> MemoryGrant:
    """Returns the memory grant for one claim with the given requests."""
    memory = entitlement_of(memory_record("m", *parts, **parameters)).memory
    assert memory is not None
    return memory


def test_by_default_a_memory_claim_only_binds_the_container_to_its_nodes() -> None:
    """The container is bound to the union of all requests' nodes."""
    assert grant(("a", 0, MI, PLAIN), ("b", 1, TWO, TWO)) == MemoryGrant(nodes=frozenset({0, 1}), hugepages={TWO: TWO})


def test_a_limit_on_one_request_limits_the_container_to_the_sum_of_all() -> None:
    """A cgroup has a single memory limit, which does not include hugepages."""
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("h", 1, TWO, TWO)
    limited = grant(*parts, a={"limit": "claim", "high": 0.5})
    assert (limited.maximum, limited.high) == (96 * MI, 64 * MI)
    assert memory_limits(limited) == {
        "memory.max": DesiredLimit(96 * MI, "at most", needed=True),
        "memory.high": DesiredLimit(64 * MI, "at most", needed=True),
    }


def test_limits_are_rounded_down_to_whole_pages() -> None:
    """The kernel rounds the same way. Fractions are rounded only once, after the requests have been added up, and the
    result is at least one page.
    """
    odd = grant(("a", 0, 3 * PLAIN + 7, PLAIN), a={"limit": "claim", "high": 0.4, "protect": "min"})
    assert (odd.maximum, odd.high) == (3 * PLAIN, PLAIN)
    assert set(odd.protected.values()) == {3 * PLAIN}
    pages = [(name, node, PLAIN, PLAIN) for node, name in enumerate("abcd")]
    assert grant(*pages, **{name: {"high": 0.5} for name in "abcd"}).high == 2 * PLAIN
    assert grant(pages[0], a={"high": 0.5}).high == PLAIN


def test_each_request_chooses_its_protection() -> None:
    """``low`` and ``min`` are separate files, and each gets the sum over the requests that chose it. A higher value
    that is already in the file is accepted.
    """
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("c", 1, MI, PLAIN), ("h", 1, TWO, TWO)
    protected = grant(*parts, a={"protect": "min"}, b={"protect": "low"}, c={"protect": "low"}, h={"protect": "min"})
    assert memory_limits(protected) == {
        "memory.min": DesiredLimit(64 * MI, "at least", needed=True),
        "memory.low": DesiredLimit(33 * MI, "at least", needed=True),
    }


def test_a_memory_policy_contains_the_nodes_of_requests_that_ask_for_one() -> None:
    """If there is a strict request as well, the cpuset contains the nodes of all requests, because a policy's nodes
    must be within the cpuset.
    """
    parts = ("a", 0, MI, PLAIN), ("b", 1, MI, PLAIN), ("c", 2, MI, PLAIN)
    soft = {"binding": "interleave"}
    mixed = grant(*parts, a=soft, b=soft)
    assert (mixed.nodes, mixed.policy) == ({0, 1, 2}, MemoryPolicy("interleave", frozenset({0, 1})))
    free = grant(*parts, a=soft, b=soft, c=soft)
    assert (free.nodes, free.policy) == (frozenset(), MemoryPolicy("interleave", frozenset({0, 1, 2})))


@pytest.mark.parametrize(
    ("a", "b", "fault"),
    [
        ({"binding": "preferred"}, {"binding": "interleave"}, "one memory policy"),
        ({"binding": "weighted"}, {}, "binding: weighted of request a is unknown to this release"),
        ({"protect": "all"}, {}, "protect: all of request a"),
        ({}, {"limit": "twice"}, "limit: twice of request b"),
        ({"binding": "preferred"}, {}, ""),
    ],
)
def test_parameters_that_cannot_be_enforced_are_a_fault(
    a: Mapping[str, object], b: Mapping[str, object], fault: str
) -> None:
    """A process can have only one memory policy, and a value from a newer release has an unknown meaning."""
    found = grant(("a", 0, MI, PLAIN), ("b", 1, MI, PLAIN), a=a, b=b).fault
    assert fault in found
    assert bool(fault) is bool(found)


@pytest.mark.parametrize(("one", "other", "hidden"), [("/h", "/h", True), ("/h/a", "/h", True), ("/h", "/h-a", False)])
def test_a_mount_that_hides_another_claims_mount_is_a_fault(one: str, other: str, hidden: bool) -> None:
    """Each of the two claims is valid by itself, and only the backend sees both. A request for memory on two NUMA nodes
    has a single mount.
    """
    records = [
        memory_record(uid, ("r", 0, TWO, TWO), ("r", 1, TWO, TWO), r={"mount": MemoryMount(path=path)})
        for uid, path in (("m", one), ("n", other))
    ]
    memory = entitlement_of(*records).memory
    assert memory is not None
    text = f"one claim's mount at /h would hide another's at {max(one, other)}; give each its own directory"
    assert memory.fault == (text if hidden else "")


@pytest.mark.parametrize(
    ("isolation", "sharing", "partition", "fault"),
    [
        (["exclusive"], "container", "root", ""),
        (["isolated", "isolated"], "container", "isolated", ""),
        (["exclusive", "isolated"], "container", "isolated", "its requests ask for isolation: exclusive and"),
        (["exclusive"], "pod", "", ""),
        (["isolated"], "pod", "", "is for a single container, but the claim is shared within the pod"),
        (["silent"], "container", "", "isolation: silent is unknown to this release"),
    ],
)
def test_a_containers_requests_must_agree_on_one_partition_type(
    isolation: list[str], sharing: str, partition: str, fault: str
) -> None:
    """A shared claim cannot be a partition, because several containers use it."""
    record = cpu_record("c1", *(f"r{n}={n}" for n in range(len(isolation))))
    parameters = {f"r{n}": CpuParameters(isolation=word) for n, word in enumerate(isolation)}
    entitlement = entitlement_of(record.model_copy(update={"parameters": parameters, "sharing": sharing}))
    assert entitlement.partition == partition
    assert (fault in entitlement.fault) if fault else not entitlement.fault


NAMES: Final = ("a", "b", "c")
CPU_PARAMETERS = st.builds(
    CpuParameters,
    isolation=st.sampled_from(["exclusive", "isolated", "mixed", "silent"]),
    quota=st.sampled_from(["lift", "keep"]),
    irqs=st.sampled_from(["move", "keep"]),
)
CPU_REQUESTS = st.lists(st.tuples(CPU_PARAMETERS, st.booleans()), min_size=1, max_size=3)
MEMORY_PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "binding": st.sampled_from(["strict", "preferred", "interleave", "weighted"]),
        "limit": st.sampled_from(["none", "claim"]),
        "protect": st.sampled_from(["none", "low", "min"]),
        "high": st.sampled_from([0.0, 0.5, 1.0]),
        "mount": st.sampled_from(["/h", "/h/a", "/h-a"]).map(lambda path: MemoryMount(path=path)),
    },
)
MEMORY_RESULTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3 * TWO), st.sampled_from([PLAIN, TWO])), min_size=1, max_size=2
)
MEMORY_REQUESTS = st.lists(st.tuples(MEMORY_PARAMETERS, MEMORY_RESULTS), min_size=1, max_size=3)


@st.composite
def records(draw: st.DrawFn, uid: str) -> AllocationRecord:
    """Generates the record of a CPU claim or a memory claim with up to three requests."""
    first = int(uid.removeprefix("c")) * len(NAMES)
    if draw(st.booleans()):
        requests = dict(zip(NAMES, draw(CPU_REQUESTS), strict=False))
        record = cpu_record(uid, *(f"{name}={first + n}" for n, name in enumerate(requests)))
        beside = {
            name: PoolCpus(cpus=frozenset({90, 91}), near=frozenset({90 + n}))
            for n, (name, (_, near)) in enumerate(requests.items())
            if near
        }
        parameters = {name: one for name, (one, _) in requests.items()}
        sharing = draw(st.sampled_from(["container", "pod"]))
        record = record.model_copy(update={"parameters": parameters, "pool_cpus": beside, "sharing": sharing})
    else:
        wanted = dict(zip(NAMES, draw(MEMORY_REQUESTS), strict=False))
        parts = [(name, *result) for name, (_, results) in wanted.items() for result in results]
        chosen: dict[str, Any] = {name: one for name, (one, _) in wanted.items()}
        record = memory_record(uid, *parts, **chosen)
    return record.model_copy(update={"counted": draw(st.booleans())})


@st.composite
def containers_claims(draw: st.DrawFn) -> list[HeldClaim]:
    """Generates a container's claims, each with some of its requests."""
    found = []
    for number in range(draw(st.integers(1, 4))):
        record = draw(records(f"c{number}"))
        named = draw(st.sets(st.sampled_from(record.requests), min_size=1))
        found.append(HeldClaim(record, tuple(one for one in record.requests if one in named)))
    return found


@given(records("c0"), st.data())
def test_a_claim_files_share_equals_that_of_a_container_with_all_requests(
    record: AllocationRecord, data: st.DataObject
) -> None:
    """A container that names only some of the requests gets the same share as if the record contained no others."""
    claims = Claims(files_of(record))
    known = claims.known[record.driver, record.claim.uid]
    assert isinstance(known, HeldClaim)
    assert known.share == share_of(record, record.requests)
    named = data.draw(st.lists(st.sampled_from(record.requests), min_size=1, unique=True))
    evidence = read_evidence(env_of(record, *named))
    entitlement, _, rejection = authorize(evidence, Owner(pod_uid="p1", container="main"), claims)
    (held,) = entitlement.claims
    assert rejection is None
    assert held.requests == tuple(one for one in record.requests if one in named)
    assert held.share == share_of(record, held.requests)
    assert (held is known) is (held.requests == record.requests), "the share of the whole claim is not computed again"


def without_texts(entitlement: Entitlement) -> Entitlement:
    """Returns a copy of the entitlement without its claims. Its messages are replaced with markers, since a message
    names only the first of several faults.
    """
    memory = entitlement.memory
    if memory is not None and memory.fault:
        memory = replace(memory, fault="fault", policy=None)
    return replace(entitlement, claims=(), fault=entitlement.fault and "fault", memory=memory)


@given(containers_claims(), st.data())
def test_the_order_of_claims_does_not_change_their_sum(claims: Sequence[HeldClaim], data: st.DataObject) -> None:
    """Only the list of claims and the fault that is named first depend on the order."""
    shuffled = data.draw(st.permutations(claims))
    assert without_texts(entitlement_from(shuffled)) == without_texts(entitlement_from(claims))


@given(containers_claims())
def test_the_shares_of_single_requests_add_up_to_the_share_of_all(claims: Sequence[HeldClaim]) -> None:
    """The sum of the requests' shares equals the share that is computed for all requests at once. The comparison leaves
    out two values that are computed only for whole claims: the environment variable with the union of the CPUs, and the
    amounts that the kubelet has already counted.
    """
    single = entitlement_from(HeldClaim(held.record, (request,)) for held in claims for request in held.requests)
    together = entitlement_from(claims)
    assert replace(single, claims=(), env={}, counted=together.counted) == replace(together, claims=(), env={})
    for held in claims:
        several = held.record.driver == "dra.cpu" and len(held.requests) > 1
        cpus = format_cpu_list(held.record.cpus_of(held.requests))
        assert held.share.env == ({f"DRA_CPUSET_{held.record.claim.uid}": cpus} if several else {})
