# SPDX-License-Identifier: Apache-2.0
"""The kubelet's static CPU and Memory Managers: the cpuset that they add to CRI requests.

Sources: kubernetes/kubernetes pkg/kubelet/cm/internal_container_lifecycle_linux.go (CreateContainer) and
pkg/kubelet/cm/cpumanager/cpu_manager.go (reconcileState: UpdateContainerResources for each container whose set differs
from the last one sent).
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from itertools import groupby


@dataclass
class StaticManagers:
    """Both managers of one kubelet; ``cpu`` and ``memory`` switch a policy from None to Static."""

    cpus: frozenset[int]
    """All of the machine's CPUs."""
    reserved: frozenset[int]
    """The kubelet's reservedSystemCPUs, which the static policy requires. They stay in the default set."""
    cpu: bool = True
    memory: bool = False
    _exclusive: dict[str, frozenset[int]] = field(default_factory=dict)
    """Exclusive CPUs by container."""
    _sent: dict[str, str] = field(default_factory=dict)
    """The cpuset last sent for each container."""

    @property
    def default(self) -> frozenset[int]:
        """Returns the default set, which is shared by all containers without exclusive CPUs."""
        return self.cpus.difference(*self._exclusive.values())

    def created(self, container: str, *, exclusive: int = 0, numa_nodes: Collection[int] = ()) -> dict[str, str]:
        """Returns the cpuset that is added to CreateContainer. ``exclusive`` is the number of CPUs, and ``numa_nodes``
        the memory nodes, that a container in a Guaranteed pod gets.
        """
        if self.cpu and exclusive:
            self._exclusive[container] = frozenset(sorted(self.default - self.reserved)[:exclusive])
        found = {}
        if self.cpu:
            found["cpus"] = self._sent[container] = self._cpus_of(container)
        if self.memory and numa_nodes:
            found["mems"] = format_list(numa_nodes)
        return found

    def reconcile(self) -> dict[str, dict[str, str]]:
        """Returns the arguments of UpdateContainerResources for each container whose set has changed."""
        due = {one: self._cpus_of(one) for one in self._sent if self._sent[one] != self._cpus_of(one)}
        self._sent |= due
        return {container: {"cpus": cpus} for container, cpus in due.items()}

    def removed(self, container: str) -> None:
        """Releases the container's CPUs."""
        self._exclusive.pop(container, None)
        self._sent.pop(container, None)

    def _cpus_of(self, container: str) -> str:
        return format_list(self._exclusive.get(container, self.default))


def format_list(numbers: Collection[int]) -> str:
    """Returns a list as k8s.io/utils/cpuset prints it, such as ``0-3,8``."""
    runs = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)
