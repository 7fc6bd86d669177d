# SPDX-License-Identifier: Apache-2.0
"""The cgroups where systemd runs host daemons and login sessions. Every call blocks."""

from collections.abc import Collection
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list

from nri_backend.host_isolation.plan import Cpus
from nri_backend.node.cgroups import CgroupAccessError, CgroupGoneError, CgroupTree
from nri_backend.node.host import possible_cpus

SLICES: Final = ("system.slice", "user.slice", "init.scope")
"""systemd's top-level cgroups, except those with pods. Not all of them exist on every node."""


class HostSlices:
    """Reads and writes ``cpuset.cpus`` of the slices.

    An empty ``cpuset.cpus`` means every CPU. An empty original cannot be restored, so a list of all possible CPUs is
    written instead.
    """

    def __init__(self, tree: CgroupTree, host_root: str) -> None:
        self._tree = tree
        self._host_root = host_root

    def affinities(self, _cpus_to_vacate: Cpus, _moved: Collection[str]) -> dict[str, Cpus]:
        """Returns ``cpuset.cpus`` of every slice that exists. Raises OSError if a slice has no such file, if the file
        cannot be read, or if the cgroup tree is not mounted.
        """
        return {name: cpus for name in SLICES if (cpus := self._read(name, "cpuset.cpus")) is not None}

    def set_affinity(self, name: str, cpus: Cpus) -> bool:
        """Writes a slice's ``cpuset.cpus`` and returns True. Raises OSError if that fails."""
        # The kernel rejects an empty list for a cgroup that has processes (ENOSPC, validate_change in cpuset.c).
        possible = possible_cpus(self._host_root)
        self._tree.files.write(f"{self._tree.root}/{name}/cpuset.cpus", format_cpu_list(cpus or possible))
        return True

    def count_using(self, names: Collection[str], cpus: Cpus) -> int:
        """Returns how many of the named slices have an effective cpuset that contains one of the CPUs."""
        return sum(bool(cpus & (self._read(name, "cpuset.cpus.effective") or frozenset())) for name in names)

    def _read(self, name: str, file: str) -> Cpus | None:
        try:
            return parse_cpu_list(self._tree.read(name, file))
        except CgroupGoneError as error:
            if not self._tree.is_mounted():
                # The slice may still exist. If it were treated as removed, its original would be discarded.
                raise OSError(f"{self._tree.root} is not mounted") from error
            return None
        except CgroupAccessError as error:
            raise OSError(str(error)) from error
