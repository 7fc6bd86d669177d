# SPDX-License-Identifier: Apache-2.0
"""An object store with the API server's semantics: versions, UIDs, optimistic locking, and a history for watches."""

import copy
import secrets
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

Document = dict[str, Any]


class ApiError(Exception):
    """An error response, which is returned as a Status object."""

    def __init__(self, code: int, reason: str, message: str, name: str = "", kind: str = "") -> None:
        self.code = code
        self.reason = reason
        self.name = name
        self.kind = kind
        super().__init__(message)

    def status(self) -> Document:
        """Returns the Status document."""
        details = {key: value for key, value in (("name", self.name), ("kind", self.kind)) if value}
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": str(self),
            "reason": self.reason,
            "details": details,
            "code": self.code,
        }


@dataclass(frozen=True)
class Resource:
    """A kind of object and the path that serves it."""

    group: str
    name: str
    kind: str
    namespaced: bool = False
    status: bool = False
    selectable: tuple[str, ...] = ()

    @property
    def api_version(self) -> str:
        """Returns the ``apiVersion`` of the resource's documents."""
        return f"{self.group}/v1" if self.group else "v1"


NODES = Resource("", "nodes", "Node", status=True)
CLASSES = Resource("resource.k8s.io", "deviceclasses", "DeviceClass")
CLAIMS = Resource("resource.k8s.io", "resourceclaims", "ResourceClaim", namespaced=True, status=True)
SLICES = Resource("resource.k8s.io", "resourceslices", "ResourceSlice", selectable=("spec.driver", "spec.nodeName"))
RESOURCES = (
    *(NODES, CLASSES, CLAIMS, SLICES),
    Resource("", "namespaces", "Namespace", status=True),
    Resource("", "pods", "Pod", namespaced=True, status=True, selectable=("spec.nodeName", "status.phase")),
    Resource("", "events", "Event", namespaced=True, selectable=("reason", "type", "involvedObject.name")),
    Resource("events.k8s.io", "events", "Event", namespaced=True, selectable=("reason", "type", "regarding.name")),
    Resource("resource.k8s.io", "resourceclaimtemplates", "ResourceClaimTemplate", namespaced=True),
    Resource("apps", "daemonsets", "DaemonSet", namespaced=True, status=True),
    *(Resource("", f"{kind.lower()}s", kind, namespaced=True) for kind in ("ConfigMap", "Secret", "ServiceAccount")),
    Resource("networking.k8s.io", "networkpolicies", "NetworkPolicy", namespaced=True),
    *(
        Resource("rbac.authorization.k8s.io", f"{kind.lower()}s", kind, namespaced=kind.startswith("Role"))
        for kind in ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding")
    ),
    Resource("admissionregistration.k8s.io", "validatingadmissionpolicies", "ValidatingAdmissionPolicy"),
    Resource("admissionregistration.k8s.io", "validatingadmissionpolicybindings", "ValidatingAdmissionPolicyBinding"),
)


@dataclass(frozen=True)
class Change:
    """One entry in the history. ``before`` determines which type of event a selective watch sees."""

    version: int
    resource: Resource
    before: Document | None
    after: Document | None
    """The object's state after the change. For a deleted object, this is its last state with the version of the
    deletion.
    """
    deleted: bool = False


