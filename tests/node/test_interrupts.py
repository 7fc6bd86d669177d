# SPDX-License-Identifier: Apache-2.0
"""Interrupts and unbound workqueues leave the CPUs of running claims, and their affinities are restored."""

import re
from pathlib import Path

import pytest
from numa_contract.cpuset import format_cpu_list, parse_cpu_list

from tests.node.rig.claims import cpu_config
from tests.node.rig.cluster import Cluster
from tests.node.rig.kernel import online_cpus
from tests.node.rig.wait import until
from tests.stage.pods import cpus

pytestmark = pytest.mark.profile("containerd-1.7")
IRQS = Path("/proc/irq")
WORKQUEUES = Path("/sys/devices/virtual/workqueue/cpumask")
CPUS = online_cpus()


def device_interrupts() -> dict[str, str]:
    """Returns the affinity of each interrupt that a kernel device driver handles."""
    handled = [path for path in IRQS.iterdir() if path.is_dir() and any(one.is_dir() for one in path.iterdir())]
    return {path.name: (path / "smp_affinity_list").read_text().strip() for path in handled}


def on(taken: frozenset[int]) -> set[str]:
    """Returns the interrupts whose affinity contains one of these CPUs."""
    return {number for number, text in device_interrupts().items() if parse_cpu_list(text) & taken}


def masks() -> frozenset[int]:
    """Returns the CPUs that new interrupts or unbound workqueues may use."""
    bits = [int(path.read_text().replace(",", ""), 16) for path in (IRQS / "default_smp_affinity", WORKQUEUES)]
    return frozenset(cpu for cpu in CPUS for mask in bits if mask >> cpu & 1)


def managed() -> frozenset[str]:
    """Returns the managed interrupts, which the kernel does not allow to be moved: those of the disk's queues."""
    return frozenset(path.parent.name for path in IRQS.glob("*/virtio*-req.*"))


def widened() -> str:
    """Sets the affinity of a movable interrupt to all CPUs and returns the interrupt's number."""
    number = min(device_interrupts().keys() - managed())
    (IRQS / number / "smp_affinity_list").write_text(format_cpu_list(CPUS))
    return number


def metric(cluster: Cluster, name: str) -> float:
    """Returns one of the backend's gauges from its lease."""
    text = str(cluster.instance.state("/metrics"))
    found = re.search(rf"^dra_numa_backend_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def everything() -> tuple[dict[str, str], frozenset[int]]:
    """Returns all values that must be the same before and after a claim."""
    return device_interrupts(), masks()


def test_interrupts_leave_a_claims_cpus_and_are_restored(cluster: Cluster) -> None:
    """Interrupts are moved when the claim's container starts and restored when the container exits; a managed interrupt
    is not moved, and is counted.
    """
    before = everything()
    db = cluster.pod(cpus(3, numa_node=1))
    assert everything() == before
    box = db.run()
    until(
        lambda: on(db.cpus) <= managed() and masks() == CPUS - db.cpus,
        "all movable interrupts have left the claimed CPUs",
    )
    staying = {number for number in managed() if parse_cpu_list(before[0][number]) & db.cpus}
    until(lambda: metric(cluster, "immovable_interrupts") == len(staying), "the immovable interrupts are counted")
    assert metric(cluster, "moved_interrupts") > 0
    assert {n: t for n, t in device_interrupts().items() if not parse_cpu_list(before[0][n]) & db.cpus}.items() <= (
        before[0].items()
    ), "other interrupts are unchanged"
    box.stop()
    until(lambda: everything() == before, "all affinities are restored")


def test_affinities_are_restored_after_the_backend_is_killed(cluster: Cluster) -> None:
    """The claim ends while no backend is running: the next backend restores the stored affinities."""
    before = everything()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(
        lambda: on(db.cpus) <= managed() and masks() == CPUS - db.cpus,
        "all movable interrupts have left the claimed CPUs",
    )
    cluster.instance.kill_backend()
    box.stop()
    assert everything() != before
    cluster.wait_ready()
    until(lambda: everything() == before, "all affinities are restored")


def test_affinities_changed_by_others_are_kept(cluster: Cluster) -> None:
    """If an administrator changes an interrupt's CPUs while the claim's container is running, the change is kept after
    the container has exited.
    """
    number, before = widened(), device_interrupts()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: number not in on(db.cpus), "the interrupt has left")
    affinity = IRQS / number / "smp_affinity_list"
    affinity.write_text("0")
    box.stop()
    until(lambda: masks() == CPUS and device_interrupts() == before | {number: "0"}, "the other interrupts are back")
    affinity.write_text(before[number])


def test_a_claim_can_keep_interrupts_on_its_cpus(cluster: Cluster) -> None:
    """With ``irqs: keep``, interrupts stay on the claim's CPUs, but are still moved off another claim's CPUs."""
    number = widened()
    nic = cluster.pod(cpus(2, numa_node=0), config=[cpu_config(irqs="keep")])
    db = cluster.pod(cpus(2, numa_node=1))
    nic.run()
    db.run()
    until(lambda: masks() == CPUS - db.cpus, "interrupts have left the claim without the parameter")
    until(
        lambda: device_interrupts()[number] == format_cpu_list(CPUS - db.cpus), "the existing interrupt has left, too"
    )


def test_an_operator_can_disable_moving_interrupts(cluster: Cluster) -> None:
    """If ``irqs: keep`` is set for the driver, all affinities are restored, even while the claim's container is
    running.
    """
    before = everything()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: masks() == CPUS - db.cpus, "the interrupts have left")
    cluster.configure({"irqs": "keep"})
    until(lambda: everything() == before, "all affinities are restored")
    assert box.cpus_allowed == db.cpus
