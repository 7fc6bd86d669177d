# SPDX-License-Identifier: Apache-2.0
"""NRI messages to domain values and back. Protobuf goes no further than this package."""

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
_OURS: Final = (CPU_ENV_PREFIX, MEMORY_ENV_PREFIX)
# What a response frame holds beside the updates: the envelope, the field tags.
_ENVELOPE_BYTES: Final = 64
_STATES = {
    pb.CONTAINER_CREATED: ContainerState.CREATED,
    pb.CONTAINER_PAUSED: ContainerState.PAUSED,
    pb.CONTAINER_RUNNING: ContainerState.RUNNING,
    pb.CONTAINER_STOPPED: ContainerState.STOPPED,
}


def read_pod(message: pb.PodSandbox) -> Pod:
    """A pod sandbox as a value."""
    return Pod(
        id=message.id,
        uid=message.uid,
        namespace=message.namespace,
        name=message.name,
        cgroup_parent=message.linux.cgroup_parent,
        runtime_handler=message.runtime_handler,
    )


def read_container(message: pb.Container) -> Container:
    """A container as a value."""
    return Container(
        id=message.id,
        pod_id=message.pod_sandbox_id,
        name=message.name,
        state=_STATES.get(message.state, ContainerState.UNKNOWN),
        env=_of_ours(message.env),
        cgroups_path=message.linux.cgroups_path,
        resources=read_resources(message.linux.resources),
    )


def _of_ours(env: Iterable[str]) -> tuple[str, ...]:
    # A pod's author writes 1.5 MB of variables, and the runtime sends all of them with every event.
    found: list[str] = []
    left = MAX_VARIABLE_BYTES
    for entry in env:
        if entry.startswith(_OURS):
            found.append(entry[: max(left, 0) + 1])
            left -= len(entry)
            if left < 0 or len(found) > MAX_VARIABLES:
                break
    return tuple(found)


def read_resources(message: pb.LinuxResources) -> Resources:
    """Resources as a value. Runtimes send wrappers that hold 0 for what the kubelet did not ask for: that is absent."""
    cpu, memory = message.cpu, message.memory
    return Resources(
        cpus=cpu.cpus,
        mems=cpu.mems,
        cpu_quota=cpu.quota.value or None,
        cpu_period=cpu.period.value or None,
        memory_limit=memory.limit.value or None,
        # An update appends to the runtime's list instead of replacing; the last entry of a page size is the valid one.
        hugepage_limits={limit.page_size: limit.limit for limit in message.hugepage_limits},
    )


def write_adjustment(adjustment: Adjustment) -> pb.ContainerAdjustment:
    """The answer for a container that is being created; fields that are not set are not sent."""
    message = pb.ContainerAdjustment(env=[pb.KeyValue(key=k, value=v) for k, v in adjustment.env.items()])
    if adjustment.resources != Resources():
        message.linux.resources.CopyFrom(_write_resources(adjustment.resources))
    if adjustment.memory_policy is not None:
        message.linux.memory_policy.CopyFrom(_write_policy(adjustment.memory_policy))
    return message


def _write_policy(policy: MemoryPolicy) -> pb.LinuxMemoryPolicy:
    # Linux takes one node only as MPOL_PREFERRED, and several as MPOL_PREFERRED_MANY since 5.15.
    preferred = pb.MPOL_PREFERRED if len(policy.nodes) == 1 else pb.MPOL_PREFERRED_MANY
    mode = pb.MPOL_INTERLEAVE if policy.mode == "interleave" else preferred
    return pb.LinuxMemoryPolicy(mode=mode, nodes=format_cpu_list(policy.nodes))


def write_updates(updates: Sequence[Update], limit: int = MAX_DATA - _ENVELOPE_BYTES) -> list[pb.ContainerUpdate]:
    """As many updates as fit into limit bytes, in order; the log says how many."""
    # Each costs its own bytes plus a tag and a length of at most five bytes in the message around it.
    around = 6
    messages: list[pb.ContainerUpdate] = []
    for update in updates:
        message = pb.ContainerUpdate(
            container_id=update.container_id,
            linux=pb.LinuxContainerUpdate(resources=_write_resources(update.resources)),
            ignore_failure=True,
        )
        limit -= message.ByteSize() + around
        if limit < 0:
            text = "an answer has room for %d of %d updates; the audit holds the kernel's files of the others true"
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
