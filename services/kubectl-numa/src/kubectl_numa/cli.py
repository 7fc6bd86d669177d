# SPDX-License-Identifier: Apache-2.0
"""The commands. The exit status is 0 on success, 1 if something is missing or kubectl fails, and 2 for a usage error.

``status`` and ``doctor`` exit with the status of the command that they run on the node.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NoReturn

from kubectl_numa import __version__
from kubectl_numa.cluster import DRIVERS, Cluster, read_cluster, read_pod
from kubectl_numa.kubectl import Kubectl, KubectlError, labels_of, path_of
from kubectl_numa.lists import (
    Document,
    claim_documents,
    claim_row,
    free_documents,
    free_row,
    node_documents,
    node_row,
)
from kubectl_numa.tables import Row, json_text, safe, table, yaml_text
from kubectl_numa.views import explain, explain_missing, explain_pod

_DRA: Final = "resource.k8s.io"
_PROGRAM: Final = "kubectl numa"
_KUBECTL_OPTIONS: Final = {
    "kubeconfig": ("FILE", "kubeconfig file (default: $KUBECONFIG, else ~/.kube/config)"),
    "context": ("NAME", "kubeconfig context to use (default: the current context)"),
    "cluster": ("NAME", "kubeconfig cluster to use (default: the context's cluster)"),
    "user": ("NAME", "kubeconfig user to use (default: the context's user)"),
    "as": ("USER", "user to impersonate"),
    "request-timeout": ("TIME", "timeout for a single request to the API server, such as 30s (default: none)"),
}
"""Options that are passed to kubectl unchanged, each with the name of its value and its description."""
_LABEL: Final = "app.kubernetes.io/part-of"
"""Label that all of the chart's pods have, in every node group."""
_REGISTRY: Final = "/plugins_registry/dra.cpu"
"""End of the host path, in the kubelet's plugin registry, that all of the driver's pods mount."""
_CONTAINER: Final = "frontend"
_WATCH_SECONDS: Final = 5.0
"""Interval between reads by ``claims --watch``. Each read lists all slices and claims."""
_SORT_KEYS: Final = {"cpus": "cpus", "memory": "memoryBytes"}
"""For each value of ``free --sort-by``, the document key of the amount to sort by."""
_USAGE_ERROR: Final = 2
"""Exit status for a usage error."""
_NOTHING_PUBLISHED: Final = "publishes nothing; is the driver running there?"
_KUBELET_CONFIG: Final = "--kubelet-config"
_IMAGE_TOO_OLD: Final = (
    f"the image of pod {{}} is older than this plugin and does not support {_KUBELET_CONFIG}; the checks of the "
    "kubelet's configuration will be skipped"
)


@dataclass(frozen=True, slots=True)
class Request:
    """A command's arguments, with access to the cluster."""

    kubectl: Kubectl
    arguments: argparse.Namespace

    def cluster(self, namespace: str = "", labels: str = "") -> Cluster:
        """Reads all slices from our drivers, and the claims in one or all namespaces, optionally only the claims with
        the given labels.
        """
        path = path_of(_DRA, "resourceslices")
        slices = (one for name in DRIVERS for one in self.kubectl.items(path, fieldSelector=f"spec.driver={name}"))
        query = {"labelSelector": labels} if labels else {}
        return read_cluster(slices, self.kubectl.items(path_of(_DRA, "resourceclaims", namespace), **query))

    def selected(self, documents: Sequence[Document]) -> list[Document]:
        """Returns the documents whose node has the labels given by ``-l``, or all documents if ``-l`` is not given."""
        if not self.arguments.selector:
            return list(documents)
        nodes = self.kubectl.items(path_of("", "nodes"), labelSelector=self.arguments.selector)
        names = {(node.get("metadata") or {}).get("name") for node in nodes}
        return [document for document in documents if document["node"] in names]

    def namespace(self) -> str:
        """Returns the namespace given by ``-n``, or else the namespace in the user's context."""
        return self.arguments.namespace or self.kubectl.namespace()

    def selector_text(self) -> str:
        """Returns the selector given by ``-l`` for the message about an empty list, or "" if ``-l`` is not given."""
        return safe(f" with labels {self.arguments.selector}") if self.arguments.selector else ""

    def show(self, documents: Sequence[Document], row: Callable[[Document], Row], nothing: str) -> int:
        """Prints a list in the requested form. For an empty table, prints ``nothing`` to standard error instead."""
        if self.arguments.output == "json":
            print(json_text(documents))
        elif self.arguments.output == "yaml":
            print(yaml_text(documents))
        elif documents:
            print(self.rows([row(document) for document in documents]), flush=True)
        else:
            print(nothing, file=sys.stderr)
        return 0

    def rows(self, rows: Sequence[Row]) -> str:
        """Formats rows as a table, with the columns and headings that the flags request."""
        return table(rows, wide=self.arguments.output == "wide", headers=not self.arguments.no_headers)