@dataclass
class Store:
    """All objects. Every method is synchronous and runs on one event loop, so no locks are needed."""

    admit: Callable[[Resource, Document, Document | None], Document] = lambda _resource, new, _old: new
    version: int = 1000
    history: list[Change] = field(default_factory=list)
    forgotten: int = 0
    listeners: set[Callable[[], None]] = field(default_factory=set)
    _objects: dict[tuple[Resource, str, str], Document] = field(default_factory=dict)

    def get(self, resource: Resource, namespace: str, name: str) -> Document:
        """Returns a copy of the object. Raises ApiError 404."""
        found = self._objects.get((resource, namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", f'{resource.name} "{name}" not found', name, resource.name)
        return copy.deepcopy(found)

    def select(self, resource: Resource, namespace: str = "") -> Iterator[Document]:
        """Returns copies of the objects, sorted by namespace and name."""
        for key in sorted((key for key in self._objects if key[0] is resource), key=lambda key: key[1:]):
            if namespace in {"", key[1]}:
                yield copy.deepcopy(self._objects[key])

    def create(self, resource: Resource, namespace: str, document: Document, *, dry_run: bool = False) -> Document:
        """Stores a new object and sets its name, UID, version and creation time."""
        document = copy.deepcopy(document)
        metadata = document.setdefault("metadata", {})
        name = str(metadata.get("name") or self._generated(metadata))
        if metadata.get("resourceVersion"):
            raise ApiError(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if (resource, namespace, name) in self._objects:
            raise ApiError(409, "AlreadyExists", f'{resource.name} "{name}" already exists', name, resource.name)
        metadata |= {"name": name, "uid": str(uuid.uuid4()), "creationTimestamp": _now(), "generation": 1}
        if resource.namespaced:
            metadata["namespace"] = namespace
        document = {"kind": resource.kind, "apiVersion": resource.api_version, **document}
        document = self.admit(resource, document, None)
        return document if dry_run else self._put(resource, document, None)

    def update(self, resource: Resource, namespace: str, name: str, document: Document, part: str = "") -> Document:
        """Replaces the object, or only its status if ``part`` is ``status``. Everything else, and the object's
        identity, is kept.
        """
        old = self.get(resource, namespace, name)
        metadata = document.get("metadata") or {}
        self._check_version(resource, old, metadata.get("uid"), metadata.get("resourceVersion"))
        new = copy.deepcopy(document if not part else {**old, "status": document.get("status")})
        if not part and resource.status:
            new["status"] = old.get("status")
        new = {key: value for key, value in new.items() if value is not None}
        new |= {"kind": resource.kind, "apiVersion": resource.api_version}
        fixed = ("name", "namespace", "uid", "creationTimestamp", "generation", "generateName")
        kept = {key: old["metadata"][key] for key in fixed if key in old["metadata"]}
        managed = {"managedFields": metadata["managedFields"]} if "managedFields" in metadata else {}
        new["metadata"] = {**(old["metadata"] | managed if part else metadata), **kept}
        new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
        new = self.admit(resource, new, old)
        if new.get("spec") != old.get("spec"):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if new == old:
            return old
        return self._put(resource, new, old)

    def delete(self, resource: Resource, namespace: str, name: str, preconditions: Document | None = None) -> Document:
        """Deletes the object immediately, even if it has finalizers."""
        old = self.get(resource, namespace, name)
        wanted = preconditions or {}
        self._check_version(resource, old, wanted.get("uid"), wanted.get("resourceVersion"))
        return self._remove(resource, old)

    def since(self, version: int, resource: Resource) -> list[Change]:
        """Returns the changes that were made to objects of a kind after a version."""
        return [change for change in self.history if change.version > version and change.resource is resource]

    def forget_history(self) -> None:
        """Drops the history, as compaction does: no watch can start from an earlier version."""
        self.version += 1
        self.forgotten = self.version
        self.history.clear()

    def _generated(self, metadata: Document) -> str:
        if not metadata.get("generateName"):
            raise ApiError(422, "Invalid", "metadata.name: Required value: name or generateName is required")
        # As in names.SimpleNameGenerator: at most 63 characters, 5 of them random.
        return str(metadata["generateName"])[:58] + "".join(
            secrets.choice("bcdfghjklmnpqrstvwxz2456789") for _ in range(5)
        )

    def _check_version(self, resource: Resource, old: Document, uid: object, version: object) -> None:
        name, metadata = old["metadata"]["name"], old["metadata"]
        for what, wanted, actual in (
            ("UID", uid, metadata["uid"]),
            ("ResourceVersion", version, metadata["resourceVersion"]),
        ):
            if wanted and wanted != actual:
                text = f'Operation cannot be fulfilled on {resource.name} "{name}": {what} {wanted} is not {actual}'
                raise ApiError(409, "Conflict", text, name, resource.name)

    def _put(self, resource: Resource, document: Document, old: Document | None) -> Document:
        self.version += 1
        metadata = document["metadata"]
        metadata["resourceVersion"] = str(self.version)
        self._objects[resource, metadata.get("namespace", ""), metadata["name"]] = document
        self._record(Change(self.version, resource, old, copy.deepcopy(document)))
        return copy.deepcopy(document)

    def _remove(self, resource: Resource, document: Document) -> Document:
        self.version += 1
        metadata = document["metadata"]
        before = self._objects.pop((resource, metadata.get("namespace", ""), metadata["name"]))
        gone = {**document, "metadata": {**metadata, "resourceVersion": str(self.version)}}
        self._record(Change(self.version, resource, before, gone, deleted=True))
        return gone

    def _record(self, change: Change) -> None:
        self.history.append(change)
        for listener in list(self.listeners):
            listener()


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
