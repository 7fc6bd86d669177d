# SPDX-License-Identifier: Apache-2.0
"""What one run of the service is made of: every edge is built here and handed to those who use it."""

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

from numa_contract.names import CLAIMS_JOURNAL, DRIVERS
from numa_contract.reports import ContainerReport

from dra_frontend.api_server.client import KubeClient
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimDirectory
from dra_frontend.claims.memory_kills import MemoryKills
from dra_frontend.claims.metadata_files import MetadataFiles
from dra_frontend.claims.reconciler import Upkeep
from dra_frontend.claims.recovery import LostRecords
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import Change, ClaimStore
from dra_frontend.devices.inventory import Inventory
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.managers import read_policies, static_note
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.machine_watch import HostTrees, MachineWatch
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.publishing.notices import Notices
from dra_frontend.publishing.offer import Offer
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.settings import Settings
from dra_frontend.state_endpoint.api import NodeState
from dra_frontend.state_endpoint.events import EventFeed
from dra_frontend.telemetry import MeasuredClaims, Telemetry

_LOG = logging.getLogger(__name__)


class Service:
    """One run of the service: what it is made of."""

    def __init__(
        self,
        settings: Settings,
        trees: HostTrees,
        run_directory: RunDirectory,
        client: KubeClient,
    ) -> None:
        self.settings = settings
        self.run_directory = run_directory
        self.client = client
        config = settings.config
        run_dir = Path(config.run_dir)
        self.backend = BackendView(time.monotonic)
        self.feed = EventFeed()
        node = settings.node_name
        self.watch = MachineWatch(trees, config, node, lambda: self.store.ledger)
        self.telemetry = Telemetry(lambda: self.store.ledger, self.watch, self.backend)
        directory = ClaimDirectory(Path(config.cdi_dir), run_dir / CLAIMS_JOURNAL, run_dir / "quarantine")
        root = Path(config.kubelet_root_dir)
        metadata = MetadataFiles(
            str(root / "plugins"), enabled=config.device_metadata, failed=self.telemetry.no_metadata
        )
        self.store = ClaimStore(directory, self.run_directory.claims_lock, self.backend, metadata)
        self.lost = LostRecords(node, client, self.store, self._inventory, self.backend)
        self.upkeep = Upkeep(node, client, self.store, self.lost, self.backend)
        self.kills = MemoryKills(node, lambda: self.store.ledger, client)
        self.claims = NodeClaims(client, self.store, self._inventory, self.backend, self.lost)
        boards = {driver: HealthBoard() for driver in DRIVERS}
        counted = config.publish_node_allocatable_resource_mapping
        self.offer = Offer(node, self._inventory, lambda: self.store.ledger, boards, counted=counted)
        self.notices = Notices(client, node)
        measured = MeasuredClaims(self.claims, self.telemetry)
        self.plugins = {
            driver: KubeletPlugin(
                driver, measured, PluginPaths.below(root, driver, self.settings.pod_uid), boards[driver]
            )
            for driver in DRIVERS
        }
        self.publishers = {
            driver: Publisher(self.client, driver, self.settings.node_name, self.notices.notify) for driver in DRIVERS
        }
        for driver, publisher in self.publishers.items():
            self.telemetry.follow_slices(driver, publisher)
        self.store.listeners.append(self._changed)

    def _inventory(self) -> Inventory:
        return self.watch.inventory

    def _changed(self, change: Change) -> None:
        self.feed.publish("record", {"change": change.kind, "driver": change.driver, "uid": change.uid})

    def reported(self, report: ContainerReport | None) -> None:
        """The backend's lease or a container has changed."""
        self.claims.backend_changed()
        if report is not None:
            self.upkeep.reported(report)
            self.kills.reported(report)
        elif self.backend.live:
            # Until everything was told again, silence does not mean that a container is gone.
            self.kills.keep(self.backend.containers)

    def unready(self) -> list[str]:
        """Returns why the service is not ready."""
        problems = [f"backend: {self.backend.problem}"] if self.backend.problem else []
        problems += [f"{driver}: nothing is offered: {why}" for driver, why in self._inventory().refused.items()]
        if self.watch.problem and not self._inventory().pools:
            problems.append(f"machine: {self.watch.problem}")
        for driver, plugin in self.plugins.items():
            if not plugin.registered:
                problems.append(f"{driver}: not registered with the kubelet {plugin.error}".rstrip())
        for driver, publisher in self.publishers.items():
            if not publisher.status.ready:
                problems.append(f"{driver}: slices not published {publisher.status.error or ''}".rstrip())
        return problems

    def warnings(self) -> list[str]:
        """Returns what an operator should know of, although the service is ready."""
        published = (warning for publisher in self.publishers.values() for warning in publisher.status.warnings)
        return [*self.watch.warnings, *published]

    def endless(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """Returns what runs as long as the service does, by name."""
        publishing = [(f"publisher {driver}", publisher.run()) for driver, publisher in self.publishers.items()]
        return [
            ("reports", self.upkeep.run_reports()),
            ("kills", self.kills.run()),
            ("disk", self.upkeep.run_disk()),
            ("claims", self.upkeep.run_claims()),
            ("link", self.lead()),
            ("machine", self.watch.run(self.offer.refresh)),
            ("notices", self.notices.run()),
            *publishing,
        ]

    def state(self) -> NodeState:
        """Returns what the state endpoint needs."""
        return NodeState(
            node=self.settings.node_name,
            instance=f"{self.settings.pod_uid}/{uuid4().hex[:8]}",
            live=self.watch,
            snapshot=lambda: self.offer.snapshot,
            ledger=lambda: self.store.ledger,
            quarantined=lambda: self.store.quarantined,
            backend=self.backend,
            feed=self.feed,
            reported=self.reported,
            unready=self.unready,
            warnings=self.warnings,
            metrics=self.telemetry.render,
        )

    async def lead(self) -> None:
        """Lets ``state.sock`` lead here while this pod's backend enforces, or nobody's does yet. Runs for ever."""
        led = False
        while True:
            leads = self.backend.leads
            if (leads and not led) or not self.run_directory.active_link.exists():
                await self.run_directory.become_active()
            led = leads
            await asyncio.sleep(0.5)

    async def start(self) -> None:
        """Loads the claims and reads the machine that they are on. Raises OSError."""
        await self.store.start()
        await self.watch.read()
        self.offer.refresh()

    async def open_for_claims(self, stack: AsyncExitStack) -> None:
        """Serves the kubelet, once the backend enforces: registered earlier, we would have to refuse claims."""
        for plugin in self.plugins.values():
            await stack.enter_async_context(plugin)
        while problem := await self.claims.backend_ready():
            _LOG.warning("not registering with the kubelet yet problem=%s", problem)
        for plugin in self.plugins.values():
            await plugin.register()
        self.offer.open(self.publishers)
        await self._tell_managers()

    async def _tell_managers(self) -> None:
        """Says once whether the kubelet pins containers, too."""
        root = HostTree(self.settings.config.kubelet_root_dir)
        policies = await asyncio.to_thread(read_policies, root)
        for one in policies:
            self.telemetry.kubelet_manager(one.manager, is_static=one.is_static)
        if note := static_note(policies):
            self.notices.notify("KubeletManagerStatic", note)
