# SPDX-License-Identifier: Apache-2.0
"""Synthetic machines: sockets, NUMA nodes, L3 groups, cores and threads in all kinds of irregular arrangements."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from dra_frontend.machine.model import CoreType, Cpu, HugepagePool, Machine, NumaNode
from hypothesis import strategies as st

GIB = 1 << 30
HUGEPAGES: Final = (HugepagePool(2 << 20, 256, 256),)


@dataclass(frozen=True, slots=True)
class Core:
    """The location of a core, and its number of threads."""

    package: int = 0
    node: int = 0
    l3: int | None = 0
    threads: int = 1
    kind: CoreType = CoreType.STANDARD


def assemble(
    cores: Iterable[Core],
    *,
    offline: frozenset[int] = frozenset(),
    adjacent: bool = False,
    stride: int = 1,
    memory: int = 4 * GIB,
    hugepages: tuple[HugepagePool, ...] = HUGEPAGES,
) -> Machine:
    """Returns a machine made of these cores.

    By default, the first threads of all cores are numbered before the second ones. If ``adjacent`` is True, the threads
    of each core are numbered consecutively. With a ``stride``, the ids are sparse: 0, stride, 2 * stride and so on.
    """
    cores = list(cores)
    slots = [(thread, number) for number, core in enumerate(cores) for thread in range(core.threads)]
    slots.sort(key=lambda slot: (slot[1], slot[0]) if adjacent else slot)
    places = {index * stride: number for index, (_, number) in enumerate(slots) if index * stride not in offline}
    lowest: dict[int, int] = {}
    caches: dict[int | None, int] = {}
    numbers: dict[int | None, int] = {}
    for index, (_, number) in enumerate(slots):
        # The id of an L3 is that of its lowest-numbered CPU, even if that CPU is offline.
        numbers.setdefault(cores[number].l3, index * stride)
    ranks: dict[int, int] = {}
    in_package: dict[int, int] = {}
    for number, core in enumerate(cores):
        ranks[number] = in_package.get(core.package, 0)  # core_id repeats on every socket, as in the kernel
        in_package[core.package] = ranks[number] + 1
    for cpu, number in places.items():
        lowest.setdefault(number, cpu)
        caches.setdefault(cores[number].l3, cpu)
    cpus = {
        cpu: Cpu(
            id=cpu,
            core=lowest[number],
            core_id=ranks[number],
            package=cores[number].package,
            numa_node=cores[number].node,
            l3=None if cores[number].l3 is None else caches[cores[number].l3],
            l3_id=-1 if cores[number].l3 is None else numbers[cores[number].l3],
            core_type=cores[number].kind,
        )
        for cpu, number in places.items()
    }
    ids = sorted({core.node for core in cores})
    nodes = {
        node: NumaNode(
            id=node,
            cpus=frozenset(c.id for c in cpus.values() if c.numa_node == node),
            memory_bytes=memory,
            hugepages=hugepages,
            distances={other: 10 if other == node else 21 for other in ids},
        )
        for node in ids
    }
    smt = any(cpu.core != cpu.id for cpu in cpus.values())
    return Machine(cpus=cpus, numa_nodes=nodes, offline=offline, smt=smt)


def even_cores(
    sockets: int, nodes_per_socket: int, l3s_per_node: int, cores_per_l3: int, threads: int, *, has_l3: bool = True
) -> list[Core]:
    """Returns the cores of a symmetric machine."""
    return [
        Core(node // nodes_per_socket, node, node * l3s_per_node + l3 if has_l3 else None, threads)
        for node in range(sockets * nodes_per_socket)
        for l3 in range(l3s_per_node)
        for _ in range(cores_per_l3)
    ]


def machine(
    sockets: int = 2,
    nodes_per_socket: int = 1,
    l3s_per_node: int = 1,
    cores_per_l3: int = 2,
    threads: int = 2,
    *,
    offline: frozenset[int] = frozenset(),
    has_l3: bool = True,
    memory: int = 4 * GIB,
    hugepages: tuple[HugepagePool, ...] = HUGEPAGES,
) -> Machine:
    """Returns a symmetric machine with threads numbered as on x86: all first threads, then all second threads."""
    cores = even_cores(sockets, nodes_per_socket, l3s_per_node, cores_per_l3, threads, has_l3=has_l3)
    return assemble(cores, offline=offline, memory=memory, hugepages=hugepages)


def hybrid(performance: int = 4, clusters: int = 2, low_power: int = 2) -> list[Core]:
    """Returns the cores of an Intel hybrid processor: P-cores with two threads, E-cores in groups of four, and E-cores
    outside the L3.
    """
    return [
        *[Core(threads=2, kind=CoreType.PERFORMANCE)] * performance,
        *[Core(kind=CoreType.EFFICIENCY)] * (clusters * 4),
        *[Core(l3=None, kind=CoreType.EFFICIENCY)] * low_power,
    ]


def uneven(*sockets: int, threads: int = 2, per_l3: int = 4) -> list[Core]:
    """Returns the cores of sockets of different sizes, each a NUMA node with L3 groups of ``per_l3`` cores."""
    return [
        Core(socket, socket, socket * 100 + core // per_l3, threads)
        for socket, count in enumerate(sockets)
        for core in range(count)
    ]


def isolating(found: Machine, cpus: Iterable[int]) -> Machine:
    """Returns the machine with isolated CPUs (``isolcpus``)."""
    return replace(found, isolcpus=frozenset(cpus) & found.online)


def _sparse_nodes(cores: Iterable[Core]) -> list[Core]:
    return [replace(core, node=core.node * 3 + 1, package=core.package * 2) for core in cores]


SYNTHETIC: Final[Mapping[str, Machine]] = {
    "one-cpu": assemble([Core()]),
    "vm-no-l3": assemble(even_cores(1, 1, 1, 4, 1, has_l3=False)),
    "vm-no-l3-smt": assemble(even_cores(2, 1, 1, 4, 2, has_l3=False), adjacent=True),
    "laptop": assemble(even_cores(1, 1, 1, 4, 2)),
    "laptop-smt-off": assemble(even_cores(1, 1, 1, 4, 2), offline=frozenset(range(4, 8))),
    "s2-small": assemble(even_cores(2, 1, 1, 4, 2)),
    "s2-adjacent": assemble(even_cores(2, 1, 1, 8, 2), adjacent=True),
    "s2-64": assemble(even_cores(2, 1, 1, 16, 2)),
    "s2-snc2": assemble(even_cores(2, 2, 1, 8, 2)),
    "s2-snc4-l3-per-socket": assemble(
        [Core(node // 4, node, node // 4, 2) for node in range(8) for _ in range(4)],
    ),
    "epyc-nps1": assemble(even_cores(1, 1, 8, 8, 2)),
    "epyc-nps4": assemble(even_cores(2, 4, 2, 8, 2)),
    "epyc-512": assemble(even_cores(2, 4, 4, 8, 2)),
    "one-node-512": assemble(even_cores(1, 1, 16, 16, 2)),
    "s8-256": assemble(even_cores(8, 1, 1, 16, 2)),
    "s8-8-nodes-no-smt": assemble(even_cores(8, 1, 2, 4, 1)),
    "s4": assemble(even_cores(4, 1, 2, 3, 2)),
    "smt4-power": assemble(even_cores(2, 1, 1, 6, 4), adjacent=True),
    "smt4-some-off": assemble(even_cores(2, 1, 1, 6, 4), adjacent=True, offline=frozenset({1, 2, 3, 9, 14, 27})),
    "smt8": assemble(even_cores(2, 2, 1, 3, 8), adjacent=True),
    "arm-128": assemble(even_cores(2, 2, 1, 32, 1)),
    "arm-no-l3": assemble(even_cores(2, 1, 1, 16, 1, has_l3=False)),
    "big-little": assemble(
        [*[Core(kind=CoreType.EFFICIENCY)] * 4, *[Core(kind=CoreType.PERFORMANCE)] * 4],
    ),
    "hybrid": assemble(hybrid(), adjacent=True),
    "hybrid-no-lp": assemble(hybrid(8, 4, 0), adjacent=True),
    "hybrid-only-e-in-l3": assemble(hybrid(2, 1, 4)),
    "uneven-2": assemble(uneven(8, 4)),
    "uneven-3": assemble(uneven(3, 10, 5, threads=2, per_l3=3)),
    "uneven-smt1": assemble(uneven(7, 2, 4, 1, threads=1)),
    "sparse-ids": assemble(even_cores(2, 1, 2, 4, 2), stride=3),
    "sparse-nodes": assemble(_sparse_nodes(even_cores(4, 2, 1, 3, 2)), stride=2, adjacent=True),
    "asymmetric-offline": assemble(even_cores(2, 1, 2, 4, 2), offline=frozenset({1, 5, 6, 17, 18, 22, 30})),
    "a-node-nearly-off": assemble(even_cores(2, 1, 1, 4, 2), offline=frozenset({4, 5, 6, 12, 13, 14, 15})),
    "mixed-threads": assemble(
        [Core(node=n, package=n, l3=n, threads=t) for n in range(2) for t in (4, 4, 2, 1, 2, 1)], adjacent=True
    ),
    "isolcpus": isolating(assemble(even_cores(2, 1, 2, 4, 2)), [*range(4, 12), 20, 21, 22]),
    "isolated-hybrid": isolating(assemble(hybrid(), adjacent=True), [2, 3, 5, 8, 9, 10, 17]),
}
"""Named machines of every kind that the allocator must support: 1 to 8 sockets, 1 to 512 CPUs."""


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Draws a symmetric machine with 1 to 8 sockets and SMT 1, 2 or 4, some of whose CPUs may be offline."""
    sockets = draw(st.sampled_from([1, 2, 4, 8]))
    shape = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        draw(st.sampled_from([1, 2, 4])),
    )
    total = sockets * shape[0] * shape[1] * shape[2] * shape[3]
    offline = draw(st.frozensets(st.integers(1, max(1, total - 1)), max_size=total // 3))
    return machine(sockets, *shape, offline=offline, has_l3=draw(st.booleans()))


_KINDS = st.sampled_from(list(CoreType))
_CORES = st.builds(
    Core,
    package=st.integers(0, 2),
    node=st.integers(0, 1),
    l3=st.none() | st.integers(0, 1),
    threads=st.sampled_from([1, 2, 2, 4]),
    kind=_KINDS,
)


@st.composite
def odd_machines(draw: st.DrawFn) -> Machine:
    """Draws a small asymmetric machine, in which NUMA nodes, caches, threads and core types may differ arbitrarily."""
    drawn = draw(st.lists(_CORES, min_size=1, max_size=7))
    # A NUMA node is inside one socket and an L3 inside one NUMA node; otherwise anything is possible.
    cores = [
        replace(core, node=core.package * 2 + core.node, l3=core.l3 and core.package * 4 + core.node * 2 + core.l3)
        for core in drawn
    ]
    total = sum(core.threads for core in cores)
    offline = draw(st.frozensets(st.integers(1, max(1, total - 1)), max_size=total // 3))
    found = assemble(cores, offline=offline, adjacent=draw(st.booleans()))
    return isolating(found, draw(st.frozensets(st.sampled_from(sorted(found.online)))))
