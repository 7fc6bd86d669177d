# SPDX-License-Identifier: Apache-2.0
"""Hugepage limits of containers and pods: what the kubelet asked for, and what is claimed. Bytes by page size."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from numa_contract.errors import MalformedError
from numa_contract.pagesize import oci_page_size, parse_page_size

from nri_backend.claims.entitlement import Entitlement
from nri_backend.limits.limit import Limit, Raise, Wanted, with_reservation
from nri_backend.nri.model import Resources


@dataclass(frozen=True, slots=True)
class HugeWants:
    """From what the hugepage limits of a container are computed; bytes by page size in bytes."""

    claimed: Mapping[int, int]
    stated: Mapping[int, int] = field(default_factory=dict)
    """What the kubelet asked for this container; empty where the runtime has dropped it (stock containerd)."""


@dataclass(frozen=True, slots=True)
class Guard:
    """For a container without a hugepage claim: it is not to reserve pages, so that mmap fails and not their use.

    The kubelet limits use alone: without this ``mmap(MAP_HUGETLB)`` succeeds and the first touch kills (PostgreSQL's
    "Bus error").
    """

    sizes: tuple[int, ...]
    """Page sizes in bytes that the kubelet has not stated a limit for, or one of 0."""
    told: bool
    """The runtime tells what the kubelet states; else the pod's own limit must be 0, or it may have asked for pages."""


def guard_limits(
    guard: Guard, reservable: Mapping[str, Limit], pod_own: Callable[[], Mapping[int, Limit]]
) -> dict[str, Wanted]:
    """Returns what to limit, out of the reservation limits as they are; ``pod_own`` is asked for only when needed."""
    files = {file: size for size in guard.sizes if reservable.get(file := reservation_file(size), 0) != 0}
    if not files:
        return {}
    own = {} if guard.told else pod_own()
    return {file: Wanted(0) for file, size in files.items() if guard.told or own.get(size) == 0}


def reservation_file(size: int) -> str:
    """Returns the file that limits the reservations of a size."""
    return limit_files(size)[1]


@lru_cache
def limit_files(size: int) -> tuple[str, ...]:
    """Returns the files that limit hugepages of a size: in use, and reserved (so that mmap fails instead of use)."""
    return with_reservation(f"hugetlb.{oci_page_size(size)}.max")


def stated_limits(resources: Resources) -> dict[int, int]:
    """Returns the hugepage limits that runtime or kubelet state, by page size in bytes."""
    found: dict[int, int] = {}
    for size, limit in resources.hugepage_limits.items():
        try:
            found[parse_page_size(size)] = limit
        except MalformedError:
            continue
    return found


def asked_limits(shown: Mapping[int, int], claimed: Mapping[int, int]) -> dict[int, int]:
    """Returns what the kubelet asked for, out of the limits that a runtime shows after our answer at the creation.

    The answer has added the claimed bytes. A size of which nothing else is left counts as not stated: the runtime may
    have dropped the statement.
    """
    return {
        size: limit - claimed.get(size, 0) if limit > claimed.get(size, 0) else limit
        for size, limit in shown.items()
        if size not in claimed or limit != claimed[size]
    }


def claimed_bytes(holdings: Iterable[Entitlement]) -> dict[int, int]:
    """Returns the bytes claimed by page size; a request that several of the containers hold counts once."""
    distinct: dict[tuple[str, str, int], int] = {}
    for entitlement in holdings:
        distinct |= entitlement.hugepages
    total: dict[int, int] = defaultdict(int)
    for (_, _, size), amount in distinct.items():
        total[size] += amount // size * size
    return dict(total)


def container_limits(wants: HugeWants, pod_own: Mapping[int, Limit]) -> dict[str, Wanted]:
    """Returns a claim container's limits by file: what the kubelet stated plus what is claimed, else 0.

    Where the runtime has dropped the kubelet's statement, the pod's own limit stands in for it: that bounds the sum of
    what its containers asked for, and is 0 for a pod that asked for none. Limits are whole pages, as in the kernel.
    """
    limits: dict[str, Wanted] = {}
    for size in sorted({*pod_own, *wants.claimed}):
        base = wants.stated.get(size, 0) if wants.stated else pod_own.get(size) or 0
        claimed = wants.claimed.get(size, 0)
        limit = (base + claimed) // size * size
        limits |= {file: Wanted(limit, needed=claimed > 0) for file in limit_files(size)}
    return limits


def pod_raises(claimed: Mapping[int, int], sizes: Iterable[int]) -> dict[str, Raise]:
    """Returns what a pod's limits need: the claims of all its containers, on top of what the kubelet has set."""
    return {
        limit_files(size)[0]: Raise(plus=claimed.get(size, 0), needed=claimed.get(size, 0) > 0)
        for size in sorted({*sizes, *claimed})
    }
