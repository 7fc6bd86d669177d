# SPDX-License-Identifier: Apache-2.0
"""What the outside sees of the devices: slices for the scheduler, health for the kubelet."""

import logging
from collections.abc import Mapping

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
        boards: Mapping[str, HealthBoard],
        publishers: Mapping[str, Publisher],
        *,
        counted: bool = False,
    ) -> None:
        """``counted``: devices say which of the node's allocatable resources they take from (KEP-5517)."""
        self._node = node
        self._boards = boards
        self._publishers = publishers
        self._counted = counted
        self.snapshot = Snapshot()

    def refresh(self, inventory: Inventory, ledger: Ledger) -> None:
        """Compares machine and books, and publishes what is different."""
        before, self.snapshot = self.snapshot, snapshot(inventory, ledger, self.snapshot)
        for fault in self.snapshot.faults():
            if fault not in before.faults():
                _log.warning("device unhealthy", extra={"fault": fault})
        for driver, board in self._boards.items():
            board.show(self.snapshot.health[driver])
            pools = [pool for pool in self.snapshot.pools if pool.driver == driver]
            if pools != [pool for pool in before.pools if pool.driver == driver]:
                documents = {p.name: slice_documents(p, self._node, counted=self._counted) for p in pools}
                self._publishers[driver].set_pools(documents)
