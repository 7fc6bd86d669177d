# SPDX-License-Identifier: Apache-2.0
"""Finds the cgroups whose processes are, or may be, running on given CPUs. Every function blocks."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError

from nri_backend.node.cgroups import CgroupAccessError, CgroupGoneError, CgroupTree
from nri_backend.node.model import CPUS, EFFECTIVE


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Cgroup of a pod that runs in a sandbox, and the cgroups of the pod's containers outside the sandbox; see
    sandbox_cgroups().
    """

    pod: str
    outside_sandbox: Collection[str]


@dataclass(frozen=True, slots=True)
class OtherCgroups:
    """Cgroups of the containers that must not run on the starting container's CPUs, by container id."""

    paths: Mapping[str, str]
    """Paths of the cgroups of containers that do not run in a sandbox."""
    sandboxes: Mapping[str, Sandbox]
    """The sandbox of each container that runs in its pod's sandbox."""
    online: frozenset[int]
    """Online CPUs."""
    contents: Callable[[Mapping[str, str], str], Mapping[str, bytes]]
    """Reads the same file in several cgroups through descriptors that the audit keeps open (FileCache.contents())."""


def occupants(
    tree: CgroupTree, others: OtherCgroups, own: frozenset[int], *, partition: bool
) -> dict[str, frozenset[int] | None]:
    """Returns the containers that are, or may be, running on the CPUs in ``own``, each with its effective CPUs.

    ``partition`` is True if the CPUs are to become a partition. In that case, a container is left out if some of its
    configured CPUs are online and none of these are in ``own``. Its effective CPUs may still include those in ``own``:
    if all of its configured CPUs belong to other partitions, its effective CPUs are those of its parent. The audit
    cannot move such a container, and does not need to: the kernel takes a new partition's CPUs away from all other
    cgroups, unless the configured CPUs of a sibling overlap with the partition.
    """
    found: dict[str, frozenset[int] | None] = {}
    read = others.contents(others.paths, EFFECTIVE)
    # A node has hundreds of containers but few different cpusets, so each distinct content is parsed and compared once.
    parsed = {content: _cpus_in(content) for content in set(read.values())}
    elsewhere = {content for content, cpus in parsed.items() if cpus and cpus.isdisjoint(own)}
    left = list[str]()
    if len(read) < len(others.paths) or len(elsewhere) < len(parsed):
        left = [container_id for container_id in others.paths if read.get(container_id) not in elsewhere]
    for container_id in (*left, *others.sandboxes):
        sandbox = others.sandboxes.get(container_id)
        path = others.paths[container_id] if sandbox is None else sandbox.pod
        cpus = parsed[read[container_id]] if container_id in read else None
        if not cpus:
            cpus = _shown_cpus(tree, path, None if sandbox is None else sandbox.outside_sandbox)
        if cpus is None or (cpus & own and not (partition and _is_elsewhere(tree, path, own, others.online))):
            found[container_id] = cpus
    return found


def _is_elsewhere(tree: CgroupTree, path: str, own: frozenset[int], online: frozenset[int]) -> bool:
    """Returns True if a cgroup has configured CPUs that are online, and none of them is among ``own``."""
    try:
        configured = (tree.read_set(path, CPUS) or frozenset()) & online
    except (CgroupGoneError, CgroupAccessError):
        return False
    return bool(configured) and configured.isdisjoint(own)


def _cpus_in(content: bytes) -> frozenset[int] | None:
    try:
        return parse_cpu_list(content.decode(errors="replace").strip())
    except MalformedError:
        return None


def _shown_cpus(tree: CgroupTree, path: str, outside_sandbox: Collection[str] | None) -> frozenset[int] | None:
    """Returns the effective CPUs of a cgroup: empty if it does not exist, None if they cannot be read."""
    try:
        paths = [path] if outside_sandbox is None else sandbox_cgroups(tree, path, outside_sandbox)
        seen = [tree.read_set(one, EFFECTIVE) for one in paths]
    except CgroupGoneError:
        return frozenset() if tree.is_mounted() else None
    except CgroupAccessError:
        return None
    return None if None in seen else frozenset().union(*filter(None, seen))


def sandbox_cgroups(tree: CgroupTree, pod: str, outside_sandbox: Collection[str]) -> list[str]:
    """Returns the cgroups in which a pod's virtual machine or sandbox runs; none if the pod has no processes.

    ``outside_sandbox`` contains the cgroups of the pod's containers that run outside the sandbox. If one of the
    sandbox's cgroups has no cpuset files, the result depends on ``outside_sandbox``: if it is empty, only the pod's own
    cgroup is returned; otherwise, only the sandbox's cgroups with cpuset files are returned. Raises CgroupAccessError.
    """
    children = [path for path in (f"{pod}/{child}" for child in tree.children(pod)) if path not in outside_sandbox]
    found = [path for path in children if tree.populated(path)]
    own = [path for path in found if tree.has(path, CPUS)]
    return own if len(own) == len(found) or outside_sandbox else [pod]
