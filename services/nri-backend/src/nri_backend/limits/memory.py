# SPDX-License-Identifier: Apache-2.0
"""The limits of plain memory that a container's claims ask for."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Final

from nri_backend.claims.memory import MemoryGrant, Protected
from nri_backend.limits.limit import Rule, Wanted

MEMORY_MAX: Final = "memory.max"
MEMORY_HIGH: Final = "memory.high"


def container_limits(grant: MemoryGrant) -> dict[str, Wanted]:
    """Returns what the files of the container must say.

    A limit that the pod's spec sets lower than the claim holds as well: both were asked for. The same goes for a
    protection that is higher.
    """
    limits = {
        file: Wanted(limit, Rule.AT_MOST, needed=True)
        for file, limit in ((MEMORY_MAX, grant.maximum), (MEMORY_HIGH, grant.high))
        if limit is not None
    }
    protection = protected_bytes([grant.protected])
    return limits | {file: Wanted(size, Rule.AT_LEAST, needed=True) for file, size in protection.items()}


def protected_bytes(shares: Iterable[Mapping[Protected, int]]) -> dict[str, int]:
    """Returns the bytes protected by file; a request that several containers hold counts once."""
    distinct: dict[Protected, int] = {}
    for share in shares:
        distinct |= share
    total: dict[str, int] = defaultdict(int)
    for (file, _, _), size in distinct.items():
        total[file] += size
    return dict(total)
