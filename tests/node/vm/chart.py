# SPDX-License-Identifier: Apache-2.0
"""Prints the chart's objects as JSON, with the values that the node tests need. Helm runs on the host."""

import json

from tests.chart.helm import render

# The API server is a stand-in on the node's loopback: its address comes by a kubeconfig, not by a service account.
ACCESS = "/run/node-test"
VALUES = {
    "driverConfig": {"kubeconfig": f"{ACCESS}/kubeconfig", "reservedCPUs": "0-1"},
    "frontend": {"extraVolumeMounts": [{"name": "access", "mountPath": ACCESS, "readOnly": True}]},
    "extraVolumes": [{"name": "access", "hostPath": {"path": ACCESS}}],
}

if __name__ == "__main__":
    print(json.dumps(render(VALUES)))
