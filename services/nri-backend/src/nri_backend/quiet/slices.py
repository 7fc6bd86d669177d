# SPDX-License-Identifier: Apache-2.0
"""The cgroups of host daemons, and of people who are logged in. Every call blocks."""

from collections.abc import Collection
from pathlib import Path
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list

from nri_backend.node.cgroups import CgroupGoneError, CgroupRefusedError, CgroupTree
from nri_backend.node.host import possible_cpus
from nri_backend.quiet.moves import Cpus

SLICES: Final = ("system.slice", "user.slice", "init.scope")
"""What systemd puts beside the pods, as far as it exists."""


class HostSlices:
    """The ``cpuset.cpus`` of these; empty is every CPU, and becomes a list of all of them once it was another."""

    def __init__(self, tree: CgroupTree, host_root: str) -> None:
        self._tree = tree
        self._host_root = host_root

    def present(self, _taken: Cpus, _moved: Collection[str]) -> dict[str, Cpus]:
        """Returns what they say. OSError where one has no such file, or it cannot be read."""
        return {name: cpus for name in SLICES if (cpus := self._read(name, "cpuset.cpus")) is not None}

    def write(self, name: str, cpus: Cpus) -> bool:
        """Writes what one is to say. OSError if it cannot be written."""
        # The kernel takes an empty list from no cgroup that has processes (ENOSPC, validate_change in cpuset.c).
        every = possible_cpus(self._host_root)
        Path(self._tree.root, name, "cpuset.cpus").write_text(format_cpu_list(cpus or every))
        return True

    def staying(self, names: Collection[str], taken: Cpus) -> int:
        """Returns how many of these run on taken CPUs, by what the kernel says."""
        return sum(bool(taken & (self._read(name, "cpuset.cpus.effective") or frozenset())) for name in names)

    def _read(self, name: str, file: str) -> Cpus | None:
        try:
            return parse_cpu_list(self._tree.read(name, file))
        except CgroupGoneError:
            return None
        except CgroupRefusedError as error:
            raise OSError(str(error)) from error
