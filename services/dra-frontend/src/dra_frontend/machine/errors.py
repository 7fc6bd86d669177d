# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's counters for memory and CPU errors, and determines to which NUMA nodes or CPUs each one applies.

The kernel sets the counters to zero at boot, when the EDAC driver is loaded, and on a write to ``reset_counters``.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import shown

from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.memory import NODE_DIRECTORY
from dra_frontend.machine.model import Machine

_EDAC: Final = "/sys/devices/system/edac"
_CONTROLLERS: Final = f"{_EDAC}/mc"
# a72_edac's instances are named cpu0, cpu1, ... No other EDAC driver has one instance for each CPU.
_CPUS: Final = f"{_EDAC}/cpu"
_MAX_NAMED_DIMMS: Final = 4
_MAX_LABEL: Final = 48
# The kernel uses 32-bit counters and prints the values as signed numbers (edac_mc_sysfs.c).
_MIN_VALUE: Final = -(1 << 31)
_MODULUS: Final = 1 << 32
# sb_edac names the socket in mc_name; skx_edac, i10nm_edac and imh_edac name it in the DIMM labels. The pattern does
# not match the names of HBM controllers, since a socket's HBM may be a separate NUMA node.
_SOCKET: Final = re.compile(r"SrcID#(\d{1,3})_(?:MC|Ha)#?\d", re.ASCII)
# amd64_edac numbers controllers by AMD node. Since Zen 2, an AMD node is a socket, except on accelerators (MI300A).
_AMD: Final = re.compile(r"F(?:17h_M[3-9A-F]|19h|1Ah)\w*", re.ASCII)
_ACCELERATOR: Final = "MI200"
"""Name of a controller whose memory does not belong to any NUMA node."""


@dataclass(frozen=True, slots=True)
class ErrorCounter:
    """One kernel counter. Its errors occurred on one of ``numa_nodes`` or in one of ``cpus``."""

    source: str
    """Name of the source in sysfs: ``mc0``, ``node0`` or ``cpu0``."""
    description: str
    """Description of the source, for messages."""
    corrected: int
    uncorrected: int
    numa_nodes: frozenset[int] = frozenset()
    cpus: frozenset[int] = frozenset()


def read_errors(reader: Reader, machine: Machine) -> tuple[tuple[ErrorCounter, ...], dict[str, str]]:
    """Returns the readable counters and, for each source that cannot be read, the reason. If the memory controllers
    or the CPUs cannot be listed, the reason is stored under the key ``mc`` or ``cpu``.
    """
    counters: list[ErrorCounter | None] = []
    problems: dict[str, str] = {}
    for source, number, read in _sources(reader, machine, problems):
        try:
            counters.append(read(reader, machine, number, source))
        except HostTreeError as error:
            problems[source] = str(error)
    return tuple(one for one in counters if one is not None), problems


_Read = Callable[[Reader, Machine, int, str], ErrorCounter | None]


def _sources(reader: Reader, machine: Machine, problems: dict[str, str]) -> Iterator[tuple[str, int, _Read]]:
    for number in machine.numa_nodes:
        yield f"node{number}", number, _read_node
    for path, pattern, read in ((_CONTROLLERS, r"mc(\d+)", _read_controller), (_CPUS, r"cpu(\d+)", _read_cpu)):
        try:
            for number, source in (reader.names(path, pattern) or {}).items():
                yield source, number, read
        except HostTreeError as error:
            problems[path.rpartition("/")[2]] = str(error)


def _read_node(reader: Reader, _machine: Machine, number: int, source: str) -> ErrorCounter | None:
    """Returns the counter of a node's pages that the kernel has marked as poisoned because of uncorrected errors, or
    None if the kernel does not provide the counter (before Linux 6.4).
    """
    total = reader.integer(f"{NODE_DIRECTORY}/{source}/memory_failure/total")
    nodes = frozenset({number})
    return None if total is None else ErrorCounter(source, f"pages of NUMA node {number}", 0, total, nodes)


def _read_controller(reader: Reader, machine: Machine, number: int, source: str) -> ErrorCounter | None:
    path = f"{_CONTROLLERS}/{source}"
    counts, name = _read_counts(reader, path), reader.text(f"{path}/mc_name") or ""
    if counts is None or name == _ACCELERATOR:
        return None
    dimms = list((reader.names(path, r"(?:dimm|rank)(\d+)") or {}).values())
    label = reader.text(f"{path}/{dimms[0]}/dimm_label") if dimms else None
    nodes = _controller_nodes(number, name, label or "", machine)
    description = f"memory controller {source} ({shown(name, _MAX_LABEL)})"
    if len(nodes) > 1:
        description += f" of one of the NUMA nodes {format_cpu_list(nodes)}"
    if any(counts):
        description += _faulty_dimms(reader, path, dimms, "ue" if counts[1] else "ce")
    return ErrorCounter(source, description, *counts, nodes)


def _read_cpu(reader: Reader, _machine: Machine, number: int, source: str) -> ErrorCounter | None:
    counts = _read_counts(reader, f"{_CPUS}/{source}")
    return counts and ErrorCounter(source, f"caches of CPU {number}", *counts, cpus=frozenset({number}))


def _read_counts(reader: Reader, path: str) -> tuple[int, int] | None:
    """Returns the numbers of corrected and uncorrected errors, or None if a file is missing."""
    corrected, uncorrected = (reader.integer(f"{path}/{kind}_count", _MIN_VALUE) for kind in ("ce", "ue"))
    return None if corrected is None or uncorrected is None else (corrected % _MODULUS, uncorrected % _MODULUS)


def _controller_nodes(number: int, name: str, label: str, machine: Machine) -> frozenset[int]:
    """Returns the NUMA nodes whose memory may be attached to a memory controller: the nodes of the controller's socket,
    or all nodes with memory if the socket is unknown.
    """
    with_memory = frozenset(node.id for node in machine.numa_nodes.values() if node.memory_bytes)
    socket = number if _AMD.fullmatch(name) else None
    if match := _SOCKET.search(name) or _SOCKET.search(label):
        socket = int(match[1])
    return with_memory & {cpu.numa_node for cpu in machine.cpus.values() if cpu.package == socket} or with_memory


def _faulty_dimms(reader: Reader, path: str, dimms: list[str], kind: str) -> str:
    """Returns a string with the labels of the DIMMs that have errors of the given kind, or "" if the kernel does not
    know the labels.
    """
    faulty = [dimm for dimm in dimms if reader.integer(f"{path}/{dimm}/dimm_{kind}_count", _MIN_VALUE)]
    labels = [shown(reader.text(f"{path}/{dimm}/dimm_label") or dimm, _MAX_LABEL) for dimm in faulty[:_MAX_NAMED_DIMMS]]
    return f", DIMM {', '.join(labels)}" if labels else ""
