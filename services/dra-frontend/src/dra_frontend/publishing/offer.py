# SPDX-License-Identifier: Apache-2.0
"""What the outside sees of the devices: slices for the scheduler, health for the kubelet."""

import logging
from collections.abc import Callable, Mapping

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.publishing.device_status import Snapshot, snapshot
from dra_frontend.publishing.publisher import Publisher

_log = logging.getLogger(__name__)


class Offer:
    """Keeps slices and health true to the machine and the books."""

    def __init__(
        self,
        node: str,
        inventory: Callable[[], Inventory],
        ledger: Callable[[], Ledger],
        boards: Mapping[str, HealthBoard],
        *,
        counted: bool = False,
    ) -> None:
        """``counted``: devices say which of the node's allocatable resources they take from (KEP-5517)."""
        self._node = node
        self._inventory = inventory
        self._ledger = ledger
        self._boards = boards
        self._counted = counted
        self._publishers: Mapping[str, Publisher] = {}
        self.snapshot = Snapshot()

    def refresh(self) -> None:
        """Compares machine and books, and publishes what is different."""
        before = self.snapshot
        self.snapshot = snapshot(self._inventory(), self._ledger(), before)
        for fault in self.snapshot.faults():
            if fault not in before.faults():
                _log.warning("device unhealthy", extra={"fault": fault})
        for driver, board in self._boards.items():
            board.show(self.snapshot.health[driver])
        if self.snapshot.pools != before.pools:
            self._publish()

    def open(self, publishers: Mapping[str, Publisher]) -> None:
        """Publishes from now on."""
        self._publishers = publishers
        self._publish()

    def _publish(self) -> None:
        if not self._inventory().pools:
            return  # the machine was never read: what is published, of an earlier run, stays
        for driver, publisher in self._publishers.items():
            pools = self.snapshot.pools_of(driver)
            publisher.set_pools({p.name: slice_documents(p, self._node, counted=self._counted) for p in pools})
