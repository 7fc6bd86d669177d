# SPDX-License-Identifier: Apache-2.0
"""Whether the kubelet counts claims depends on the published devices and on the Node object."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from dra_frontend.devices.gates import COUNTING_GATE
from dra_frontend.kubelet.node_status import NodeStatus
from dra_frontend.publishing.capabilities import NodeCapabilities


@pytest.mark.parametrize(
    ("stored", "declared", "counts"), [(True, True, True), (True, False, False), (False, True, False)]
)
async def test_claims_are_counted_if_the_mapping_is_stored_and_the_node_declares_the_feature(
    stored: bool, declared: bool, counts: bool
) -> None:
    async def get_node() -> dict[str, Any]:
        return {"status": {"declaredFeatures": [COUNTING_GATE] if declared else []}}

    publishers = {"dra.memory": cast("Any", SimpleNamespace(counted=stored))}
    kubelet = NodeCapabilities(publishers, NodeStatus(get_node))
    assert await kubelet.counts_claims("dra.memory") is counts
