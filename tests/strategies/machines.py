# SPDX-License-Identifier: Apache-2.0
"""Synthetic machines: sockets, NUMA nodes, L3 groups, cores and threads in every uneven form."""

from dra_frontend.machine import Cpu, HugepagePool, Machine, NumaNode
from hypothesis import strategies as st

GIB = 1 << 30


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
    hugepages: tuple[HugepagePool, ...] = (HugepagePool(2 << 20, 256, 256),),
) -> Machine:
    """Returns an even machine, threads numbered like on x86: all first threads, then all second threads."""
    count = sockets * nodes_per_socket * l3s_per_node * cores_per_l3
    places: dict[int, tuple[int, int, int, int]] = {}
    for core in range(count):
        l3 = core // cores_per_l3
        node = l3 // l3s_per_node
        for thread in range(threads):
            places[core + thread * count] = (core, l3, node, node // nodes_per_socket)
    places = {cpu: place for cpu, place in sorted(places.items()) if cpu not in offline}
    first = {level: {p[level]: cpu for cpu, p in reversed(places.items())} for level in (0, 1)}
    cpus = {
        cpu: Cpu(
            id=cpu,
            core=first[0][core],
            core_id=core % (count // sockets),  # repeats on every socket, as the kernel's numbers do
            package=package,
            numa_node=node,
            l3=first[1][l3] if has_l3 else None,
            l3_id=first[1][l3] if has_l3 else -1,
        )
        for cpu, (core, l3, node, package) in places.items()
    }
    total = sockets * nodes_per_socket
    nodes = {
        node: NumaNode(
            id=node,
            cpus=frozenset(c.id for c in cpus.values() if c.numa_node == node),
            memory_bytes=memory,
            hugepages=hugepages,
            distances={other: 10 if other == node else 21 for other in range(total)},
        )
        for node in range(total)
    }
    return Machine(cpus=cpus, numa_nodes=nodes, offline=offline, smt=threads > 1)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Draws a machine of 1 to 8 sockets, SMT 1, 2 or 4, with some CPUs offline."""
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
