# SPDX-License-Identifier: Apache-2.0
"""The commands. Exit status: 0; 1 when something is missing or kubectl fails; 2 for wrong usage.

``status`` and ``doctor`` pass on the exit status of the command on the node.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from kubectl_numa import __version__
from kubectl_numa.cluster import DRIVERS, Cluster, read_cluster, read_pod
from kubectl_numa.kubectl import Kubectl, KubectlError, labels_of, path_of
from kubectl_numa.tables import Row, document, safe, table
from kubectl_numa.views import claim_rows, explain, explain_missing, explain_pod, free_rows, node_rows

_DRA: Final = "resource.k8s.io"
_PASSED: Final = ("kubeconfig", "context", "cluster", "user", "as", "request-timeout")
_LABEL: Final = "app.kubernetes.io/part-of"
"""Of every pod of the chart, whatever group of nodes it is for."""
_CONTAINER: Final = "frontend"
_USAGE: Final = 2
"""The exit status of a command that does not know its arguments."""
_KUBELET_CONFIG: Final = "--kubelet-config"
_OLDER: Final = (
    f"the image of pod {{}} is older than this plugin and does not know {_KUBELET_CONFIG}; its checks of the kubelet's "
    "configuration are left out"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A command with its arguments, and the way to the cluster."""

    kubectl: Kubectl
    given: argparse.Namespace

    def cluster(self) -> Cluster:
        """Reads every slice of our drivers and every claim."""
        path = path_of(_DRA, "resourceslices")
        slices = (one for name in DRIVERS for one in self.kubectl.items(path, fieldSelector=f"spec.driver={name}"))
        return read_cluster(slices, self.kubectl.items(path_of(_DRA, "resourceclaims")))

    def show(self, rows: Sequence[Row], nothing: str) -> int:
        """Prints rows in the form that was asked for."""
        if self.given.output == "json":
            print(document(rows))
        else:
            print(table(rows, wide=self.given.output == "wide") if rows else nothing)
        return 0


def _nodes(request: Request) -> int:
    return request.show(node_rows(request.cluster()), "no node publishes CPUs or memory")


def _claims(request: Request) -> int:
    namespace = "" if request.given.all_namespaces else request.given.namespace or ""
    return request.show(claim_rows(request.cluster(), namespace), "no claim has CPUs or memory")


def _free(request: Request) -> int:
    cluster = request.cluster()
    rows = free_rows(cluster, request.given.node or "")
    if not rows and request.given.node:
        if any(device.node == request.given.node for device in cluster.devices.values()):
            text = "offers nothing to claims: its devices are tainted, or it only observes; see kubectl numa nodes"
            raise KubectlError(f"node {request.given.node} {text}")
        raise KubectlError(f"node {request.given.node} publishes nothing; is the driver running there?")
    return request.show(rows, "no node publishes CPUs or memory")


def _explain(request: Request) -> int:
    namespace = request.given.namespace or request.kubectl.namespace()
    pod = read_pod(request.kubectl.get(path_of("", "pods", namespace, request.given.pod)))
    cluster = request.cluster()
    claims = {claim.name: claim for claim in cluster.claims if claim.namespace == namespace}
    lines = list(explain_pod(pod, namespace, request.given.pod))
    for use in pod.claims:
        if use.name in claims:
            lines += explain(cluster, claims[use.name], pod)
        else:
            lines += explain_missing(use, namespace, template_exists=_template_exists(request, namespace, use.template))
    print("\n".join(map(safe, lines)))
    return 0


def _template_exists(request: Request, namespace: str, name: str) -> bool | None:
    """Returns whether there is a ResourceClaimTemplate of that name; None if none is asked for or it cannot be read."""
    if not name:
        return None
    try:
        path = path_of(_DRA, "resourceclaimtemplates", namespace)
        return any(True for _ in request.kubectl.items(path, fieldSelector=f"metadata.name={name}"))
    except KubectlError:
        return None


