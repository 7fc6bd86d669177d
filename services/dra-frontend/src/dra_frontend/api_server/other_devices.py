# SPDX-License-Identifier: Apache-2.0
"""Reads the attributes of other drivers' devices from ResourceSlices, for claims whose CPUs must match those
devices.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from numa_node.backoff import Backoff

from dra_frontend.allocation.alignment import Key, OtherDevices, Values, read_attributes
from dra_frontend.api_server.errors import KubeError, UnavailableError

SECONDS: Final = 8.0
"""Time limit for a lookup, including its retries. The kubelet retries only after a minute."""
_MAX_SLICES: Final = 2000
"""Maximum number of slices from one driver that are read for a claim."""


class SliceSource(Protocol):
    """Source of other drivers' ResourceSlices."""

    def list_slices_of(self, driver: str, node_name: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yields a driver's slices on a node; "" selects the slices that are not specific to one node. Raises
        KubeError.
        """


@dataclass(frozen=True, slots=True)
class OtherDeviceReader:
    """Reads the attributes of other drivers' devices, for claims on this node whose CPUs must match those devices."""

    source: SliceSource
    node: str
    seconds: float = SECONDS

    async def read(self, wanted: frozenset[Key]) -> OtherDevices:
        """Returns the wanted devices' attributes. Devices that cannot be read are absent from the result, and
        ``problem`` contains the reason.
        """
        found: dict[Key, Mapping[str, Values]] = {}
        problem, waits = "", Backoff(0.25, 2.0)
        try:
            async with asyncio.timeout(self.seconds):
                while True:
                    try:
                        await _read_all(self.source, self.node, wanted, found)
                        return OtherDevices(found)
                    except UnavailableError as error:
                        problem = str(error)
                        await asyncio.sleep(max(waits.next(), error.retry_after))
        except KubeError as error:
            problem = str(error)
        except TimeoutError:
            problem = problem or "the API server did not respond in time"
        return OtherDevices(found, problem)


async def _read_all(
    source: SliceSource, node: str, wanted: frozenset[Key], found: dict[Key, Mapping[str, Values]]
) -> None:
    """Reads the wanted devices that are not in ``found`` yet, and adds their attributes to it. Raises KubeError."""
    # The node's own slices are read first, because there are only a few. Network-attached devices may have many slices.
    for node_name in (node, ""):
        for driver in sorted({driver for driver, _, _ in wanted - found.keys()}):
            missing = frozenset(key for key in wanted - found.keys() if key[0] == driver)
            found |= await _read(source, driver, node_name, missing)


async def _read(
    source: SliceSource, driver: str, node_name: str, wanted: frozenset[Key]
) -> dict[Key, Mapping[str, Values]]:
    pools = {pool for _, pool, _ in wanted}
    documents, seen = [], 0
    async with aclosing(source.list_slices_of(driver, node_name)) as listed:
        async for document in listed:
            seen += 1
            if seen > _MAX_SLICES:
                scope = f"on node {node_name}" if node_name else "that are not specific to one node"
                raise KubeError("list resourceslices", f"{driver} has more than {_MAX_SLICES} slices {scope}")
            if document["spec"]["pool"]["name"] in pools:
                documents.append(document)
    return read_attributes(documents, wanted)
