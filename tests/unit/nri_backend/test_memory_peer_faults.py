# SPDX-License-Identifier: Apache-2.0
"""What the memory peer gets wrong and the backend must not, in the order of its page of facts.

The frontend's are in the file of this name there; reconnection is in ``tests/integration/test_nri_session.py``.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from nri_backend.node.preflight import PreflightError, check_node
from nri_backend.nri.model import ContainerState, RefusedError

from tests.fakes.waiting import eventually
from tests.rigs.claims import MI, POD, container, memory_record, pod
from tests.rigs.enforcement import Node

TWO, GIGA = 2 * MI, 1 << 30
UNIFIED = "30 23 0:26 / {root} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate{more}\n"


def limits(node: Node, path: str, size: str = "2MB") -> list[str]:
    """What a cgroup may use and reserve."""
    return [node.kernel.get(path, f"hugetlb.{size}.{name}") for name in ("max", "rsvd.max")]


# Shape


@pytest.mark.parametrize(
    ("more", "lines", "remedy"),
    [
        (",memory_hugetlb_accounting", "", "take it out of the node's mount options"),
        ("", "50 23 0:40 / {root} rw - tmpfs tmpfs rw\n", "unmount all but"),
        ("", "33 30 0:29 / /sys/fs/cgroup/hugetlb rw - cgroup cgroup rw,hugetlb\n", "cgroup_no_v1=all"),
    ],
)
@pytest.mark.fault("memory peer, preflight")
def test_what_cannot_work_is_refused_with_a_remedy(memory: Path, more: str, lines: str, remedy: str) -> None:
    """Accounting of hugepages, a root that is mounted over, hugetlb in cgroup v1: told with what to change."""
    (memory / "proc/self").mkdir(parents=True)
    root = memory / "cgroup"
    (memory / "proc/self/mountinfo").write_text((UNIFIED + lines).format(root=root, more=more))
    root.mkdir()
    (root / "cgroup.controllers").write_text("cpuset cpu memory\n")
    with pytest.raises(PreflightError, match=remedy):
        check_node(str(root), str(memory), [])


# NRI


@pytest.mark.fault("memory peer, nri")
async def test_claims_of_one_size_add_up(node: Node) -> None:
    """Two claims of 64 MiB are 128 MiB, in the answer and in the kernel's files."""
    env = node.claim(memory_record("m1", ("a", 0, 64 * MI, TWO))) + node.claim(
        memory_record("m2", ("a", 0, 64 * MI, TWO))
    )
    stored, answer = await node.create("c", *env)
    assert answer.resources.hugepage_limits == {"2MB": 128 * MI}
    path = node.make_cgroups(pod(), stored)
    await node.enforcer.start_container(pod(), stored)
    assert limits(node, path) == limits(node, POD) == [str(128 * MI)] * 2


@pytest.mark.fault("memory peer, nri")
async def test_two_nodes_and_two_sizes_of_one_claim_are_all_kept(node: Node) -> None:
    """Mems are the union, limits the sums by size."""
    record = memory_record("m", ("a", 0, 4 * MI, TWO), ("b", 1, 6 * MI, TWO), ("c", 1, GIGA, GIGA))
    path = await node.run("c", *node.claim(record))
    assert node.kernel.get(path, "cpuset.mems") == "0-1"
    assert (limits(node, path), limits(node, path, "1GB")) == ([str(10 * MI)] * 2, [str(GIGA)] * 2)


@pytest.mark.fault("memory peer, nri")
async def test_reservations_are_limited_as_well(node: Node) -> None:
    """With ``max`` alone mmap succeeds and the first touch is SIGBUS; so is every size that nobody claimed."""
    path = await node.run("c", *node.claim(memory_record("m", ("a", 0, 64 * MI, TWO))))
    for where in (path, POD):
        assert node.kernel.get(where, "hugetlb.2MB.rsvd.max") == str(64 * MI)
    assert limits(node, path, "1GB") == ["0", "0"]


