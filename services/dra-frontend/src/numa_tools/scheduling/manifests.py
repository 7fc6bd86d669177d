# SPDX-License-Identifier: Apache-2.0
"""Reads manifests: claims, templates, classes, slices, pods, and every object that contains pod templates."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from numa_contract.errors import shown

from numa_tools.scheduling.claim_spec import ClaimSpec, DeviceClass, read_claim_spec, read_class
from numa_tools.scheduling.pod_templates import PodTemplate, pod_templates
from numa_tools.scheduling.reading import ManifestError, items, mapping, quantities, value

_PARENTS: Final = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "PodTemplate": ("template",),
}
"""Kubernetes' built-in kinds, each with the path at which objects of that kind must contain a pod template."""
_GROUPS: Final = ("", "v1", "apps", "batch")
"""``apiVersion`` prefixes of Kubernetes' built-in kinds. They are checked because other API groups define kinds of the
same name, such as Job.
"""
_MAX_PODS: Final = 4096
"""Maximum number of pods and pod templates in all files."""
_DEFINITIONS: Final = ("ResourceClaim", "ResourceClaimTemplate", "DeviceClass", "ResourceSlice")
_IMPLICIT: Final = "deviceclass.resource.kubernetes.io/"
_NODE_RESOURCES: Final = ("cpu", "memory", "ephemeral-storage")
Name = tuple[str, str]
"""An object's namespace and name."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim to simulate: a ResourceClaim, or a claim that is created from a template or for extended resources."""

    namespace: str
    name: str
    spec: ClaimSpec
    users: tuple[str, ...] = ()
    """The pod's containers that use the claim at the same time."""
    pods: int = 1
    """Number of pods that use the claim, counted in all files. It can be greater than 1 only if the pods refer to a
    ResourceClaim by name.
    """

    @property
    def document(self) -> dict[str, Any]:
        """The ResourceClaim before it is allocated."""
        return {"metadata": {"namespace": self.namespace, "name": self.name}}


