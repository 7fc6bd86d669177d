# SPDX-License-Identifier: Apache-2.0
"""Limits for pods and containers, both with kubelets that add claims to limits (KEP-5517) and with kubelets that do
not.

``tests/fakes/kubelet_cgroups.py`` computes the limits that the kubelet sets. The tests compare the contents of the
cgroup files with the expected limits.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from nri_backend.nri.model import ContainerState, Resources
from numa_contract.records import AllocationRecord

from tests.fakes.kubelet_cgroups import Limits, claim_status, container_limits, pod_limits
from tests.rigs.builders import MI, cpu_record, env_of, memory_record
from tests.rigs.containers import POD, container, pod
from tests.rigs.enforcement import Node, enforcing

TWO = 2 * MI
HUGE = "hugetlb.2MB.max"
RESERVABLE = "hugetlb.2MB.rsvd.max"
FILES = ("cpu.max", "memory.max", HUGE, RESERVABLE)
KUBELETS = [("1.36", False), ("1.36", True), ("1.37", False), ("1.37", True)]
Files = dict[str, dict[str, str]]
"""File contents, keyed by container. The key for the pod's own files is ``pod``."""

CPUS = cpu_record("c1", "cpus=2-3")
PAGES = memory_record("m1", ("pages", 0, 64 * MI, TWO))
MEMORY = memory_record("m2", ("memory", 0, 256 * MI, 4096), memory={"limit": "claim"})


@dataclass(frozen=True)
class ClaimPod:
    """A pod, its claims, and the containers that use them."""

    containers: Mapping[str, dict[str, str]]
    """Container limits, by container name."""
    claims: Mapping[str, tuple[AllocationRecord, ...]]
    init: Mapping[str, dict[str, str]] = field(default_factory=dict)
    pod: dict[str, str] = field(default_factory=dict)
    """Limits set on the pod itself."""

    def document(self) -> dict[str, Any]:
        """Returns the pod as the kubelet sees it. Its status contains ``nodeAllocatableResourceClaimStatuses``, which
        is written by a scheduler that counts claims.
        """
        records = {one.claim.uid: one for held in self.claims.values() for one in held}
        users = {uid: [n for n, held in self.claims.items() if uid in {o.claim.uid for o in held}] for uid in records}
        statuses = [claim_status(uid, users[uid], _mapped(record)) for uid, record in records.items()]
        parts = {kind: [_part(n, one) for n, one in of.items()] for kind, of in self._kinds().items()}
        level = {"resources": {"limits": self.pod}} if self.pod else {}
        return {"spec": {**parts, **level}, "status": {"nodeAllocatableResourceClaimStatuses": statuses}}

    def _kinds(self) -> dict[str, Mapping[str, dict[str, str]]]:
        return {"initContainers": self.init, "containers": self.containers}


def _part(name: str, limits: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "resources": {"limits": limits}}


def _mapped(record: AllocationRecord) -> dict[str, str]:
    if record.cpus:
        return {"cpu": str(len(record.cpus_of()))}
    return {"hugepages-2Mi" if part.hugepages else "memory": str(part.size) for part in record.memory}


async def run_pod(root: Path, claim_pod: ClaimPod, release: str, *, gate: bool, keeps: bool = False) -> Files:
    """Runs the pod on a kubelet of the given release and returns its cgroup files. If ``keeps`` is set, the runtime
    keeps the hugepage limits that it receives from the kubelet; otherwise it drops them.
    """
    document = claim_pod.document()
    counts = release == "1.37" and gate
    held = {name: [one.model_copy(update={"counted": counts}) for one in of] for name, of in claim_pod.claims.items()}
    async with enforcing(Node(root, guard=True)) as node:
        limits = pod_limits(document, release, gate=gate)
        node.pod_quota = _text(limits.cpu_quota)
        node.pod_limits = {"memory.max": _text(limits.memory), HUGE: str(limits.hugepages.get("2Mi", 0))}
        for record in {one.claim.uid: one for of in held.values() for one in of}.values():
            node.claim(record)
        shown: Files = {}
        for name in (*claim_pod.init, *claim_pod.containers):
            env = [variable for record in held.get(name, ()) for variable in env_of(record)]
            path = await _run(node, name, env, container_limits(document, name, release, gate=gate), keeps=keeps)
            shown[name] = {file: node.kernel.get(path, file).partition(" ")[0] for file in FILES}
            if name in claim_pod.init:
                await node.stop(name)
        shown["pod"] = {file: node.kernel.get(POD, file).partition(" ")[0] for file in FILES}
        return shown


