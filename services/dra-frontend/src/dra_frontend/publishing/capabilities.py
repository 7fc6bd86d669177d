# SPDX-License-Identifier: Apache-2.0
"""Determines whether the kubelet adds the resources of claims to pods' limits (KEP-5517), from the published devices
and the Node's status.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from dra_frontend.kubelet.node_status import NodeStatus
from dra_frontend.publishing.publisher import Publisher


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """Capabilities of this node's kubelet that depend on the published devices."""

    publishers: Mapping[str, Publisher]
    """Publishers by driver."""
    node_status: NodeStatus

    async def counts_claims(self, driver: str) -> bool:
        """Returns True if the kubelet adds the resources of a driver's claims to pods' limits (KEP-5517). Raises
        KubeError if the Node has never been read successfully.

        The kubelet adds them if it declares the feature and the API server has stored the mapping for the driver's
        devices.
        """
        return self.publishers[driver].counted and await self.node_status.counts_claims()
