# SPDX-License-Identifier: Apache-2.0
"""A node as the state endpoint sees it: a machine, claims of every kind, and the backend's report."""

import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, cast

from dra_frontend.allocation.claim import RefusedError
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.store import ClaimStore
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice, Device
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import Machine
from dra_frontend.node.machine_watch import MachineWatch
from dra_frontend.publishing.offer import Offer, Snapshot, snapshot
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.names import DRIVERS
from numa_contract.records import AllocationRecord
from numa_contract.reports import BackendStatus, ContainerReport
from numa_contract.state.status import Notice, StatusCode

from tests.rigs.builders import NODE, files_of, opaque, report, result
from tests.rigs.decisions import decided, view
from tests.rigs.trees import captured
from tests.strategies.machines import machine

LARGEST: Final = "512fake-2s8n32c2t"
"""A generated machine, since none of the captured ones is as large: two sockets, eight NUMA nodes, 256 cores with two
threads each.
"""
HOSTILE: Final = "<img src=x onerror=alert(1)>"
"""A name that no API server accepts but that a container runtime could report."""
_KINDS: Final = ({"isolation": "exclusive"}, {"isolation": "isolated"}, {"sharing": "pod"})


class NodeState:
    """The data that the endpoint reads, which tests can change."""

    node, instance = NODE, "pod/1"

    def __init__(self, found: Machine, config: Config) -> None:
        inventory = build_inventory(found, config, NODE)
        values = SimpleNamespace(inventory=inventory, machine=found, problem="", warnings=(), host_pages={})
        self.watch = cast("MachineWatch", values)
        self.backend = BackendView(time.monotonic)
        self.offer = Offer(NODE, {driver: HealthBoard() for driver in DRIVERS}, {})
        self.problems: list[str] = []
        self.warned: list[str] = []
        self.hold()

    def hold(self, *records: AllocationRecord, releasing: tuple[AllocationRecord, ...] = ()) -> None:
        """Sets the claims on the node; those that are being released still have running containers."""
        going = {(one.driver, one.claim.uid): ClaimFile.of(one) for one in releasing}
        ledger = Ledger(files_of(*records), going, tuple(self.backend.containers.values()))
        self.store = cast("ClaimStore", SimpleNamespace(ledger=ledger, quarantined={}))
        self.offer.snapshot = snapshot(self.watch.inventory, ledger, Snapshot())

    def enforce(self, *containers: ContainerReport) -> None:
        """Makes the backend's lease live and reports these containers."""
        status = BackendStatus(instance="b", generation=1, active=True, synchronized=True, runtime="containerd 2.1.4")
        self.backend.renew(status, [one.model_dump(mode="json") for one in containers])

    def handle_report(self) -> None:
        """Does nothing, since nothing waits for reports here."""

    def update_readiness(self) -> list[Notice]:
        """Returns the problems that the test sets."""
        return [Notice(code=StatusCode.NOT_REGISTERED, text=text, unready=True) for text in self.problems]

    def warnings(self) -> list[Notice]:
        """Returns the warnings that the test sets."""
        return [Notice(code=StatusCode.CONFIGURATION_DOES_NOT_FIT, text=text) for text in self.warned]

    def metrics(self) -> bytes:
        """Returns no metrics."""
        return b""


@dataclass(slots=True)
class _Author:
    """An allocator that creates the node's claims one after another and skips a claim if the machine has no room for
    it.
    """

    inventory: Inventory
    config: Config
    records: list[AllocationRecord]
    number: int = 0

    def claim(self, device: Device, driver: str, pool: str, amount: str, fields: dict[str, Any]) -> None:
        """Allocates an amount of a device, or nothing if the claim is refused."""
        self.number += 1
        uid, key = f"uid-{self.number}", "dra.cpu/cpu" if driver == "dra.cpu" else "size"
        taken = result("r", driver, device.name, pool, consumedCapacity={key: amount}, shareID=uid)
        config = [opaque(fields)] if fields else []
        found = view(uid, taken, name=f"train-{self.number}", namespace="ml-team", config=config)
        try:
            ledger = Ledger(files_of(*self.records))
            self.records.append(decided(found, driver, ledger, self.inventory, self.config))
        except RefusedError:
            pass


def populated(name: str) -> NodeState:
    """Returns a node on a captured machine, or on LARGEST, with claims of every kind that fits."""
    found = machine(2, 4, 4, 8, 2, memory=96 << 30) if name == LARGEST else discover(captured(name))
    config = Config(reserved_cpus=frozenset({min(found.online)}) if len(found.cpus) > 2 else frozenset())
    state = NodeState(found, config)
    author = _Author(state.watch.inventory, config, [])
    for pool in author.inventory.pools:
        for index, device in enumerate(pool.devices):
            if isinstance(device, CpuDevice):
                for kind in range(3):
                    author.claim(device, pool.driver, pool.name, str(max(1, device.amount // 6)), _KINDS[kind])
            elif index % 2 == 0:
                author.claim(device, pool.driver, pool.name, str(device.amount // 3), {})
    cpu_claims = [one for one in author.records if one.cpus]
    *cpu_claims, last = cpu_claims
    state.enforce(*_containers(cpu_claims, found.online), _user(last, HOSTILE))
    state.hold(*(one for one in author.records if one is not last), releasing=(last,))
    state.warned = ["reservedMemory: this kernel has no hugepages-16Gi; it has 2Mi, 1Gi"]
    return state


def _user(record: AllocationRecord, name: str) -> ContainerReport:
    use = {"uid": record.claim.uid, "driver": record.driver}
    isolated = record.parameters_of("r").isolation == "isolated"
    exclusivity = "pool" if record.sharing == "pod" else "isolated" if isolated else "partition"
    where = {"cpus": format_cpu_list(record.cpus_of()), "exclusivity": exclusivity}
    return report(f"id-{record.claim.uid}", name=name, podName=f"{record.claim.name}-0", claims=[use], **where)


def _containers(records: list[AllocationRecord], online: frozenset[int]) -> list[ContainerReport]:
    """Returns a container for each of four out of five claims, and two containers without a claim. One of the
    containers with a claim has one CPU too many.
    """
    users = [_user(one, "worker") for index, one in enumerate(records) if index % 5 != 4]
    if len(users) > 4:
        users[3] = users[3].model_copy(update={"cpus": users[3].cpus | {max(online)}, "exclusivity": "pool"})
    free = format_cpu_list(online - frozenset().union(*(one.cpus_of() for one in records)))
    others = [report(f"other-{n}", name="web", podName=f"web-{n}", podNamespace="shop", cpus=free) for n in range(2)]
    return [*users, *others]
