# SPDX-License-Identifier: Apache-2.0
"""Computes what the kubelet derives from resources and priority: limits for containers and for the pod's cgroup, and
OOM scores. The module does no I/O.

The rules are those of pkg/kubelet/cm, pkg/kubelet/kuberuntime and pkg/kubelet/qos with cgroup v2, without swap.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

from tests.node._pb import cri_pb2 as pb
from tests.node.rig.kernel import PAGE_KIB
from tests.node.rig.pod_cgroups import Qos
from tests.node.rig.template import Fields

PERIOD: Final = 100_000
"""CFS period in microseconds."""
CRITICAL: Final = {"system-node-critical": -997}
"""oom_score_adj for priority classes whose pods get the same protection from the OOM killer as static pods
(pkg/kubelet/qos/policy.go).
"""
_SUFFIXES: Final[Mapping[str, Decimal]] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{name: Decimal(1000**power) for power, name in enumerate("kMGT", 1)},
    **{f"{name}i": Decimal(1024**power) for power, name in enumerate("KMGT", 1)},
}


class UntranslatableError(Exception):
    """A field has a value that none of the kubelet's rules in this module covers."""


def quantity(text: object) -> Decimal:
    """Returns a resource quantity such as 256Mi or 100m as a number. Raises UntranslatableError."""
    words = str(text)
    number = words.rstrip("".join(_SUFFIXES)) if words[-1:].isalpha() else words
    suffix = words[len(number) :]
    if suffix not in _SUFFIXES:
        raise UntranslatableError(f"quantity {text}")
    return Decimal(number) * _SUFFIXES[suffix]


def cpu_shares(cpus: Decimal) -> int:
    """Returns the CPU shares for a request in CPUs."""
    return max(2, int(cpus * 1024))


def cpu_weight(shares: int) -> int:
    """Returns cpu.weight for CPU shares, as opencontainers/cgroups converts them (1024 shares correspond to weight
    100).
    """
    if shares <= 2:
        return 1
    if shares >= 262144:
        return 10000
    log = math.log2(shares)
    return math.ceil(10 ** ((log * log + 125 * log) / 612 - 7 / 34))


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Limits for the pod's cgroup."""

    qos: Qos
    shares: int
    memory: int
    """Memory limit in bytes; 0 means no limit."""
    quota: int
    """CPU quota in microseconds per period; 0 means no limit."""


class PodResources:
    """Requests and limits of all containers in a pod."""

    def __init__(
        self, init: Sequence[Mapping[str, Any]], containers: Sequence[Mapping[str, Any]], priority: str, memory: int
    ) -> None:
        """Parses the containers' `resources`, the name of the priority class and the node's memory in bytes.

        Raises UnknownFieldError or UntranslatableError.
        """
        # Init containers run alone, one after another, so the largest request for each resource counts.
        self._alone = [_amounts(given) for given in init]
        self._together = [_amounts(given) for given in containers]
        self._priority = priority
        self._memory = memory

    def group(self) -> PodGroup:
        """Returns the limits for the pod's cgroup; if one container lacks a limit, the pod has none."""
        limits = [limits for _, limits in self._together]
        memory = int(self._limit("memory")) if limits and all("memory" in one for one in limits) else 0
        quota = _quota(self._limit("cpu")) if limits and all("cpu" in one for one in limits) else 0
        together, alone = ([requests for requests, _ in some] for some in (self._together, self._alone))
        shares = cpu_shares(_needed(together, alone, "cpu"))
        return PodGroup(_qos([*self._together, *self._alone]), shares, memory, quota)

    def _limit(self, resource: str) -> Decimal:
        together, alone = ([limits for _, limits in some] for some in (self._together, self._alone))
        return _needed(together, alone, resource)

    def of(self, given: Mapping[str, Any]) -> pb.LinuxContainerResources:
        """Returns the resources of a container as the kubelet sends them to the runtime."""
        requests, limits = _amounts(given)
        memory = int(limits.get("memory", 0))
        return pb.LinuxContainerResources(
            cpu_period=PERIOD,
            cpu_quota=_quota(limits.get("cpu", Decimal(0))),
            cpu_shares=cpu_shares(requests.get("cpu", Decimal(0))),
            memory_limit_in_bytes=memory,
            memory_swap_limit_in_bytes=memory,  # memory and swap together; without swap, this is the memory alone
            oom_score_adj=self._oom_score(requests),
            hugepage_limits=[
                pb.HugepageLimit(page_size=size, limit=int(limits.get(f"hugepages-{size.removesuffix('B')}i", 0)))
                for size in PAGE_KIB
            ],
            unified={"memory.oom.group": "1"},
        )

    def _oom_score(self, requests: Mapping[str, Decimal]) -> int:
        qos = self.group().qos
        if self._priority in CRITICAL:
            return CRITICAL[self._priority]
        if qos != "burstable":
            return -997 if qos == "guaranteed" else 1000
        return max(3, min(999, 1000 - int(1000 * requests.get("memory", Decimal(0)) / self._memory)))


def _needed(
    together: Sequence[Mapping[str, Decimal]], alone: Sequence[Mapping[str, Decimal]], resource: str
) -> Decimal:
    total = sum((one.get(resource, Decimal(0)) for one in together), Decimal(0))
    return max([total, *(one.get(resource, Decimal(0)) for one in alone)])


def _qos(every: list[tuple[dict[str, Decimal], dict[str, Decimal]]]) -> Qos:
    if not any(requests or limits for requests, limits in every):
        return "besteffort"
    complete = all(limits.keys() >= {"cpu", "memory"} and requests == limits for requests, limits in every)
    return "guaranteed" if complete else "burstable"


def _amounts(given: Mapping[str, Any]) -> tuple[dict[str, Decimal], dict[str, Decimal]]:
    """Returns requests and limits; a missing request equals the limit, as the API server sets it."""
    fields = Fields.of(given)
    limits = {name: quantity(text) for name, text in (fields.take("limits") or {}).items()}
    requests = {name: quantity(text) for name, text in (fields.take("requests") or {}).items()}
    fields.finish()
    for name in {*limits, *requests}:
        if name not in ("cpu", "memory") and not name.startswith("hugepages-"):
            raise UntranslatableError(f"resource {name}")
    return limits | requests, limits


def _quota(cpus: Decimal) -> int:
    return max(1000, int(cpus * PERIOD)) if cpus else 0
