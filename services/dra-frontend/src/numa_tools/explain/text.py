# SPDX-License-Identifier: Apache-2.0
"""Formats an explanation as text: one fact per line, with its details indented underneath."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from numa_contract.errors import printable
from numa_contract.quantity import format_quantity

from numa_tools.explain.enforced import Problem

_INDENT: Final = "  "


def explanation_text(found: Mapping[str, Any], problems: Sequence[Problem]) -> str:
    """Formats an explanation. The problems come last, so that they are visible in a terminal when the command exits."""
    lines = list(_whole(found))
    for one in problems:
        lines += ["", f"PROBLEM  {one['problem']}", f"WHY      {one['why']}", f"REMEDY   {one['remedy']}"]
    return "\n".join(map(printable, lines))


def _whole(found: Mapping[str, Any]) -> Iterator[str]:
    if "pod" in found and "claims" in found:
        yield f"Pod {found['pod']} ({found['uid']})"
        for claim in found["claims"]:
            yield from _indented(_claim(claim))
        if not found["claims"]:
            yield f"{_INDENT}has no prepared claim on this node"
            yield from _indented(_containers(found["containers"]))
    elif "claim" in found and "state" in found:
        yield from _claim(found)
    elif "cpu" in found:
        yield from _cpu(found)
    elif "device" in found:
        yield from _device(found)
    else:
        for one in next(iter(found.values())):
            yield from _whole(one)


def _indented(lines: Iterable[str]) -> Iterator[str]:
    return (_INDENT + line for line in lines)


def _claim(found: Mapping[str, Any]) -> Iterator[str]:
    pods = f", for pod {', '.join(found['pods'])}" if found.get("pods") else ""
    yield f"Claim {found['claim']} ({found['uid']}): {found['state']}{pods}"
    for row in found.get("has", ()):
        yield from _indented(_allocated_row(row))
    for row in found.get("requests", ()):
        yield from _indented(_request(row))
    for row in found.get("wouldGet", ()):
        gets = f"CPUs {row['cpus']}" if "cpus" in row else f"NUMA node {row.get('numaNode')}"
        yield f"{_INDENT}would get {gets} of {row['device']} for request {row['request']}"
    if "waitsFor" in found:
        yield f"{_INDENT}{found['waitsFor']}"
    yield from _indented(_containers(found.get("containers", ())))
    if "rebuilt" in found:
        yield f"{_INDENT}{found['rebuilt']}"


def _allocated_row(row: Mapping[str, Any]) -> Iterator[str]:
    if "cpus" not in row:
        size = format_quantity(row["bytes"], binary=True)
        page = format_quantity(row["pageBytes"], binary=True)
        yield f"request {row['request']}: {size} of {row['device']} (NUMA node {row['numaNode']}, {page} pages)"
        if "parameters" in row:
            yield f"{_INDENT}{_pairs(row['parameters'])}"
        return
    why = row["why"]
    where = why["shape"]
    yield f"request {row['request']}: CPUs {row['cpus']} of {row['device']}"
    cores = f"whole cores: {where['wholeCores']}, shared with others: {where['sharedCores']}"
    yield f"{_INDENT}where: {cores}; L3 groups: {where['l3']}; NUMA nodes: {where['numaNodes']}"
    yield f"{_INDENT}by:    {_pairs(why['parameters'])}"
    for attribute, values in why.get("joined", {}).items():
        yield f"{_INDENT}near:  {attribute} {', '.join(map(str, values))}, as matchAttribute requires"
    yield f"{_INDENT}why:   {why['text']}"
    for place in why.get("places", ()):
        what = f"{place['size']} CPUs ({place['cpus']}), whole cores: {place['wholeCores']}"
        yield f"{_INDENT * 2}{place['place']}: {what}: {place['verdict']}"
    for taken in why.get("taken", ()):
        yield f"{_INDENT * 2}allocated: {taken['cpus']} to {taken['claim']}"


def _request(row: Mapping[str, Any]) -> Iterator[str]:
    yield f"request {row['request']} (class {row['class']})" + (f": {row['problem']}" if "problem" in row else "")
    for one in row["devices"]:
        yield f"{_INDENT}{one['device']}: {_fit(one)}"


def _fit(row: Mapping[str, Any]) -> str:
    if row["fits"] is None:
        return f"unknown: {row['unknown']}"
    return "fits" if row["fits"] else str(row["missing"])


def _containers(containers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    for one in containers:
        yield f"container {one['container']} of pod {one['pod']}: {one['state']}"
        if one["state"] == "refused":
            continue
        yield f"{_INDENT}runs on CPUs {one['cpus'] or 'unknown'}, memory of NUMA nodes {one['numaNodes'] or 'unknown'}"
        if "keptBy" in one:
            yield f"{_INDENT}other processes are kept off these CPUs by {one['keptBy']}" + (
                f": {one['why']}" if "why" in one else ""
            )
        for name, text in sorted({**one.get("limits", {}), **one.get("kernel", {})}.items()):
            yield f"{_INDENT}{name} = {text}"


def _cpu(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"CPU {found['cpu']}: {found['use']}"
    if found["online"]:
        l3 = "no L3" if found["l3"] is None else f"L3 of CPU {found['l3']}"
        yield f"{_INDENT}core {found['core']}, {l3}, NUMA node {found['numaNode']}, socket {found['socket']}"
        if found["isolcpus"]:
            yield f"{_INDENT}isolated at boot (isolcpus)"
    yield f"{_INDENT}device {found['device'] or 'none: this CPU is not offered to claims'}"
    yield from _indented(_containers(found.get("containers", ())))


def _device(found: Mapping[str, Any]) -> Iterator[str]:
    yield f"Device {found['device']} of driver {found['driver']}: {found['free']} of {found['capacity']} free"
    if "cpus" in found:
        yield f"{_INDENT}CPUs {found['cpus']}, free: {found['freeCpus'] or 'none'}"
    for claim, amount in found["claims"].items():
        yield f"{_INDENT}{amount} claimed by {claim}"
    for name, value in sorted(found["attributes"].items()):
        yield f"{_INDENT}{name} = {str(value).lower() if isinstance(value, bool) else value}"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()
    )
