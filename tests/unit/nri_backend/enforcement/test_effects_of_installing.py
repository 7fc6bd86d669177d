# SPDX-License-Identifier: Apache-2.0
"""The cgroup files that the backend writes once it is installed, as listed in the table in docs/effects.md."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from numa_contract.records import AllocationRecord

from tests.rigs.builders import cpu_record, memory_record
from tests.rigs.containers import PODS, TOP, container, pod
from tests.rigs.enforcement import Node, auditing
from tests.rigs.kernel_tree import MI, KernelTree
from tests.rigs.partition_tree import PartitionTree

RUNNING = (("web", "p1"), ("db", "p2"))
"""Containers that were running before the driver was installed, with their pods."""
GUARD = {"hugetlb.2MB.rsvd.max": "0", "hugetlb.1GB.rsvd.max": "0"}
CLAIM = cpu_record("u", "r=2-3", pods=("p3",))


class Installed:
    """A node on which containers are running and the driver has just been installed."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.paths = [node.make_cgroups(pod(of), container(id_, of=of)) for id_, of in RUNNING]
        self.updates: dict[str, str] = {}
        """The CPUs in the updates that the runtime received, by container ID."""

    async def install(self) -> None:
        """Starts the backend and waits until it has compared all files once."""
        await self.node.enforcer.activate()
        updates = await self.node.synchronize(*RUNNING)
        self.updates = {one.container_id: one.resources.cpus for one in updates}
        await self.settle()

    async def settle(self) -> None:
        """Waits until the audit has compared all files."""
        for _ in range(3):
            self.node.ahead += 61
            self.node.enforcer.signals.audit.set()
            await asyncio.sleep(0.1)

    def each(self, files: dict[str, str]) -> dict[str, dict[str, str]]:
        """Returns the given file contents for each cgroup whose container was running before the installation."""
        return {path: files for path in self.paths}  # noqa: C420  no test changes the files

    def written(self) -> dict[str, dict[str, str]]:
        """Returns the files written since the last call, by cgroup, with the last content of each."""
        found: dict[str, dict[str, str]] = {}
        for path, name, text in self.node.kernel.written:
            found.setdefault(path, {})[name] = text
        self.node.kernel.written.clear()
        return found


@asynccontextmanager
async def installed(
    root: Path, *, partitions: bool, reserved: str = "", guard: bool = False
) -> AsyncIterator[Installed]:
    """Yields a node after the installation, in partition mode or in pool mode."""
    node = Node(root, reserved, guard=guard, tree=PartitionTree if partitions else KernelTree)
    found = Installed(node)
    async with auditing(node):
        await found.install()
        yield found


@pytest.mark.parametrize("partitions", [True, False])
async def test_without_reserved_cpus_and_the_guard_no_cgroup_is_written(partitions: bool, tmp_path: Path) -> None:
    """Without reserved CPUs and without the guard, the installation has the fewest effects: the backend writes to no
    cgroup. In pool mode, the runtime stores the list of all CPUs for each container.
    """
    async with installed(tmp_path, partitions=partitions) as found:
        assert found.written() == {}
        assert found.updates == ({} if partitions else {"web": "0-7", "db": "0-7"})


@pytest.mark.parametrize("partitions", [True, False])
async def test_the_guard_sets_two_files_for_each_running_container(partitions: bool, tmp_path: Path) -> None:
    """With the default values, the guard's files are written before the first claim is prepared."""
    async with installed(tmp_path, partitions=partitions, guard=True) as found:
        assert found.written() == found.each(GUARD)


@pytest.mark.parametrize("partitions", [True, False])
async def test_reserved_cpus_move_each_running_container(partitions: bool, tmp_path: Path) -> None:
    """Running containers are moved when the driver is installed, before the first claim. Later containers are created
    with the pool's CPUs.
    """
    async with installed(tmp_path, partitions=partitions, reserved="0") as found:
        assert found.written() == found.each({"cpuset.cpus": "1-7"})
        assert found.updates == {"web": "1-7", "db": "1-7"}
        _, answer = await found.node.create("new", of="p4")
        assert answer.resources.cpus == "1-7"


