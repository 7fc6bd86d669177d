# SPDX-License-Identifier: Apache-2.0
"""Tests of the rig itself, without the driver. They verify facts on which the other node tests rely."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.node.rig import figures, kernel
from tests.node.rig.answering_plugin import VARIABLE
from tests.node.rig.cri import CriError
from tests.node.rig.marks import both_drivers, each_runtime, every_machine
from tests.node.rig.node import Node
from tests.node.rig.pod_cgroups import Driver
from tests.node.rig.pods import Container, Resources
from tests.node.rig.services import Services

MIB = 1 << 20
LIMIT = str(4 * MIB)
SOURCE = Path(__file__).parents[2]


def limits(box: Container) -> list[str]:
    """Returns the container's two limits on 2 MiB pages."""
    return [box.cgroup.hugetlb("2MB")[what] for what in ("max", "rsvd.max")]


def library_version(package: str, library: str) -> str:
    """Returns the version of a Go library that Debian built into a package."""
    command = ["dpkg-query", "-W", "-f=${Static-Built-Using} ${Built-Using}", package]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return built.split(f"{library} (= ", 1)[1].split(")", 1)[0]


@pytest.mark.core
@every_machine
def test_the_machine_matches_the_profile(node: Node) -> None:
    """The guest has the NUMA nodes, CPUs, threads and hugepages of the profile."""
    profile = node.profile
    assert len(kernel.numa_nodes()) == profile.numa_nodes
    assert len(kernel.online_cpus()) == profile.cpus
    assert {len(kernel.siblings(cpu)) for cpu in kernel.online_cpus()} == {profile.threads}
    assert frozenset().union(*map(kernel.node_cpus, kernel.numa_nodes())) == kernel.online_cpus()
    for number in kernel.numa_nodes():
        assert {size: kernel.hugepages(number, size) for size in profile.pages} == profile.pages
        assert kernel.node_memory_kib(number) > (profile.memory_gib / profile.numa_nodes - 0.5) * MIB
    figures.note("kernel", Path("/proc/sys/kernel/osrelease").read_text().strip())


@pytest.mark.core
@each_runtime
def test_the_runtime_matches_the_profile_and_has_nri(node: Node) -> None:
    """The profile's release of containerd serves CRI and has its NRI socket."""
    name, version = node.runtime.version()
    assert name == "containerd"
    older = node.profile.name == "containerd-1.7"
    assert version.startswith("1.7." if older else "2.")
    assert node.cgroups.driver == "systemd"
    node.wait_for_containerd()
    figures.note("containerd", version)
    if not older:
        figures.note("NRI library", library_version("containerd", "golang-github-containerd-nri"))


@pytest.mark.core
@each_runtime
def test_a_process_cannot_write_the_root_of_its_cgroup_namespace(node: Node) -> None:
    """systemd mounts cgroup2 with nsdelegate, and a container is in a cgroup namespace whose root is its own
    cgroup.

    Therefore no process inside can write its own cpuset, whatever its capabilities. The files of the pod's cgroup, one
    level above, can be written.
    """
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    (options,) = (words[3].split(",") for words in mounts if words[:2] == ["cgroup2", "/sys/fs/cgroup"])
    assert "nsdelegate" in options
    box = node.pod().run()
    assert Path(f"/proc/{box.pid}/ns/cgroup").readlink() != Path("/proc/1/ns/cgroup").readlink()
    write = "import os, sys; os.setns(os.open(sys.argv[1], os.O_RDONLY)); open(sys.argv[2], 'w').write('1-2')"
    results = {}
    for group in (box.cgroup, box.cgroup.parent):
        arguments = [f"/proc/{box.pid}/ns/cgroup", str(group.directory / "cpuset.cpus")]
        done = subprocess.run([sys.executable, "-c", write, *arguments], check=False, capture_output=True, text=True)
        results[group.path == box.cgroup.path] = done.stderr.strip().splitlines()[-1:]
    assert results == {True: ["PermissionError: [Errno 1] Operation not permitted"], False: []}
    assert box.cpus_allowed == {1, 2}, "the pod's cgroup limits the container"


