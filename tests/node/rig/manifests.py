# SPDX-License-Identifier: Apache-2.0
"""Starts pods from manifests on the node as the controllers, the scheduler and the kubelet would, up to the start of
their containers.

The images in manifests cannot be pulled here: every container runs busybox, with its own command if that is part of
busybox.
"""

import copy
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.scheduler import UnschedulableError, schedule
from tests.node.rig.cluster import NODE_NAME, Cluster
from tests.node.rig.cri import CriError
from tests.node.rig.kubelet_resources import PERIOD, cpu_shares, quantity
from tests.node.rig.pod_cgroups import Qos
from tests.node.rig.pods import FOREVER, Container, Pod, Resources
from tests.node.rig.wait import until

Document = dict[str, Any]
_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
_IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""Prefix of a DeviceClass's implicit extended resource name, which ends with the name of the class. Pods can request
every class by this name, even one without ``extendedResourceName``.
"""


def pod_templates(documents: Iterable[Document]) -> Iterator[Document]:
    """Yields the metadata and spec of each Pod among the objects, and of each pod template in the other objects."""
    for document in documents:
        if document["kind"] == "Pod":
            yield document
            continue
        for template in _templates(document.get("spec")):
            names = {"name": document["metadata"]["name"], "namespace": "default"}
            yield {**template, "metadata": {**names, **template.get("metadata", {})}}


def _templates(value: Any) -> Iterator[Document]:
    """Yields the pod templates at any depth in a value, because those of a JobSet or a LeaderWorkerSet are nested."""
    if isinstance(value, list):
        for one in value:
            yield from _templates(one)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key.lower().endswith("template") and "containers" in (inner.get("spec") or {}):
                yield inner
            else:
                yield from _templates(inner)


def read_manifest(path: Path) -> list[Document]:
    """Returns the objects in a file."""
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


@dataclass
class ManifestPod:
    """A pod with its claims; start() starts it as a kubelet does, end() removes it."""

    cluster: Cluster
    document: Document
    objects: list[Document]
    uid: str = field(default_factory=lambda: str(uuid.uuid4()))
    claims: dict[str, Document] = field(default_factory=dict)
    """Claims, by their names in the pod's ``resourceClaims``."""
    boxes: dict[str, Container] = field(default_factory=dict)
    sandbox: Pod | None = None

    @property
    def name(self) -> str:
        """Returns the pod's name."""
        return str(self.document["metadata"]["name"])

    def start(self) -> "ManifestPod":
        """Creates the claims, has them allocated and prepared, and starts every container in the pod."""
        for entry in self.document["spec"].get("resourceClaims") or []:
            self.claims[entry["name"]] = self._allocated(entry)
        status = [{"name": n, "resourceClaimName": c["metadata"]["name"]} for n, c in self.claims.items()]
        pod = copy.deepcopy(self.document)
        pod["metadata"] |= {"namespace": "default", "uid": self.uid}
        pod["status"] = {"resourceClaimStatuses": status} | self._extended()
        devices = self.cluster.kubelet("prepare", pod=pod, claims=list(self.claims.values()))
        self.sandbox = self.cluster.node.pod(self.name, uid=self.uid, qos=self._qos())
        for container in self.document["spec"]["containers"]:
            self.boxes[container["name"]] = self._started(container, devices[container["name"]])
        return self

    def _allocated(self, entry: Mapping[str, str]) -> Document:
        name = entry.get("resourceClaimName") or f"{self.name}-{entry['name']}"
        if "resourceClaimName" in entry:
            (found,) = self._named("ResourceClaim", name)
            spec = found["spec"]
        else:
            (template,) = self._named("ResourceClaimTemplate", entry["resourceClaimTemplateName"])
            spec = template["spec"]["spec"]
        return self._scheduled(name, spec)

    def _extended(self) -> Document:
        """Creates the claim for the extended resources that DeviceClasses provide, as the scheduler does (KEP-5004)."""
        classes = {
            one["spec"]["extendedResourceName"]: one["metadata"]["name"]
            for one in self.cluster.objects
            if one["kind"] == "DeviceClass" and "extendedResourceName" in one["spec"]
        }
        requests: list[Document] = []
        mappings: list[Document] = []
        for number, container in enumerate(self.document["spec"]["containers"]):
            for resource, amount in ((container.get("resources") or {}).get("requests") or {}).items():
                device_class = classes.get(resource) or resource.removeprefix(_IMPLICIT)
                if device_class == resource:
                    continue
                request = f"container-{number}-request-{len(requests)}"
                exactly = {"deviceClassName": device_class, "count": int(amount)}
                requests.append({"name": request, "exactly": exactly})
                mappings.append({"containerName": container["name"], "resourceName": resource, "requestName": request})
        if not requests:
            return {}
        name = f"{self.name}-extended-resources"
        self.claims[name] = self._scheduled(name, {"devices": {"requests": requests}})
        return {"extendedResourceClaimStatus": {"resourceClaimName": name, "requestMappings": mappings}}

    def _scheduled(self, name: str, spec: Document) -> Document:
        if not any(one["metadata"]["name"] == name for one in self.cluster.api(_CLAIMS)["items"]):
            self.cluster.api(_CLAIMS, "POST", {"metadata": {"name": name}, "spec": spec})
        pods = [{"name": self.name, "uid": self.uid}]
        try:
            return dict(schedule(self.cluster.server, "default", name, pods=pods, node=NODE_NAME))
        except UnschedulableError as error:
            raise AssertionError(f"{error}; published: {self.cluster.devices()}") from None

    def _named(self, kind: str, name: str) -> list[Document]:
        return [one for one in self.objects if one["kind"] == kind and one["metadata"]["name"] == name]

    def _qos(self) -> Qos:
        resources = [one.get("resources") or {} for one in self.document["spec"]["containers"]]
        guaranteed = all(
            one.get("limits", {}).get(name) is not None and one.get("requests", {}).get(name) == one["limits"][name]
            for one in resources
            for name in ("cpu", "memory")
        )
        return "guaranteed" if guaranteed else "burstable"

    def _started(self, container: Document, devices: list[str]) -> Container:
        assert self.sandbox is not None
        sandbox = self.sandbox
        command = container.get("command") if container["image"] == "busybox" else None
        attempt, last = -1, ""

        def tried() -> Container | None:
            nonlocal attempt, last
            attempt += 1
            try:
                return sandbox.run(
                    container["name"],
                    command or FOREVER,
                    cdi=list(dict.fromkeys(devices)),
                    resources=resources_of(container),
                    attempt=attempt,
                )
            except CriError as error:
                last = error.details
                return None

        try:
            box = until(tried, f"container {container['name']} of {self.name} starts", within=30, every=2.0)
        except TimeoutError as error:
            raise AssertionError(f"{error}: {last}") from None
        assert box is not None
        return box

    def end(self) -> None:
        """Removes the containers, then the claims."""
        if self.sandbox is not None:
            self.sandbox.remove()
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            reported = {one["podUid"] for one in self.cluster.instance.state("/v1/containers")}
            if self.uid not in reported:
                break
            time.sleep(0.5)
        self.cluster.kubelet("unprepare", pod_uid=self.uid)
        for claim in self.claims.values():
            with suppress(Exception):
                self.cluster.delete_claim(claim["metadata"]["name"])


def resources_of(container: Document) -> Resources:
    """Returns the resources that the kubelet passes to the runtime for a container, derived from the container's
    requests and limits.
    """
    given = container.get("resources") or {}
    requests, limits = given.get("requests") or {}, given.get("limits") or {}
    cpu = limits.get("cpu")
    return Resources(
        shares=cpu_shares(quantity(requests.get("cpu", cpu or "0"))),
        quota=int(quantity(cpu) * PERIOD) if cpu else 0,
        memory=int(quantity(limits.get("memory", "0"))),
        hugepages={"2MB": 0, "1GB": 0},
    )
