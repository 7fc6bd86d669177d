# SPDX-License-Identifier: Apache-2.0
"""Pods and containers as the runtime tells of them, and what they hold, for tests of enforcement."""

from typing import Literal

from nri_backend.claims.entitlement import Entitlement, Held, entitlement_from
from nri_backend.nri.model import Container, ContainerState, Pod, Resources
from numa_contract.config import Config, SharedPool
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

TOP = "kubepods.slice"
PODS = f"{TOP}/kubepods-burstable.slice"
POD = f"{PODS}/kubepods-burstable-podp1.slice"
"""The cgroup of the pod that the tests have unless they say another, below that of its class, below that of all."""


def config(
    reserved: str = "",
    *,
    lazy: bool = False,
    guard: bool = False,
    quota: Literal["raise", "lift", "keep"] = "raise",
    exclusivity: Literal["auto", "partition", "pool"] = "auto",
) -> Config:
    """What an operator has chosen."""
    pool = SharedPool(grow="lazy" if lazy else "immediate")
    cpus = parse_cpu_list(reserved)
    return Config(
        reserved_cpus=cpus, shared_pool=pool, hugepage_guard=guard, cpu_quota=quota, cpu_exclusivity=exclusivity
    )


def entitlement_of(*records: AllocationRecord) -> Entitlement:
    """What a container holds that has all requests of the records."""
    return entitlement_from(Held(record, record.requests) for record in records)


def _slice_of(uid: str) -> str:
    return f"kubepods-burstable-pod{uid}.slice"


def pod(uid: str = "p1") -> Pod:
    """A pod under the systemd driver."""
    return Pod(f"sandbox-{uid}", uid, "ns", uid, f"/{PODS}/{_slice_of(uid)}")


def container(
    id_: str, *env: str, of: str = "p1", name: str = "main", cpus: str = "", huge: dict[str, int] | None = None
) -> Container:
    """A container that is being created, under the systemd driver."""
    resources = Resources(cpus=cpus, hugepage_limits=huge or {})
    path = f"{_slice_of(of)}:cri-containerd:{id_}"
    return Container(id_, f"sandbox-{of}", name, ContainerState.UNKNOWN, env, path, resources)


def cgroup_of(container: Container) -> str:
    """Where that container's cgroup is."""
    slice_, prefix, id_ = container.cgroups_path.split(":")
    return f"{PODS}/{slice_}/{prefix}-{id_}.scope"