@pytest.mark.fault("memory peer, nri")
async def test_the_pods_limit_does_not_grow_at_restarts(node: Node) -> None:
    """Twenty lives of one container: the limit is the claim, on top of what the kubelet itself gave."""
    env = node.claim(memory_record("m", ("a", 0, 64 * MI, TWO)))
    node.kernel.make(POD)
    for size in ("2MB", "1GB"):
        node.kernel.set(POD, f"hugetlb.{size}.max", str(8 * MI) if size == "2MB" else "0")
    for life in range(20):
        await node.run(f"life-{life}", *env)
        assert limits(node, POD) == [str(72 * MI)] * 2
        await node.stop(f"life-{life}")
        await node.enforcer.remove_container(pod(), container(f"life-{life}"))


@pytest.mark.fault("memory peer, nri")
async def test_an_unknown_sandbox_does_not_fail_synchronize(node: Node) -> None:
    """A container whose sandbox the runtime no longer lists is passed over for claims; the others are all known."""
    record = memory_record("m", ("a", 1, 64 * MI, TWO))
    claim = replace(container("c", *node.claim(record)), state=ContainerState.RUNNING)
    stray = replace(container("stray", of="gone"), state=ContainerState.RUNNING)
    path = node.make_cgroups(pod(), claim)
    await node.enforcer.synchronize([pod()], [stray, claim])
    await eventually(
        lambda: node.kernel.get(path, "cpuset.mems.effective") == "1" and limits(node, path)[1] == str(64 * MI)
    )


@pytest.mark.fault("memory peer, nri")
async def test_a_removed_sandbox_does_not_forget_its_claims(node: Node) -> None:
    """Only the frontend gives claims back: a new sandbox of the pod finds its memory, another pod is still refused."""
    env = node.claim(memory_record("m", ("a", 1, 64 * MI, TWO)))
    await node.run("first", *env)
    await node.stop("first")
    await node.enforcer.remove_container(pod(), container("first"))
    await node.enforcer.remove_pod(pod())
    with pytest.raises(RefusedError, match="not known to be reserved for this pod"):
        await node.create("thief", *env, of="p2")
    path = await node.run("again", *env)
    assert (node.kernel.get(path, "cpuset.mems"), limits(node, path)) == ("1", [str(64 * MI)] * 2)


@pytest.mark.fault("memory peer, nri")
async def test_one_claim_is_one_container(node: Node) -> None:
    """A second container of the pod is refused with a reason, the first may come again."""
    env = node.claim(memory_record("m", ("a", 1, 64 * MI, TWO)))
    await node.run("first", *env)
    with pytest.raises(RefusedError, match="belongs to container main"):
        await node.create("second", *env, name="side")
    await node.stop("first")
    assert node.kernel.get(await node.run("first-again", *env), "cpuset.mems") == "1"


@pytest.mark.fault("memory peer, nri")
async def test_a_memory_claim_is_more_than_mems(node: Node) -> None:
    """Where it asks for them it has a limit, and protection that every cgroup above it passes on (needs A5)."""
    record = memory_record("m", ("a", 1, 64 * MI, 4096), a={"limit": "claim", "protect": "min"})
    path = await node.run("c", *node.claim(record))
    assert node.kernel.get(path, "memory.max") == str(64 * MI)
    assert [node.kernel.get(where, "memory.min") for where in (path, POD)] == [str(64 * MI)] * 2


@pytest.mark.fault("memory peer, nri")
async def test_evidence_that_lies_is_refused(node: Node) -> None:
    """Claims are what the record says, not what a variable says: more nodes or bytes than claimed is no container."""
    variables = node.claim(memory_record("m", ("a", 1, 64 * MI, TWO)))
    more = [variable.replace("size:64Mi", "size:1Gi") for variable in variables]
    with pytest.raises(RefusedError, match="is not what the claim was given"):
        await node.create("liar", *more)
