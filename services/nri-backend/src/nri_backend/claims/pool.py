# SPDX-License-Identifier: Apache-2.0
"""The shared pool: the CPUs of every container that holds no CPU claim."""

from collections.abc import Iterable

from numa_contract.cdi import ClaimFile


def claimed_cpus(files: Iterable[ClaimFile]) -> frozenset[int]:
    """Returns the CPUs that some claim's file holds, whether its record can be read or not."""
    return frozenset().union(*(file.cpus for file in files))


def shared_pool(online: frozenset[int], reserved: frozenset[int], held: frozenset[int]) -> frozenset[int]:
    """Returns the CPUs for containers without a claim; no CPU of ``held`` is ever among them.

    When every other CPU is held, they share the reserved ones. Empty when there is none of these either: then no plain
    container may start, because an empty cpuset means "no change" to every runtime.
    """
    return (online - reserved - held) or ((online & reserved) - held)
