# SPDX-License-Identifier: Apache-2.0
"""Removes one capability or mount from the rendered pod, as an admission policy or a mistaken edit might."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any

from tests.node.rig.kubelet_pod import Document


def removals(objects: Iterable[Document]) -> list[str]:
    """Returns a name for each capability and each mount of the pod's containers, e.g. ``backend mount cgroup``."""
    found = []
    for container in _containers(objects):
        added = container["securityContext"]["capabilities"].get("add", [])
        found += [f"{container['name']} capability {one}" for one in added]
        found += [f"{container['name']} mount {mount['name']}" for mount in container["volumeMounts"]]
    return found


def without(objects: Iterable[Document], removal: str) -> list[Document]:
    """Returns the objects without one capability or mount. Raises ValueError if the pod does not have it."""
    name, kind, what = removal.split(" ")
    edited = copy.deepcopy(list(objects))
    (container,) = (one for one in _containers(edited) if one["name"] == name)
    if kind == "capability":
        container["securityContext"]["capabilities"]["add"].remove(what)
        return edited
    kept = [mount for mount in container["volumeMounts"] if mount["name"] != what]
    if len(kept) == len(container["volumeMounts"]):
        raise ValueError(f"container {name} has no mount {what}")
    container["volumeMounts"] = kept
    return edited


def _containers(objects: Iterable[Document]) -> Iterator[dict[str, Any]]:
    for document in objects:
        if document["kind"] == "DaemonSet":
            yield from document["spec"]["template"]["spec"]["containers"]
