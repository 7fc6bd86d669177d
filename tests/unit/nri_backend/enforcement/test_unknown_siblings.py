# SPDX-License-Identifier: Apache-2.0
"""The limits of a pod in which one container's claim has no record."""

from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.nri.model import ContainerState, RejectedError
from numa_contract.records import AllocationRecord

from tests.rigs.builders import MI, cpu_record, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, auditing

TWO = 2 * MI
HUGE = "hugetlb.2MB.max"
PAGES = memory_record("m2", ("m", 0, 32 * MI, TWO))


async def run_without_record(node: Node, record: AllocationRecord) -> None:
    """Runs a container whose claim no longer has a record and that started while no instance was connected."""
    sibling = replace(container("a", *node.claim(record), name="a"), state=ContainerState.RUNNING)
    node.make_cgroups(pod(), sibling)
    node.unprepare(record)
    await node.enforcer.activate()
    await node.enforcer.synchronize([pod()], [sibling])


async def test_a_pods_limit_is_raised_for_the_other_claims_despite_an_unknown_one(memory_dir: Path) -> None:
    """If the limit is reset, it is raised again. It is not lowered, since the running container may use the pages."""
    node = Node(memory_dir)
    async with auditing(node):
        await run_without_record(node, cpu_record("u1", "cpus=5"))
        path = await node.run("b", *node.claim(PAGES), name="b")
        assert [node.kernel.get(where, HUGE) for where in (path, POD)] == [str(32 * MI)] * 2
        node.kernel.set(POD, HUGE, "0")
        await node.until(lambda: node.kernel.get(POD, HUGE) == str(32 * MI))
        node.unprepare(PAGES)
        await node.stop("b")
        node.kernel.set(POD, HUGE, str(48 * MI))
        audits = node.counts.counters["audits"]
        await node.until(lambda: node.counts.counters["audits"] > audits + 40)
        assert node.kernel.get(POD, HUGE) == str(48 * MI), "the limit is not lowered while the container runs"


async def test_claimed_pages_are_rejected_while_a_siblings_memory_claim_is_unknown(memory_dir: Path) -> None:
    """Once the sibling's claim has a record, the same start succeeds."""
    node, record = Node(memory_dir), memory_record("m1", ("m", 0, 64 * MI, TWO))
    async with auditing(node):
        await run_without_record(node, record)
        env = node.claim(PAGES)
        with pytest.raises(RejectedError, match=r"container a in the same pod .* no record, .* delete the pod"):
            await node.run("b", *env, name="b")
        await node.run("c", *node.claim(cpu_record("u2", "cpus=3")), name="c")
        node.claim(record)
        await node.run("d", *env, name="d")
        assert node.kernel.get(POD, HUGE) == str(96 * MI)
