# SPDX-License-Identifier: Apache-2.0
"""Merging the responses of several plugins into one container (NRI pkg/adaptation/result.go,
pkg/runtime-tools/generate).
"""

from collections.abc import Iterable, Sequence

from tests.fakes._pb import nri_pb2 as pb


class ConflictError(Exception):
    """Two plugins have set the same field, so the container is not created."""


class Ownership:
    """Records which plugin has set each field within one request. Setting a field to the same value again is also a
    conflict.
    """

    def __init__(self) -> None:
        self._owners: dict[tuple[str, ...], str] = {}

    def claim(self, plugin: str, *field: str) -> None:
        """Assigns the field to the plugin. Raises ConflictError."""
        owner = self._owners.setdefault(field, plugin)
        if owner != plugin:
            raise ConflictError(f'plugins "{owner}" and "{plugin}" both tried to set {" ".join(field)}')


def adjust(container: pb.Container, adjustment: pb.ContainerAdjustment, plugin: str, owners: Ownership) -> None:
    """Applies the variables and resources of one plugin's adjustment, so that the next plugin sees them."""
    env = env_of(container.env)
    for entry in adjustment.env:
        owners.claim(plugin, "env", entry.key)
        env[entry.key] = entry.value
    del container.env[:]
    container.env.extend(f"{key}={content}" for key, content in env.items())
    _claim_resources(adjustment.linux.resources, plugin, owners, ())
    overwrite(container.linux.resources, adjustment.linux.resources)


def claim_update(update: pb.ContainerUpdate, plugin: str, owners: Ownership) -> None:
    """Records the owner of every field in an update of another container. Raises ConflictError."""
    _claim_resources(update.linux.resources, plugin, owners, ("of", update.container_id))


def overwrite(stored: pb.LinuxResources, wanted: pb.LinuxResources) -> None:
    """Merges resources into the stored ones. Zero and empty values mean "no change"."""
    for name in ("shares", "quota", "period"):
        if wanted.cpu.HasField(name) and (value := getattr(wanted.cpu, name).value):
            getattr(stored.cpu, name).value = value
    stored.cpu.cpus = wanted.cpu.cpus or stored.cpu.cpus
    stored.cpu.mems = wanted.cpu.mems or stored.cpu.mems
    if wanted.memory.limit.value:
        stored.memory.limit.value = stored.memory.swap.value = wanted.memory.limit.value
    given = {limit.page_size for limit in wanted.hugepage_limits}
    kept = [limit for limit in stored.hugepage_limits if limit.page_size not in given]
    del stored.hugepage_limits[:]
    stored.hugepage_limits.extend(kept)
    stored.hugepage_limits.extend(wanted.hugepage_limits)
    for key, value in wanted.unified.items():
        stored.unified[key] = value


def drop_hugepage_limits(stored: pb.LinuxResources) -> None:
    """Drops the limits, as stock containerd does with disable_hugetlb_controller = true."""
    del stored.hugepage_limits[:]


def env_of(entries: Iterable[str]) -> dict[str, str]:
    """Returns a dict with the names and values of ``NAME=VALUE`` entries."""
    return {name: value for name, _, value in (entry.partition("=") for entry in entries)}


def _claim_resources(resources: pb.LinuxResources, plugin: str, owners: Ownership, where: Sequence[str]) -> None:
    cpu = resources.cpu
    given = {
        "CPU shares": cpu.HasField("shares"),
        "CPU quota": cpu.HasField("quota"),
        "CPU period": cpu.HasField("period"),
        "CPU pinning": bool(cpu.cpus),
        "memory pinning": bool(cpu.mems),
        "memory limit": bool(resources.memory.limit.value),
    }
    for field, is_given in given.items():
        if is_given:
            owners.claim(plugin, field, *where)
    for limit in resources.hugepage_limits:
        owners.claim(plugin, "hugepage limit", limit.page_size, *where)
    for key in resources.unified:
        owners.claim(plugin, "unified resource", key, *where)
