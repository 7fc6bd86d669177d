# SPDX-License-Identifier: Apache-2.0
"""The chart rendered by the real Helm, as the objects that a cluster would get."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "charts/dra-driver-numa"
HELM = Path(sys.executable).with_name("helm")
NAMESPACE = "dra-driver-numa"
Document = dict[str, Any]

RULES: Document = {"enabled": True, "runbookURL": "https://wiki.example/numa/symptoms.html"}
# Every option is on, so each object that the chart can create is included.
EVERYTHING: Document = {
    "driverConfig": {"hugepagesOnDemand": [{"numaNode": 0, "size": "32Mi", "pages": 4}]},
    "networkPolicy": {"apiServerCIDRs": ["10.0.0.1/32", "fd00::1/128"]},
    "deviceClasses": {"extendedResource": "dra-numa/cpu"},
    "existingPods": {"enabled": True},
    "resourceQuota": {"enabled": True},
    "openshift": {"scc": {"create": True}},
    "hugepageProvision": {
        "enabled": True,
        "pages": [{"size": "2Mi", "count": 4, "node": 0}, {"size": "1G", "count": 1}],
    },
    "metrics": {"podMonitor": {"enabled": True}, "dashboard": {"enabled": True}, "prometheusRule": RULES},
}


class HelmError(Exception):
    """Raised if Helm fails, with Helm's error message."""


def run(*arguments: str) -> str:
    """Returns Helm's output. Raises HelmError."""
    done = subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise HelmError(done.stderr)
    return done.stdout


def render(
    values: Mapping[str, Any] | None = None, *, release: str = "dra-driver-numa", namespace: str = NAMESPACE
) -> list[Document]:
    """Returns the objects that ``helm install`` would create with these values. Raises HelmError."""
    documents: list[Document] = json.loads(_rendered(json.dumps(values or {}), release, namespace))
    return documents


def text(values: Mapping[str, Any], release: str = "dra-driver-numa", namespace: str = NAMESPACE) -> str:
    """Returns the output of ``helm template`` with these values. Raises HelmError."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(values))
        file.flush()
        return run("template", release, str(CHART), "--namespace", namespace, "--values", file.name)


@lru_cache(256)
def _rendered(values: str, release: str, namespace: str) -> str:
    """Returns the objects as JSON, which Python parses a hundred times faster than YAML."""
    objects = yaml.load_all(text(json.loads(values), release, namespace), yaml.CSafeLoader)
    return json.dumps([document for document in objects if document])


def only(documents: list[Document], kind: str) -> Document:
    """Returns the only object of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def pod_of(documents: list[Document]) -> Document:
    """Returns the pod spec of the DaemonSet for nodes without a group."""
    sets = [one for one in documents if "dra-driver-numa/group" not in one["metadata"]["labels"]]
    spec: Document = only(sets, "DaemonSet")["spec"]["template"]["spec"]
    return spec


def container(documents: list[Document], name: str) -> Document:
    """Returns a container or init container in the DaemonSet."""
    pod = pod_of(documents)
    every = [*pod.get("initContainers", []), *pod["containers"]]
    found: Document = next(one for one in every if one["name"] == name)
    return found


def host_mounts(documents: list[Document], name: str) -> dict[str, tuple[str, bool]]:
    """Returns a container's host path mounts. Each path in the container is mapped to a pair: the path on the host, and
    whether the mount is read-only.
    """
    paths = {
        volume["name"]: volume["hostPath"]["path"] for volume in pod_of(documents)["volumes"] if "hostPath" in volume
    }
    return {
        mount["mountPath"]: (paths[mount["name"]], mount.get("readOnly", False))
        for mount in container(documents, name)["volumeMounts"]
        if mount["name"] in paths
    }
