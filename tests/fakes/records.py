# SPDX-License-Identifier: Apache-2.0
"""A small record for tests of what keeps records."""

from numa_contract.records import AllocationRecord, AllocationResult, ClaimReference, CpuAllocation


def record(uid: str = "u1", cpus: frozenset[int] = frozenset({1, 2})) -> AllocationRecord:
    """A CPU record."""
    return AllocationRecord(
        driver="dra.cpu",
        claim=ClaimReference(uid=uid, namespace="ns", name=f"claim-{uid}"),
        results=(AllocationResult(request="r", pool="p", device="d"),),
        cpus=(CpuAllocation(request="r", device="d", cpus=cpus),),
    )
