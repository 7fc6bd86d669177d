# SPDX-License-Identifier: Apache-2.0
"""Containers that use the shared pool in addition to exclusive CPUs (isolation ``mixed``)."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.plan import cpuset_of
from nri_backend.containers.state import NodeState
from nri_backend.node.model import Host
from nri_backend.nri.model import RejectedError, Resources
from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_contract.records import AllocationRecord, CpuParameters

from tests.rigs.builders import cpu_record, env_of, files_of, mixed
from tests.rigs.containers import config, container, entitlement_of, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.kernel_tree import KernelTree
from tests.rigs.partition_tree import PartitionTree

NEAR = "0-3"
MACHINE = parse_cpu_list("0-7")


@pytest.mark.parametrize("tree", [KernelTree, PartitionTree])
async def test_the_shared_part_is_the_pool_near_the_exclusive_cpus(tmp_path: Path, tree: type[KernelTree]) -> None:
    """The shared part is the pool's CPUs on the same NUMA node, or the whole pool if claims hold all of those.

    CPUs that become free are added to the shared part again. No other container uses the container's exclusive CPUs,
    and the container uses no other container's exclusive CPUs.
    """
    async with enforcing(Node(tmp_path, tree=tree)) as node:
        plain = await node.run("plain", of="p2")
        vpp = await node.run("vpp", *node.claim(mixed(cpu_record("c1", "r=2-3"), NEAR)))
        assert (node.cpus(vpp), node.cpus(plain)) == ("1-3", "1,4-7")
        other = cpu_record("c2", "r=1", pods=["p3"])
        db = await node.run("db", *node.claim(other), of="p3")
        await node.until(lambda: node.cpus(vpp) == "2-7")
        assert (node.cpus(db), node.cpus(plain)) == ("1", "4-7")
        await node.stop("db", of="p3")
        node.unprepare(other)
        await node.until(lambda: node.cpus(vpp) == "1-3")
        assert node.cpus(plain) == "1,4-7"


async def test_a_mixed_claim_is_enforced_by_the_pool_even_with_partitions(tmp_path: Path) -> None:
    """The claim's CPUs are held once the claim has been prepared, and the report gives the reason."""
    async with enforcing(Node(tmp_path, exclusivity="partition", tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        env = node.claim(mixed(cpu_record("c1", "r=2-3"), "0-7"))
        await node.until(lambda: node.cpus(plain) == "1,4-7")
        vpp = await node.run("vpp", *env)
        assert (node.partition(vpp), node.cpus(vpp)) == ("member", "1-7")
        reported = node.reports["vpp"]
        assert (reported.exclusivity, reported.cpus, reported.claims[0].cpus) == ("pool", parse_cpu_list("1-7"), {2, 3})
        assert ("cpuConfig.poolCPUs" in reported.pool_requested_by, reported.fallback_reason) == (True, "")


async def test_a_mixed_container_avoids_its_pods_partitions(tmp_path: Path) -> None:
    """The container avoids a sibling's CPUs before the sibling starts, while it runs, and when the pool changes."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        own, sibling = mixed(cpu_record("c1", "r=2-3"), "0-7"), cpu_record("c2", "r=4-5")
        env = node.claim(sibling)
        vpp = await node.run("vpp", *node.claim(own), name="vpp")
        assert node.cpus(vpp) == "1-3,6-7"
        db = await node.run("db", *env, name="db")
        held = cpu_record("c3", "r=6", pods=["p3"], pool=True)
        node.claim(held)
        await node.until(lambda: node.cpus(vpp) == "1-3,7")
        assert (node.partition(db), node.cpus(db)) == ("root", "4-5")


async def test_a_partition_in_another_pod_does_not_wait_for_a_mixed_container(tmp_path: Path) -> None:
    """The kernel removes the partition's CPUs from the container and later returns them, without any write."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        vpp = await node.run("vpp", *node.claim(mixed(cpu_record("c1", "r=2-3"), "0-7")))
        node.kernel.written.clear()
        db = await node.run("db", *node.claim(cpu_record("c2", "r=6-7", pods=["p3"])), of="p3")
        assert (node.partition(db), node.cpus(vpp)) == ("root", "1-5")
        await node.stop("db", of="p3")
        assert node.cpus(vpp) == "1-7"
        assert vpp not in {path for path, *_ in node.kernel.written}


async def test_a_partition_is_rejected_on_a_mixed_containers_exclusive_cpus(tmp_path: Path) -> None:
    """Two records contain the same CPU. If the partition were created, the kernel would take this CPU away from the
    running container.
    """
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        node.enforcer.starter.clear_seconds = 0.0
        vpp = await node.run("vpp", *node.claim(mixed(cpu_record("c1", "r=2-3"), "0-7")))
        with pytest.raises(RejectedError, match="container main of pod ns/p1 still runs on the claim's CPUs"):
            await node.create("db", *node.claim(cpu_record("c2", "r=3-4", pods=["p3"])), of="p3")
        assert parse_cpu_list("2-3") <= parse_cpu_list(node.cpus(vpp))


async def test_a_mixed_container_without_one_of_its_exclusive_cpus_is_rejected(tmp_path: Path) -> None:
    """The container's cpuset file is correct, but one of the exclusive CPUs is in another process's partition."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        env = node.claim(mixed(cpu_record("c1", "r=2-3"), "0-7"))
        node.kernel.make("byhand")
        node.kernel.set("byhand", "cpuset.cpus.exclusive", "3")
        node.kernel.set("byhand", "cpuset.cpus.partition", "root")
        with pytest.raises(RejectedError, match=r"cpuset\.cpus must be 1-7 but is 1-2,4-7"):
            await node.run("vpp", *env)


async def test_a_mixed_containers_other_claims_are_enforced_by_the_pool(tmp_path: Path) -> None:
    """A container has only one cgroup, which cannot be a partition for just one of the container's claims."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        plain = await node.run("plain", of="p2")
        env = node.claim(mixed(cpu_record("c1", "r=2-3"), NEAR)) + node.claim(cpu_record("c2", "r=4-5"))
        vpp = await node.run("vpp", *env)
        assert (node.cpus(vpp), node.cpus(plain)) == ("1-5", "1,6-7")


async def test_a_mixed_and_an_isolated_claim_in_one_container_are_rejected(tmp_path: Path) -> None:
    """The frontend checks one claim at a time, so only the backend sees both claims."""
    async with enforcing(Node(tmp_path, tree=PartitionTree)) as node:
        lone = cpu_record("c2", "r=4-5").model_copy(update={"parameters": {"r": CpuParameters(isolation="isolated")}})
        env = node.claim(mixed(cpu_record("c1", "r=2-3"), NEAR)) + node.claim(lone)
        with pytest.raises(RejectedError, match=r"CPUs from the shared pool \(poolCPUs\) and for isolation: isolated"):
            await node.create("vpp", *env)


@pytest.mark.parametrize(("cpus", "runs"), [("1-3", True), ("2-3", True), ("0-7", False), ("1-2", False)])
async def test_a_standby_accepts_exclusive_cpus_with_any_part_of_the_pool(
    tmp_path: Path, cpus: str, runs: bool
) -> None:
    """The standby rejects a start if any of the exclusive CPUs is missing, or if other CPUs are outside the pool."""
    node = Node(tmp_path)
    await node.synchronize()
    env = node.claim(mixed(cpu_record("c1", "r=2-3"), NEAR))
    node.stored = Resources(cpus=cpus)
    if runs:
        await node.run("vpp", *env)
    else:
        with pytest.raises(RejectedError, match="no instance of nri-backend has enforced its claims"):
            await node.run("vpp", *env)


async def test_an_unknown_isolation_is_a_fault() -> None:
    """Releases that do not know ``mixed`` therefore reject a record that contains it."""
    entitlement = entitlement_of(mixed(cpu_record("c1", "r=2-3"), NEAR))
    assert (entitlement.fault, entitlement.partition) == ("", "")
    tomorrow = cpu_record("c1", "r=2-3", isolation="another")
    assert "isolation: another is unknown to this release" in entitlement_of(tomorrow).fault


@st.composite
def nodes(draw: st.DrawFn) -> tuple[bool, str, list[tuple[frozenset[int], str | None, str]]]:
    """Draws a node: whether it supports partitions, its reserved CPUs, and disjoint claims. A claim consists of its
    CPUs, the CPUs near which it uses the pool (None for an exclusive claim), and its pod.
    """
    owners = draw(st.lists(st.integers(0, 5), min_size=8, max_size=8))
    found = []
    for number in sorted(set(owners) - {0, 5}):
        cpus = frozenset(cpu for cpu, owner in enumerate(owners) if owner == number)
        near = draw(st.none() | st.sampled_from(["0-3", "4-7", "0-7"]))
        found.append((cpus, near, draw(st.sampled_from(["p1", "p2", "p3"]))))
    reserved = format_cpu_list(cpu for cpu, owner in enumerate(owners) if owner == 5)
    return draw(st.booleans()), reserved, found


@given(nodes())
def test_exclusive_cpus_are_in_no_other_cpuset(
    given_: tuple[bool, str, list[tuple[frozenset[int], str | None, str]]],
) -> None:
    """Each container has all of its exclusive CPUs, and no other container's cpuset contains them.

    A partition's CPUs are an exception, since the kernel removes them from other pods' cpusets.
    """
    partitions, reserved, claims = given_
    state, records = NodeState(config(reserved)), list[AllocationRecord]()
    state.set_host(Host(MACHINE, (), partitions=partitions))
    for number, (cpus, near, of) in enumerate(claims):
        record = cpu_record(f"c{number}", f"r={format_cpu_list(cpus)}", pods=[of])
        records.append(record if near is None else mixed(record, near))
    state.set_claim_files(files_of(*records))
    state.put(_running(state, "plain", "p9", ()))
    for record in records:
        state.put(_running(state, record.claim.uid, record.reserved_for[0].uid, env_of(record)))
    containers = list(state)
    for one in containers:
        wanted = cpuset_of(state, one)
        assert one.entitlement.cpus <= wanted.cpus
        for other in containers:
            if other.id != one.id:
                common = wanted.cpus & other.entitlement.cpus
                assert not common or (other.observed.partition and other.identity.pod.uid != one.identity.pod.uid)


def _running(state: NodeState, id_: str, of: str, env: tuple[str, ...]) -> Tracked:
    tracked = state.authorized(tracked_as(pod(of), container(id_, *env, of=of, name=id_)))
    assert tracked.rejection is None
    return replace(tracked, phase=Phase.RUNNING).with_observation(partition=state.partition_for(tracked))
