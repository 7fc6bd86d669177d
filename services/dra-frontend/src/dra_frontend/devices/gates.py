# SPDX-License-Identifier: Apache-2.0
"""Feature gates of Kubernetes on which the published devices depend, and the fields of a device behind each gate.

A server whose gate is off drops the fields, or refuses the slice. Every text and every comparison of the driver takes
the names from here.
"""

from collections.abc import Mapping
from typing import Any, Final

SHARING: Final = "DRAConsumableCapacity"
"""Several claims share a device. Alpha in Kubernetes 1.34, on by default from 1.36 on."""
SHARING_FIELDS: Final = ("allowMultipleAllocations", "requestPolicy")
TAINTS: Final = "DRADeviceTaints"
TAINTS_FIELD: Final = "taints"
LISTS: Final = "DRAListTypeAttributes"
"""Attributes with several values (KEP-5491)."""
BINDING: Final = "DRADeviceBindingConditions"
COUNTING: Final = "DRANodeAllocatableResources"
"""Claims count against the node, and the kubelet adds them to limits (KEP-5517, from Kubernetes 1.37 on; ADR 20)."""
ALLOCATABLE: Final = "nodeAllocatableResources"
"""The field of a device by which claims are counted against the node, in the form of Kubernetes 1.37."""


def kubelet_counts_claims(node: Mapping[str, Any]) -> bool:
    """Returns True if the kubelet declares in its Node that it adds claims to the limits of pods and containers."""
    return COUNTING in ((node.get("status") or {}).get("declaredFeatures") or ())
