# SPDX-License-Identifier: Apache-2.0
"""Hugepages that an operator wants: ``HugePageProvision`` files, and how many pages each NUMA node shall have. Core."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from numa_contract.config import ConfigError, faults_of
from numa_contract.cpuset import format_cpu_list
from numa_contract.errors import MalformedError
from numa_contract.pagesize import kubernetes_page_size, parse_page_size
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from dra_frontend.machine.model import LOCAL_TIER, Machine, NumaNode


def _page_size(text: str) -> str:
    try:
        parse_page_size(text)
    except MalformedError as error:
        raise ValueError(f"{text!r} {error.reason}") from error
    return text


PageSize = Annotated[str, AfterValidator(_page_size)]


class _Input(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


class Pages(_Input):
    """Pages of one size: on one node, or on all of them together."""

    size: PageSize
    count: Annotated[int, Field(ge=0)]
    node: Annotated[int, Field(ge=0)] | None = None


class Spec(_Input):
    """What is wanted."""

    pages: list[Pages]
    default_hugepages_size: Annotated[PageSize | None, Field(alias="defaultHugepagesSize")] = None
    """A boot parameter of the kernel: accepted, and of no effect on a machine that runs."""


class _File(_Input):
    kind: Literal["HugePageProvision"]
    api_version: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: Spec
    status: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wish:
    """One entry of a file."""

    source: str
    """File and place in it."""
    page_bytes: int
    count: int
    node: int | None


@dataclass(frozen=True, slots=True)
class Target:
    """How many pages of one size one node shall have in all."""

    page_bytes: int
    node: int
    wanted: int
    source: str


def read_wishes(document: Any, source: str) -> list[Wish]:
    """Returns the entries of one file; raises ConfigError naming every fault."""
    try:
        spec = _File.model_validate(document).spec
    except ValidationError as error:
        raise ConfigError(source, faults_of(error)) from error
    return [
        Wish(f"{source}: spec.pages.{index}", parse_page_size(pages.size), pages.count, pages.node)
        for index, pages in enumerate(spec.pages)
    ]


def plan(machine: Machine, wishes: Iterable[Wish]) -> list[Target]:
    """Returns the targets of all wishes together, by page size and node; raises ConfigError where they cannot be.

    A wish without a node is split evenly, the remainder going to the lowest nodes; memory without CPUs (CXL, HBM) takes
    part only where there is no other.
    """
    targets: dict[tuple[int, int], Target] = {}
    for wish in wishes:
        for target in _targets(machine, wish):
            key = (target.page_bytes, target.node)
            other = targets.setdefault(key, target)
            if other.wanted != target.wanted:
                reason = (
                    f"{target.wanted} pages of {kubernetes_page_size(target.page_bytes)} on node {target.node}, but "
                    f"{other.source} says {other.wanted}; leave one of them out"
                )
                raise ConfigError(target.source, [reason])
    _check_memory(machine, list(targets.values()))
    return [targets[key] for key in sorted(targets)]


def _targets(machine: Machine, wish: Wish) -> list[Target]:
    sizes = {pool.page_bytes for node in machine.numa_nodes.values() for pool in node.hugepages}
    if wish.page_bytes not in sizes:
        known = ", ".join(map(kubernetes_page_size, sorted(sizes))) or "none"
        raise ConfigError(
            wish.source, [f"this kernel has no pages of {kubernetes_page_size(wish.page_bytes)}; it has {known}"]
        )
    nodes = [node for node in machine.numa_nodes.values() if node.online and node.memory_bytes]
    if not nodes:
        raise ConfigError(wish.source, ["no NUMA node of this machine has memory"])
    if wish.node is None:
        return _split(wish, [node for node in nodes if node.tier == LOCAL_TIER] or nodes)
    if wish.node not in {node.id for node in nodes}:
        known = format_cpu_list(node.id for node in nodes)
        raise ConfigError(wish.source, [f"there is no NUMA node {wish.node} with memory; there are {known}"])
    return [Target(wish.page_bytes, wish.node, wish.count, wish.source)]


def _split(wish: Wish, nodes: Sequence[NumaNode]) -> list[Target]:
    each, rest = divmod(wish.count, len(nodes))
    ids = sorted(node.id for node in nodes)
    return [Target(wish.page_bytes, node, each + (place < rest), wish.source) for place, node in enumerate(ids)]


def _check_memory(machine: Machine, targets: Sequence[Target]) -> None:
    """A slip of the pen must not make the kernel throw out everything else that is in memory.

    Pools of sizes that no file names for a node stay as they are, and count as they are.
    """
    for node in machine.numa_nodes.values():
        own = [target for target in targets if target.node == node.id]
        sizes = {target.page_bytes for target in own}
        wanted = sum(target.wanted * target.page_bytes for target in own)
        present = sum(pool.total * pool.page_bytes for pool in node.hugepages if pool.page_bytes not in sizes)
        if own and wanted + present > node.memory_bytes:
            sources = ", ".join(dict.fromkeys(target.source for target in own))
            beside = f" beside {present} bytes of other sizes, which stay" if present else ""
            raise ConfigError(
                sources, [f"{wanted} bytes of hugepages on node {node.id}{beside}, which has {node.memory_bytes}"]
            )
