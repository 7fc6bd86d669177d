# SPDX-License-Identifier: Apache-2.0
"""Converts between NRI messages and the values of model.py. Protobuf is not used outside this package."""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from numa_contract.cpuset import format_cpu_list
from numa_contract.names import CPU_ENV_PREFIX, MEMORY_ENV_PREFIX

from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.model import (
    MAX_VARIABLE_BYTES,
    MAX_VARIABLES,
    Adjustment,
    Container,
    ContainerState,
    MemoryPolicy,
    Pod,
    Resources,
    Update,
)
from nri_backend.ttrpc import MAX_DATA

_log = logging.getLogger(__name__)
_OUR_PREFIXES: Final = (CPU_ENV_PREFIX, MEMORY_ENV_PREFIX)
# Size of everything else in a response frame: the ttrpc response around the updates and its field tags.
_ENVELOPE_BYTES: Final = 64
_STATES = {
    pb.CONTAINER_CREATED: ContainerState.CREATED,
    pb.CONTAINER_PAUSED: ContainerState.PAUSED,
    pb.CONTAINER_RUNNING: ContainerState.RUNNING,
    pb.CONTAINER_STOPPED: ContainerState.STOPPED,
}


def read_pod(message: pb.PodSandbox) -> Pod:
    """Converts a pod sandbox."""
    return Pod(
        id=message.id,
        uid=message.uid,
        namespace=message.namespace,
        name=message.name,
        cgroup_parent=message.linux.cgroup_parent,
        runtime_handler=message.runtime_handler,
    )


def read_container(message: pb.Container) -> Container:
    """Converts a container."""
    return Container(
        id=message.id,
        pod_id=message.pod_sandbox_id,
        name=message.name,
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        env=_our_variables(message.env),
        cgroups_path=message.linux.cgroups_path,
        resources=read_resources(message.linux.resources),
    )


def _our_variables(env: Iterable[str]) -> tuple[str, ...]:
    # The author of a pod can set 1.5 MB of variables, and the runtime sends all of them with every event.
    found: list[str] = []
    left = MAX_VARIABLE_BYTES
    for entry in env:
        if entry.startswith(_OUR_PREFIXES):
            found.append(entry[: max(left, 0) + 1])
            left -= len(entry)
            if left < 0 or len(found) > MAX_VARIABLES:
                break
    return tuple(found)


def read_resources(message: pb.LinuxResources) -> Resources:
    """Converts resources. A wrapper message with the value 0 means that the kubelet did not set the field."""
    cpu, memory = message.cpu, message.memory
    return Resources(
        cpus=cpu.cpus,
        mems=cpu.mems,
        cpu_quota=cpu.quota.value or None,
        cpu_period=cpu.period.value or None,
        memory_limit=memory.limit.value or None,
        # Runtimes append an update to their list instead of replacing it; the last entry of a page size applies.
        hugepage_limits={limit.page_size: limit.limit for limit in message.hugepage_limits},
    )


def write_adjustment(adjustment: Adjustment) -> pb.ContainerAdjustment:
    """Converts the adjustment of a container that is being created. Unset fields are not sent."""
    message = pb.ContainerAdjustment(env=[pb.KeyValue(key=k, value=v) for k, v in adjustment.env.items()])
    if adjustment.resources != Resources():
        message.linux.resources.CopyFrom(_write_resources(adjustment.resources))
    if adjustment.memory_policy is not None:
        message.linux.memory_policy.CopyFrom(_write_policy(adjustment.memory_policy))
    return message


def _write_policy(policy: MemoryPolicy) -> pb.LinuxMemoryPolicy:
    # MPOL_PREFERRED accepts a single node; MPOL_PREFERRED_MANY accepts several and exists since Linux 5.15.
    preferred = pb.MPOL_PREFERRED if len(policy.nodes) == 1 else pb.MPOL_PREFERRED_MANY
    mode = pb.MPOL_INTERLEAVE if policy.mode == "interleave" else preferred
    return pb.LinuxMemoryPolicy(mode=mode, nodes=format_cpu_list(policy.nodes))


def write_updates(updates: Sequence[Update], limit: int = MAX_DATA - _ENVELOPE_BYTES) -> list[pb.ContainerUpdate]:
    """Converts the first updates that fit into ``limit`` bytes, and logs a warning if that is not all of them."""
    # Field tag and length prefix of each update in the enclosing message; a length needs at most five bytes.
    overhead = 6
    messages: list[pb.ContainerUpdate] = []
    for update in updates:
        message = pb.ContainerUpdate(
            container_id=update.container_id,
            linux=pb.LinuxContainerUpdate(resources=_write_resources(update.resources)),
            ignore_failure=True,
        )
        limit -= message.ByteSize() + overhead
        if limit < 0:
            text = "a response contains only %d of %d updates; the audit applies the others to the cgroups"
            _log.warning(text, len(messages), len(updates))
            break
        messages.append(message)
    return messages


def _write_resources(resources: Resources) -> pb.LinuxResources:
    limits = [pb.HugepageLimit(page_size=size, limit=limit) for size, limit in resources.hugepage_limits.items()]
    message = pb.LinuxResources(hugepage_limits=limits)
    if resources.cpus:
        message.cpu.cpus = resources.cpus
    if resources.mems:
        message.cpu.mems = resources.mems
    if resources.cpu_quota is not None:
        message.cpu.quota.value = resources.cpu_quota
    if resources.memory_limit is not None:
        message.memory.limit.value = resources.memory_limit
    return message
