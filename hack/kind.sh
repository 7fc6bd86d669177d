#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# kind.sh up|down: creates or deletes a kind cluster with the driver from this tree.
# Needs docker, kind, kubectl and helm.
#
# Builds both images from this tree, as localhost/NAME:VERSION, unless FRONTEND_IMAGE or BACKEND_IMAGE names an image
# that docker already has (NAME:TAG).
# KIND_NODE_IMAGE is a node image with Kubernetes 1.34 or later (default: kind's own).
set -eu
cd "$(dirname "$0")/.."
cluster=dra-driver-numa namespace=dra-driver-numa
version=$(sed -n 's/^appVersion: "\(.*\)"/\1/p' charts/dra-driver-numa/Chart.yaml)
frontend=${FRONTEND_IMAGE:-localhost/dra-frontend:$version}
backend=${BACKEND_IMAGE:-localhost/nri-backend:$version}

fail() { echo "kind: $*" >&2; exit 1; }

need() {
  for tool in "$@"; do command -v "$tool" >/dev/null || fail "$tool is not installed"; done
}

up() {
  need docker kind kubectl helm
  [ -n "${FRONTEND_IMAGE:-}" ] || build dra-frontend "$frontend"
  [ -n "${BACKEND_IMAGE:-}" ] || build nri-backend "$backend"
  kind create cluster --config hack/kind.yaml ${KIND_NODE_IMAGE:+--image "$KIND_NODE_IMAGE"}
  kind load docker-image --name "$cluster" "$frontend" "$backend"
  kubectl create namespace "$namespace"
  kubectl label namespace "$namespace" pod-security.kubernetes.io/enforce=privileged
  helm install dra-driver-numa charts/dra-driver-numa --namespace "$namespace" \
    --set "frontend.image.repository=${frontend%:*},frontend.image.tag=${frontend##*:}" \
    --set "backend.image.repository=${backend%:*},backend.image.tag=${backend##*:}"
  kubectl --namespace "$namespace" rollout status daemonset/dra-driver-numa --timeout 180s
  wait_for_slices
  echo "kind: ready; try kubectl apply -f examples/cpus.yaml"
}

build() { # build TARGET NAME: always builds, because an image of this version may be from an older tree
  docker build --target "$1" --build-arg "VERSION=$version" --tag "$2" .
}

wait_for_slices() {
  nodes=$(kubectl get nodes -o name | wc -l)
  for _ in $(seq 60); do
    publishing=$(kubectl get resourceslices -o jsonpath='{range .items[?(@.spec.driver=="dra.cpu")]}{.spec.nodeName}{"\n"}{end}' | sort -u | wc -l)
    [ "$publishing" -lt "$nodes" ] || return 0
    sleep 2
  done
  fail "$publishing of $nodes nodes publish CPUs; kubectl -n $namespace logs daemonset/dra-driver-numa -c frontend shows why"
}

down() {
  need kind
  kind delete cluster --name "$cluster"
}

case ${1:-} in
  up | down) "$1" ;;
  *) fail "use up or down" ;;
esac
