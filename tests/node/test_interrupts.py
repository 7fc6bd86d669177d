# SPDX-License-Identifier: Apache-2.0
"""Interrupts and unbound workqueues leave the CPUs of running claims, and get back what they had."""

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
    """The affinity of each interrupt that a driver handles."""
    handled = [path for path in IRQS.iterdir() if path.is_dir() and any(one.is_dir() for one in path.iterdir())]
    return {path.name: (path / "smp_affinity_list").read_text().strip() for path in handled}


def on(taken: frozenset[int]) -> set[str]:
    """The interrupts whose affinity has one of these CPUs."""
    return {number for number, text in device_interrupts().items() if parse_cpu_list(text) & taken}


def masks() -> frozenset[int]:
    """The CPUs that new interrupts or unbound workqueues may use."""
    bits = [int(path.read_text().replace(",", ""), 16) for path in (IRQS / "default_smp_affinity", WORKQUEUES)]
    return frozenset(cpu for cpu in CPUS for mask in bits if mask >> cpu & 1)


def managed() -> frozenset[str]:
    """Interrupts that the kernel does not let anybody move: those of the disk's queues."""
    return frozenset(path.parent.name for path in IRQS.glob("*/virtio*-req.*"))


def widened() -> str:
    """An interrupt that can be moved, and that may be on every CPU."""
    number = min(device_interrupts().keys() - managed())
    (IRQS / number / "smp_affinity_list").write_text(format_cpu_list(CPUS))
    return number


def metric(cluster: Cluster, name: str) -> float:
    """A gauge of the backend, as its lease has told it."""
    text = str(cluster.instance.state("/metrics"))
    found = re.search(rf"^dra_numa_backend_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else -1.0


def everything() -> tuple[dict[str, str], frozenset[int]]:
    """What is to be the same before and after."""
    return device_interrupts(), masks()


def test_interrupts_leave_a_claims_cpus_and_come_back(cluster: Cluster) -> None:
    """When its container starts, and when it ends; a managed one stays and is counted."""
    before = everything()
    db = cluster.pod(cpus(3, numa_node=1))
    assert everything() == before
    box = db.run()
    until(lambda: on(db.cpus) <= managed() and masks() == CPUS - db.cpus, "all that can leave has left")
    staying = {number for number in managed() if parse_cpu_list(before[0][number]) & db.cpus}
    until(lambda: metric(cluster, "immovable_interrupts") == len(staying), "those that stay are counted")
    assert metric(cluster, "moved_interrupts") > 0
    assert {n: t for n, t in device_interrupts().items() if not parse_cpu_list(before[0][n]) & db.cpus}.items() <= (
        before[0].items()
    ), "others are as they were"
    box.stop()
    until(lambda: everything() == before, "all is as before")


def test_a_killed_backend_leaves_nothing_behind(cluster: Cluster) -> None:
    """The claim ends while nobody looks: the next backend gives back what the former one has kept."""
    before = everything()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: on(db.cpus) <= managed() and masks() == CPUS - db.cpus, "all that can leave has left")
    cluster.instance.kill_backend()
    box.stop()
    assert everything() != before
    cluster.wait_ready()
    until(lambda: everything() == before, "all is as before")


def test_what_somebody_else_has_changed_meanwhile_stays(cluster: Cluster) -> None:
    """An administrator who gives an interrupt other CPUs finds them there afterwards."""
    number, before = widened(), device_interrupts()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: number not in on(db.cpus), "the interrupt has left")
    affinity = IRQS / number / "smp_affinity_list"
    affinity.write_text("0")
    box.stop()
    until(lambda: masks() == CPUS and device_interrupts() == before | {number: "0"}, "the others are back")
    affinity.write_text(before[number])


def test_a_claim_that_keeps_interrupts_has_them(cluster: Cluster) -> None:
    """With irqs: keep they stay on its CPUs, and leave those of the other claim all the same."""
    number = widened()
    nic = cluster.pod(cpus(2, numa_node=0), config=[cpu_config(irqs="keep")])
    db = cluster.pod(cpus(2, numa_node=1))
    nic.run()
    db.run()
    until(lambda: masks() == CPUS - db.cpus, "the claim without the parameter has none")
    until(lambda: device_interrupts()[number] == format_cpu_list(CPUS - db.cpus), "nor has it one of before")


def test_an_operator_who_wants_them_back_has_them(cluster: Cluster) -> None:
    """With irqs: leave all is as before, though the claim's container still runs."""
    before = everything()
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: masks() == CPUS - db.cpus, "they have left")
    cluster.configure({"irqs": "leave"})
    until(lambda: everything() == before, "all is as before")
    assert box.cpus_allowed == db.cpus
