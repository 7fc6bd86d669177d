# SPDX-License-Identifier: Apache-2.0
"""An instance in observe mode reports exactly the values that an audit would write, and its hooks change nothing."""

import contextlib
import os
import random
from pathlib import Path
from typing import Final

import pytest
from nri_backend.claims.authorization import Reason
from nri_backend.containers.lifecycle import Phase
from nri_backend.enforcement.hooks import Enforcer
from nri_backend.enforcement.observer import Observer
from nri_backend.enforcement.standby import REFUSAL
from nri_backend.host_isolation.isolation import HostIsolation
from nri_backend.node.cgroups import CgroupTree
from nri_backend.node.node_files import ObservedFiles
from nri_backend.nri.model import Adjustment, RejectedError
from numa_contract.backend_codes import BackendCode
from numa_contract.reports import MAX_OBSERVED, Observation

from tests.rigs.builders import cpu_record, env_of, memory_record
from tests.rigs.containers import container, pod
from tests.rigs.enforcement import Node, enforcing
from tests.rigs.irq_tree import IrqTree
from tests.rigs.kernel_tree import MI, KernelTree
from tests.rigs.partition_tree import PartitionTree
from tests.unit.nri_backend.host_isolation.test_isolation import node as state_with_claims
from tests.unit.nri_backend.host_isolation.test_isolation import put, settings

_DERIVED: Final = ("cpuset.cpus.effective", "cpuset.mems.effective", "cpuset.cpus.exclusive.effective")
Content = dict[str, tuple[str, bytes]]


def content(tree: CgroupTree) -> Content:
    """Returns the content and the extended attribute of each file and cgroup. Files that the kernel computes are left
    out.
    """
    found: Content = {}
    for path in Path(tree.root).rglob("*"):
        attribute = b""
        with contextlib.suppress(OSError):
            attribute = os.getxattr(path, "user.dra-driver-numa")
        if path.name not in _DERIVED:
            text = path.read_text().strip() if path.is_file() else ""
            found[str(path.relative_to(tree.root))] = text, attribute
    return found


def observer_of(node: Node) -> Observer:
    """Returns an observer for the node's state and cgroups."""
    files = ObservedFiles()
    tree = CgroupTree(node.kernel.root, files)
    return Observer(node.enforcer, tree, files, lambda: ())


def desired(found: Observation) -> dict[str, str]:
    """Returns the desired contents by path relative to the cgroup root."""
    return {f"{one.cgroup}/{one.file}": one.desired for one in found.changes}


def drift(node: Node, chance: random.Random, paths: list[str]) -> None:
    """Changes some files, as other programs and users would."""
    values = {
        "cpuset.cpus": ("", "0-7", "1-3", "4"),
        "cpuset.mems": ("", "0", "0-1"),
        "cpu.max": ("max 100000", "50000 100000"),
        "memory.low": ("0", "4096"),
        "hugetlb.2MB.rsvd.max": ("max", "0", str(64 * MI)),
        "hugetlb.2MB.max": ("max", "0"),
    }
    for _ in range(chance.randint(1, 8)):
        file = chance.choice([*values])
        node.kernel.set(chance.choice(paths), file, chance.choice(values[file]))


@pytest.mark.parametrize("tree", [KernelTree, PartitionTree])
@pytest.mark.parametrize("seed", range(8))
async def test_an_audit_writes_exactly_what_was_reported(tmp_path: Path, seed: int, tree: type[KernelTree]) -> None:
    """Pods, claims and changes by other programs are random. The observer's pass changes no file, and the audits that
    follow write exactly the changes that the pass has reported.
    """
    chance = random.Random(seed)
    node = Node(tmp_path, guard=chance.random() < 0.5, tree=tree)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    env = [
        *node.claim(cpu_record("c1", "r=2-3")),
        *(node.claim(memory_record("m1", ("m", 0, 4 * MI, 2 * MI))) if chance.random() < 0.7 else ()),
    ]
    paths = [await node.run("a", *env, quota=20000)] if chance.random() < 0.8 else []
    paths += [await node.run(f"x{number}", of="p1", name=f"n{number}") for number in range(chance.randint(1, 3))]
    paths += [await node.run(f"y{number}", of="p2", name=f"n{number}") for number in range(chance.randint(0, 2))]
    drift(node, chance, paths)
    before = content(node.kernel)
    observer = observer_of(node)
    await observer.run_pass()
    assert content(node.kernel) == before
    found = observer.observation
    assert found.complete
    assert found.total == len(found.changes) == found.cgroup_files
    reported = {
        path: text.partition(" ")[0] for path, text in desired(found).items() if text.strip() != before[path][0]
    }

    def written() -> dict[str, str]:
        after = content(node.kernel)
        return {path: text.partition(" ")[0] for path, (text, _) in after.items() if text != before[path][0]}

    for _ in range(20):
        # An invalidated partition is recreated after the sibling that invalidated it has been moved. On a busy machine,
        # a job may count as hanging, and a later round then repeats it.
        node.ahead += 5.0
        node.enforcer._auditor.request_audit()
        await node.enforcer._auditor._round()
        if written() == reported:
            break
    assert written() == reported
    assert {f"{one.cgroup}/{one.file}": one.present for one in found.changes} == {p: before[p][0] for p in reported}


