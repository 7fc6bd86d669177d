# SPDX-License-Identifier: Apache-2.0
"""Pods and containers as the runtime describes them, and claim entitlements, for tests of enforcement."""

from typing import Literal

from nri_backend.claims.entitlement import Entitlement, HeldClaim, entitlement_from
from nri_backend.nri.model import Container, ContainerState, Pod, Resources
from nri_backend.problems import Problem
from numa_contract.backend_codes import BackendCode
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

NO_SUCH_KERNEL = Problem("no such kernel", BackendCode.KERNEL_TOO_OLD)
"""The problem that prevents partitions on a node whose kernel does not support them."""
TOP = "kubepods.slice"
PODS = f"{TOP}/kubepods-burstable.slice"
POD = f"{PODS}/kubepods-burstable-podp1.slice"
"""Cgroup of the default pod p1. ``PODS`` is the cgroup of its QoS class, and ``TOP`` that of all pods."""


def config(
    reserved: str = "",
    *,
    lazy: bool = False,
    guard: bool = False,
    quota: Literal["raise", "lift", "keep"] = "raise",
    exclusivity: Literal["auto", "partition", "pool"] = "auto",
) -> Config:
    """Returns the operator's configuration."""
    cpus = parse_cpu_list(reserved)
    return Config(
        reserved_cpus=cpus,
        pool_growth="lazy" if lazy else "immediate",
        hugepage_guard=guard,
        cpu_quota=quota,
        cpu_exclusivity=exclusivity,
    )


def entitlement_of(*records: AllocationRecord) -> Entitlement:
    """Returns the entitlement of a container that uses all requests of these records."""
    return entitlement_from(HeldClaim(record, record.requests) for record in records)


def _slice_of(uid: str) -> str:
    return f"kubepods-burstable-pod{uid}.slice"


def pod(uid: str = "p1") -> Pod:
    """Returns a pod as the runtime describes it, with the systemd cgroup driver."""
    return Pod(f"sandbox-{uid}", uid, "ns", uid, f"/{PODS}/{_slice_of(uid)}")


def container(
    id_: str, *env: str, of: str = "p1", name: str = "main", cpus: str = "", huge: dict[str, int] | None = None
) -> Container:
    """Returns a container as the runtime describes it when it is created, with the systemd cgroup driver."""
    resources = Resources(cpus=cpus, hugepage_limits=huge or {})
    path = f"{_slice_of(of)}:cri-containerd:{id_}"
    return Container(id_, f"sandbox-{of}", name, ContainerState.UNKNOWN, env, path, resources)


def cgroup_of(container: Container) -> str:
    """Returns the path of a container's cgroup relative to the cgroup root."""
    slice_, prefix, id_ = container.cgroups_path.split(":")
    return f"{PODS}/{slice_}/{prefix}-{id_}.scope"
