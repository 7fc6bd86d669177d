# SPDX-License-Identifier: Apache-2.0
"""The cgroups above containers. Memory is protected only as far as every one of them is protected too.

cgroup-v2.rst: a cgroup has no more of ``memory.low`` and ``memory.min`` than its ancestors pass on.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from nri_backend.claims.memory import Protected
from nri_backend.limits.limit import Raise
from nri_backend.limits.memory import protected_bytes


def ancestors(path: str) -> tuple[str, ...]:
    """Returns every cgroup above one, the nearest first, without the root: that one is never short of anything."""
    above = []
    while path := path.rpartition("/")[0]:
        above.append(path)
    return tuple(above)


def protections(containers: Iterable[tuple[str, Mapping[Protected, int]]]) -> dict[str, dict[str, Raise]]:
    """Returns by ancestor what it must pass on to the containers below it; those are paths with what each protects."""
    below: dict[str, list[Mapping[Protected, int]]] = defaultdict(list)
    for path, protected in containers:
        if protected:
            for ancestor in ancestors(path):
                below[ancestor].append(protected)
    return {
        path: {file: Raise(plus=size, needed=True) for file, size in protected_bytes(shares).items()}
        for path, shares in below.items()
    }
