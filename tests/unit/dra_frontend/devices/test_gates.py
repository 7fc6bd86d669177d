# SPDX-License-Identifier: Apache-2.0
"""Feature gates that the published devices depend on."""

from dra_frontend.devices.gates import COUNTING, kubelet_counts_claims


def test_a_kubelet_declares_that_it_counts() -> None:
    """A Node without the list belongs to a kubelet that is too old."""
    declared = ["GuaranteedQoSPodCPUResize", COUNTING]
    assert kubelet_counts_claims({"status": {"declaredFeatures": declared}})
    assert not kubelet_counts_claims({"status": {"declaredFeatures": declared[:1]}})
    assert not kubelet_counts_claims({"status": {}})
    assert not kubelet_counts_claims({})
