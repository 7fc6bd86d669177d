# SPDX-License-Identifier: Apache-2.0
"""What the outside is told of the devices: slices for the scheduler, health for the kubelet."""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.allocatable import MappingForm
from dra_frontend.devices.inventory import Inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.values import DeviceHealth
from dra_frontend.publishing.device_status import Picture, picture

_LOG = logging.getLogger(__name__)


class Slices(Protocol):
    """Publishes the slices of one driver."""

    def set_pools(self, pools: Mapping[str, list[dict[str, Any]]]) -> None:
        """Says what should be there; what is left out is deleted."""


class Board(Protocol):
    """Shows the health of one driver's devices."""

    def show(self, devices: Iterable[DeviceHealth]) -> None:
        """Replaces the list."""


class Offer:
    """Keeps slices and health true to the machine and the books."""

    def __init__(
        self,
        node: str,
        inventory: Callable[[], Inventory],
        ledger: Callable[[], Ledger],
        boards: Mapping[str, Board],
        *,
        mapping: Callable[[], MappingForm | None] = lambda: None,
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._ledger = ledger
        self._boards = boards
        self._mapping = mapping
        self._slices: Mapping[str, Slices] = {}
        self.picture = Picture()

    def refresh(self) -> None:
        """Looks at machine and books, and tells what is different."""
        before = self.picture
        self.picture = picture(self._inventory(), self._ledger(), before)
        for fault in self.picture.faults():
            if fault not in before.faults():
                _LOG.warning("device unhealthy %s", fault)
        for driver, board in self._boards.items():
            board.show(self.picture.health[driver])
        if self.picture.pools != before.pools:
            self.publish()

    def open(self, slices: Mapping[str, Slices]) -> None:
        """Publishes from now on."""
        self._slices = slices
        self.publish()

    def publish(self) -> None:
        """Hands the slices to their publishers, in the form of the API server's release."""
        if not self._inventory().pools:
            return  # the machine was never read: what is published, of an earlier run, stays
        for driver, slices in self._slices.items():
            pools = self.picture.pools_of(driver)
            mapping = self._mapping()
            slices.set_pools({pool.name: slice_documents(pool, self._node, mapping=mapping) for pool in pools})
