# SPDX-License-Identifier: Apache-2.0
"""Output of the commands: tables for people, JSON and YAML for programs."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import yaml
from numa_contract.cpuset import format_cpu_list
from numa_contract.pagesize import kubernetes_page_size

from dra_frontend.machine.model import CoreType, Machine, NumaNode

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def structured(document: Any, form: str) -> str:
    """Returns a document as ``json`` or ``yaml``, in the order it has."""
    if form == "json":
        return json.dumps(document, indent=2)
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120).rstrip("\n")


def machine_table(machine: Machine) -> str:
    """Returns a machine for a person: a summary, then one row for each NUMA node."""
    lines = [f"{name + ':':<12}{value}" for name, value in _summary(machine) if value]
    nodes = list(machine.numa_nodes.values())
    sizes = sorted({pool.page_bytes for node in nodes for pool in node.hugepages})
    hugepages = [f"{kubernetes_page_size(size)} FREE/TOTAL" for size in sizes]
    header = ["NODE", "CPUS", "CORES", "L3", "MEMORY", *hugepages, "DISTANCES"]
    return "\n".join([*lines, "", *columns([header, *(_row(machine, node, sizes) for node in nodes)])])


def _summary(machine: Machine) -> Iterable[tuple[str, str]]:
    cpus = machine.cpus.values()
    cores = len({cpu.core for cpu in cpus})
    packages = len({cpu.package for cpu in cpus})
    yield "CPUs", f"{len(cpus)} online ({format_cpu_list(machine.cpus)})"
    yield "Topology", f"{_count(packages, 'package')}, {_count(cores, 'core')}, SMT {'on' if machine.smt else 'off'}"
    types = [(kind, [cpu.id for cpu in cpus if cpu.core_type == kind]) for kind in CoreType]
    if any(ids for kind, ids in types if kind != CoreType.STANDARD):
        yield "Core types", ", ".join(f"{kind.value} {format_cpu_list(ids)}" for kind, ids in types if ids)
    yield "Offline", format_cpu_list(machine.offline)
    yield "Isolated", format_cpu_list(machine.isolated)
    yield "Memory", _size(sum(node.memory_bytes for node in machine.numa_nodes.values()))
    yield "Base page", _size(machine.base_page_bytes)


def _row(machine: Machine, node: NumaNode, sizes: Sequence[int]) -> list[str]:
    cpus = [machine.cpus[cpu] for cpu in node.cpus]
    pools = {pool.page_bytes: pool for pool in node.hugepages}
    return [
        f"{node.id}",
        format_cpu_list(node.cpus) or "-",
        str(len({cpu.core for cpu in cpus})),
        str(len({cpu.l3 for cpu in cpus} - {None})),
        _size(node.memory_bytes) if node.online else "offline",
        *(f"{pools[size].free}/{pools[size].total}" if size in pools else "-" for size in sizes),
        " ".join(f"{other}:{distance}" for other, distance in node.distances.items()) or "-",
    ]


def columns(rows: list[list[str]]) -> list[str]:
    """Returns one line for each row, its cells below those of the row before."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _size(amount: int) -> str:
    """Returns bytes with one decimal, cut and not rounded, so that nothing looks larger than it is."""
    unit = 0
    while amount >> (10 * (unit + 1)) and unit < len(_UNITS) - 1:
        unit += 1
    whole, rest = divmod(amount, 1 << (10 * unit))
    tenths = rest * 10 >> (10 * unit)
    return f"{whole}.{tenths} {_UNITS[unit]}" if tenths else f"{whole} {_UNITS[unit]}"
