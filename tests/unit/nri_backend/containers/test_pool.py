# SPDX-License-Identifier: Apache-2.0
"""How a node's CPUs are divided into the shared pool, CPUs held for claims, and partitions."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.entitlement import PartitionKind
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.pool import Pool, claimed_cpus, divide
from nri_backend.containers.state import exclusive_use
from nri_backend.node.model import Host
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list

from tests.rigs.builders import cpu_record
from tests.rigs.containers import container, entitlement_of, pod

CPUS = st.frozensets(st.integers(0, 15))


def claim(uid: str, cpus: str, *, shared: bool = False) -> ClaimFile:
    """Returns the file of a claim that is reserved for pod p1."""
    record = cpu_record(uid, f"r={cpus}", pool=shared)
    return ClaimFile("dra.cpu", uid, record, parse_cpu_list(cpus))


def running(file: ClaimFile, partition: PartitionKind = "", phase: Phase = Phase.RUNNING) -> Tracked:
    """Returns a container that uses a claim."""
    assert file.record is not None
    tracked = tracked_as(pod(), container(file.uid))
    entitlement = entitlement_of(file.record)
    return replace(tracked, entitlement=entitlement, phase=phase).with_observation(partition=partition)


def divided(
    *claims: ClaimFile, by: tuple[Tracked, ...] = (), reserved: str = "0", mode: Literal["auto", "pool"] = "auto"
) -> Pool:
    """Divides eight CPUs on a kernel that supports partitions."""
    config = Config(reserved_cpus=parse_cpu_list(reserved), cpu_exclusivity=mode)
    host = Host(parse_cpu_list("0-7"), (), partitions=True)
    return divide(config, host, claimed_cpus(claims), filter(None, map(exclusive_use, by)))


@given(CPUS, CPUS, CPUS)
def test_without_partitions_the_pool_contains_no_claimed_cpu(
    online: frozenset[int], reserved: frozenset[int], held: frozenset[int]
) -> None:
    """The pool contains exactly the online CPUs that are neither reserved nor claimed."""
    claims = [ClaimFile("dra.cpu", "a", None, held)]
    pool = divide(Config(reserved_cpus=reserved), Host(online), claimed_cpus(claims), ()).shared
    assert not pool & held
    assert pool <= online
    assert pool == online - reserved - held or not online - reserved - held


@pytest.mark.parametrize(
    ("online", "reserved", "held", "pool"),
    [
        ("0-7", "0", "2-3", "1,4-7"),
        ("0-7", "0", "1-7", "0"),
        ("0-7", "", "0-7", ""),
        ("1-7", "0", "1-7", ""),
    ],
)
def test_the_pool_is_the_reserved_cpus_if_all_others_are_claimed(
    online: str, reserved: str, held: str, pool: str
) -> None:
    """If there are no reserved CPUs, or if all of them are offline, the pool is empty."""
    claims = [ClaimFile("dra.cpu", "a", None, parse_cpu_list(held))]
    config = Config(reserved_cpus=parse_cpu_list(reserved))
    assert divide(config, Host(parse_cpu_list(online)), claimed_cpus(claims), ()).shared == parse_cpu_list(pool)


A, B = claim("a", "2-3"), claim("b", "4-5")
SHARED = claim("s", "6", shared=True)
DAMAGED = ClaimFile("dra.cpu", "d", None, frozenset({1}), "damaged")


@pytest.mark.parametrize(
    ("claims", "by", "mode", "pool", "held"),
    [
        ((A, B), (), "pool", "1,6-7", "2-5"),
        ((A, B), (), "auto", "1-7", ""),
        ((A, B), (running(A, "root"),), "auto", "1-7", ""),
        ((A, B), (running(A, "root"),), "pool", "1,6-7", "2-5"),
        ((A, B), (running(A),), "auto", "1,4-7", "2-3"),
        ((A, B), (running(A, phase=Phase.CREATED),), "auto", "1-7", ""),
        ((A, B), (running(A, phase=Phase.STOPPED),), "auto", "1-7", ""),
        ((A, SHARED), (running(A, "root"),), "auto", "1-5,7", "6"),
        ((A, DAMAGED), (running(A, "isolated"),), "auto", "2-7", "1"),
        ((), (running(A),), "pool", "1,4-7", "2-3"),
        ((), (running(A, "root"),), "pool", "1,4-7", "2-3"),
        ((), (running(A, "root"),), "auto", "1-7", ""),
    ],
)
def test_a_claim_is_held_unless_the_kernel_enforces_it(
    claims: tuple[ClaimFile, ...], by: tuple[Tracked, ...], mode: Literal["auto", "pool"], pool: str, held: str
) -> None:
    """In pool mode, the CPUs of every claim are held. In partition mode, a claim's CPUs are held only if the claim is
    shared or damaged, or while its running container is not a partition.
    """
    result = divided(*claims, by=by, mode=mode)
    assert (result.shared, result.held) == (parse_cpu_list(pool), parse_cpu_list(held))
    assert result.constant == (mode == "auto" and not held)


def test_a_pool_of_only_partition_cpus_is_not_used_while_a_claim_is_held() -> None:
    """If all of the pool's CPUs were in partitions, the kernel would give the pool's members their parent's CPUs, which
    include the CPUs held for claims.
    """
    most = claim("a", "1-5,7")
    assert divided(SHARED, most, by=(running(most, "root"),)).shared == {0}
    assert divided(most, by=(running(most, "root"),)).shared == parse_cpu_list("1-7"), "no claim is held"
    other = claim("o", "0,6", shared=True)
    assert not divided(most, other, by=(running(most, "root"),), reserved="").shared, "no CPU is better than held ones"


def test_a_sibling_avoids_its_pods_claims_unless_no_cpu_remains() -> None:
    """An overlap within a pod makes the partition invalid. If no CPU remained, the sibling's empty cpuset would mean
    all of its parent's CPUs.
    """
    result = divided()
    assert result.cpus_without_claim(frozenset({2, 3}), in_own_pod=False) == parse_cpu_list("1,4-7")
    assert result.cpus_without_claim(parse_cpu_list("1-7"), in_own_pod=False) == {0}, "the reserved CPUs"
    assert divided(reserved="").cpus_without_claim(parse_cpu_list("0-7"), in_own_pod=False) == parse_cpu_list("0-7")
    assert result.cpus_without_claim(frozenset(), in_own_pod=True) == {0}
