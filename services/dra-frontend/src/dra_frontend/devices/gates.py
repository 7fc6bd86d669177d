# SPDX-License-Identifier: Apache-2.0
"""Kubernetes feature gates that published devices depend on, and the device fields behind each gate.

If a gate is disabled, the server drops the fields or rejects the slice. All code that compares or prints the name of a
gate or field uses these constants.
"""

from collections.abc import Mapping
from typing import Any, Final

SHARING_GATE: Final = "DRAConsumableCapacity"
"""Lets several claims share a device. Alpha in Kubernetes 1.34, enabled by default from 1.36."""
SHARING_FIELDS: Final = ("allowMultipleAllocations", "requestPolicy")
TAINTS_GATE: Final = "DRADeviceTaints"
TAINTS_FIELD: Final = "taints"
LISTS_GATE: Final = "DRAListTypeAttributes"
"""Allows attributes with several values (KEP-5491)."""
BINDING_GATE: Final = "DRADeviceBindingConditions"
COUNTING_GATE: Final = "DRANodeAllocatableResources"
"""Counts claimed resources against the node's allocatable resources. The kubelet adds the claimed resources to pod
limits (KEP-5517, from Kubernetes 1.37; docs/adr/0020).
"""
ALLOCATABLE_FIELD: Final = "nodeAllocatableResources"
"""Device field through which claims are counted against the node, in the format that Kubernetes 1.37 uses."""


def kubelet_counts_claims(node: Mapping[str, Any]) -> bool:
    """Returns True if the kubelet declares in the Node's status that it adds claimed resources to pod and container
    limits.
    """
    return COUNTING_GATE in ((node.get("status") or {}).get("declaredFeatures") or ())
