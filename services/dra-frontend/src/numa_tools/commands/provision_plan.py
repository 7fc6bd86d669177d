# SPDX-License-Identifier: Apache-2.0
"""Parses ``HugePageProvision`` files and computes the number of pages for each NUMA node. This module does no I/O."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from dra_frontend.machine.model import LOCAL_TIER, Machine
from numa_contract.config import ConfigError
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import kubernetes_page_size, parse_page_size
from pydantic import BeforeValidator, Field

from numa_tools.commands.forms import Input, validated


def _page_bytes(size: object) -> int:
    if not isinstance(size, str):
        raise ValueError("must be a string such as 2Mi")
    try:
        return parse_page_size(size)
    except MalformedError as error:
        raise ValueError(f"{size!r} {error.reason}") from error


PageSize = Annotated[int, BeforeValidator(_page_bytes)]


class Pages(Input):
    """Pages of one size, on one NUMA node or on all NUMA nodes together."""

    size: PageSize
    count: Annotated[int, Field(ge=0)]
    node: Annotated[int, Field(ge=0)] | None = None


class _Spec(Input):
    pages: list[Pages]
    default_hugepages_size: PageSize | None = None
    """A kernel boot parameter. It is accepted but has no effect on a running machine."""


class _File(Input):
    kind: Literal["HugePageProvision"]
    api_version: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: _Spec
    status: dict[str, Any] = Field(default_factory=dict)


RequestedPages = tuple[str, Pages]
"""An entry's location (the file and the position in it), and the entry itself."""


@dataclass(frozen=True, slots=True)
class Target:
    """Total number of pages of a given size that a NUMA node should have."""

    page_bytes: int
    node: int
    pages: int
    source: str


def read_requested(document: Any, source: str) -> list[RequestedPages]:
    """Parses a file's entries. Raises ConfigError with every fault."""
    pages = validated(_File, document, source).spec.pages
    return [(f"{source}: spec.pages.{index}", one) for index, one in enumerate(pages)]


def plan(machine: Machine, requested: Iterable[RequestedPages]) -> list[Target]:
    """Returns the targets from all entries, by page size and NUMA node. Raises ConfigError for contradictory entries.

    If an entry names no node, its pages are split evenly, and the lowest-numbered nodes get the remainder. NUMA nodes
    without CPUs (CXL, HBM) are used only if there are no other nodes.
    """
    targets: dict[tuple[int, int], Target] = {}
    for target in (target for source, pages in requested for target in _targets(machine, source, pages)):
        other = targets.setdefault((target.page_bytes, target.node), target)
        if other.pages != target.pages:
            what = f"{target.pages} pages of {kubernetes_page_size(target.page_bytes)} on node {target.node}"
            reason = f"{what}, but {other.source} requests {other.pages}; remove one of them"
            raise ConfigError(target.source, [reason])
    _check_memory(machine, list(targets.values()))
    return [targets[key] for key in sorted(targets)]


def _targets(machine: Machine, source: str, pages: Pages) -> list[Target]:
    if pages.size not in machine.page_sizes:
        known = ", ".join(map(kubernetes_page_size, machine.page_sizes)) or "none"
        raise ConfigError(source, [f"this kernel has no {kubernetes_page_size(pages.size)} pages; it has {known}"])
    nodes = {node.id: node for node in machine.numa_nodes.values() if node.online and node.memory_bytes}
    if not nodes:
        raise ConfigError(source, ["none of this machine's NUMA nodes has memory"])
    if pages.node is not None and pages.node not in nodes:
        present = format_cpu_list(nodes)
        text = f"NUMA node {pages.node} does not exist or has no memory; the NUMA nodes with memory are {present}"
        raise ConfigError(source, [text])
    local = [number for number, node in nodes.items() if node.tier == LOCAL_TIER]
    ids = sorted(local or nodes) if pages.node is None else [pages.node]
    each, rest = divmod(pages.count, len(ids))
    return [Target(pages.size, number, each + (place < rest), source) for place, number in enumerate(ids)]


def _check_memory(machine: Machine, targets: Sequence[Target]) -> None:
    """Raises ConfigError if the pages exceed a node's memory, since the kernel would then evict everything else from
    the node.

    Pools that no file mentions are left unchanged and are counted at their current size.
    """
    for node in machine.numa_nodes.values():
        own = [target for target in targets if target.node == node.id]
        sizes = {target.page_bytes for target in own}
        wanted = sum(target.pages * target.page_bytes for target in own)
        present = sum(pool.total * pool.page_bytes for pool in node.hugepages if pool.page_bytes not in sizes)
        if own and wanted + present > node.memory_bytes:
            sources = ", ".join(dict.fromkeys(target.source for target in own))
            beside = f"; {present} bytes in pages of other sizes stay allocated there" if present else ""
            raise ConfigError(
                sources,
                [
                    (
                        f"{wanted} bytes of hugepages are requested on node {node.id}, which has only "
                        f"{node.memory_bytes} bytes of memory{beside}"
                    )
                ],
            )
