# SPDX-License-Identifier: Apache-2.0
"""What one run of the service is made of: every edge is built here and handed to those who use it."""

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

from numa_contract.names import CLAIMS_JOURNAL, DRIVERS
from numa_contract.reports import ContainerReport
from numa_node.readiness import Readiness

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.client import KubeClient
from dra_frontend.api_server.errors import KubeError
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.memory_kills import MemoryKills
from dra_frontend.claims.metadata_files import MetadataFiles
from dra_frontend.claims.reconciler import Upkeep
from dra_frontend.claims.recovery import LostRecords
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import Change, ClaimStore
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.pcie import cut_devices
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths
from dra_frontend.node.machine_watch import FirstLook, HostTrees, MachineWatch
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.publishing.offer import Offer
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.publishing.server_version import ServerRelease
from dra_frontend.publishing.status import Notice
from dra_frontend.settings import Settings
from dra_frontend.state_endpoint.api import NodeState
from dra_frontend.state_endpoint.records import RecordNews
from dra_frontend.telemetry import MeasuredClaims, Telemetry

_log = logging.getLogger(__name__)


class Service:
    """One run of the service: what it is made of."""

    def __init__(
        self,
        settings: Settings,
        trees: HostTrees,
        first: FirstLook,
        run_directory: RunDirectory,
        client: KubeClient,
    ) -> None:
        self.settings = settings
        self.run_directory = run_directory
        self.client = client
        config, node = settings.config, settings.node_name
        run_dir, kubelet_root = Path(config.run_dir), Path(config.kubelet_root_dir)
        self.backend = BackendView(time.monotonic)
        self.telemetry = Telemetry()
        self.readiness = Readiness()
        self._link_problem = ""
        directory = ClaimDirectory(Path(config.cdi_dir), run_dir / CLAIMS_JOURNAL, run_dir / "quarantine")
        metadata = MetadataFiles(
            str(kubelet_root / "plugins"), enabled=config.device_metadata, failed=self.telemetry.no_metadata
        )
        self.store = ClaimStore(directory, run_directory.claims_lock, self.backend, metadata)
        self.store.listeners.append(self._changed)
        self.records = RecordNews(self.store.generation)
        self.watch = MachineWatch(trees, config, node, first, self._ledger)
        self.telemetry.show_node(self._ledger, self.watch, self.backend)
        self.lost = LostRecords(node, client, self.store, self._inventory, self.backend)
        self.upkeep = Upkeep(node, client, self.store, self.lost, self.backend)
        self.kills = MemoryKills(node, self._ledger, client)
        self.claims = NodeClaims(client, self.store, self._inventory, self.backend, self.lost)
        boards = {driver: HealthBoard() for driver in DRIVERS}
        self.release = ServerRelease(client, self._notify, enabled=config.publish_node_allocatable_resource_mapping)
        self.offer = Offer(node, self._inventory, self._ledger, boards, mapping=lambda: self.release.mapping)
        measured = MeasuredClaims(self.claims, self.telemetry)
        self.plugins = {
            driver: KubeletPlugin(
                driver, measured, PluginPaths.below(kubelet_root, driver, settings.pod_uid), boards[driver]
            )
            for driver in DRIVERS
        }
        self.publishers = {driver: Publisher(client, driver, node, notify=self._notify) for driver in DRIVERS}
        for driver, publisher in self.publishers.items():
            self.telemetry.follow_slices(driver, publisher)

    def _ledger(self) -> Ledger:
        return self.store.ledger

    def _inventory(self) -> Inventory:
        return self.watch.inventory

    def _changed(self, change: Change) -> None:
        if change.kind != "freed":  # its record went before
            self.records.publish(self.store.generation, change.kind, change.driver, change.uid)

    async def _notify(self, notice: Notice) -> None:
        _log.warning("notice", extra={"reason": notice.reason, "note": notice.note})
        name = self.settings.node_name
        regarding = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": name}
        await self.client.create_event("default", regarding, notice.reason, notice.note, notice.kind)

    def reported(self, reports: Iterable[ContainerReport]) -> None:
        """The backend has renewed its lease; these reports are new or changed."""
        self.claims.backend_changed()
        for report in reports:
            self.upkeep.reported(report)
            self.kills.reported(report)
        if self.backend.live:
            # Until everything was told, silence does not mean that a container is gone.
            self.kills.keep(self.backend.containers)

    def unready(self) -> tuple[str, ...]:
        """Returns why the pod is not ready; nothing when it is, and for a while after it was."""
        return self.readiness.update(self._problems())

    def _problems(self) -> list[str]:
        # A pod whose backend stands by stays ready whoever else enforces: else a roll-out would not go on.
        problems = [f"backend: {self.backend.failing}"] if self.backend.failing else []
        if self._link_problem:
            problems.append(self._link_problem)
        for driver, plugin in self.plugins.items():
            if not plugin.registered:
                problems.append(f"{driver}: not registered with the kubelet {plugin.error}".rstrip())
        for driver, publisher in self.publishers.items():
            if not publisher.status.ready:
                problems.append(f"{driver}: slices not published {publisher.status.error or ''}".rstrip())
        return problems

    def endless(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Returns what runs as long as the service does, by name."""
        publishing = [(f"publisher {driver}", publisher.run()) for driver, publisher in self.publishers.items()]
        return [
            ("reports", self.upkeep.run_reports()),
            ("kills", self.kills.run()),
            ("disk", self.upkeep.run_disk()),
            ("claims", self.upkeep.run_claims()),
            ("backend", self.follow_backend()),
            ("kubelet", self.tell_pins()),
            ("machine", self.watch.run(self.offer.refresh)),
            ("release", self.release.follow(self.offer.publish)),
            *publishing,
        ]

    def state(self) -> NodeState:
        """Returns what the state endpoint needs."""
        return NodeState(
            node=self.settings.node_name,
            instance=f"{self.settings.pod_uid}/{uuid4().hex[:8]}",
            live=self.watch,
            picture=lambda: self.offer.picture,
            ledger=self._ledger,
            quarantined=lambda: self.store.quarantined,
            backend=self.backend,
            records=self.records,
            reported=self.reported,
            unready=self.unready,
            metrics=self.telemetry.render,
        )

    async def follow_backend(self) -> None:
        """Lets ``state.sock`` lead here while this pod's backend enforces, or nobody's does yet. Runs for ever."""
        led = False
        while True:
            try:
                leads = self.backend.leads
                if (leads and not led) or not self.run_directory.active_link.exists():
                    await self.run_directory.become_active()
                led, self._link_problem = leads, ""
            except OSError as error:
                self._link_problem = f"state.sock cannot lead here: {error}"
            # Whether or not anybody probes: the log tells when the pod was not ready.
            self.unready()
            await asyncio.sleep(0.5)

    async def tell_pins(self) -> None:
        """Says once of each manager of the kubelet that it pins containers, too. Runs for ever."""
        told = frozenset[str]()
        while True:
            seen = frozenset(self.backend.status.kubelet_pins) if self.backend.status else told
            if not seen <= told:
                told |= seen
                try:
                    await self._notify(Notice("KubeletManagerStatic", static_note(seen)))
                except KubeError as error:
                    _log.warning("event not recorded", extra={"error": str(error)})
            await asyncio.sleep(1.0)

    async def start(self) -> None:
        """Loads the claims and looks at the machine that they are on. Raises OSError."""
        await self.store.start()
        await self.watch.look()
        self.offer.refresh()

    async def open_for_claims(self, stack: AsyncExitStack) -> None:
        """Serves the kubelet, once the backend enforces: registered earlier, we would have to refuse claims."""
        for plugin in self.plugins.values():
            await stack.enter_async_context(plugin)
        while problem := await self.claims.backend_ready():
            _log.warning("not registering with the kubelet yet", extra={"problem": problem})
        for plugin in self.plugins.values():
            await plugin.register()
        await self.release.learn()
        if cut := cut_devices(self._inventory().machine.pcie_roots, self._inventory().pools):
            _log.warning("near more PCIe roots than a slice can list, use a smaller groupBy", extra={"devices": cut})
        self.offer.open(self.publishers)


def static_note(managers: Iterable[str]) -> str:
    """Returns what an operator should know of the kubelet's own managers that pin containers: ``cpu``, ``memory``."""
    return (
        f"the kubelet's {' and '.join(sorted(managers))} manager is static: claims keep their CPUs, since the driver "
        "answers and audits, but Guaranteed pods may be given CPUs of claims, and then share the pool; set the "
        "policies to none"
    )
