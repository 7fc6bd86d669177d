# SPDX-License-Identifier: Apache-2.0
"""Reads CPUs, cores, packages, L3 groups and core types from sysfs.

Sibling files are validated against each other, because a core or cache in two groups could be allocated twice.
Contradictory files about core siblings are an error. Contradictory package or L3 files are only recorded as doubts,
because packages can be derived from their IDs instead, and L3 groups can be omitted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.model import CoreType, DoubtTopic
from dra_frontend.machine.numbering import Group, group_numbers

CPU_DIRECTORY = "/sys/devices/system/cpu"

# Newer name first (Documentation/admin-guide/cputopology.rst). Each of these files contains a mask; the file
# with the same name and the suffix _list contains the equivalent list.
_CORE_FILES = ("core_cpus", "thread_siblings")
_PACKAGE_FILES = ("package_cpus", "core_siblings")

Files = list[tuple[str, str]]
"""Paths of a CPU mask and the equivalent list."""
Groups = dict[int, Group]
"""The group of each CPU. A CPU that does not belong to any group is absent."""


@dataclass(frozen=True, slots=True)
class CpuStates:
    """Online, offline, isolated and possible CPUs."""

    online: frozenset[int]
    offline: frozenset[int]
    isolcpus: frozenset[int]
    possible: frozenset[int]
    """CPUs that can ever come online under this kernel."""

    @property
    def present(self) -> frozenset[int]:
        """CPUs that have a directory in sysfs."""
        return self.online | self.offline


def read_cpu_states(reader: Reader) -> CpuStates:
    """Returns the CPUs by state. Raises HostTreeError if two files disagree about a CPU."""
    present = reader.names(CPU_DIRECTORY, r"cpu(\d+)")
    if not present:
        raise HostTreeError(CPU_DIRECTORY, "contains no CPU directories: sysfs is not mounted here")
    path = f"{CPU_DIRECTORY}/online"
    listed = reader.cpu_list(path)
    by_directory = frozenset(cpu for cpu in present if _is_online(reader, cpu, listed))
    if listed is None:
        listed, path = by_directory, CPU_DIRECTORY
    if not listed:
        raise HostTreeError(path, "contains no online CPU")
    for cpu in sorted(listed - set(present)):
        raise HostTreeError(path, f"lists CPU {cpu}, which has no directory {CPU_DIRECTORY}/cpu{cpu}")
    for cpu in sorted(listed ^ by_directory):
        raise HostTreeError(path, f"disagrees with {CPU_DIRECTORY}/cpu{cpu} about whether CPU {cpu} is online")
    isolcpus = reader.cpu_list(f"{CPU_DIRECTORY}/isolated") or frozenset()
    possible = reader.cpu_list(f"{CPU_DIRECTORY}/possible") or frozenset()
    return CpuStates(listed, frozenset(present) - listed, isolcpus & listed, possible.union(present))


def _is_online(reader: Reader, cpu: int, listed: frozenset[int] | None) -> bool:
    path = f"{CPU_DIRECTORY}/cpu{cpu}/online"
    flag = reader.text(path)
    if flag not in ("0", "1", "", None):
        raise HostTreeError(path, f"{flag[:40]!r} is neither 0 nor 1")
    if listed is not None and (flag or cpu in listed):
        return flag != "0"  # a CPU without this file cannot be taken offline
    # An offline CPU has no topology directory. If the kernel provides no list, a CPU without that directory must
    # therefore be marked as offline.
    has_topology = reader.all_names(f"{CPU_DIRECTORY}/cpu{cpu}/topology") is not None
    others_have = reader.all_names(f"{CPU_DIRECTORY}/cpu0/topology") is not None
    if listed is None and flag != "0" and others_have and not has_topology:
        raise HostTreeError(path, f"does not show CPU {cpu} as offline, but that CPU has no topology directory")
    return flag != "0" if listed is None else has_topology


def read_cores(reader: Reader, online: frozenset[int]) -> tuple[Groups, dict[int, int]]:
    """Returns each CPU's core as a set of sibling threads, and the raw core IDs (-1 if unknown).

    Raises HostTreeError if the files of sibling threads contradict each other, because one core could then be allocated
    to two claims.
    """
    cores = _siblings(reader, online, {cpu: _topology_files(cpu, _CORE_FILES) for cpu in online})
    ids = {cpu: _topology_integer(reader, cpu, "core_id") for cpu in online}
    return {cpu: cores.get(cpu, frozenset({cpu})) for cpu in online}, ids


def read_packages(reader: Reader, cpus: CpuStates, earlier: Mapping[int, int]) -> dict[int, int]:
    """Returns each CPU's package number, which is the kernel's package ID if every package has a different ID.

    If the masks contradict each other or the package IDs, a doubt is recorded, and only the IDs are used.
    """
    ids = {cpu: _topology_integer(reader, cpu, "physical_package_id") for cpu in cpus.online}
    try:
        groups = _siblings(reader, cpus.online, {cpu: _topology_files(cpu, _PACKAGE_FILES) for cpu in cpus.online})
        for cpu, group in groups.items():
            if len({ids[cpu], ids[min(group)]} - {-1}) > 1:
                path = f"{CPU_DIRECTORY}/cpu{cpu}/topology/physical_package_id"
                raise HostTreeError(path, f"is {ids[cpu]}, but CPU {min(group)} of the same package has a different ID")
    except HostTreeError as error:
        reader.doubts[DoubtTopic.SOCKET] = str(error)
        groups = {}
    alone: dict[int, set[int]] = defaultdict(set)
    for cpu in cpus.online - set(groups):
        alone[ids[cpu]].add(cpu)
    packages = {*groups.values(), *map(frozenset, alone.values())}
    # POWER and s390 report -1, and s390 repeats IDs in every book.
    named = {package: top for package in packages if (top := max(ids[cpu] for cpu in package)) >= 0}
    return group_numbers(packages, cpus.present, named, earlier, ordinal=True)


def _topology_integer(reader: Reader, cpu: int, name: str) -> int:
    value = reader.integer(f"{CPU_DIRECTORY}/cpu{cpu}/topology/{name}", lowest=-1)
    return -1 if value is None else value


def _siblings(reader: Reader, online: frozenset[int], files: Mapping[int, Files]) -> Groups:
    """Returns the groups that the CPUs' files describe. For each CPU, the first mask/list pair that exists is used.

    A CPU without files of its own is placed in the group whose files list it. Raises HostTreeError if the files of two
    CPUs contradict each other, or if a CPU's files do not include the CPU itself.
    """
    groups: Groups = {}
    known: dict[frozenset[int], frozenset[int]] = {}
    for cpu in sorted(online):
        siblings, path = next(filter(None, (reader.cpu_set(*pair) for pair in files.get(cpu, ()))), (None, ""))
        if siblings is None:
            continue
        if cpu not in siblings:
            raise HostTreeError(path, f"does not include CPU {cpu} itself")
        if siblings in known:
            continue
        known[siblings] = group = siblings & online
        for other in sorted(group):
            if groups.setdefault(other, group) != group:
                raise HostTreeError(path, f"includes CPU {other}, which another file groups with different CPUs")
    return groups


def _topology_files(cpu: int, names: Iterable[str]) -> Files:
    paths = [f"{CPU_DIRECTORY}/cpu{cpu}/topology/{name}" for name in names]
    return [(path, f"{path}_list") for path in paths]


def read_l3(reader: Reader, cpus: CpuStates, earlier: Mapping[int, int]) -> tuple[Groups, dict[int, int]]:
    """Returns each CPU's L3 group and the number of its L3 cache, which is the kernel's ID if there is one.

    If a CPU's files contradict those of most CPUs in its group, a doubt is recorded and the CPU is treated as having no
    L3. The other CPUs keep their group.
    """
    sets: dict[int, Group] = {}
    ids: dict[int, int | None] = {}
    damaged: dict[int, str] = {}
    for cpu in sorted(cpus.online):
        try:
            if (path := _l3_directory(reader, cpu)) and (found := _l3_set(reader, cpu, path)):
                ids[cpu], sets[cpu] = reader.integer(f"{path}/id"), found & cpus.online
        except HostTreeError as error:
            damaged[cpu] = str(error)
    groups = _by_majority(sets, cpus.online - set(damaged))
    for cpu in sets.keys() - groups.keys():
        damaged[cpu] = _contradiction(_l3_directory(reader, cpu), sets, cpu)
    if damaged:
        reader.doubts[DoubtTopic.L3] = damaged[min(damaged)]
    named = {
        groups[cpu]: number for cpu, number in sorted(ids.items(), reverse=True) if cpu in groups and number is not None
    }
    # CPUs without an L3 (low-power cores) do not belong to any group. They are not passed to group_numbers(), which
    # would otherwise treat them as offline CPUs and add them to groups.
    bare = cpus.online - set(groups)
    return groups, group_numbers(set(groups.values()), cpus.present - bare, named, earlier)


def _l3_set(reader: Reader, cpu: int, directory: str) -> frozenset[int] | None:
    """Returns the CPUs that share a cache with a CPU according to that CPU's files, or None if the CPU has no such
    files. Raises HostTreeError if a file is invalid or does not include the CPU itself.
    """
    found = reader.cpu_set(f"{directory}/shared_cpu_map", f"{directory}/shared_cpu_list")
    if found is None:
        return None
    siblings, path = found
    if cpu not in siblings:
        raise HostTreeError(path, f"does not include CPU {cpu} itself")
    return siblings


def _by_majority(sets: Mapping[int, Group], usable: frozenset[int]) -> Groups:
    """Returns each set that more than half of its members report, minus the members that report a different set.

    A usable CPU without files of its own is placed in the set whose members' files list it. A CPU that would be in two
    sets is placed in neither.
    """
    kept = {}
    for group in set(sets.values()):
        members = frozenset(cpu for cpu in group & usable if sets.get(cpu, group) == group)
        if 2 * len(members) > len(group):
            kept[group] = members
    naming = Counter(cpu for group in kept for cpu in group)
    groups = (frozenset(cpu for cpu in members if naming[cpu] == 1) for members in kept.values())
    return {cpu: group for group in groups for cpu in group}


def _contradiction(directory: str, sets: Mapping[int, Group], cpu: int) -> str:
    other = next((one for one in sorted(sets[cpu]) if sets.get(one) != sets[cpu]), cpu)
    return str(
        HostTreeError(
            f"{directory}/shared_cpu_map", f"includes CPU {other}, which another file groups with different CPUs"
        )
    )


def _l3_directory(reader: Reader, cpu: int) -> str:
    directory = f"{CPU_DIRECTORY}/cpu{cpu}/cache"
    for name in (reader.names(directory, r"index(\d+)") or {}).values():
        path = f"{directory}/{name}"
        if reader.integer(f"{path}/level") == 3 and reader.text(f"{path}/type") != "Instruction":
            return path
    return ""


# Cores of the same kind have the same base frequency. Their maximum frequencies differ: favoured cores (Turbo Boost Max
# 3.0) reach frequencies up to an eighth higher than other cores.
_FREQUENCIES: Final = (
    ("cpufreq/base_frequency", Fraction(9, 10)),
    ("acpi_cppc/nominal_freq", Fraction(9, 10)),
    ("cpufreq/cpuinfo_max_freq", Fraction(17, 20)),
)
"""A CPU's frequency files, each with a fraction. Cores whose frequency is below that fraction of the highest frequency
belong to a slower kind.
"""


def _slow_cpus(reader: Reader, online: frozenset[int]) -> frozenset[int]:
    """Returns the CPUs that belong to slower kinds of cores, or an empty set if all cores are of the same kind.

    The first frequency in which the kinds differ is used. A frequency that is not known for every CPU is ignored.
    """
    for name, part in _FREQUENCIES:
        found: dict[int, int] = {}
        for cpu in sorted(online):
            value = reader.integer(f"{CPU_DIRECTORY}/cpu{cpu}/{name}")
            if not value:
                break
            found[cpu] = value
        else:
            highest = max(found.values())
            if slow := frozenset(cpu for cpu, value in found.items() if value < highest * part):
                return slow
    return frozenset()


def read_core_types(reader: Reader, online: frozenset[int]) -> dict[int, CoreType]:
    """Returns the type of every CPU; all CPUs are standard if the machine has only one kind of core."""
    has_performance = reader.cpu_list("/sys/devices/cpu_core/cpus") is not None
    # cpu_lowpower: the cores outside the ring on Arrow Lake H (arch/x86/events/intel/core.c).
    small = [reader.cpu_list(f"/sys/devices/{name}/cpus") for name in ("cpu_atom", "cpu_lowpower")]
    efficient = frozenset[int]().union(*(cpus for cpus in small if cpus is not None))
    if not has_performance and not efficient:
        # Arm: capacities are relative to the fastest CPU, whose capacity is 1024. Favoured cores of the same kind
        # differ by only a few percent.
        found = {cpu: reader.integer(f"{CPU_DIRECTORY}/cpu{cpu}/cpu_capacity") for cpu in online}
        capacity = {cpu: value for cpu, value in found.items() if value is not None}
        highest = max(capacity.values(), default=0)
        efficient = frozenset(cpu for cpu, value in capacity.items() if value * 4 < highest * 3)
        if not capacity:
            efficient = _slow_cpus(reader, online)
    if efficient.isdisjoint(online):
        return dict.fromkeys(online, CoreType.STANDARD)
    return {cpu: CoreType.EFFICIENCY if cpu in efficient else CoreType.PERFORMANCE for cpu in online}