def _driver_pod(request: Request) -> Mapping[str, Any]:
    """Returns the driver's pod on a node, the newest that runs where there are two. KubectlError."""
    given = request.given
    pods = request.kubectl.items(path_of("", "pods"), fieldSelector=f"spec.nodeName={given.node}")
    found = [pod for pod in pods if labels_of(pod).get(_LABEL) == given.driver and _runs(pod)]
    if not found:
        raise KubectlError(f"no running pod of {given.driver} on node {given.node}; --driver names another {_LABEL}")
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def _runs(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _output(request: Request) -> list[str]:
    """Returns the flag for the form of the output that was asked for, for a command in the driver's pod."""
    return ["-o", "json"] if request.given.output == "json" else []


def _status(request: Request) -> int:
    meta = _driver_pod(request)["metadata"]
    command = ["dra-frontend", "status", *_output(request)]
    status, errors = request.kubectl.execute(meta["namespace"], meta["name"], _CONTAINER, command)
    sys.stderr.write(errors)
    return status


def _doctor(request: Request) -> int:
    meta = _driver_pod(request)["metadata"]
    run = partial(request.kubectl.execute, meta["namespace"], meta["name"], _CONTAINER)
    command, kubelet = ["dra-frontend", "doctor", *_output(request)], _kubelet_config(request)
    status, errors = run([*command, _KUBELET_CONFIG, "-"], kubelet) if kubelet else run(command)
    if status == _USAGE and f"unrecognized arguments: {_KUBELET_CONFIG}" in errors:
        print(f"kubectl numa: {_OLDER.format(meta['name'])}", file=sys.stderr)
        status, errors = run(command)
    sys.stderr.write(errors)
    return status


def _kubelet_config(request: Request) -> str:
    """Returns the kubelet's configuration as JSON, which the driver itself may not read; empty if the user may not."""
    try:
        return json.dumps(request.kubectl.get(f"{path_of('', 'nodes', name=request.given.node)}/proxy/configz"))
    except KubectlError:
        return ""


def _page(request: Request) -> int:
    pod = _driver_pod(request)
    ports = [port for one in pod["spec"]["containers"] for port in one.get("ports") or [] if port.get("name") == "page"]
    if not ports:
        raise KubectlError(
            "the page is off on this node: set driverConfig.pagePort in the chart's values, such as 8082"
        )
    meta, given = pod["metadata"], request.given
    port = int(ports[0]["containerPort"])
    return request.kubectl.forward(meta["namespace"], meta["name"], given.port, port, show=given.browser)


_COMMANDS: Final[Mapping[str, tuple[Callable[[Request], int], str, str]]] = {
    "nodes": (_nodes, "", "what each node has, and what of it is free"),
    "claims": (_claims, "", "what each claim has, and whether that is enforced"),
    "free": (_free, "node?", "what claims can still have, by NUMA node"),
    "explain": (_explain, "pod", "what a pod's claims have, or what they wait for"),
    "status": (_status, "node", "run dra-frontend status on a node; its exit status is passed on"),
    "doctor": (_doctor, "node", "run dra-frontend doctor on a node; its exit status is passed on"),
    "page": (_page, "node", "open the page of a node in the browser"),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kubectl numa", description="CPUs, memory and hugepages of a cluster's nodes")
    parser.add_argument("--version", action="version", version=__version__)
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("-o", "--output", choices=["table", "wide", "json"], default="table")
    common.add_argument("-n", "--namespace", help="claims and pods of this namespace; default: all claims")
    common.add_argument("--driver", default="dra-driver-numa", help=f"{_LABEL} of the driver's pods")
    for name in _PASSED:
        common.add_argument(f"--{name}", dest=name, help="as of kubectl")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, argument, text) in _COMMANDS.items():
        one = commands.add_parser(name, help=text, description=text, parents=[common])
        if argument:
            one.add_argument(argument.rstrip("?"), nargs="?" if argument.endswith("?") else None)
        if name == "claims":
            text = "claims of all namespaces, which is the default"
            one.add_argument("-A", "--all-namespaces", action="store_true", help=text)
        if name == "page":
            one.add_argument("--port", type=int, default=0, help="local port; default: a free one")
            one.add_argument("--no-browser", dest="browser", action="store_false", help="only print the address")
    return parser


def run(arguments: Sequence[str], program: str) -> int:
    """Runs one command by the ``kubectl`` that is named; returns the exit status."""
    try:
        given = _parser().parse_args(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    flags = [f"--{name}={value}" for name in _PASSED if (value := getattr(given, name))]
    try:
        return _COMMANDS[given.command][0](Request(Kubectl(program, flags), given))
    except KubectlError as error:
        print(f"kubectl numa: {safe(error)}", file=sys.stderr)
        return 1
