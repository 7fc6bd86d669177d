# SPDX-License-Identifier: Apache-2.0
"""NRI messages to domain values and back."""

from dataclasses import replace

import pytest
from nri_backend._pb import nri_pb2 as pb
from nri_backend.nri.messages import read_container, read_pod, read_resources, write_adjustment, write_updates
from nri_backend.nri.model import Adjustment, Container, ContainerState, MemoryPolicy, Pod, Resources, Update
from numa_contract.cpuset import format_cpu_list

_EVERYTHING = Resources(
    cpus="0-3,8",
    mems="0",
    cpu_quota=-1,
    memory_limit=1 << 30,
    hugepage_limits={"2MB": 4 << 20, "1GB": 0},
)


def test_a_pod_keeps_its_identity_and_its_cgroup() -> None:
    """The id is the sandbox's, the uid the pod's."""
    message = pb.PodSandbox(
        id="s",
        uid="u",
        name="n",
        namespace="ns",
        runtime_handler="kata",
        linux=pb.LinuxPodSandbox(cgroup_parent="/k.slice"),
    )
    assert read_pod(message) == Pod("s", "u", "ns", "n", "/k.slice", "kata")


@pytest.mark.fault("protocol trap 3.13")
def test_a_container_is_known_by_its_environment_not_by_its_cdi_devices() -> None:
    """Only some runtimes fill CDI_devices; the environment that CDI made is there everywhere."""
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
def test_every_state_has_a_meaning(number: int, state: str) -> None:
    """A state of a later runtime is unknown, not an error."""
    message = pb.Container()
    message.ParseFromString(b"\x20" + bytes([number]))
    assert read_container(message).state is ContainerState[state]


def test_wrappers_that_hold_zero_mean_not_given() -> None:
    """Runtimes relay CRI's zeros; nothing can be unset through them."""
    message = pb.LinuxResources(
        cpu=pb.LinuxCPU(
            quota=pb.OptionalInt64(), period=pb.OptionalUInt64(), shares=pb.OptionalUInt64(), cpus="", mems=""
        ),
        memory=pb.LinuxMemory(limit=pb.OptionalInt64()),
    )
    assert read_resources(message) == Resources()


@pytest.mark.fault("protocol trap 3.8")
def test_of_two_hugepage_limits_the_last_is_the_one_that_holds() -> None:
    """An update appends to the runtime's list, and runc writes the entries in order."""
    limits = [pb.HugepageLimit(page_size="2MB", limit=limit) for limit in (1, 2)]
    assert read_resources(pb.LinuxResources(hugepage_limits=limits)).hugepage_limits == {"2MB": 2}


@pytest.mark.fault("protocol trap 3.14")
def test_page_sizes_and_lists_are_passed_in_the_runtimes_spelling() -> None:
    """``2MB`` and ``0-3,8`` go out as they are, and what goes out can be read back."""
    message = write_adjustment(Adjustment(_EVERYTHING)).linux.resources
    assert [limit.page_size for limit in message.hugepage_limits] == ["2MB", "1GB"]
    assert message.cpu.cpus == "0-3,8"
    message.cpu.period.value = 5
    assert read_resources(message) == replace(_EVERYTHING, cpu_period=5)


@pytest.mark.fault("protocol trap 3.9")
def test_what_a_runtime_ignores_is_never_sent() -> None:
    """Reservation, swap and the rest do nothing; shares, realtime and pids are not ours to set."""
    message = write_adjustment(Adjustment(_EVERYTHING)).linux.resources
    assert [field.name for field, _ in message.memory.ListFields()] == ["limit"]
    assert [field.name for field, _ in message.cpu.ListFields()] == ["quota", "cpus", "mems"]


def test_an_adjustment_claims_only_what_it_sets() -> None:
    """A standby answers empty, so that it cannot conflict; names and values of variables are separate fields."""
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
def test_a_memory_policy_goes_out_by_itself(mode: str, nodes: set[int], sent: pb.MpolMode) -> None:
    """Linux prefers several nodes by another mode; no resource of the container is claimed by it."""
    message = write_adjustment(Adjustment(memory_policy=MemoryPolicy(mode, frozenset(nodes))))
    assert message.linux.memory_policy.mode == sent
    assert message.linux.memory_policy.nodes == format_cpu_list(nodes)
    assert not message.linux.HasField("resources")


def test_updates_that_do_not_fit_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """An answer may not exceed 4 MiB; the audit corrects the rest."""
    updates = [Update(f"c{number}", Resources(cpus="0-3")) for number in range(50)]
    messages = write_updates(updates, 400)
    assert 0 < len(messages) < 50
    assert f"an answer has room for {len(messages)} of 50 updates" in caplog.text
    assert pb.SynchronizeResponse(update=messages).ByteSize() <= 400
    assert [message.container_id for message in messages][:2] == ["c0", "c1"]
    assert len(write_updates(updates)) == 50
