# SPDX-License-Identifier: Apache-2.0
"""What runtime or kubelet state about a container's resources, as far as claims have to do with it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from nri_backend.limits.cpu_quota import CpuLimit, stated_cpu_limit
from nri_backend.limits.hugepages import stated_limits
from nri_backend.nri.model import Resources


@dataclass(frozen=True, slots=True)
class Stated:
    """What runtime or kubelet state about a container's resources, as far as claims have to do with it."""

    hugepages: Mapping[int, int] = field(default_factory=dict)
    """Bytes by page size in bytes."""
    cpu: CpuLimit | None = None
    memory: int | None = None
    """Bytes."""

    def updated(self, wanted: Resources) -> "Stated":
        """Returns what is stated after an update, which mentions only what changes."""
        return Stated(
            hugepages={**self.hugepages, **stated_limits(wanted)},
            cpu=self.cpu if wanted.cpu_quota is None else stated_cpu_limit(wanted),
            memory=self.memory if wanted.memory_limit is None else wanted.memory_limit,
        )


def stated(resources: Resources) -> Stated:
    """Returns what the resources of a container state."""
    return Stated(stated_limits(resources), stated_cpu_limit(resources), resources.memory_limit)
