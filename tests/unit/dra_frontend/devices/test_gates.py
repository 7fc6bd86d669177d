# SPDX-License-Identifier: Apache-2.0
"""Feature gates on which the published devices depend."""

from dra_frontend.devices.gates import COUNTING, kubelet_counts_claims


def test_the_node_object_declares_whether_the_kubelet_counts_claims() -> None:
    """A Node object without the list of declared features comes from a kubelet that is too old."""
    declared = ["GuaranteedQoSPodCPUResize", COUNTING]
    assert kubelet_counts_claims({"status": {"declaredFeatures": declared}})
    assert not kubelet_counts_claims({"status": {"declaredFeatures": declared[:1]}})
    assert not kubelet_counts_claims({"status": {}})
    assert not kubelet_counts_claims({})
