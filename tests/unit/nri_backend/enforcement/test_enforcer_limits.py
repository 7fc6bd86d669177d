# SPDX-License-Identifier: Apache-2.0
"""CPU quota and memory limits, from the runtime's call to the cgroup files."""

from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from nri_backend.budgets import ALL_CONTAINERS_SECONDS, IDLE_SECONDS
from nri_backend.nri.model import LinkStatus, RejectedError, Resources

from tests.fakes.waiting import eventually
from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import POD, PODS, TOP, container, pod
from tests.rigs.enforcement import Node, auditing, enforcing
from tests.rigs.kernel_tree import DENIED
from tests.rigs.partition_tree import PartitionTree

ONE = cpu_record("c1", "cpus=2-3")
ABOVE = (POD, PODS, TOP)
PLAIN = 4096


@pytest.fixture
async def node(memory_dir: Path) -> AsyncIterator[Node]:
    """Yields an active instance. The kubelet limits each pod to three CPUs."""
    async with enforcing(Node(memory_dir)) as node:
        node.pod_quota = "300000"
        yield node


async def test_a_container_whose_claim_covers_its_limit_is_not_throttled(node: Node) -> None:
    """The claimed CPUs are added to the limit of the container's pod. A sibling keeps its own limit."""
    side = await node.run("side", name="side", quota=100_000)
    env = node.claim(ONE)
    stored, answer = await node.create("claim", *env, quota=200_000)
    assert answer.resources == Resources(cpus="2-3", cpu_quota=-1)
    path = node.make_cgroups(pod(), stored)
    node.kernel.set(path, "cpu.max", "200000 100000")  # the runtime ignores the answer
    await node.enforcer.start_container(pod(), stored)
    assert (node.quota(path), node.quota(POD), node.quota(side)) == ("max", "500000", "100000")
    assert (node.reports["claim"].limits, node.reports["side"].limits) == ({"cpu.max": "max"}, {})


async def test_the_pods_cpu_limit_is_restored_after_the_last_claim_container(node: Node) -> None:
    """The container restarts twenty times, and the kubelet resizes the pod once. In the end, the last value that the
    kubelet wrote is restored.
    """
    env = node.claim(ONE)
    await node.run("side", name="side", quota=100_000)
    for life in range(20):
        await node.run(f"life-{life}", *env, quota=200_000)
        assert node.quota(POD) == ("500000" if life <= 7 else "600000")
        if life == 7:
            node.kernel.set(POD, "cpu.max", "400000 100000")
        await node.stop(f"life-{life}")
    await node.until(lambda: node.kernel.get(POD, "cpu.max") == "400000 100000")
    assert node.counts.counters["repaired_cpu"] == 0, "changes that claims cause are not counted as repairs"


@pytest.mark.parametrize("reported", [False, True], ids=["found by the audit", "reported by RemoveContainer"])
async def test_the_pods_limit_is_restored_when_the_claim_containers_last_process_exits(
    node: Node, reported: bool
) -> None:
    """The claim raises the pod's limit until the last process of the claim's container has exited. The limit is then
    restored without waiting for the comparison of all pods' limits, which runs only every 60 s.
    """
    await node.run("side", name="side", quota=100_000)
    path = await node.run("claim", *node.claim(ONE), quota=200_000)
    await node.enforcer.stop_container(pod(), container("claim"))
    waited = node.ahead + 20
    await node.until(lambda: node.ahead >= waited)
    assert node.quota(POD) == "500000"
    node.kernel.remove(path)
    if reported:
        await node.enforcer.remove_container(pod(), container("claim"))
    ended = node.ahead
    await node.until(lambda: node.quota(POD) == "300000")
    assert node.ahead - ended <= 15


async def test_a_new_instance_restores_a_limit_that_the_previous_one_raised(memory_dir: Path) -> None:
    """The original limit is stored on the pod's cgroup. Otherwise, the new instance would raise the already raised
    limit again.
    """
    async with enforcing(Node(memory_dir)) as node:
        node.pod_quota = "300000"
        await node.run("side", name="side", quota=100_000)
        await node.run("claim", *node.claim(ONE), quota=200_000)
        assert node.quota(POD) == "500000"
    other = Node(memory_dir)
    async with auditing(other):
        await other.synchronize(("claim", "p1"), ("side", "p1"))
        await other.enforcer.activate()
        await other.stop("claim")
        await other.until(lambda: other.quota(POD) == "300000")