def _names(resource: str, names: Sequence[str]) -> int:
    for name in names:
        print(f"{resource}/{safe(name)}")
    return 0


def _nodes(request: Request) -> int:
    node = request.arguments.node
    found = [one for one in request.selected(node_documents(request.cluster())) if node in (None, one["node"])]
    if node and not found and not request.arguments.selector:
        raise KubectlError(f"node {node} {_NOTHING_PUBLISHED}")
    if request.arguments.output == "name":
        return _names("node", [one["node"] for one in found])
    return request.show(found, node_row, f"No nodes found that publish CPUs or memory{request.selector_text()}.")


def _claims(request: Request) -> int:
    namespace = "" if request.arguments.all_namespaces else request.namespace()
    found = claim_documents(request.cluster(namespace, request.arguments.selector))
    if request.arguments.output == "name":
        return _names(f"resourceclaim.{_DRA}", [one["claim"] for one in found])
    where = f" in {namespace} namespace; -A lists all namespaces" if namespace else ""
    nothing = f"No claims with CPUs or memory{request.selector_text()} found{where}."
    status = request.show(found, _claim_row(namespace), safe(nothing))
    return _watch_claims(request, namespace, found) if request.arguments.watch else status


def _claim_row(namespace: str) -> Callable[[Document], Row]:
    """Returns the function that builds a claim's row. The row includes the namespace only if all namespaces are
    listed.
    """
    return partial(claim_row, namespaced=not namespace)


def _watch_claims(request: Request, namespace: str, shown: Sequence[Document]) -> int:
    """Prints the rows of new and changed claims, like ``kubectl get --watch``, until the command is interrupted."""
    while True:
        time.sleep(_WATCH_SECONDS)
        found = claim_documents(request.cluster(namespace, request.arguments.selector))
        before = {_key(one): one for one in shown}
        row = _claim_row(namespace)
        if changed := [row(one) for one in found if one != before.get(_key(one))]:
            rows = table(
                changed, wide=request.arguments.output == "wide", headers=not shown and not request.arguments.no_headers
            )
            print(rows, flush=True)
        shown = found


def _key(claim: Document) -> tuple[str, str]:
    return claim["namespace"], claim["claim"]


def _free(request: Request) -> int:
    cluster, node = request.cluster(), request.arguments.node or ""
    usable = free_documents(cluster, node)
    nodes = [one for one in node_documents(cluster) if node in ("", one["node"])]
    if not usable and node:
        text = "has no devices usable by claims: all are tainted, or the node only observes; see kubectl numa nodes"
        raise KubectlError(f"node {node} " + (text if nodes else _NOTHING_PUBLISHED))
    found = request.selected(usable)
    if key := _SORT_KEYS.get(request.arguments.sort_by or ""):
        found.sort(key=lambda one: -one.get(key, 0))
    if not found and request.selected(nodes):
        text = (
            "No nodes have devices usable by claims: all are tainted, or the nodes only observe; see kubectl numa nodes"
        )
        selector = f" -l {safe(request.arguments.selector)}" if request.arguments.selector else ""
        return request.show(found, free_row, f"{text}{selector}.")
    return request.show(found, free_row, f"No nodes found that publish CPUs or memory{request.selector_text()}.")


