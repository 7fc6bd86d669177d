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
from numa_node.readiness import Readiness

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.api_server.client import KubeClient
from dra_frontend.claims.backend import BackendView
from dra_frontend.claims.directory import ClaimFiles
from dra_frontend.claims.journal import Journal
from dra_frontend.claims.memory_kills import MemoryKills
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.claims.reconciler import Reconciler
from dra_frontend.claims.recovery import Recovery
from dra_frontend.claims.service import NodeClaims
from dra_frontend.claims.store import ClaimStore
from dra_frontend.claims.transaction import Change
from dra_frontend.devices.inventory import Inventory
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.plugin import KubeletPlugin, PluginPaths
from dra_frontend.node.machine_watch import HostTrees, MachineWatch
from dra_frontend.node.run_directory import RunDirectory
from dra_frontend.publishing.notices import Notices
from dra_frontend.publishing.offer import Offer
from dra_frontend.publishing.publisher import Publisher
from dra_frontend.settings import Settings
from dra_frontend.state_endpoint.api import NodeState
from dra_frontend.state_endpoint.records import RecordNews
from dra_frontend.telemetry import Telemetry

_log = logging.getLogger(__name__)


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
        config, node = settings.config, settings.node_name
        run_dir, kubelet_root = Path(config.run_dir), Path(config.kubelet_root_dir)
        self.backend = BackendView(time.monotonic)
        self.telemetry = Telemetry()
        self.readiness = Readiness()
        metadata = MetadataFiles(
            str(kubelet_root / "plugins"), enabled=config.device_metadata, failed=self.telemetry.no_metadata
        )
        files, journal = ClaimFiles(Path(config.cdi_dir), run_dir / "quarantine"), Journal(run_dir / CLAIMS_JOURNAL)
        self.store = ClaimStore(files, journal, run_directory.claims_lock, self.backend, metadata)
        self.store.listeners.append(self._changed)
        self.records = RecordNews(self.store.generation)
        self.watch = MachineWatch(trees, config, node, self._ledger)
        self.telemetry.show_node(self._ledger, self.watch, self.backend)
        self.recovery = Recovery(node, client, self.store, self._inventory, self.backend, config)
        self.reconciler = Reconciler(node, client, self.store, self.backend)
        self.kills = MemoryKills(node, self.store, self.backend, client)
        self.claims = NodeClaims(client, self.store, self._inventory, self.backend, self.recovery, config)
        boards = {driver: HealthBoard() for driver in DRIVERS}
        counted = config.publish_node_allocatable_resource_mapping
        self.offer = Offer(node, self._inventory, self._ledger, boards, counted=counted)
        self.notices = Notices(client, node)
        self.plugins = {
            driver: KubeletPlugin(
                driver,
                self.claims,
                PluginPaths.below(kubelet_root, driver, settings.pod_uid),
                boards[driver],
                count=self.telemetry.note,
            )
            for driver in DRIVERS
        }
        self.publishers = {driver: Publisher(client, driver, node, self.notices.notify) for driver in DRIVERS}
        for driver, publisher in self.publishers.items():
            self.telemetry.follow_slices(driver, publisher)

    def _ledger(self) -> Ledger:
        return self.store.ledger

    def _inventory(self) -> Inventory:
        return self.watch.inventory

    def _changed(self, change: Change) -> None:
        if change.kind != "freed":  # its record went before
            self.records.publish(self.store.generation, change.kind, change.driver, change.uid)

    def reported(self) -> None:
        """The backend has renewed its lease."""
        self.claims.backend_changed()
        self.reconciler.backend_changed()
        self.kills.backend_changed()

    def unready(self) -> tuple[str, ...]:
        """Returns why the pod is not ready; nothing when it is, and for a while after it was."""
        return self.readiness.update(self._problems())

    def _problems(self) -> list[str]:
        # A pod whose backend stands by stays ready whoever else enforces: else a roll-out would not go on.
        problems = [f"backend: {self.backend.failing}"] if self.backend.failing else []
        problems += [f"{driver}: nothing is offered: {why}" for driver, why in self._inventory().refused.items()]
        if self.watch.problem and not self._inventory().pools:
            problems.append(f"machine: {self.watch.problem}")
        problems += self.store.problems
        problems += [problem for problem in (self.run_directory.problem,) if problem]
        problems += [plugin.problem for plugin in self.plugins.values() if plugin.problem]
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
            ("reports", self.reconciler.run_reports()),
            ("kills", self.kills.run()),
            ("disk", self.reconciler.run_disk()),
            ("sweep", self.reconciler.run_sweep()),
            ("recovery", self.recovery.run()),
            *((f"sockets {driver}", plugin.keep_sockets()) for driver, plugin in self.plugins.items()),
            ("readiness", self.follow_readiness()),
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
            ledger=self._ledger,
            quarantined=lambda: self.store.quarantined,
            backend=self.backend,
            records=self.records,
            reported=self.reported,
            unready=self.unready,
            warnings=self.warnings,
            metrics=self.telemetry.render,
        )

    async def follow_readiness(self) -> None:
        """Looks whether the pod is ready though nobody probes, so that the log tells; says once of each manager of the
        kubelet that it pins containers, too. Runs for ever.
        """
        told = frozenset[str]()
        while True:
            self.unready()
            seen = frozenset(self.backend.status.kubelet_pins) if self.backend.status else told
            if not seen <= told:
                told |= seen
                self.notices.notify("KubeletManagerStatic", static_note(seen))
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
            _log.warning("not registering with the kubelet yet", extra={"problem": problem})
        for plugin in self.plugins.values():
            await plugin.register()
        self.offer.open(self.publishers)


def static_note(managers: Iterable[str]) -> str:
    """Returns what an operator should know of the kubelet's own managers that pin containers: ``cpu``, ``memory``."""
    return (
        f"the kubelet's {' and '.join(sorted(managers))} manager is static: claims keep their CPUs, since the driver "
        "answers and audits, but Guaranteed pods may be given CPUs of claims, and then share the pool; set the "
        "policies to none"
    )