@dataclass(frozen=True, slots=True)
class Workload:
    """Claims that must fit together: all of a pod's claims, or a single claim."""

    name: str
    claims: tuple[Claim, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the outcome, such as parts that are not simulated."""


@dataclass(slots=True)
class Manifests:
    """The objects in all files."""

    claims: dict[Name, Claim] = field(default_factory=dict)
    templates: dict[Name, Claim] = field(default_factory=dict)
    classes: dict[str, DeviceClass] = field(default_factory=dict)
    slices: list[Mapping[str, Any]] = field(default_factory=list)
    pods: list[tuple[Name, PodTemplate]] = field(default_factory=list)
    """Pods and pod templates, each with the name of the object that contains it."""
    generated: Counter[tuple[str, Name]] = field(default_factory=Counter)
    """Number of objects for each kind and generated name."""

    def add(self, document: Any) -> None:
        """Adds a document, or each item of a List. Raises a ManifestError that names the object."""
        if document is None:
            return
        if not isinstance(document, dict):
            raise ManifestError(f"is not a Kubernetes object: {shown(document)}")
        kind = value(document, "kind", str)
        if kind.endswith("List") and isinstance(document.get("items"), list):
            for one in items(document, "items", lambda one: one):
                self.add({"kind": kind.removesuffix("List"), **one})
            return
        try:
            self._add(kind, document)
        except ManifestError as error:
            raise ManifestError(f"{kind}{_name_suffix(document)}: {error}") from error

    def _add(self, kind: str, document: Mapping[str, Any]) -> None:
        if kind not in _DEFINITIONS:
            self._add_pods(kind, document)
            return
        metadata = mapping(document, "metadata")
        name = value(metadata, "namespace", str, "default"), _name_of(metadata)
        match kind:
            case "ResourceClaim":
                name = self._unique_name(kind, name)
                self.claims[name] = Claim(*name, read_claim_spec(mapping(document, "spec")))
            case "ResourceClaimTemplate":
                name = self._unique_name(kind, name)
                self.templates[name] = Claim(*name, read_claim_spec(mapping(document, "spec", "spec")))
            case "DeviceClass":
                self.classes[name[1]] = read_class(document)
            case "ResourceSlice":
                self.slices.append(document)

    def _unique_name(self, kind: str, name: Name) -> Name:
        """Returns a unique name. A number is appended to a generated name that is already in use."""
        if not name[1].endswith("*"):
            return name
        self.generated[kind, name] += 1
        number = self.generated[kind, name]
        return name if number == 1 else (name[0], f"{name[1]}{number}")

    def _add_pods(self, kind: str, document: Mapping[str, Any]) -> None:
        """Adds a pod, or the pod templates inside an object of another kind."""
        builtin = str(document.get("apiVersion") or "").partition("/")[0] in _GROUPS
        found = pod_templates(document)
        if builtin and (kind == "Pod" or kind in _PARENTS):
            spec = mapping(document, *_PARENTS.get(kind, ()), "spec")
            found = [PodTemplate("", spec, found[0].pods if len(found) == 1 else 1)]
        if not found:
            return
        metadata = mapping(document, "metadata")
        namespace, name = value(metadata, "namespace", str, "default"), _name_of(metadata)
        for one in found:
            self.pods.append(((namespace, f"{name}/{one.part}" if len(found) > 1 and one.part else name), one))
        if len(self.pods) > _MAX_PODS:
            raise ManifestError(f"the files have more than {_MAX_PODS} pods and pod templates")

    def merged_with(self, other: "Manifests") -> "Manifests":
        """Returns new Manifests with the objects from this instance and from ``other``."""
        return Manifests(
            self.claims | other.claims,
            self.templates | other.templates,
            self.classes | other.classes,
            self.slices + other.slices,
            self.pods + other.pods,
        )

    def claim_workloads(self) -> list[Workload]:
        """Returns a workload for each claim and claim template."""
        return [Workload(claim.name, (claim,)) for claim in (*self.claims.values(), *self.templates.values())]

    def pod_workloads(self, definitions: "Manifests", classes: Mapping[str, DeviceClass]) -> list[Workload]:
        """Returns the pods with their claims from ``definitions``. Raises a ManifestError that names the pod."""
        users: Counter[Name] = Counter()
        for (namespace, _), template in self.pods:
            users.update({(namespace, claim): template.pods for claim in _named_claims(template.spec)})
        found = []
        for name, template in self.pods:
            try:
                workload = _workload(name, template.spec, definitions, classes, users)
            except ManifestError as error:
                raise ManifestError(f"pod {name[1]}: {error}") from error
            found.append(replace(workload, notes=(*workload.notes, *_pod_count_note(template))))
        return found


def _pod_count_note(template: PodTemplate) -> Iterable[str]:
    """Yields a note if several pods are created from a template, since only one of them is simulated."""
    if template.pods > 1:
        yield f"only one of its template's {template.pods} pods is simulated; -n N simulates N on this node"


def _name_suffix(document: Mapping[str, Any]) -> str:
    """Returns an object's name for an error message, preceded by a space, or "" if the object has no name."""
    metadata = document.get("metadata")
    name = metadata.get("name", metadata.get("generateName")) if isinstance(metadata, dict) else None
    return "" if name is None else f" {name if isinstance(name, str) else shown(name)}"


def _name_of(metadata: Mapping[str, Any]) -> str:
    """Returns an object's name, or its ``generateName`` with ``*`` in place of the API server's suffix."""
    generated = value(metadata, "generateName", str, "")
    return value(metadata, "name", str, f"{generated}*" if generated else None)


def _named_claims(spec: Mapping[str, Any]) -> set[str]:
    """Returns the names of the ResourceClaims that a pod refers to. The fields have not been validated yet."""
    entries = spec.get("resourceClaims")
    names = [
        one.get("resourceClaimName") for one in (entries if isinstance(entries, list) else ()) if isinstance(one, dict)
    ]
    return {name for name in names if isinstance(name, str)}


def _workload(
    name: Name,
    spec: Mapping[str, Any],
    definitions: Manifests,
    classes: Mapping[str, DeviceClass],
    users: Mapping[Name, int],
) -> Workload:
    claims = dict(items(spec, "resourceClaims", lambda one: _claim_of_pod(name, one, definitions, users)))
    before = items(spec, "initContainers", lambda one: one)
    containers = [*before, *items(spec, "containers", lambda one: one)]
    for container in containers:
        try:
            items(mapping(container, "resources"), "claims", lambda one: _check_use(one, claims))
        except ManifestError as error:
            raise ManifestError(f"container {value(container, 'name', str, '')}: resources.{error}") from error
    extended, notes = _extended(containers, classes)
    # An init container releases its claims when it exits, unless it is a sidecar.
    lasting = [one for one in containers if one not in before or one.get("restartPolicy") == "Always"]
    claims = {inner: replace(one, users=_users(inner, lasting)) for inner, one in claims.items()}
    if claims and not any(map(_determines_qos, (spec, *containers))):
        notes.append(
            "no container requests cpu or memory: the pod is BestEffort and will be killed first (docs/workloads.md)"
        )
    made = [Claim(name[0], f"{name[1]}-extended-resources", extended)] if extended.requests else []
    return Workload(name[1], (*claims.values(), *made), tuple(notes))


def _users(claim: str, containers: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Returns the containers that use a claim at the same time. The fields in ``containers`` have already been
    validated.
    """
    return tuple(
        value(container, "name", str, "")
        for container in containers
        if any(use.get("name") == claim for use in mapping(container, "resources").get("claims") or ())
    )


def _determines_qos(document: Mapping[str, Any]) -> bool:
    """Returns True if the pod or one of its containers requests resources that determine the QoS class."""
    resources = mapping(document, "resources")
    return bool({"cpu", "memory"} & {*mapping(resources, "requests"), *mapping(resources, "limits")})


def _claim_of_pod(
    pod: Name, entry: Mapping[str, Any], definitions: Manifests, users: Mapping[Name, int]
) -> tuple[str, Claim]:
    inner = value(entry, "name", str)
    template, claim = entry.get("resourceClaimTemplateName"), entry.get("resourceClaimName")
    named, there = (
        ("ResourceClaimTemplate", definitions.templates) if template else ("ResourceClaim", definitions.claims)
    )
    found = there.get((pod[0], str(template or claim)))
    if found is None:
        raise ManifestError(f"{named} {pod[0]}/{template or claim} is not in any of the files")
    if template:
        return inner, Claim(pod[0], f"{pod[1]}-{inner}", found.spec)
    return inner, Claim(pod[0], found.name, found.spec, pods=users[pod[0], found.name])


def _check_use(use: Mapping[str, Any], claims: Mapping[str, Claim]) -> None:
    name, request = value(use, "name", str), value(use, "request", str, "")
    if name not in claims:
        raise ManifestError(f"name: {name} is not in spec.resourceClaims")
    if request and request not in {one.name for one in claims[name].spec.requests}:
        raise ManifestError(f"request: claim {name} has no request {request}")


def _extended(
    containers: Iterable[Mapping[str, Any]], classes: Mapping[str, DeviceClass]
) -> tuple[ClaimSpec, list[str]]:
    """Returns the claim that the scheduler creates for extended resources (KEP-5004), and a note for each resource that
    no DeviceClass provides.
    """
    requests, notes = [], []
    for index, container in enumerate(containers):
        resources = mapping(container, "resources")
        requested = quantities(resources, "limits") | quantities(resources, "requests")
        for position, resource in enumerate(sorted(requested)):
            if not requested[resource] or resource in _NODE_RESOURCES or resource.startswith("hugepages-"):
                continue
            device_class = next(
                (one for one in classes.values() if resource in (one.extended_resource, _IMPLICIT + one.name)), None
            )
            if device_class is None:
                notes.append(f"{resource}: no DeviceClass provides this resource, so it is not simulated")
                continue
            subrequest = {"deviceClassName": device_class.name, "count": int(requested[resource])}
            requests.append({"name": f"container-{index}-request-{position}", "exactly": subrequest})
    return read_claim_spec({"devices": {"requests": requests}}), notes