async def _run(node: Node, name: str, env: list[str], limits: Limits, *, keeps: bool) -> str:
    pages = {"2MB": limits.hugepages.get("2Mi", 0), "1GB": limits.hugepages.get("1Gi", 0)} if keeps else {}
    stated = Resources(cpu_quota=limits.cpu_quota, memory_limit=limits.memory, hugepage_limits=pages)
    asked = replace(container(name, *env, name=name), resources=stated)
    # The kubelet limits the pod before the runtime creates a container. Otherwise, an audit could raise a limit of 0.
    node.make_pod(pod())
    answer = (await node.enforcer.create_container(pod(), asked)).resources
    stored = replace(
        answer,
        cpu_quota=stated.cpu_quota if answer.cpu_quota is None else answer.cpu_quota,
        memory_limit=stated.memory_limit if answer.memory_limit is None else answer.memory_limit,
        hugepage_limits={**pages, **answer.hugepage_limits} if keeps else {},
    )
    created = replace(asked, resources=stored, state=ContainerState.CREATED)
    path = node.make_cgroups(pod(), created)
    for size, limit in stored.hugepage_limits.items():
        for file in (f"hugetlb.{size}.max", f"hugetlb.{size}.rsvd.max"):
            node.kernel.set(path, file, str(limit))
    await node.enforcer.start_container(pod(), created)
    return path


def _text(limit: int | None) -> str:
    return "max" if limit is None else str(limit)


def _huge(limit: int) -> dict[str, str]:
    return {HUGE: str(limit), RESERVABLE: str(limit)}


CASES = {
    "no hugepages requested": (
        ClaimPod({"work": {}, "side": {}}, {"work": (PAGES,)}),
        {"work": _huge(64 * MI), "side": {RESERVABLE: "0"}, "pod": {HUGE: str(64 * MI)}},
    ),
    "as many hugepages requested as claimed": (
        ClaimPod({"work": {"hugepages-2Mi": "64Mi", "memory": "1Gi"}}, {"work": (PAGES,)}),
        {"work": _huge(128 * MI), "pod": {HUGE: str(128 * MI)}},
    ),
    "a claim that two containers share": (
        ClaimPod(
            {"one": {"hugepages-2Mi": "8Mi"}, "two": {"hugepages-2Mi": "8Mi"}},
            dict.fromkeys(("one", "two"), (PAGES.model_copy(update={"sharing": "pod"}),)),
        ),
        {"pod": {HUGE: str(80 * MI)}},
    ),
    "a claim of an init container": (
        ClaimPod({"work": {}}, {"init": (PAGES,), "work": (PAGES,)}, init={"init": {}}),
        {"init": _huge(64 * MI), "work": _huge(64 * MI), "pod": {HUGE: str(64 * MI)}},
    ),
    "CPU limit equal to the claim": (
        ClaimPod({"work": {"cpu": "2", "memory": "1Gi"}, "side": {"cpu": "1", "memory": "1Gi"}}, {"work": (CPUS,)}),
        {"work": {"cpu.max": "max"}, "side": {"cpu.max": "100000"}, "pod": {"cpu.max": "500000"}},
    ),
    "CPU limit below the claim": (
        ClaimPod({"work": {"cpu": "500m"}}, {"work": (CPUS,)}),
        {"work": {"cpu.max": "max"}, "pod": {"cpu.max": "250000"}},
    ),
    "no CPU limit": (
        ClaimPod({"work": {}, "side": {"cpu": "1"}}, {"work": (CPUS,)}),
        {"work": {"cpu.max": "max"}, "side": {"cpu.max": "100000"}, "pod": {"cpu.max": "max"}},
    ),
    "two CPU claims in two containers": (
        ClaimPod(
            {"one": {"cpu": "2"}, "two": {"cpu": "1"}},
            {"one": (CPUS,), "two": (cpu_record("c2", "cpus=4"),)},
        ),
        {"one": {"cpu.max": "max"}, "two": {"cpu.max": "max"}, "pod": {"cpu.max": "600000"}},
    ),
    "memory that the claim limits": (
        ClaimPod({"work": {"memory": "512Mi"}, "side": {}}, {"work": (MEMORY,)}),
        {"work": {"memory.max": str(256 * MI)}, "side": {"memory.max": "max"}, "pod": {"memory.max": "max"}},
    ),
    "memory that the claim alone limits": (
        ClaimPod({"work": {}}, {"work": (MEMORY, PAGES, CPUS)}),
        {"work": {"memory.max": str(256 * MI), "cpu.max": "max", **_huge(64 * MI)}, "pod": {"memory.max": "max"}},
    ),
}


