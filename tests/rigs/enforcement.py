# SPDX-License-Identifier: Apache-2.0
"""A node with an enforcer: claim files, a simulated cgroup tree, and telemetry that the tests can read."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from nri_backend.containers.state import NodeState
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.enforcement.reconciler import Deps
from nri_backend.enforcement.recorder import EnforcementRecords
from nri_backend.frontend_link.reports import report
from nri_backend.limits.runtime import cgroup_directory
from nri_backend.node.heartbeat import Leadership
from nri_backend.node.model import Host
from nri_backend.nri.model import Adjustment, Container, ContainerState, Pod, Resources, Update
from nri_backend.problems import NO_PROBLEM
from nri_backend.telemetry import Telemetry
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord
from numa_contract.reports import ContainerReport
from numa_node.claim_directory import ClaimDirectory

from tests.fakes.waiting import patience
from tests.rigs.builders import env_of, write_claim
from tests.rigs.containers import NO_SUCH_KERNEL, config, container, pod
from tests.rigs.kernel_tree import SIZES, KernelTree
from tests.rigs.partition_tree import PARTITION, PartitionTree


def deps_of(
    directory: ClaimDirectory,
    tree: KernelTree,
    read_host: Callable[[], Host],
    records: type[EnforcementRecords] = EnforcementRecords,
) -> Deps:
    """Returns the dependencies of a standby, which runs next to an active instance.

    The enforcement records are stored in the parent directory of the cgroup tree.
    """
    own, _, _ = tree.root.rpartition("/")
    return Deps(
        directory=directory,
        tree=tree,
        read_host=read_host,
        enforcement_records=records(own, tree),
        leadership=lambda: Leadership(fresh=True, first=False),
        telemetry=Telemetry(),
    )


class Node:
    """A node with eight CPUs, of which CPU 0 is reserved, and the actions of its kubelet and runtime."""

    def __init__(
        self,
        root: Path,
        reserved: str = "0",
        *,
        lazy: bool = False,
        guard: bool = False,
        cpu_quota: Literal["raise", "lift", "keep"] = "raise",
        exclusivity: Literal["auto", "partition", "pool"] = "auto",
        tree: Callable[[Path], KernelTree] = KernelTree,
        records: type[EnforcementRecords] = EnforcementRecords,
    ) -> None:
        self.pod_quota = "max"
        """Quota that the kubelet writes to a pod's ``cpu.max``."""
        self.pod_limits: dict[str, str] = {}
        """Values that the kubelet writes to a pod's other files, by file name."""
        self.cdi = root / "cdi"
        self.cdi.mkdir(exist_ok=True)
        self.kernel = tree(root / "cgroup")
        capable = isinstance(self.kernel, PartitionTree)
        self.host = Host(parse_cpu_list("0-7"), SIZES, capable, NO_PROBLEM if capable else NO_SUCH_KERNEL)
        self.counts = Telemetry()
        self.ahead = 0.0
        """Seconds by which the audit's clock is ahead of the monotonic clock."""
        self.leader = Leadership(fresh=True, first=False)
        """The active instance, as a standby sees it."""
        self.stored = Resources()
        """Resources that the other NRI plugins set when a container is created."""
        deps = replace(
            deps_of(ClaimDirectory(str(self.cdi)), self.kernel, lambda: self.host, records),
            leadership=lambda: self.leader,
            telemetry=self.counts,
            clock=lambda: time.monotonic() + self.ahead,
        )
        state = NodeState(config(reserved, lazy=lazy, guard=guard, quota=cpu_quota, exclusivity=exclusivity))
        state.set_host(self.host)
        self.enforcer = Enforcer(deps, state, "own_pod")
        # A hook may wait until a slow machine has moved the other containers. The product's own limit is tested in
        # test_budgets.py.
        self.enforcer.starter.clear_seconds = 8 * patience()

    @property
    def reports(self) -> dict[str, ContainerReport]:
        """Reports to the frontend, by container id: tracked containers and rejected attempts."""
        state = self.enforcer.state
        return {one.id: report(one) for one in (*state, *state.rejected.values())}

    def claim(self, record: AllocationRecord) -> tuple[str, ...]:
        """Writes a claim's file. Returns the environment of a container that uses the claim."""
        write_claim(self.cdi, record)
        return env_of(record)

    def unprepare(self, record: AllocationRecord) -> None:
        """Removes a claim's file."""
        (self.cdi / f"dra.k8s.io-{record.driver.removeprefix('dra.')}_claim-{record.claim.uid}.json").unlink()

    def make_pod(self, of: Pod) -> None:
        """Creates a pod's cgroup with its limits, as the kubelet does, unless it exists."""
        parent = cgroup_directory(of.cgroup_parent)
        if self.kernel.path(parent).exists():
            return
        self.kernel.make(parent)
        no_pages = {f"hugetlb.{size}.max": "0" for size in ("2MB", "1GB")}
        for file, text in {"cpu.max": f"{self.pod_quota} 100000", **no_pages, **self.pod_limits}.items():
            self.kernel.set(parent, file, text)

    def make_cgroups(self, of: Pod, one: Container, sizes: tuple[int, ...] = SIZES) -> str:
        """Creates the cgroups of a pod and of a container with their limits, as the kubelet and the OCI runtime do.

        Existing cgroups are kept. Returns the path of the container's cgroup.
        """
        self.make_pod(of)
        path = cgroup_directory(one.cgroups_path)
        if not self.kernel.path(path).exists():
            self.kernel.make(path, sizes=sizes)
        if (quota := one.resources.cpu_quota) is not None:
            self.kernel.set(path, "cpu.max", f"{'max' if quota < 0 else quota} 100000")
        if one.resources.memory_limit is not None:
            self.kernel.set(path, "memory.max", str(one.resources.memory_limit))
        # Stock containerd applies CPUs and mems but drops hugepage limits.
        for name, text in (("cpuset.cpus", one.resources.cpus), ("cpuset.mems", one.resources.mems)):
            if text:
                self.kernel.set(path, name, text)
        return path

    async def create(
        self,
        id_: str,
        *env: str,
        of: str = "p1",
        name: str = "main",
        quota: int | None = None,
        limit: int | None = None,
    ) -> tuple[Container, Adjustment]:
        """Creates a container with the kubelet's ``quota`` and memory ``limit``.

        Returns the container as the runtime then stores it, and the response to CreateContainer.
        """
        asked = container(id_, *env, of=of, name=name)
        asked = replace(asked, resources=replace(asked.resources, cpu_quota=quota, memory_limit=limit))
        answer = await self.enforcer.create_container(pod(of), asked)
        stored_env = (*asked.env, *(f"{key}={value}" for key, value in answer.env.items()))
        resources = answer.resources if self.enforcer.active else self.stored
        if resources.cpu_quota is None:
            resources = replace(resources, cpu_quota=quota)
        if resources.memory_limit is None:
            resources = replace(resources, memory_limit=limit)
        return replace(asked, env=stored_env, resources=resources, state=ContainerState.CREATED), answer

    async def run(self, id_: str, *env: str, of: str = "p1", name: str = "main", **limits: int) -> str:
        """Creates and starts a container, with limits as in create(). Returns the path of its cgroup."""
        stored, _ = await self.create(id_, *env, of=of, name=name, **limits)
        path = self.make_cgroups(pod(of), stored)
        await self.enforcer.start_container(pod(of), stored)
        return path

    async def until(self, condition: Callable[[], object]) -> None:
        """Runs the audit with its clock advancing until the condition is true.

        Raises TimeoutError after 20 seconds, multiplied by the tests' patience factor.
        """
        async with asyncio.timeout(20 * patience()):
            while not condition():
                self.ahead += 1.0
                self.enforcer.signals.audit.set()
                await asyncio.sleep(0.002)

    async def stop(self, id_: str, of: str = "p1") -> None:
        """Removes a container's cgroup and reports that the container has exited, as the runtime does."""
        one = container(id_, of=of)
        path = cgroup_directory(one.cgroups_path)
        if self.kernel.path(path).exists():
            self.kernel.remove(path)
        await self.enforcer.stop_container(pod(of), one)

    async def synchronize(self, *ids: tuple[str, str], **cpus: str) -> list[Update]:
        """Sends the runtime's list of containers: (id, pod) pairs, and stored CPUs by id. Returns the updates."""
        containers = [replace(container(i, of=of, cpus=cpus.get(i, "")), state=ContainerState.RUNNING) for i, of in ids]
        pods = [pod(uid) for uid in dict.fromkeys(of for _, of in ids)]
        return await self.enforcer.synchronize(pods, containers)

    def quota(self, path: str) -> str:
        """Returns a cgroup's CPU quota in microseconds per period, or "max"."""
        return self.kernel.get(path, "cpu.max").partition(" ")[0]

    def partition(self, path: str) -> str:
        """Returns the content of a cgroup's partition file."""
        return self.kernel.get(path, PARTITION)

    def cpus(self, path: str) -> str:
        """Returns a cgroup's effective CPUs."""
        return self.kernel.get(path, "cpuset.cpus.effective")


@contextlib.asynccontextmanager
async def auditing(node: Node) -> AsyncIterator[None]:
    """Runs the instance's audit inside the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(node.enforcer.run_forever())
        yield
        task.cancel()


@contextlib.asynccontextmanager
async def enforcing(node: Node) -> AsyncIterator[Node]:
    """Activates the instance, connects it to a runtime without containers, and runs its audit inside the block."""
    async with auditing(node):
        await node.enforcer.activate()
        await node.enforcer.synchronize([], [])
        yield node