@pytest.mark.parametrize(("choice", "of_pod"), [("raise", "500000"), ("lift", "max"), ("keep", "300000")])
async def test_the_operator_chooses_how_a_claim_changes_the_pods_cpu_limit(
    memory_dir: Path, choice: Literal["raise", "lift", "keep"], of_pod: str
) -> None:
    """The pod is limited to three CPUs and has a claim for two. The claim's own container is never throttled."""
    async with enforcing(Node(memory_dir, cpu_quota=choice)) as node:
        node.pod_quota = "300000"
        path = await node.run("claim", *node.claim(ONE), quota=200_000)
        assert (node.quota(path), node.quota(POD)) == ("max", of_pod)


async def test_the_kubelets_quota_stays_if_the_claim_keeps_it_or_does_not_cover_it(node: Node) -> None:
    kept = await node.run("kept", *node.claim(cpu_record("c1", "cpus=2-3", quota="keep")), quota=200_000)
    over = await node.run("over", *node.claim(cpu_record("c2", "cpus=4")), name="over", quota=150_000)
    assert (node.quota(kept), node.quota(over), node.quota(POD)) == ("200000", "150000", "300000")
    (update,) = await node.enforcer.update_container(pod(), container("kept"), Resources(cpu_quota=100_000))
    assert update.resources.cpu_quota is None


async def test_a_resize_reevaluates_whether_the_container_is_throttled(node: Node) -> None:
    """A limit above the claim is applied, and a limit that the claim covers is removed."""
    path = await node.run("claim", *node.claim(ONE), quota=200_000)
    (update,) = await node.enforcer.update_container(pod(), container("claim"), Resources(cpu_quota=300_000))
    assert update.resources == Resources(cpus="2-3")
    node.kernel.set(path, "cpu.max", "300000 100000")
    await node.until(lambda: node.quota(POD) == "300000")
    assert node.quota(path) == "300000"
    (update,) = await node.enforcer.update_container(pod(), container("claim"), Resources(cpu_quota=200_000))
    assert update.resources == Resources(cpus="2-3", cpu_quota=-1)
    await node.until(lambda: (node.quota(path), node.quota(POD)) == ("max", "500000"))
    await node.until(lambda: node.counts.counters["repaired_cpu"] >= 1)


async def test_a_claims_memory_limit_is_applied_to_the_container(node: Node) -> None:
    """The limit is the claimed bytes without hugepages, or the container's own limit if that is lower."""
    parts = ("a", 1, 64 * MI, PLAIN), ("h", 1, 2 * MI, 2 * MI)
    env = node.claim(memory_record("m1", *parts, a={"limit": "claim", "high": 0.75}))
    stored, answer = await node.create("claim", *env, limit=128 * MI)
    assert answer.resources.memory_limit == 64 * MI
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert node.kernel.get(path, "memory.max") == str(64 * MI)
    assert node.kernel.get(path, "memory.high") == str(48 * MI)
    assert node.kernel.get(POD, "memory.max") == "max"
    applied = node.reports["claim"].limits
    assert (applied["memory.max"], applied["memory.high"]) == (str(64 * MI), str(48 * MI))
    assert applied["hugetlb.2MB.rsvd.max"] == str(2 * MI)
    node.kernel.set(path, "memory.max", str(32 * MI))
    (update,) = await node.enforcer.update_container(pod(), stored, Resources(memory_limit=96 * MI))
    assert update.resources.memory_limit == 64 * MI
    (update,) = await node.enforcer.update_container(pod(), stored, Resources(memory_limit=32 * MI))
    assert update.resources.memory_limit is None
    await node.enforcer.activate()
    assert node.kernel.get(path, "memory.max") == str(32 * MI), "a lower limit of the kubelet's holds"


