# SPDX-License-Identifier: Apache-2.0
"""Disturbances of claimed CPUs by a neighbour, host daemons and interrupts: the table in docs/exclusive.md."""

import subprocess
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from numa_contract.cpuset import format_cpu_list

from tests.node.rig import figures, kernel
from tests.node.rig.claims import cpu_config
from tests.node.rig.cluster import Cluster
from tests.node.rig.delays import Delays, cyclictest, inside
from tests.node.rig.pods import Container
from tests.stage.pods import cpus

ROUNDS = 3
SECONDS = 1
LOOPS = len(kernel.online_cpus())
NEIGHBOUR = ["sh", "-c", "for n in $(seq $0); do while :; do :; done & done; wait", str(LOOPS)]
BUILD = "for n in 1 2 3 4; do while :; do head -c 100000 /usr/bin/busybox | sha256sum >/dev/null; done & done"
DISK = "while :; do dd if=/dev/vda of=/dev/null bs=4k count=100 iflag=direct status=none; done &"
NETWORK = "busybox ping -A -q 10.0.2.2"
UNIT = "noise.service"


def mode(name: str, claim: Mapping[str, str] | None = None, **settings: Any) -> Any:
    """Returns one row of the table: its name, the claim's parameters and the driver's settings."""
    return pytest.param(name, claim or {}, marks=pytest.mark.configuration(**settings), id=name)


def measure(box: Container, on: Collection[int]) -> Delays:
    """Runs cyclictest once in the container's cgroup, with a SCHED_OTHER thread on each of the CPUs, and returns the
    measured delays.
    """
    with inside(box.cgroup, cyclictest(on, every=500, seconds=SECONDS)) as process:
        return Delays.read(process.communicate()[0])


@contextmanager
def host_at_work() -> Iterator[None]:
    """Runs a daemon in system.slice that continuously starts processes, reads the disk and waits for the network."""
    work = f"{BUILD}; {DISK} {NETWORK}"
    subprocess.run(["systemd-run", "-q", "--collect", f"--unit={UNIT}", "sh", "-c", work], check=True)
    try:
        yield
    finally:
        subprocess.run(["systemctl", "stop", UNIT], check=True)


def aim_network_at(targets: Collection[int]) -> None:
    """Moves the network interface's interrupts to CPUs that irqbalance might choose."""
    for file in Path("/proc/irq").glob("*/virtio*put.*"):
        (file.parent / "smp_affinity_list").write_text(format_cpu_list(targets))


def device_interrupts(on: Collection[int]) -> int:
    """Returns the number of interrupts on these CPUs."""
    lines = Path("/proc/interrupts").read_text().splitlines()
    counted = [line.split()[1:] for line in lines if "PCI-MSI" in line]
    return sum(int(counts[cpu]) for counts in counted for cpu in on)


def turns(on: Collection[int]) -> int:
    """Returns how often a thread has started to run on these CPUs."""
    lines = [line.split() for line in Path("/proc/schedstat").read_text().splitlines()]
    return sum(int(line[9]) for line in lines if line[0] in {f"cpu{cpu}" for cpu in on})


@pytest.mark.profile("noise")
@pytest.mark.parametrize(
    ("name", "claim"),
    [
        mode("pool, host daemons and interrupts left alone", cpuExclusivity="pool", irqs="keep"),
        mode("pool, host daemons and interrupts moved", cpuExclusivity="pool", hostSlices=True),
        mode("partition, exclusive", cpuExclusivity="partition"),
        mode("partition, isolated", {"isolation": "isolated"}, cpuExclusivity="partition"),
    ],
)
def test_measure_wake_ups_on_claimed_cpus(cluster: Cluster, name: str, claim: Mapping[str, str]) -> None:
    """This test only measures. It fails only if the container does not have the claimed CPUs."""
    pod = cluster.pod(cpus(2, numa_node=1), config=[cpu_config(**claim)] if claim else [])
    aim_network_at(pod.cpus)
    box = pod.run()
    cluster.node.pod("neighbour").run(command=NEIGHBOUR)
    with host_at_work():
        interrupts, ran = device_interrupts(pod.cpus), turns(pod.cpus)
        rounds = [measure(box, pod.cpus) for _ in range(ROUNDS)]
        interrupts, ran = device_interrupts(pod.cpus) - interrupts, turns(pod.cpus) - ran
    others = ran - sum(one.wake_ups for one in rounds)
    each = ROUNDS * SECONDS
    rates = f"{interrupts // each} device interrupts and {others // each} turns of others a second"
    figures.note(name, f"{Delays.medians(rounds)}; {rates}")
    assert box.cpus_allowed == pod.cpus
