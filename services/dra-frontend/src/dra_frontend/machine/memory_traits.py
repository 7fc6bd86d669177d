# SPDX-License-Identifier: Apache-2.0
"""Reads the performance, tier and kind of every NUMA node's memory from sysfs.

Memory can be offered without any of these values. If a file cannot be used, its value stays unknown and a doubt is
recorded.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from numa_contract.errors import shown

from dra_frontend.machine.file_tree import HostTreeError, Reader
from dra_frontend.machine.memory_kinds import MemoryFacts, memory_kinds
from dra_frontend.machine.model import DoubtTopic, MemoryKind, MemoryTraits

_NODES: Final = "/sys/devices/system/node"
_TIERS: Final = "/sys/devices/virtual/memory_tiering"
_DAX: Final = "/sys/bus/dax"
_CXL: Final = "/sys/bus/cxl/devices"
_NVDIMM: Final = "/sys/bus/nd/devices"
_BLOCKS: Final = "/sys/devices/system/memory"
# The kernel stores bandwidths and latencies in 32 bits (struct access_coordinate). 0 means that the firmware does not
# report the value.
_MAX_VALUE: Final = (1 << 32) - 1
_MAX_DEVICES: Final = 1024
"""Maximum number of devices examined on a bus."""
_HEX = re.compile(r"(?:0x)?[0-9a-f]{1,16}", re.ASCII)
_DAX_DEVICE = re.compile(r"dax\d{1,6}\.\d{1,6}", re.ASCII)

_T = TypeVar("_T")


def read_traits(
    reader: Reader, cpus: Mapping[int, frozenset[int]], normal: frozenset[int] | None
) -> dict[int, MemoryTraits]:
    """Returns the traits of each NUMA node's memory. ``cpus`` contains the online CPUs of every node.

    ``normal`` contains the nodes with normal memory, or is None if the kernel does not list them.
    """
    tiers = _read_or_doubt(reader, _read_tiers) or {}
    dax = _read_or_doubt(reader, _read_dax) or {}
    cxl = _read_or_doubt(reader, _read_cxl_regions) or frozenset()
    with_cpus = frozenset(node for node, found in cpus.items() if found)
    facts: dict[int, MemoryFacts] = {}
    initiators: dict[int, frozenset[int]] = {}
    for node in cpus:
        path = _read_or_doubt(reader, _access_path, node) or ""
        initiators[node] = (_read_or_doubt(reader, _read_initiators, path) or frozenset()) & with_cpus
        # The performance values apply to the listed initiators. They are not used if none of the initiators has CPUs.
        measured = bool(initiators[node])
        facts[node] = MemoryFacts(
            has_cpus=node in with_cpus,
            normal=normal is None or node in normal,
            bus=dax.get(node) or (MemoryKind.CXL if node in cxl else None),
            special_purpose=node in dax,
            side_cache=bool(_read_or_doubt(reader, _has_side_cache, node)),
            bandwidth=_read_mean(reader, path, "bandwidth") if measured else None,
            latency=_read_mean(reader, path, "latency") if measured else None,
            tier=tiers.get(node),
        )
    kinds = memory_kinds(facts)
    return {
        node: MemoryTraits(kinds[node], one.bandwidth, one.latency, one.tier, initiators[node])
        for node, one in facts.items()
    }


def _read_or_doubt(reader: Reader, read: Callable[..., _T], *arguments: int | str) -> _T | None:
    """Calls ``read``, one of the functions below, and returns its result. If the function fails, records a doubt and
    returns None. Only the first doubt is kept.
    """
    try:
        return read(reader, *arguments)
    except HostTreeError as error:
        reader.doubts.setdefault(DoubtTopic.MEMORY, str(error))
        return None


def _access_path(reader: Reader, node: int) -> str:
    """Returns the directory that describes the nearest initiators for a node's memory.

    Access class 1 (since Linux 5.10) includes only CPUs, while class 0 also includes devices that initiate requests.
    Older kernels only have class 0.
    """
    paths = [f"{_NODES}/node{node}/access{number}/initiators" for number in (1, 0)]
    return next((path for path in paths if reader.all_names(path) is not None), paths[-1])


def _has_side_cache(reader: Reader, node: int) -> bool:
    return bool(reader.names(f"{_NODES}/node{node}/memory_side_cache", r"index(\d{1,3})"))


def _read_initiators(reader: Reader, path: str) -> frozenset[int]:
    return frozenset(reader.names(path, r"node(\d{1,4})") or ())


def _read_mean(reader: Reader, path: str, quantity: str) -> int | None:
    """Returns the mean of the read and write values. If only one is known, returns that value; if neither is known,
    returns None.
    """
    names = (f"{path}/read_{quantity}", f"{path}/write_{quantity}")
    known = [value for name in names if (value := _read_or_doubt(reader, _read_value, name))]
    return sum(known) // len(known) if known else None


def _read_value(reader: Reader, path: str) -> int | None:
    value = reader.integer(path)
    if value is not None and value > _MAX_VALUE:
        raise HostTreeError(path, f"{value} is more than {_MAX_VALUE}")
    return value


def _read_tiers(reader: Reader) -> dict[int, int]:
    """Returns the number of each node's memory tier (since Linux 6.1)."""
    names = reader.names(_TIERS, r"memory_tier(\d{1,9})") or {}
    lists = {tier: reader.cpu_list(f"{_TIERS}/{name}/nodelist") or () for tier, name in names.items()}
    return {node: tier for tier, nodes in lists.items() for node in nodes}


