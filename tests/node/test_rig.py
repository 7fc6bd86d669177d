# SPDX-License-Identifier: Apache-2.0
"""Facts of the rig itself, without our services: what the other node tests rest on."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.node.rig import figures, kernel
from tests.node.rig.answering_plugin import ANSWER
from tests.node.rig.cri import CriError
from tests.node.rig.marks import both_drivers, each_runtime, every_machine
from tests.node.rig.node import CDI_DIRECTORY, Node
from tests.node.rig.pod_cgroups import Driver
from tests.node.rig.pods import Container, Resources
from tests.node.rig.services import Services
from tests.node.rig.wait import until

MIB = 1 << 20
LIMIT = str(4 * MIB)
SOURCE = Path(__file__).parents[2]


def limits(box: Container) -> list[str]:
    """The container's two limits of 2 MiB pages."""
    return [box.cgroup.hugetlb("2MB")[what] for what in ("max", "rsvd.max")]


def library_version(package: str, library: str) -> str:
    """The version of a Go library that Debian built into a package."""
    command = ["dpkg-query", "-W", "-f=${Static-Built-Using} ${Built-Using}", package]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return built.split(f"{library} (= ", 1)[1].split(")", 1)[0]


@pytest.mark.core
@every_machine
def test_the_machine_is_the_profile(node: Node) -> None:
    """The guest has the NUMA nodes, CPUs, threads and hugepages that the profile promises."""
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
def test_the_runtime_is_the_profiles_and_has_nri(node: Node) -> None:
    """containerd of the profile's release answers CRI and has its NRI socket."""
    name, version = node.runtime.version()
    assert name == "containerd"
    older = node.profile.name == "containerd-1.7"
    assert version.startswith("1.7." if older else "2.")
    assert node.cgroups.driver == "systemd"
    node.wait_for_containerd()
    figures.note("containerd", version)
    if not older:
        figures.note("NRI library", library_version("containerd", "golang-github-containerd-nri"))


@both_drivers
def test_a_container_runs_in_its_pods_group(node: Node, cgroup_driver: Driver) -> None:
    """Under both drivers a group's path is what the backend must derive from cgroup_parent and the container's id."""
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
    """An update leaves a limit written by others alone, and writes unified keys and cpusets again as stored."""
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
def test_what_becomes_of_limits_that_a_plugin_answers(node: Node, services: Services) -> None:
    """Stock containerd drops a plugin's hugepage limits; its unified keys reach the kernel."""
    plugin = services.module("answering", "tests.node.rig.answering_plugin", env={"PYTHONPATH": str(SOURCE)})
    plugin.start().wait_for_log("synchronised")
    pod = node.pod(hugetlb={"2MB": 8 * MIB})
    unified = {"hugetlb.2MB.max": LIMIT, "hugetlb.2MB.rsvd.max": LIMIT}
    answers = {"dropped": {"hugepage_limits": {"2MB": 4 * MIB}}, "kept": {"unified": unified}}
    boxes = {name: pod.run(name, env={ANSWER: json.dumps(answer)}) for name, answer in answers.items()}
    assert {name: limits(box) for name, box in boxes.items()} == {"dropped": ["max", "max"], "kept": [LIMIT, LIMIT]}


def test_systemd_restores_a_cpuset_when_a_property_is_set(node: Node) -> None:
    """This systemd leaves what others wrote alone at daemon-reload and daemon-reexec, not when a property is set."""
    container = node.pod().run(resources=Resources(cpus="1-2"))
    scope = Path(container.cgroup.path).name
    container.cgroup.write("cpuset.cpus", "4-5")
    for command in (["daemon-reload"], ["daemon-reexec"]):
        subprocess.run(["systemctl", *command], check=True)
        assert container.cpus_allowed == {4, 5}
    subprocess.run(["systemctl", "set-property", "--runtime", scope, "CPUWeight=50"], check=True)
    assert container.cpus_allowed == {1, 2}


def test_a_cdi_file_is_injected(node: Node) -> None:
    """Stock containerd resolves a CDI device from /var/run/cdi at container creation and refuses an unknown one."""
    document = {
        "cdiVersion": "0.6.0",
        "kind": "example.com/thing",
        "devices": [{"name": "one", "containerEdits": {"env": ["FROM_CDI=yes"]}}],
    }
    (CDI_DIRECTORY / "example.com-thing.json").write_text(json.dumps(document))
    pod = node.pod()
    container = pod.run(command=["sh", "-c", "echo $FROM_CDI; exec sleep 1000"], cdi=["example.com/thing=one"])
    assert "FROM_CDI=yes\n" in container.exec("env").out
    assert container.log() == "yes\n"
    with pytest.raises(CriError, match=r"example\.com/thing=two"):
        pod.create("other", cdi=["example.com/thing=two"])


def test_hugepages_and_their_nodes_are_seen_inside(node: Node) -> None:
    """A program in a container gets pages of the node in its mems; one over the group's limit is ENOMEM at mmap."""
    pod = node.pod(hugetlb={"2MB": 8 * MIB, "1GB": 1024 * MIB})
    container = pod.run(image="python", resources=Resources(mems="1"))
    two, one_gig, small = container.touch_memory("2M:3", "1G:1", "4K:50")
    assert (two["nodes"], two["page_kib"]) == ({"1": 3}, 2048)
    assert (one_gig["nodes"], one_gig["page_kib"]) == ({"1": 1}, 1048576)
    assert small["nodes"] == {"1": 50}
    container.cgroup.write("hugetlb.2MB.rsvd.max", 6 * MIB)
    fits, over = container.touch_memory("2M:3", "2M:1")
    assert (fits["error"], over["error"]) == (None, "ENOMEM")


def test_memory_of_a_container_is_seen_from_outside(node: Node) -> None:
    """numa_maps of a container's process names the nodes of its pages while it holds them."""
    pod = node.pod(hugetlb={"2MB": 8 * MIB})
    command = ["python3", "-IS", "/programs/touch_memory.py", "--hold", "2M:2"]
    container = pod.run(command=command, image="python", resources=Resources(mems="0"))
    until(container.log, "the program told what it holds")
    huge = [mapping for mapping in kernel.numa_maps(container.pid) if mapping.page_kib == 2048]
    assert [mapping.pages for mapping in huge] == [{0: 2}]
    assert container.cgroup.hugetlb("2MB")["current"] == str(4 * MIB)


def test_containerd_can_be_killed_under_a_container(node: Node) -> None:
    """A container lives on over a SIGKILL of containerd, and the rig reaches it afterwards."""
    container = node.pod().run()
    pid = container.pid
    node.kill_containerd()
    assert container.pid == pid
    assert container.state == "running"


def test_services_can_be_killed_stopped_and_restarted(services: Services) -> None:
    """A service dies by signal, leaves by SIGTERM, starts again and shows only the log of its latest start."""
    script = 'echo "ready $WHO"; trap "exit 7" TERM; while :; do sleep 0.1; done'
    service = services.add("shell", ["sh", "-c", script], {"WHO": "first"}).start()
    service.wait_for_log("ready first")
    service.env["WHO"] = "second"
    service.restart().wait_for_log("ready second")
    assert "first" not in service.log()
    service.send(signal.SIGSTOP)
    assert service.stop() == 7
    assert not service.alive