@pytest.mark.parametrize("word", ["low", "min"])
async def test_protection_is_raised_in_every_ancestor_and_lowered_afterwards(node: Node, word: str) -> None:
    """The sum over the running containers is added to the kubelet's value, and is repaired if another process resets
    it.
    """
    file = f"memory.{word}"
    node.kernel.make(TOP)
    node.kernel.set(TOP, file, str(10 * MI))
    envs = {
        of: node.claim(memory_record(f"m-{of}", ("a", 1, size * MI, PLAIN), pods=(of,), a={"protect": word}))
        for of, size in (("p1", 64), ("p2", 32))
    }
    path = await node.run("one", *envs["p1"])
    await node.run("two", *envs["p2"], of="p2")

    def shown() -> list[str]:
        return [node.kernel.get(where, file) for where in (path, *ABOVE)]

    def mebibytes(*amounts: int) -> list[str]:
        return [str(amount * MI) for amount in amounts]

    assert shown() == mebibytes(64, 64, 96, 106)
    node.kernel.set(PODS, file, "0")
    await node.until(lambda: shown() == mebibytes(64, 64, 96, 106))
    await node.until(lambda: node.counts.counters["repaired_memory"] == 1)
    await node.stop("two", "p2")
    await node.until(lambda: shown() == mebibytes(64, 64, 64, 74))
    await node.stop("one")
    await node.until(lambda: [node.kernel.get(where, file) for where in ABOVE] == mebibytes(0, 0, 10))


async def test_a_pods_problem_ends_with_the_pod(node: Node) -> None:
    node.kernel.make(POD)
    await node.run("claim", *node.claim(ONE), quota=200_000)
    node.kernel.refused[POD, "cpu.max"] = DENIED
    node.kernel.set(POD, "cpu.max", "300000 100000")
    await node.enforcer.activate()
    assert any("cpu.max" in problem for problem in node.enforcer.problems)
    await node.stop("claim")
    await node.enforcer.remove_container(pod(), container("claim"))
    node.kernel.remove(POD)
    await node.enforcer.activate()
    assert node.enforcer.problems == ()


async def test_a_memory_policy_is_rejected_with_a_runtime_that_cannot_set_one(node: Node) -> None:
    """The message gives the runtime's version and the remedy. With NRI 0.12, the answer contains the policy, but no
    NUMA nodes for the cpuset.
    """
    env = node.claim(memory_record("m1", ("a", 1, 64 * MI, PLAIN), a={"binding": "preferred"}))
    node.enforcer.runtime = LinkStatus(runtime_name="containerd", runtime_version="2.1.9")
    with pytest.raises(
        RejectedError, match=r"preferred .* NRI 0\.12; containerd 2\.1\.9 does not support it.*use binding"
    ):
        await node.create("claim", *env)
    assert node.counts.counters["refused_unsupported"] == 1
    node.enforcer.runtime = replace(node.enforcer.runtime, runtime_version="2.3.0", nri_version="v0.12.0")
    _, answer = await node.create("claim", *env)
    assert (answer.memory_policy is not None, answer.resources.mems) == (True, "")
    other = node.claim(memory_record("m2", ("a", 0, MI, PLAIN), a={"binding": "interleave"}))
    with pytest.raises(RejectedError, match="one memory policy"):
        await node.create("both", *env, *other)


def audited_since(node: Node, audits: int) -> bool:
    """Returns True if more than the given number of audits have ended."""
    return node.counts.counters["audits"] > audits


async def ticks(node: Node, seconds: float) -> None:
    """Advances the audit's clock tick by tick, on a node without claims."""
    end = node.ahead + seconds
    while node.ahead < end:
        audits = node.counts.counters["audits"]
        node.ahead += IDLE_SECONDS
        node.enforcer.signals.audit.set()
        await eventually(partial(audited_since, node, audits))


async def test_an_audit_of_all_containers_compares_their_limits(tmp_path: Path) -> None:
    """In partition mode, no other audit checks the reservation limit of a container without a claim."""
    async with enforcing(Node(tmp_path, guard=True, tree=PartitionTree)) as node:
        path = await node.run("plain")
        await ticks(node, 30)
        node.enforcer._auditor.request_full()
        node.kernel.set(path, "hugetlb.2MB.rsvd.max", "max")
        await ticks(node, ALL_CONTAINERS_SECONDS + IDLE_SECONDS)
        assert node.kernel.get(path, "hugetlb.2MB.rsvd.max") == "0"