@both_drivers
def test_a_container_runs_in_its_pods_cgroup(node: Node, cgroup_driver: Driver) -> None:
    """With both cgroup drivers, a cgroup's path is the one that the backend must derive from cgroup_parent and the
    container's id.
    """
    pod = node.pod(uid="0b1d-22")
    container = pod.run(resources=Resources(cpus="1-2", mems="0"))
    root = "/kubepods.slice/kubepods-burstable.slice" if cgroup_driver == "systemd" else "/kubepods/burstable"
    inside = {
        "systemd": f"/kubepods-burstable-pod0b1d_22.slice/cri-containerd-{container.id}.scope",
        "cgroupfs": f"/pod0b1d-22/{container.id}",
    }
    assert container.state == "running"
    assert container.cgroup.path == root + inside[cgroup_driver]
    assert container.cgroup.parent == pod.cgroup
    assert container.cgroup.cpus() == container.cpus_allowed == {1, 2}
    assert container.cgroup.mems() == container.mems_allowed == {0}
    assert pod.cgroup.hugetlb("2MB")["max"] == pod.cgroup.hugetlb("2MB")["rsvd.max"] == "0"


@each_runtime
@both_drivers
def test_stock_containerd_drops_hugepage_limits_but_not_unified_keys(node: Node, cgroup_driver: Driver) -> None:
    """An update does not change limits that others have written, but resets unified keys and cpusets to their stored
    values.
    """
    pod = node.pod(hugetlb={"2MB": 8 * MIB})
    dropped = pod.run("dropped", resources=Resources(hugepages={"2MB": 4 * MIB}))
    unified = {"hugetlb.2MB.max": LIMIT, "hugetlb.2MB.rsvd.max": LIMIT}
    kept = pod.run("kept", resources=Resources(unified=unified))
    assert [limits(dropped), limits(kept)] == [["max", "max"], [LIMIT, LIMIT]]
    for container in (dropped, kept):
        container.update(Resources(cpus="1-2"))
        container.cgroup.write("hugetlb.2MB.max", 2 * MIB)
        container.cgroup.write("cpuset.cpus", "4-5")
        container.update(Resources(shares=512))
    assert [one.cgroup.hugetlb("2MB")["max"] for one in (dropped, kept)] == [str(2 * MIB), LIMIT]
    assert [one.cpus_allowed for one in (dropped, kept)] == [{1, 2}, {1, 2}]
    no_file = pod.create("no-file", resources=Resources(unified={"hugetlb.3MB.max": LIMIT}))
    with pytest.raises(CriError, match=r"hugetlb\.3MB\.max"):
        no_file.start()


@each_runtime
def test_stock_containerd_applies_only_the_unified_limits_of_a_plugin(node: Node, services: Services) -> None:
    """Stock containerd drops the hugepage limits that a plugin sets, but applies the plugin's unified keys."""
    plugin = services.module("answering", "tests.node.rig.answering_plugin", env={"PYTHONPATH": str(SOURCE)})
    plugin.start().wait_for_log("synchronised")
    pod = node.pod(hugetlb={"2MB": 8 * MIB})
    unified = {"hugetlb.2MB.max": LIMIT, "hugetlb.2MB.rsvd.max": LIMIT}
    answers = {"dropped": {"hugepageLimits": [{"pageSize": "2MB", "limit": 4 * MIB}]}, "kept": {"unified": unified}}
    boxes = {name: pod.run(name, env={VARIABLE: json.dumps(answer)}) for name, answer in answers.items()}
    assert {name: limits(box) for name, box in boxes.items()} == {"dropped": ["max", "max"], "kept": [LIMIT, LIMIT]}


def test_systemd_restores_a_cpuset_when_a_property_is_set(node: Node) -> None:
    """This version of systemd does not overwrite values from other programs on daemon-reload and daemon-reexec, but
    does so when a property is set.
    """
    container = node.pod().run(resources=Resources(cpus="1-2"))
    scope = Path(container.cgroup.path).name
    container.cgroup.write("cpuset.cpus", "4-5")
    for command in (["daemon-reload"], ["daemon-reexec"]):
        subprocess.run(["systemctl", *command], check=True)
        assert container.cpus_allowed == {4, 5}
    subprocess.run(["systemctl", "set-property", "--runtime", scope, "CPUWeight=50"], check=True)
    assert container.cpus_allowed == {1, 2}
