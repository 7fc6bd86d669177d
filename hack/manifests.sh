#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# manifests.sh [HELM ARGUMENT...]: prints all objects that the chart installs as one file, for users without Helm.
# Accepts the arguments of "helm template", for example --values FILE. Variables: HELM (the command, default
# "helm") and CHART (default charts/dra-driver-numa).
set -eu
cd "$(dirname "$0")/.."
namespace=dra-driver-numa
chart=${CHART:-charts/dra-driver-numa}
cat <<END
# SPDX-License-Identifier: Apache-2.0
# Generated from charts/dra-driver-numa by "make manifests". To change it, edit the chart or set values.
---
apiVersion: v1
kind: Namespace
metadata:
  name: $namespace
  labels:
    # The pods mount host paths.
    pod-security.kubernetes.io/enforce: privileged
END
# --skip-tests: the pod of "helm test" must not be installed permanently.
"${HELM:-helm}" template dra-driver-numa "$chart" --namespace "$namespace" --skip-tests "$@"
