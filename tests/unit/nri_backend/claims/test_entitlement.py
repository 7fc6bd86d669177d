# SPDX-License-Identifier: Apache-2.0
"""The sum of a container's claims: memory binding, limits and protection, mounts and the partition type."""

from collections.abc import Mapping
from typing import Any

import pytest
from nri_backend.claims.entitlement import MemoryGrant
from nri_backend.limits.claimed import memory_limits
from nri_backend.limits.difference import DesiredLimit
from nri_backend.nri.model import MemoryPolicy
from numa_contract.records import CpuParameters, MemoryMount

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import entitlement_of

PLAIN, TWO = 4096, 2 * MI


def grant(*parts: tuple[str, int, int, int], **parameters: Any) -> MemoryGrant:
    """Returns the memory grant of one claim with these requests."""
    memory = entitlement_of(memory_record("m", *parts, **parameters)).memory
    assert memory is not None
    return memory


def test_by_default_a_memory_claim_only_binds_to_its_nodes() -> None:
    """The nodes are the union over all requests."""
    assert grant(("a", 0, MI, PLAIN), ("b", 1, TWO, TWO)) == MemoryGrant(nodes=frozenset({0, 1}))


def test_a_limit_of_one_request_limits_the_container_to_the_sum_of_all() -> None:
    """A cgroup has one limit, which does not include hugepages."""
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("h", 1, TWO, TWO)
    limited = grant(*parts, a={"limit": "claim", "high": 0.5})
    assert (limited.maximum, limited.high) == (96 * MI, 64 * MI)
    assert memory_limits(limited) == {
        "memory.max": DesiredLimit(96 * MI, "at most", needed=True),
        "memory.high": DesiredLimit(64 * MI, "at most", needed=True),
    }


def test_limits_are_rounded_down_to_whole_pages() -> None:
    """The kernel rounds in the same way. A fraction is rounded once, after the sum, and is at least one page."""
    odd = grant(("a", 0, 3 * PLAIN + 7, PLAIN), a={"limit": "claim", "high": 0.4, "protect": "min"})
    assert (odd.maximum, odd.high) == (3 * PLAIN, PLAIN)
    assert set(odd.protected.values()) == {3 * PLAIN}
    pages = [(name, node, PLAIN, PLAIN) for node, name in enumerate("abcd")]
    assert grant(*pages, **{name: {"high": 0.5} for name in "abcd"}).high == 2 * PLAIN
    assert grant(pages[0], a={"high": 0.5}).high == PLAIN


def test_each_request_chooses_its_protection() -> None:
    """``low`` and ``min`` are separate files, each with the sum of the requests that chose it.

    A higher value is accepted.
    """
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("c", 1, MI, PLAIN), ("h", 1, TWO, TWO)
    protected = grant(*parts, a={"protect": "min"}, b={"protect": "low"}, c={"protect": "low"}, h={"protect": "min"})
    assert memory_limits(protected) == {
        "memory.min": DesiredLimit(64 * MI, "at least", needed=True),
        "memory.low": DesiredLimit(33 * MI, "at least", needed=True),
    }


def test_a_memory_policy_contains_the_nodes_of_the_requests_that_ask_for_one() -> None:
    """With an additional strict request the cpuset contains the nodes of all requests: a policy must be inside it."""
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
    """A process has one memory policy, and a value of a newer release has an unknown meaning."""
    found = grant(("a", 0, MI, PLAIN), ("b", 1, MI, PLAIN), a=a, b=b).fault
    assert fault in found
    assert bool(fault) is bool(found)


@pytest.mark.parametrize(("one", "other", "hidden"), [("/h", "/h", True), ("/h/a", "/h", True), ("/h", "/h-a", False)])
def test_a_mount_that_hides_the_mount_of_another_claim_is_a_fault(one: str, other: str, hidden: bool) -> None:
    """Each claim is valid by itself, so only the backend sees both. Two nodes of one request have one mount."""
    records = [
        memory_record(uid, ("r", 0, TWO, TWO), ("r", 1, TWO, TWO), r={"mount": MemoryMount(path=path)})
        for uid, path in (("m", one), ("n", other))
    ]
    memory = entitlement_of(*records).memory
    assert memory is not None
    text = f"of its claims' mounts that at /h would hide that at {max(one, other)}; give each a directory of its own"
    assert memory.fault == (text if hidden else "")


@pytest.mark.parametrize(
    ("isolation", "sharing", "partition", "fault"),
    [
        (["exclusive"], "container", "root", ""),
        (["isolated", "isolated"], "container", "isolated", ""),
        (["exclusive", "isolated"], "container", "isolated", "its requests ask for isolation: exclusive and"),
        (["exclusive"], "pod", "", ""),
        (["isolated"], "pod", "", "is for one container, and the claim is shared in the pod"),
        (["silent"], "container", "", "isolation: silent is unknown to this release"),
    ],
)
def test_the_requests_of_a_container_agree_on_one_partition_type(
    isolation: list[str], sharing: str, partition: str, fault: str
) -> None:
    """A shared claim cannot be a partition, because several containers use it."""
    record = cpu_record("c1", *(f"r{n}={n}" for n in range(len(isolation))))
    parameters = {f"r{n}": CpuParameters(isolation=word) for n, word in enumerate(isolation)}
    entitlement = entitlement_of(record.model_copy(update={"parameters": parameters, "sharing": sharing}))
    assert entitlement.partition == partition
    assert (fault in entitlement.fault) if fault else not entitlement.fault