def _explain(request: Request) -> int:
    namespace = request.namespace()
    pod = read_pod(request.kubectl.get(path_of("", "pods", namespace, request.arguments.pod)))
    cluster = request.cluster()  # all namespaces, because every claim affects the free amounts
    claims = {claim.name: claim for claim in cluster.claims if claim.namespace == namespace}
    lines = list(explain_pod(pod, namespace, request.arguments.pod))
    for use in pod.claims:
        if use.name in claims:
            lines += explain(cluster, claims[use.name], pod)
        else:
            lines += explain_missing(use, namespace, template_exists=_template_exists(request, namespace, use.template))
    print("\n".join(map(safe, lines)))
    return 0


def _template_exists(request: Request, namespace: str, name: str) -> bool | None:
    """Returns True if the ResourceClaimTemplate exists, False if it does not, or None if ``name`` is empty or the
    template cannot be read.
    """
    if not name:
        return None
    try:
        path = path_of(_DRA, "resourceclaimtemplates", namespace)
        return any(True for _ in request.kubectl.items(path, fieldSelector=f"metadata.name={name}"))
    except KubectlError:
        return None


def _driver_pod(request: Request) -> Mapping[str, Any]:
    """Returns the driver's running pod on a node, or the newest of these pods if there are several. Raises
    KubectlError.
    """
    arguments = request.arguments
    pods = request.kubectl.items(path_of("", "pods"), fieldSelector=f"spec.nodeName={arguments.node}")
    found = [
        pod
        for pod in pods
        if labels_of(pod).get(_LABEL) == arguments.driver and _is_running(pod) and mounts_registry(pod)
    ]
    if not found:
        other = f"use --driver if the driver's pods have another value of the label {_LABEL}"
        raise KubectlError(f"no running pod of {arguments.driver} on node {arguments.node}; {other}")
    return max(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def mounts_registry(pod: Mapping[str, Any]) -> bool:
    """Returns True if a pod mounts a driver's directory in the kubelet's plugin registry, as all of the driver's pods
    do.

    Any tenant can set a pod's labels, but a tenant who may mount this directory can become root on the node anyway
    (docs/security.md). Only the end of the path is compared, since the kubelet's directory is configurable.
    """
    volumes = (pod.get("spec") or {}).get("volumes") or []
    return any(str((one.get("hostPath") or {}).get("path")).endswith(_REGISTRY) for one in volumes)


def _is_running(pod: Mapping[str, Any]) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"


def _output_option(request: Request) -> list[str]:
    """Returns the output option to pass to a command in the driver's pod."""
    return ["-o", request.arguments.output] if request.arguments.output else []


def _status(request: Request) -> int:
    meta = _driver_pod(request)["metadata"]
    command = ["dra-frontend", "status", *_output_option(request), *(["--watch"] if request.arguments.watch else [])]
    status, errors = request.kubectl.execute(meta["namespace"], meta["name"], _CONTAINER, command)
    sys.stderr.write(errors)
    return status


def _doctor(request: Request) -> int:
    meta = _driver_pod(request)["metadata"]
    run = partial(request.kubectl.execute, meta["namespace"], meta["name"], _CONTAINER)
    command, kubelet = ["dra-frontend", "doctor", *_output_option(request)], _kubelet_config(request)
    status, errors = run([*command, _KUBELET_CONFIG, "-"], kubelet) if kubelet else run(command)
    if status == _USAGE_ERROR and f"unrecognized arguments: {_KUBELET_CONFIG}" in errors:
        print(f"kubectl numa: {_IMAGE_TOO_OLD.format(meta['name'])}", file=sys.stderr)
        status, errors = run(command)
    sys.stderr.write(errors)
    return status


def _kubelet_config(request: Request) -> str:
    """Returns the kubelet's configuration as JSON, or "" if the user is not permitted to read it."""
    try:
        return json.dumps(request.kubectl.get(f"{path_of('', 'nodes', name=request.arguments.node)}/proxy/configz"))
    except KubectlError:
        return ""


def _page(request: Request) -> int:
    pod = _driver_pod(request)
    ports = [port for one in pod["spec"]["containers"] for port in one.get("ports") or [] if port.get("name") == "page"]
    if not ports:
        raise KubectlError(
            "the page is disabled on this node: set driverConfig.pagePort in the chart's values, such as 8082"
        )
    meta, arguments = pod["metadata"], request.arguments
    port = int(ports[0]["containerPort"])
    return request.kubectl.forward(
        meta["namespace"], meta["name"], arguments.port, port, open_browser=arguments.browser
    )


@dataclass(frozen=True, slots=True)
class _Command:
    """A command's function, help texts and output formats."""

    run: Callable[[Request], int]
    text: str
    argument: str = ""
    """Name of the command's argument, with a question mark at the end if the argument is optional."""
    outputs: tuple[str, ...] = ()
    """Values of ``-o``."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Example arguments by description, for the help text."""


_TABLES: Final = ("wide", "json", "yaml")
COMMANDS: Final[Mapping[str, _Command]] = {
    "nodes": _Command(
        _nodes,
        "list the nodes with the CPUs, memory and hugepages that are still free for claims",
        "node?",
        (*_TABLES, "name"),
        {
            "All nodes": "",
            "One node": "node-1",
            "Nodes with a label": "-l pool=hpc",
            "With the number of devices and the names of tainted devices": "-o wide",
        },
    ),
    "claims": _Command(
        _claims,
        "list a namespace's claims, their CPUs and memory, and whether they are enforced",
        outputs=(*_TABLES, "name"),
        examples={
            "Claims in the current context's namespace": "",
            "Claims in all namespaces": "-A",
            "With the reason for each claim's state": "-n shop -o wide",
            "Claims with a label": "-l app=db",
            "Claims as they change": "-A --watch",
            "CPUs of each claim, for a script": "-A -o json | jq '.[] | {namespace, claim, cpus}'",
        },
    ),
    "free": _Command(
        _free,
        "list the CPUs, memory and hugepages that are still free for claims, by NUMA node",
        "node?",
        _TABLES,
        {"All nodes": "", "The most free CPUs first": "--sort-by cpus", "One node, with its devices": "node-1 -o wide"},
    ),
    "explain": _Command(
        _explain,
        "explain which resources a pod's claims have, or what they are waiting for",
        "pod",
        examples={
            "A pod in the current context's namespace": "db-0",
            "A pod in another namespace": "db-0 -n shop",
        },
    ),
    "status": _Command(
        _status,
        "run dra-frontend status in the driver's pod on a node, and exit with its status",
        "node",
        _TABLES,
        {
            "A node's devices, claims and problems": "node-1",
            "With the claims' UIDs and the reasons for their state": "node-1 -o wide",
            "Every 2 s": "node-1 --watch",
        },
    ),
    "doctor": _Command(
        _doctor,
        "run dra-frontend doctor in the driver's pod on a node, and exit with its status",
        "node",
        ("json", "yaml"),
        {"A node's problems, with causes and remedies": "node-1"},
    ),
    "page": _Command(
        _page,
        "open a node's page in the browser",
        "node",
        examples={"In the browser": "node-1", "On a fixed local port": "node-1 --port 8082 --no-browser"},
    ),
}
_STATUSES: Final = "Exit status: 0 for success; 1 if something is missing or kubectl fails; 2 for a usage error."
_FORWARDED_STATUSES: Final = (
    "Exit status: 0 if there are no problems; 1 if there are problems, or if the command cannot be run on the node; "
    "2 for a usage error or unusable input."
)


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports a usage error on a single line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_USAGE_ERROR, f"{_PROGRAM}: {safe(message)}; see {self.prog} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser for all commands."""
    text = "Shows the CPUs, memory and hugepages of a cluster's nodes, and the claims that they are allocated to."
    formatter_class = argparse.RawDescriptionHelpFormatter
    parser = _Parser(_PROGRAM, description=text, epilog=_epilog("", COMMANDS["nodes"]), formatter_class=formatter_class)
    parser.add_argument("--version", action="version", version=__version__, help="print the version and exit")
    text = "namespace for the claims and explain commands (default: the context's namespace)"
    parser.add_argument("-n", "--namespace", metavar="NAME", help=text)
    _add_kubectl_options(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = f"{_sentence(command)}."
        subparser = commands.add_parser(
            name, help=command.text, description=text, epilog=_epilog(name, command), formatter_class=formatter_class
        )
        if argument := command.argument:
            optional = argument.endswith("?")
            subparser.add_argument(
                argument.rstrip("?"),
                metavar=argument.rstrip("?").upper(),
                nargs="?" if optional else None,
                help=f"name of the {argument.rstrip('?')}" + (" (default: all)" if optional else ""),
            )
        _add_flags(subparser, name, command)
        # SUPPRESS: an absent flag must not override the same flag given before the command.
        _add_kubectl_options(subparser, default=argparse.SUPPRESS)
    return parser


def _add_kubectl_options(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    for flag, (metavar, text) in _KUBECTL_OPTIONS.items():
        parser.add_argument(f"--{flag}", dest=flag, metavar=metavar, default=default, help=text)


def _sentence(command: _Command) -> str:
    return command.text[0].upper() + command.text[1:]


def _epilog(name: str, command: _Command) -> str:
    """Returns the end of a help text: examples and exit statuses. If ``name`` is empty, there is one example for each
    command.
    """
    if name:
        lines = [f"  # {text}\n  {f'{_PROGRAM} {name} {words}'.rstrip()}" for text, words in command.examples.items()]
    else:
        first = {one: next(iter(command.examples.values())) for one, command in COMMANDS.items()}
        lines = [
            f"  # {_sentence(COMMANDS[one])}\n  {f'{_PROGRAM} {one} {words}'.rstrip()}" for one, words in first.items()
        ]
    statuses = _FORWARDED_STATUSES if name in ("status", "doctor") else _STATUSES
    return "\n".join(["examples:", *lines, "", statuses])


def _add_flags(parser: argparse.ArgumentParser, name: str, command: _Command) -> None:
    if command.outputs:
        text = f"output format: {', '.join(command.outputs)} (default: a table)"
        parser.add_argument("-o", "--output", choices=["table", *command.outputs], metavar="FORM", help=text)
    if name in ("nodes", "free", "claims"):
        parser.add_argument("--no-headers", action="store_true", help="print tables without headings")
    if name in ("claims", "explain"):
        text = f"namespace of the {command.argument or name} (default: the context's namespace)"
        parser.add_argument("-n", "--namespace", metavar="NAME", default=argparse.SUPPRESS, help=text)
    if name in ("nodes", "free", "claims"):
        text = "list only claims with these labels, such as app=db (default: all)"
        if name != "claims":
            text = (
                "list only nodes with these labels, such as pool=hpc; requires permission to list nodes (default: all)"
            )
        parser.add_argument("-l", "--selector", metavar="LABELS", default="", help=text)
    if name == "free":
        text = "sort the NUMA nodes by free cpus or memory, highest first (default: by name)"
        parser.add_argument("--sort-by", choices=_SORT_KEYS, metavar="AMOUNT", help=text)
    if name == "claims":
        parser.add_argument("-A", "--all-namespaces", action="store_true", help="list claims in all namespaces")
        text = f"print claims again when they change (checked every {_WATCH_SECONDS:.0f} s)"
        parser.add_argument("-w", "--watch", action="store_true", help=text)
    if name == "status":
        parser.add_argument("-w", "--watch", action="store_true", help="print the status again every 2 s")
    if name in ("status", "doctor", "page"):
        text = f"value of the label {_LABEL} of the driver's pods (default: dra-driver-numa)"
        parser.add_argument("--driver", metavar="NAME", default="dra-driver-numa", help=text)
    if name == "page":
        parser.add_argument("--port", metavar="PORT", type=int, default=0, help="local port (default: a free one)")
        text = "only print the address, without opening a browser"
        parser.add_argument("--no-browser", dest="browser", action="store_false", help=text)


def run(arguments: Sequence[str], program: str) -> int:
    """Parses the arguments and runs the command. ``program`` is the kubectl to use. Returns the exit status."""
    parser = build_parser()
    try:
        parsed = parser.parse_args(arguments)
        if parsed.command == "claims" and parsed.watch and parsed.output not in (None, "table", "wide"):
            parser.error(f"--watch prints tables, so it cannot be used with -o {parsed.output}")
    except SystemExit as end:
        return int(end.code or 0)
    if getattr(parsed, "output", None) == "table":
        parsed.output = None
    flags = [f"--{name}={value}" for name in _KUBECTL_OPTIONS if (value := getattr(parsed, name))]
    try:
        return COMMANDS[parsed.command].run(Request(Kubectl(program, flags), parsed))
    except KubectlError as error:
        print(f"{_PROGRAM}: {safe(error)}", file=sys.stderr)
        return 1
