# SPDX-License-Identifier: Apache-2.0
"""The environment of the frontends in a trace: machine, kernel, API server, claims and the driver's pods."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Final

from dra_frontend.api_server.errors import KubeError, UnavailableError
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.machine.model import HugepagePool
from dra_frontend.node.host_tree import HostTree
from numa_contract.config import Config
from numa_contract.names import MEMORY_DRIVER

from tests.fuzz.frontend_oracle import Key
from tests.rigs.builders import MI, NODE
from tests.rigs.frontend import Claims, Frontend
from tests.rigs.simulation import Process
from tests.strategies.machines import machine

PAGES: Final = 256
"""Number of hugepages on each NUMA node."""
NODE_CPUS: Final = tuple(node.cpus for _, node in sorted(machine().numa_nodes.items()))
"""CPUs on each NUMA node."""


@lru_cache(256)
def inventory_of(config: Config, offline: frozenset[int], pages: tuple[int, ...]) -> Inventory:
    """Returns the devices of two NUMA nodes with four CPUs each. ``pages`` contains the number of hugepages on each
    node.
    """
    found = machine(offline=offline)
    nodes = {
        number: replace(node, hugepages=(HugepagePool(2 * MI, pages[number], pages[number]),))
        for number, node in found.numa_nodes.items()
    }
    return build_inventory(replace(found, numa_nodes=nodes), config, NODE)


@lru_cache
def config_of(group_by: str, on_demand: bool) -> Config:
    pools = [{"numaNode": node, "size": "2Mi", "pages": PAGES} for node in range(2) if on_demand]
    return Config.model_validate({"reservedCPUs": "0", "groupBy": group_by, "hugepagesOnDemand": pools})


class Kernel:
    """The hugepage pools in sysfs."""

    def __init__(self, root: Path) -> None:
        self.tree = HostTree(root)
        below = "sys/devices/system/node/node{}/hugepages/hugepages-2048kB/nr_hugepages"
        self._files = [root / below.format(node) for node in range(2)]
        for file in self._files:
            file.parent.mkdir(parents=True)
            file.write_text("0\n")

    @property
    def pages(self) -> tuple[int, ...]:
        """Returns the number of pages on each NUMA node."""
        return tuple([int(file.read_text()) for file in self._files])


class Input:
    """The bytes of a trace, read one by one; 0 after the end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    @property
    def is_read(self) -> bool:
        """Returns True if no bytes remain."""
        return self._place >= len(self._data)

    def number(self, limit: int) -> int:
        """Returns a number below the limit."""
        self._place += 1
        return self._data[self._place - 1] % limit if self._place <= len(self._data) else 0


class Server(Claims):
    """An API server that fails and delays calls."""

    def __init__(self) -> None:
        super().__init__()
        self.error_type: type[KubeError] | None = None
        self.failures = 0
        """Number of calls that fail."""
        self.delay = 0.0
        self.endless = False
        """True if a list does not end."""
        self._versions = count(1)
        self._listed: dict[str, dict[str, dict[str, Any]]] = {}
        """The claims that each list returned, by resourceVersion, until a watch starts from that version."""

    async def _fail(self, operation: str) -> None:
        if self.delay:
            await asyncio.sleep(self.delay)
        if self.error_type is not None and self.failures:
            self.failures -= 1
            raise self.error_type(operation, "simulated")

    async def get_claim(self, namespace: str, name: str) -> dict[str, Any] | None:
        """Returns the claim, after a delay."""
        await self._fail("get resourceclaims")
        return copy.deepcopy(self.documents.get(name))

    async def list_claims(self, namespace: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """Yields the claims. If ``endless`` is set, the list does not end but fails after 120 s, so the client must
        stop reading it earlier.
        """
        await self._fail("list resourceclaims")
        for document in list(self.documents.values()):
            yield copy.deepcopy(document)
            await asyncio.sleep(self.delay / 10)
        if self.endless:
            await asyncio.sleep(120)
            raise UnavailableError("list resourceclaims", "the list did not end within 120 s")

    async def list_labelled_claims(
        self, label: str, reduce: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> tuple[list[dict[str, Any]], str]:
        """Returns all claims, since every claim in the trace has the label."""
        await self._fail("list resourceclaims")
        version = str(next(self._versions))
        self._listed[version] = copy.deepcopy(self.documents)
        return [kept for one in self.documents.values() if (kept := reduce(copy.deepcopy(one))) is not None], version

    async def watch_labelled_claims(
        self, label: str, resource_version: str
    ) -> AsyncGenerator[tuple[str, dict[str, Any]], None]:
        """Yields the changes since the list. Each watch has its own list, so two instances see the same changes."""
        now = self._listed.pop(resource_version)
        while True:
            await asyncio.sleep(2)
            await self._fail("watch resourceclaims")
            before, now = now, copy.deepcopy(self.documents)
            for name, document in before.items():
                # A claim with the same name but a different UID is a different object.
                present = now.get(name)
                if present is None or present["metadata"]["uid"] != document["metadata"]["uid"]:
                    yield "DELETED", document
            for name, document in now.items():
                if before.get(name) != document:
                    yield "MODIFIED", copy.deepcopy(document)

    async def apply_claim_devices(
        self, namespace: str, name: str, uid: str, devices: list[dict[str, Any]], manager: str
    ) -> dict[str, Any]:
        """Accepts the device conditions of a claim without storing them."""
        await self._fail("patch resourceclaims")
        return {}


@dataclass(eq=False, slots=True)
class Claim:
    """A claim that the scheduler has allocated on the node."""

    uid: str
    name: str
    document: dict[str, Any]
    drivers: tuple[str, ...]
    pages: Mapping[str, int]
    near: frozenset[int]
    exists: bool = True
    """True while the API server contains the claim with this UID and the claim is allocated."""
    called: set[str] = field(default_factory=set)
    """Drivers that the kubelet has called for the claim and that have not unprepared it since."""

    def pages_of(self, driver: str) -> Mapping[str, int]:
        """Returns the bytes of hugepages that one driver prepares, by device."""
        return self.pages if driver == MEMORY_DRIVER else {}


class Instance(Process):
    """One of the driver's pods: its frontend, and the last report from its backend."""

    def __init__(self, frontend: Frontend) -> None:
        super().__init__()
        self.frontend = frontend
        self.memory: dict[Key, frozenset[int]] = {}
        """CPUs by claim, for claims whose files the process has seen but whose release it has not."""
        self.generation = 0
        self.backend_runs = 0
        """Number of times that the backend has been stopped or started again."""
        self.reported: tuple[int, dict[str, Any]] = (0, {})
        """Generation and containers of the backend's last report with containers, by id."""
        self.read_generation: int | None = 0
        """Generation of the records that the backend has read, or None while it cannot read them."""
        self.reads_from = 0.0
        """Time at which the backend connects to read record changes. It may report earlier."""
        self.backend_is_up = True
        self.reports_held_until = 0.0
        self.essential: list[asyncio.Task[None]] = []