class Observed:
    """A node whose only instance is in observe mode."""

    def __init__(self, root: Path, reserved: str = "0") -> None:
        self.files = ObservedFiles()
        self.node = Node(root, reserved)
        self.node.kernel.files, self.node.kernel.observes = self.files, True

    @property
    def enforcer(self) -> Enforcer:
        return self.node.enforcer


async def test_hooks_change_nothing_and_refuse_claims(tmp_path: Path) -> None:
    """A container without a claim starts with the runtime's settings. A container with a claim is rejected with a
    message that gives a remedy.
    """
    observed = Observed(tmp_path)
    async with enforcing(observed.node) as node:
        assert not observed.enforcer.active
        assert observed.enforcer.observing
        _, answer = await node.create("plain")
        assert answer == Adjustment()
        path = await node.run("plain")
        before = content(node.kernel)
        env = node.claim(cpu_record("c1", "r=2-3"))
        with pytest.raises(RejectedError, match="set enforcement: enforce"):
            await node.create("claims", *env)
        (refused,) = [one for one in node.reports.values() if one.refused]
        assert refused.refused_code == BackendCode.NODE_OBSERVES
        assert refused.refused == REFUSAL
        assert node.cpus(path) == "0-7"
        assert node.enforcer._deps.telemetry.counters[f"refused_{Reason.OBSERVE}"] == 1
        assert await node.synchronize(("plain", "p1")) == []
        assert content(node.kernel) == before


@pytest.mark.parametrize("fault", ["damaged record", "other pod"])
async def test_a_claim_with_a_file_is_refused_even_if_its_record_grants_no_cpus(tmp_path: Path, fault: str) -> None:
    """Otherwise, the container would run on other containers' CPUs. If a container names only a claim that has no file,
    the container starts.
    """
    observed = Observed(tmp_path)
    async with enforcing(observed.node) as node:
        env, without_file = node.claim(cpu_record("c1", "r=2-3")), env_of(cpu_record("c2", "r=4"))
        if fault == "damaged record":
            (file,) = node.cdi.glob("*c1.json")
            file.write_text(file.read_text().replace("version", "versions"))
        with pytest.raises(RejectedError, match="only observes"):
            await node.create("claims", *env, of="p9" if fault == "other pod" else "p1")
        _, answer = await node.create("plain", *without_file)
        assert answer == Adjustment()


async def test_a_refused_start_kills_nothing(tmp_path: Path) -> None:
    """If a container was created before the mode was switched, its start is rejected, but nothing is written
    to ``cgroup.kill``.
    """
    observed = Observed(tmp_path)
    node = observed.node
    env = node.claim(cpu_record("c1", "r=2-3"))
    async with enforcing(node):
        one = container("a", *env)
        path = node.make_cgroups(pod("p1"), one)
        with pytest.raises(RejectedError, match="only observes"):
            await node.enforcer.start_container(pod("p1"), one)
        assert node.kernel.get(path, "cgroup.kill") == ""


async def test_the_report_is_bounded(tmp_path: Path) -> None:
    """The list contains at most 512 changes, but the total counts every change."""
    node = Node(tmp_path, guard=True)
    await node.enforcer.activate()
    await node.enforcer.synchronize([], [])
    for number in range(300):
        path = await node.run(f"x{number}", of=f"p{number}")
        for size in ("2MB", "1GB"):
            node.kernel.set(path, f"hugetlb.{size}.rsvd.max", "max")
    observer = observer_of(node)
    await observer.run_pass()
    assert len(observer.observation.changes) == MAX_OBSERVED
    assert observer.observation.total == 600


async def test_interrupts_are_reported_and_not_moved(tmp_path: Path) -> None:
    """A host isolation pass only records the changes that it would make. It changes neither interrupts nor the stored
    original affinities.
    """
    irqs, state, files = IrqTree(tmp_path), state_with_claims(), ObservedFiles()
    irqs.add(24, "0-7")
    put(state, Phase.RUNNING)
    state.replace_containers(tuple(state))
    (tmp_path / "cgroup").mkdir()
    tree = CgroupTree(str(tmp_path / "cgroup"), files)
    before = irqs.all_affinities()
    isolation = HostIsolation(state, lambda: False, tree, settings(tmp_path))
    (reason, run), *_ = isolation.observed_passes()
    run()
    changes = {change.path.removeprefix(str(tmp_path)): change for change in files.pop_changes()}
    assert "irqs" in reason
    assert changes["/proc/irq/24/smp_affinity_list"].desired == "0-1,4-7"
    assert changes["/proc/irq/24/smp_affinity_list"].present == "0-7"
    assert irqs.all_affinities() == before
    assert not list((tmp_path / "backend").iterdir())


async def test_updates_that_the_runtime_would_write_are_reported(tmp_path: Path) -> None:
    """In pool mode, the answer to Synchronize sets every empty cpuset, even though all CPUs are already effective."""
    observed = Observed(tmp_path, reserved="")
    node = observed.node
    path = node.make_cgroups(pod("p1"), container("a"))
    async with enforcing(node):
        await node.synchronize(("a", "p1"))
        observer = Observer(node.enforcer, node.kernel, observed.files, lambda: ())
        await observer.run_pass()
    (change,) = observer.observation.changes
    assert (change.cgroup, change.file, change.present, change.desired) == (path, "cpuset.cpus", "", "0-7")
    assert node.kernel.get(path, "cpuset.cpus") == ""
