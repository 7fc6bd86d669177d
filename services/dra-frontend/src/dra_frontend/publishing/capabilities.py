# SPDX-License-Identifier: Apache-2.0
"""Properties of the kubelet that concern claims, as far as the API server and the Node contain them."""

from collections.abc import Mapping
from dataclasses import dataclass

from dra_frontend.kubelet.node_status import NodeStatus
from dra_frontend.publishing.publisher import Publisher


@dataclass(frozen=True, slots=True)
class NodeCapabilities:
    """The capabilities of this node's kubelet that depend on the published devices."""

    publishers: Mapping[str, Publisher]
    """Publishers by driver."""
    node_status: NodeStatus

    async def counts_claims(self, driver: str) -> bool:
        """Returns True if the kubelet adds claims of a driver to the limits of pods (KEP-5517). Raises KubeError.

        It does so if it declares the feature and the API server has stored the mapping of the driver's devices.
        """
        return self.publishers[driver].counted and await self.node_status.counts_claims()
