# SPDX-License-Identifier: Apache-2.0
"""The claim that kube-scheduler creates for a pod's extended resources (KEP-5004).

It requests N devices of a class, regardless of their capacity, for each container that asks for the resource. Init
containers are left out.
"""

import json
from collections.abc import Iterable
from typing import Any

Document = dict[str, Any]
IMPLICIT = "deviceclass.resource.kubernetes.io/"
"""Prefix of the resource name that requests a class by its own name, even if the class has no extended resource
name.
"""


def class_of(resource: str, classes: Iterable[Document]) -> str | None:
    """Returns the DeviceClass for an extended resource. The newest class wins; among classes of the same age, the one
    whose name sorts first.
    """
    found = []
    for one in classes:
        name, metadata = (one.get("spec") or {}).get("extendedResourceName"), one["metadata"]
        if resource in (name, IMPLICIT + metadata["name"]):
            found.append(metadata)
    found.sort(key=lambda metadata: metadata["name"])
    found.sort(key=lambda metadata: str(metadata.get("creationTimestamp", "")), reverse=True)
    return str(found[0]["name"]) if found else None


def claim_of(pod: Document, classes: Iterable[Document]) -> tuple[Document, list[Document]] | None:
    """Returns the claim for a pod that asks for extended resources, and the requests of each container."""
    classes, requests, mappings = list(classes), [], []
    for index, container in enumerate(pod["spec"]["containers"]):
        asked = container.get("resources", {}).get("requests") or {}
        for place, resource in enumerate(sorted(asked)):
            if (name := class_of(resource, classes)) is None:
                continue
            request = f"container-{index}-request-{place}"
            exactly = {"deviceClassName": name, "allocationMode": "ExactCount", "count": int(asked[resource])}
            requests.append({"name": request, "exactly": exactly})
            mapping = {"containerName": container["name"], "resourceName": resource, "requestName": request}
            mappings.append(mapping)
    if not requests:
        return None
    owner = {key: pod["metadata"][key] for key in ("name", "uid")}
    metadata = {
        "generateName": f"{pod['metadata']['name']}-extended-resources-",
        "annotations": {"resource.kubernetes.io/extended-resource-claim": "true"},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "controller": True, **owner}],
    }
    return json.loads(json.dumps({"metadata": metadata, "spec": {"devices": {"requests": requests}}})), mappings
