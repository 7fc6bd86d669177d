# SPDX-License-Identifier: Apache-2.0
"""What memory claims mean for a container."""

from collections.abc import Mapping
from typing import Any

import pytest
from nri_backend.claims.memory import MemoryGrant
from nri_backend.limits.limit import Rule, Wanted
from nri_backend.limits.memory import container_limits
from nri_backend.nri.model import MemoryPolicy
from numa_contract.records import MemoryMount

from tests.rigs.claims import MI, entitlement_of, memory_record

PLAIN, TWO = 4096, 2 * MI


def grant(*parts: tuple[str, int, int, int], **parameters: Any) -> MemoryGrant:
    """What one claim with these requests gives."""
    memory = entitlement_of(memory_record("m", *parts, **parameters)).memory
    assert memory is not None
    return memory


def test_by_default_memory_is_bound_and_nothing_else() -> None:
    """Strict binding alone, the union of the nodes."""
    assert grant(("a", 0, MI, PLAIN), ("b", 1, TWO, TWO)) == MemoryGrant(nodes=frozenset({0, 1}))


def test_one_request_that_asks_is_enough_to_limit_the_container_to_all() -> None:
    """A cgroup has one limit; hugepages are not in it."""
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("h", 1, TWO, TWO)
    limited = grant(*parts, a={"limit": "claim", "high": 0.5})
    assert (limited.maximum, limited.high) == (96 * MI, 64 * MI)
    assert container_limits(limited) == {
        "memory.max": Wanted(96 * MI, Rule.AT_MOST, needed=True),
        "memory.high": Wanted(64 * MI, Rule.AT_MOST, needed=True),
    }


def test_limits_are_whole_pages() -> None:
    """As in the kernel, which rounds down: else a file would never say what it must."""
    odd = grant(("a", 0, 3 * PLAIN + 7, PLAIN), a={"limit": "claim", "high": 0.4, "protect": "min"})
    assert (odd.maximum, odd.high) == (3 * PLAIN, PLAIN)
    assert set(odd.protected.values()) == {3 * PLAIN}


def test_a_fraction_is_rounded_once_and_is_never_nothing() -> None:
    """Several allocations of one page each: a fraction of their sum, and at least one page."""
    pages = [(name, node, PLAIN, PLAIN) for node, name in enumerate("abcd")]
    half = {name: {"high": 0.5} for name in "abcd"}
    assert grant(*pages, **half).high == 2 * PLAIN
    assert grant(pages[0], a={"high": 0.5}).high == PLAIN


def test_protection_is_by_file_and_request() -> None:
    """Each request chooses; ``low`` and ``min`` are two files, and more than is claimed does no harm."""
    parts = ("a", 0, 64 * MI, PLAIN), ("b", 1, 32 * MI, PLAIN), ("c", 1, MI, PLAIN), ("h", 1, TWO, TWO)
    protected = grant(*parts, a={"protect": "min"}, b={"protect": "low"}, c={"protect": "low"}, h={"protect": "min"})
    assert container_limits(protected) == {
        "memory.min": Wanted(64 * MI, Rule.AT_LEAST, needed=True),
        "memory.low": Wanted(33 * MI, Rule.AT_LEAST, needed=True),
    }


def test_a_policy_stands_for_the_nodes_of_those_who_want_one() -> None:
    """Beside a strict request the cpuset has the nodes of all: a policy beyond it would be invalid."""
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
def test_what_cannot_be_enforced_is_said(a: Mapping[str, object], b: Mapping[str, object], fault: str) -> None:
    """Two policies for one process; a word of a newer release, which could mean anything."""
    found = grant(("a", 0, MI, PLAIN), ("b", 1, MI, PLAIN), a=a, b=b).fault
    assert fault in found
    assert bool(fault) is bool(found)


@pytest.mark.parametrize(("one", "other", "hidden"), [("/h", "/h", True), ("/h/a", "/h", True), ("/h", "/h-a", False)])
def test_two_claims_must_not_mount_over_each_other(one: str, other: str, hidden: bool) -> None:
    """Each is right by itself, so that only here both are seen; the runtime would keep one and say nothing."""
    records = [
        memory_record(uid, ("r", 0, TWO, TWO), r={"mount": MemoryMount(path=path)})
        for uid, path in (("m", one), ("n", other))
    ]
    memory = entitlement_of(*records).memory
    assert memory is not None
    assert memory.fault == (
        "of its claims' mounts that at /h would hide that at " + max(one, other) + "; give each a directory of its own"
        if hidden
        else ""
    )


def test_two_nodes_of_one_request_are_one_mount() -> None:
    """It has one path, however many results it has."""
    assert grant(("r", 0, TWO, TWO), ("r", 1, TWO, TWO), r={"mount": MemoryMount(path="/h")}).fault == ""