async def test_in_pool_mode_a_claim_moves_all_other_containers(tmp_path: Path) -> None:
    """The containers are moved when the claim is prepared. After it has been released, their cpusets contain all CPUs,
    instead of being empty as they were before.
    """
    async with installed(tmp_path, partitions=False) as found:
        found.node.claim(CLAIM)
        await found.settle()
        assert found.written() == found.each({"cpuset.cpus": "0-1,4-7"})
        found.node.unprepare(CLAIM)
        await found.settle()
        assert found.written() == found.each({"cpuset.cpus": "0-7"})


async def test_in_partition_mode_a_claim_writes_to_no_other_container(tmp_path: Path) -> None:
    """The other containers' effective CPUs change when the claim's container starts and exits, without a write to their
    files.
    """
    async with installed(tmp_path, partitions=True) as found:
        node = found.node
        env = node.claim(CLAIM)
        await found.settle()
        assert found.written() == {}
        path = await node.run("claimed", *env, of="p3")
        above = (path.rpartition("/")[0], PODS, TOP)
        written = found.written()
        assert written.keys() == {path, *above}
        assert [written[one] for one in above] == [{"cpuset.cpus.exclusive": "2-3"}] * 3
        assert {"cpuset.cpus.exclusive": "2-3", "cpuset.cpus.partition": "root"}.items() <= written[path].items()
        assert [node.cpus(one) for one in found.paths] == ["0-1,4-7", "0-1,4-7"]
        await node.stop("claimed", of="p3")
        node.unprepare(CLAIM)
        await found.settle()
        assert [node.cpus(one) for one in found.paths] == ["0-7", "0-7"]
        assert [node.kernel.get(one, "cpuset.cpus.exclusive") for one in (PODS, TOP)] == ["", ""]


def pages(uid: str) -> AllocationRecord:
    """Returns a claim for memory and hugepages with a limit and protection."""
    parts = (("mem", 0, 64 * MI, 4096), ("huge", 0, 4 * MI, 2 * MI))
    return memory_record(uid, *parts, pods=("p3",), mem={"limit": "claim", "protect": "low"})


async def test_memory_claims_set_the_limits_of_their_container_and_pod(tmp_path: Path) -> None:
    """The claims set memory limits and protection, NUMA nodes, hugepages and the CPU limit. Other pods are
    unchanged.
    """
    async with installed(tmp_path, partitions=True) as found:
        node = found.node
        node.pod_quota = "200000"
        env = (*node.claim(CLAIM), *node.claim(pages("m")))
        path = await node.run("claimed", *env, of="p3", quota=200_000)
        written = found.written()
        of_pod, of_all = written[path.rpartition("/")[0]], written[TOP]
        expected = {"cpuset.mems": "0", "cpu.max": "max 100000", "memory.max": str(64 * MI), "memory.low": str(64 * MI)}
        expected |= {"hugetlb.2MB.max": str(4 * MI), "hugetlb.2MB.rsvd.max": str(4 * MI)}
        assert {name: node.kernel.get(path, name) for name in expected} == expected
        assert (of_pod["hugetlb.2MB.max"], of_pod["cpu.max"]) == (str(4 * MI), "400000")
        assert of_pod["memory.low"] == of_all["memory.low"] == str(64 * MI)
        assert not written.keys() & {*found.paths, *(one.rpartition("/")[0] for one in found.paths)}


@pytest.mark.parametrize("partitions", [True, False])
async def test_an_update_reverts_reserved_cpus_but_keeps_the_guards_limits(partitions: bool, tmp_path: Path) -> None:
    """If reservedCPUs is removed, running containers get all CPUs back. The guard's limits remain until the containers
    restart.
    """
    async with installed(tmp_path, partitions=partitions, reserved="0", guard=True) as found:
        assert found.written() == found.each({"cpuset.cpus": "1-7", **GUARD})
    async with installed(tmp_path, partitions=partitions) as found:
        assert found.written() == found.each({"cpuset.cpus": "0-7"})
        assert [found.node.cpus(one) for one in found.paths] == ["0-7", "0-7"]
        _, answer = await found.node.create("restarted", of="p1", name="web")
        assert answer.resources.cpus == ("" if partitions else "0-7")
        assert answer.resources.hugepage_limits == {}
