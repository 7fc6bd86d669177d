# SPDX-License-Identifier: Apache-2.0
"""Debian's irqbalance alongside the backend: the backend bans the claimed CPUs, and irqbalance does not move any
interrupts to them.
"""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from nri_backend.host_isolation.irqbalance import Irqbalance, IrqbalanceNotRunningError

from tests.node.conftest import IRQBALANCE
from tests.node.rig.cluster import Cluster
from tests.node.rig.services import Services
from tests.node.rig.wait import until
from tests.node.test_interrupts import CPUS, IRQS, device_interrupts, managed, on
from tests.stage.pods import cpus

pytestmark = [pytest.mark.profile("containerd-1.7"), pytest.mark.irqbalance]
OWN = frozenset({1})


def banned() -> frozenset[int]:
    """Returns the CPUs that irqbalance reports as banned, or no CPUs until it responds."""
    with contextlib.suppress(IrqbalanceNotRunningError):
        if (allowed := Irqbalance("/", "/").allowed()) is not None:
            return CPUS - allowed
    return frozenset()


@pytest.fixture
def irqbalance(services: Services) -> Iterator[None]:
    """Runs irqbalance with one CPU that an operator has banned, and restores each interrupt's affinity at the end."""
    before = device_interrupts()
    Path("/run/irqbalance").mkdir(exist_ok=True)
    env = {"LD_LIBRARY_PATH": f"{IRQBALANCE}/usr/lib/x86_64-linux-gnu", "IRQBALANCE_BANNED_CPULIST": "1"}
    daemon = services.add("irqbalance", [f"{IRQBALANCE}/usr/sbin/irqbalance", "--foreground"], env).start()
    until(lambda: banned() == OWN, "irqbalance responds")
    yield
    daemon.kill()
    for number, text in before.items():
        with contextlib.suppress(OSError):
            (IRQS / number / "smp_affinity_list").write_text(text)


@pytest.mark.usefixtures("irqbalance")
def test_irqbalance_keeps_off_claimed_cpus(cluster: Cluster) -> None:
    """During two rounds of irqbalance, no movable interrupt returns to the claimed CPUs, not even between two passes of
    the backend. After the container has exited, only the original ban applies.
    """
    db = cluster.pod(cpus(2, numa_node=1))
    box = db.run()
    until(lambda: banned() == OWN | db.cpus, "irqbalance has banned the claimed CPUs")
    until(lambda: on(db.cpus) <= managed(), "all movable interrupts have left the claimed CPUs")
    end = time.monotonic() + 25
    while time.monotonic() < end:
        assert on(db.cpus) <= managed()
        time.sleep(0.5)
    box.stop()
    until(lambda: banned() == OWN, "irqbalance has its own ban again")
