# SPDX-License-Identifier: Apache-2.0
"""The feature gates that determine how devices are published."""

from dra_frontend.devices.gates import COUNTING_GATE, kubelet_counts_claims


def test_the_node_object_declares_whether_the_kubelet_counts_claims() -> None:
    """If a Node object has no list of declared features, its kubelet is too old to declare any."""
    declared = ["GuaranteedQoSPodCPUResize", COUNTING_GATE]
    assert kubelet_counts_claims({"status": {"declaredFeatures": declared}})
    assert not kubelet_counts_claims({"status": {"declaredFeatures": declared[:1]}})
    assert not kubelet_counts_claims({"status": {}})
    assert not kubelet_counts_claims({})
