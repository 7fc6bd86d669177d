# SPDX-License-Identifier: Apache-2.0
"""Conversion between NRI messages and the backend's own types."""

from dataclasses import replace

import pytest
from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.model import Adjustment, Container, ContainerState, MemoryPolicy, Pod, Resources, Update
from nri_backend.nri.plugin import read_container, read_pod, read_resources, write_adjustment, write_updates
from numa_contract.cpuset import format_cpu_list

_EVERYTHING = Resources(
    cpus="0-3,8",
    mems="0",
    cpu_quota=-1,
    memory_limit=1 << 30,
    hugepage_limits={"2MB": 4 << 20, "1GB": 0},
)


def test_a_pod_is_converted_with_its_identity_and_cgroup() -> None:
    """The pod's id identifies its sandbox, and the uid identifies the pod itself."""
    message = pb.PodSandbox(
        id="s",
        uid="u",
        name="n",
        namespace="ns",
        runtime_handler="kata",
        linux=pb.LinuxPodSandbox(cgroup_parent="/k.slice"),
    )
    assert read_pod(message) == Pod("s", "u", "ns", "n", "/k.slice", "kata")


def test_a_container_has_the_drivers_variables_but_not_its_cdi_devices() -> None:
    """Only some runtimes set CDI_devices, but all of them send the environment after CDI has edited it."""
    message = pb.Container(
        id="c",
        pod_sandbox_id="s",
        name="app",
        state=pb.CONTAINER_RUNNING,
        env=["PATH=/bin", "DRA_CPUSET_u=2-3", "odd"],
        pid=7,
        CDI_devices=[pb.CDIDevice(name="dra.k8s.io/cpu=claim-u")],
        linux=pb.LinuxContainer(cgroups_path="k.slice:cri-containerd:c"),
    )
    assert read_container(message) == Container(
        id="c",
        pod_id="s",
        name="app",
        state=ContainerState.RUNNING,
        env=("DRA_CPUSET_u=2-3",),
        cgroups_path="k.slice:cri-containerd:c",
    )


@pytest.mark.parametrize(
    ("number", "state"), [(0, "UNKNOWN"), (1, "CREATED"), (2, "PAUSED"), (3, "RUNNING"), (4, "STOPPED"), (9, "UNKNOWN")]
)
def test_states_are_converted_and_new_ones_are_unknown(number: int, state: str) -> None:
    message = pb.Container()
    message.ParseFromString(b"\x20" + bytes([number]))
    assert read_container(message).state is ContainerState[state]


def test_wrappers_with_the_value_0_count_as_unset_fields() -> None:
    """Runtimes relay zeros from CRI, where 0 means that the kubelet has not set the field."""
    message = pb.LinuxResources(
        cpu=pb.LinuxCPU(
            quota=pb.OptionalInt64(), period=pb.OptionalUInt64(), shares=pb.OptionalUInt64(), cpus="", mems=""
        ),
        memory=pb.LinuxMemory(limit=pb.OptionalInt64()),
    )
    assert read_resources(message) == Resources()


def test_the_last_of_two_hugepage_limits_applies() -> None:
    """Runtimes append an update to their list of limits, and runc writes the entries in order."""
    limits = [pb.HugepageLimit(page_size="2MB", limit=limit) for limit in (1, 2)]
    assert read_resources(pb.LinuxResources(hugepage_limits=limits)).hugepage_limits == {"2MB": 2}


def test_page_sizes_and_cpu_lists_are_sent_in_the_runtimes_format() -> None:
    """Page sizes are sent as ``2MB`` and CPU lists as ``0-3,8``. Parsing the message yields the original values."""
    message = write_adjustment(Adjustment(_EVERYTHING)).linux.resources
    assert [limit.page_size for limit in message.hugepage_limits] == ["2MB", "1GB"]
    assert message.cpu.cpus == "0-3,8"
    message.cpu.period.value = 5
    assert read_resources(message) == replace(_EVERYTHING, cpu_period=5)


def test_only_fields_that_runtimes_apply_and_the_driver_owns_are_sent() -> None:
    """Runtimes ignore some fields, such as reservation and swap. CPU shares, real-time settings and PID limits belong
    to the kubelet.
    """
    message = write_adjustment(Adjustment(_EVERYTHING)).linux.resources
    assert [field.name for field, _ in message.memory.ListFields()] == ["limit"]
    assert [field.name for field, _ in message.cpu.ListFields()] == ["quota", "cpus", "mems"]


def test_an_adjustment_contains_only_the_fields_that_it_sets() -> None:
    """A standby's adjustment is empty, so it cannot conflict with the active instance's."""
    assert write_adjustment(Adjustment()).SerializeToString() == b""
    message = write_adjustment(Adjustment(env={"A": "b=c"}))
    assert [(entry.key, entry.value) for entry in message.env] == [("A", "b=c")]
    assert not message.HasField("linux")


@pytest.mark.parametrize(
    ("mode", "nodes", "sent"),
    [
        ("preferred", {1}, pb.MPOL_PREFERRED),
        ("preferred", {0, 1, 3}, pb.MPOL_PREFERRED_MANY),
        ("interleave", {0, 1}, pb.MPOL_INTERLEAVE),
    ],
)
def test_a_memory_policy_is_sent_without_resources(mode: str, nodes: set[int], sent: pb.MpolMode) -> None:
    """Linux has a separate mode for more than one preferred node, so the mode depends on the number of nodes."""
    message = write_adjustment(Adjustment(memory_policy=MemoryPolicy(mode, frozenset(nodes))))
    assert message.linux.memory_policy.mode == sent
    assert message.linux.memory_policy.nodes == format_cpu_list(nodes)
    assert not message.linux.HasField("resources")


def test_updates_that_do_not_fit_are_omitted_and_their_number_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A response is limited to 4 MiB. The audit applies the omitted updates."""
    updates = [Update(f"c{number}", Resources(cpus="0-3")) for number in range(50)]
    messages = write_updates(updates, 400)
    assert 0 < len(messages) < 50
    assert f"a response contains only {len(messages)} of 50 updates" in caplog.text
    assert pb.SynchronizeResponse(update=messages).ByteSize() <= 400
    assert [message.container_id for message in messages][:2] == ["c0", "c1"]
    assert len(write_updates(updates)) == 50