@pytest.mark.parametrize("keeps", [False, True], ids=["containerd", "cri-o"])
@pytest.mark.parametrize(("release", "gate"), KUBELETS)
@pytest.mark.parametrize("name", CASES)
async def test_limits_do_not_depend_on_whether_the_kubelet_counts_claims(
    memory_dir: Path, name: str, release: str, gate: bool, keeps: bool
) -> None:
    """The limits are also the same whether or not the runtime keeps the kubelet's hugepage limits."""
    claim_pod, expected = CASES[name]
    shown = await run_pod(memory_dir, claim_pod, release, gate=gate, keeps=keeps)
    assert {name: {file: shown[name][file] for file in files} for name, files in expected.items()} == expected


@pytest.mark.parametrize(("release", "gate"), KUBELETS)
async def test_the_memory_limit_is_the_kubelets_if_the_claim_sets_none(
    memory_dir: Path, release: str, gate: bool
) -> None:
    """A kubelet that counts claims adds the claim to the limit from the spec. The backend changes nothing."""
    claim_pod = ClaimPod({"work": {"memory": "512Mi"}}, {"work": (memory_record("m", ("memory", 0, 256 * MI, 4096)),)})
    stated = _text(pod_limits(claim_pod.document(), release, gate=gate).memory)
    assert stated == str((768 if (release, gate) == ("1.37", True) else 512) * MI)
    shown = await run_pod(memory_dir, claim_pod, release, gate=gate)
    assert {name: files["memory.max"] for name, files in shown.items()} == {"work": stated, "pod": stated}


async def test_claims_are_not_added_to_a_pod_level_limit_if_the_kubelet_counts_them(memory_dir: Path) -> None:
    """The author of a pod-level limit has already included the claims, so the kubelet adds nothing."""
    claim_pod = ClaimPod({"work": {}}, {"work": (CPUS, PAGES)}, pod={"cpu": "3", "hugepages-2Mi": "96Mi"})
    shown = await run_pod(memory_dir, claim_pod, "1.37", gate=True)
    assert shown["pod"] | {"memory.max": ""} == {
        "cpu.max": "300000", HUGE: str(96 * MI), RESERVABLE: str(96 * MI), "memory.max": ""
    }  # fmt: skip


async def test_claims_are_added_if_the_kubelets_limit_cannot_contain_them(memory_dir: Path) -> None:
    """According to the record, the kubelet counts the claims, but the kubelet's limit is smaller than the claims."""
    claims = {"work": tuple(one.model_copy(update={"counted": True}) for one in (PAGES, CPUS))}
    async with enforcing(Node(memory_dir)) as node:
        node.pod_quota = "100000"
        env = [variable for record in claims["work"] for variable in node.claim(record)]
        path = await node.run("work", *env, quota=100_000)
        assert (node.quota(path), node.quota(POD)) == ("max", "300000")
        assert [node.kernel.get(where, HUGE) for where in (path, POD)] == [str(64 * MI)] * 2


UPSTREAM = [
    # The limits of two containers that share a claim for 1 CPU and 1000Mi, the pod's limits, and the expected limits in
    # the pod's and the first container's cgroups.
    ({"cpu": "2", "memory": "2Gi"}, {}, (500_000, 5096), (300_000, 3048)),
    ({"cpu": "1", "memory": "1Gi"}, {}, (300_000, 3048), (200_000, 2024)),
    ({}, {}, (None, None), (None, None)),
    ({}, {"cpu": "4", "memory": "4Gi"}, (400_000, 4096), (400_000, 4096)),
    ({"cpu": "2", "memory": "2Gi"}, {"cpu": "4", "memory": "4Gi"}, (400_000, 4096), (300_000, 3048)),
]


@pytest.mark.parametrize(("limits", "level", "of_pod", "of_container"), UPSTREAM)
def test_the_fake_kubelet_computes_the_limits_from_kubernetes_own_test(
    limits: dict[str, str],
    level: dict[str, str],
    of_pod: tuple[int | None, int | None],
    of_container: tuple[int | None, int | None],
) -> None:
    """In Kubernetes' test, two containers share a claim (test/e2e/node, 1.37)."""
    document = ClaimPod({"c1": limits, "c2": limits}, {}, pod=level).document()
    status = claim_status("claim", ["c1", "c2"], {"cpu": "1", "memory": "1000Mi"})
    document["status"]["nodeAllocatableResourceClaimStatuses"] = [status]

    def figures(found: Limits) -> tuple[int | None, int | None]:
        return found.cpu_quota, None if found.memory is None else found.memory // MI

    assert figures(pod_limits(document, "1.37", gate=True)) == of_pod
    assert figures(container_limits(document, "c1", "1.37", gate=True)) == of_container