def _read_dax(reader: Reader) -> dict[int, MemoryKind | None]:
    """Returns the kind of memory of each node whose memory belongs to DAX devices. The kind is None if the bus of a
    device is unknown.
    """
    names = reader.all_names(f"{_DAX}/drivers/kmem") or ()
    devices = [name for name in names if _DAX_DEVICE.fullmatch(name)][:_MAX_DEVICES]
    if not devices:
        return {}
    kinds = dict.fromkeys(_children(reader, _NVDIMM, r"dax\d{1,6}\.\d{1,6}"), MemoryKind.PERSISTENT)
    kinds |= dict.fromkeys(_children(reader, _CXL, r"dax_region\d{1,6}"), MemoryKind.CXL)
    nodes: dict[int, MemoryKind | None] = {}
    for name in devices:
        node = reader.integer(f"{_DAX}/devices/{name}/target_node", lowest=-1)
        if node is not None:
            # If a node has devices on several buses, its memory is mixed, so its kind is unknown.
            nodes[node] = kinds.get(name) if nodes.get(node, kinds.get(name)) == kinds.get(name) else None
    return nodes


def _children(reader: Reader, bus: str, pattern: str) -> Iterator[str]:
    """For each device on a bus whose name matches a pattern, yields the names of all entries in the device's directory.
    They include the DAX device that belongs to it, if there is one.
    """
    names = [name for name in reader.all_names(bus) or () if re.fullmatch(pattern, name, re.ASCII)]
    for name in names[:_MAX_DEVICES]:
        yield from reader.all_names(f"{bus}/{name}") or ()


def _read_cxl_regions(reader: Reader) -> frozenset[int]:
    """Returns the nodes whose memory the firmware set up from CXL devices. Such memory has no DAX device."""
    regions = list((reader.names(_CXL, r"region(\d{1,6})") or {}).values())[:_MAX_DEVICES]
    block = _read_hex(reader, f"{_BLOCKS}/block_size_bytes") if regions else None
    if not block:
        return frozenset()
    nodes: set[int] = set()
    for name in regions:
        start, size = (_read_hex(reader, f"{_CXL}/{name}/{file}") for file in ("resource", "size"))
        # ``number`` is the region's first whole memory block. A region that is not in use starts at the highest
        # address, and is skipped.
        if start and size and start + size < 1 << 64 and (number := -(-start // block)) * block < start + size:
            nodes.update(reader.names(f"{_BLOCKS}/memory{number}", r"node(\d{1,4})") or ())
    return frozenset(nodes)


def _read_hex(reader: Reader, path: str) -> int | None:
    text = reader.text(path)
    if text and not _HEX.fullmatch(text):
        raise HostTreeError(path, f"{shown(text, 40)} is not a hexadecimal number")
    return int(text, 16) if text else None
