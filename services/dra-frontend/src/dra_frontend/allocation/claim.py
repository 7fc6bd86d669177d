# SPDX-License-Identifier: Apache-2.0
"""A ResourceClaim document as values: what was allocated, for whom, with which opaque parameters.

Reads the form of ``resource.k8s.io/v1``. Results of every driver are kept; filter with ``results_of``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, StrEnum
from fractions import Fraction
from typing import Any, Final

from dra_frontend.allocation.fields import (
    BadFieldError,
    flag_in,
    items_in,
    object_in,
    optional_text_in,
    quantities_in,
    text_in,
    texts_in,
)

POD_CLAIM_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"


class Source(StrEnum):
    """Who wrote an opaque configuration."""

    DEVICE_CLASS = "FromClass"
    CLAIM = "FromClaim"


@dataclass(frozen=True, slots=True)
class Result:
    """One allocated device, or one share of a device."""

    request: str
    """Full name, ``request`` or ``request/subrequest``."""
    driver: str
    pool: str
    device: str
    share_id: str | None
    admin_access: bool
    """Monitoring only: must neither take the device from its owner nor count as use."""
    consumed: dict[str, Fraction]

    @property
    def base_request(self) -> str:
        """The request without its subrequest: what the kubelet and containers call it."""
        return self.request.partition("/")[0]

    def consumption(self, key: str) -> Fraction | None:
        """Returns what is consumed of a capacity, published as ``key`` or ``<driver>/key``; None: the whole device."""
        bare = key.removeprefix(f"{self.driver}/")
        for name in (key, bare, f"{self.driver}/{bare}"):
            if name in self.consumed:
                return self.consumed[name]
        return None


@dataclass(frozen=True, slots=True)
class OpaqueConfig:
    """Parameters for one driver, from a DeviceClass or from the claim, as they were written."""

    source: Source
    driver: str
    requests: tuple[str, ...]
    """None at all means all; else base names or full names."""
    parameters: dict[str, Any]

    def applies_to(self, result: Result) -> bool:
        """Tells whether the parameters are meant for a result."""
        if self.driver != result.driver:
            return False
        return not self.requests or result.request in self.requests or result.base_request in self.requests


@dataclass(frozen=True, slots=True)
class NodeTerm:
    """What one term of the node selector says about the node's name; None says nothing."""

    included: frozenset[str] | None
    excluded: frozenset[str]

    def admits(self, node: str) -> bool:
        """Tells whether a node of this name can match."""
        return node not in self.excluded and (self.included is None or node in self.included)


@dataclass(frozen=True, slots=True)
class ClaimView:
    """An allocated claim. Everything that the driver needs of it, and nothing that changes under its hands."""

    uid: str
    namespace: str
    name: str
    pod_claim_name: str | None
    """Name inside the pod, for claims made from a template."""
    reserved_for: tuple[tuple[str, str], ...]
    """(UID, name) of pods."""
    results: tuple[Result, ...]
    configs: tuple[OpaqueConfig, ...]
    nodes: tuple[NodeTerm, ...] | None
    """Any of these terms; None when the allocation is not bound to nodes."""

    def results_of(self, driver: str) -> tuple[Result, ...]:
        """Returns the results of one driver, in the order of the scheduler."""
        return tuple(result for result in self.results if result.driver == driver)

    def configs_for(self, result: Result) -> tuple[OpaqueConfig, ...]:
        """Returns the parameters for a result, later ones override earlier ones: classes first, then the claim.

        Only the order counts; naming a subrequest gives no precedence over naming its request.
        """
        fitting = [config for config in self.configs if config.applies_to(result)]
        return tuple(sorted(fitting, key=lambda config: config.source is Source.CLAIM))

    def allocated_to(self, node: str) -> bool:
        """Tells whether the allocation can be for this node; selection by labels is not looked at."""
        return self.nodes is None or any(term.admits(node) for term in self.nodes)


class RefusalKind(Enum):
    """Why a claim cannot be used."""

    MALFORMED = "malformed"
    NOT_ALLOCATED = "not allocated"
    NOT_RESERVED = "not reserved"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class ClaimRefusal:
    """A claim that cannot be used as it is; the text names it and the remedy."""

    kind: RefusalKind
    claim: str
    text: str


def read_claim(document: object, uid: str | None = None, *, reserved: bool = True) -> ClaimView | ClaimRefusal:
    """Reads a claim. With ``uid`` another object of that name is refused, with ``reserved`` one that no pod may use."""
    shown = "claim without a name"
    try:
        claim = object_in({"claim": document}, "claim")
        metadata = object_in(claim, "metadata")
        shown = f"claim {text_in(metadata, 'namespace')}/{text_in(metadata, 'name')}"
        found = text_in(metadata, "uid")
        if uid is not None and found != uid:
            return _refuse(
                RefusalKind.REPLACED,
                shown,
                f"UID {uid} was replaced by {found}; delete the pod, so that it is made again for the new claim",
            )
        if object_in(claim, "status").get("allocation") is None:
            return _refuse(
                RefusalKind.NOT_ALLOCATED, shown, "not allocated; the scheduler does that, do not set nodeName by hand"
            )
        view = _view(claim, metadata)
    except BadFieldError as error:
        return _refuse(RefusalKind.MALFORMED, shown, f"{error}; is resource.k8s.io/v1 what the server speaks?")
    if reserved and not view.reserved_for:
        return _refuse(
            RefusalKind.NOT_RESERVED,
            shown,
            "reserved for no pod in status.reservedFor; the scheduler adds it (pod groups are not supported)",
        )
    return view


def _refuse(kind: RefusalKind, shown: str, text: str) -> ClaimRefusal:
    return ClaimRefusal(kind, shown, f"{shown}: {text}")


def _view(document: Mapping[str, Any], metadata: Mapping[str, Any]) -> ClaimView:
    status = object_in(document, "status")
    allocation = object_in(status, "allocation")
    devices = object_in(allocation, "devices")
    return ClaimView(
        uid=text_in(metadata, "uid"),
        namespace=text_in(metadata, "namespace"),
        name=text_in(metadata, "name"),
        pod_claim_name=optional_text_in(object_in(metadata, "annotations"), POD_CLAIM_ANNOTATION),
        reserved_for=tuple(_pod(entry) for entry in items_in(status, "reservedFor") if entry.get("resource") == "pods"),
        results=tuple(_result(entry) for entry in items_in(devices, "results")),
        configs=tuple(_config(entry) for entry in items_in(devices, "config") if entry.get("opaque") is not None),
        nodes=_nodes(allocation),
    )


def _pod(entry: Mapping[str, Any]) -> tuple[str, str]:
    return text_in(entry, "uid"), text_in(entry, "name")


def _result(entry: Mapping[str, Any]) -> Result:
    return Result(
        request=text_in(entry, "request"),
        driver=text_in(entry, "driver"),
        pool=text_in(entry, "pool"),
        device=text_in(entry, "device"),
        share_id=optional_text_in(entry, "shareID"),
        admin_access=flag_in(entry, "adminAccess"),
        consumed=quantities_in(entry, "consumedCapacity"),
    )


def _config(entry: Mapping[str, Any]) -> OpaqueConfig:
    source = text_in(entry, "source")
    if source not in list(Source):
        raise BadFieldError("source", f"is {source!r}, neither {Source.DEVICE_CLASS} nor {Source.CLAIM}")
    opaque = object_in(entry, "opaque")
    return OpaqueConfig(
        source=Source(source),
        driver=text_in(opaque, "driver"),
        requests=texts_in(entry, "requests"),
        parameters=dict(object_in(opaque, "parameters")),
    )


def _nodes(allocation: Mapping[str, Any]) -> tuple[NodeTerm, ...] | None:
    if allocation.get("nodeSelector") is None:
        return None
    return tuple(_term(entry) for entry in items_in(object_in(allocation, "nodeSelector"), "nodeSelectorTerms"))


def _term(entry: Mapping[str, Any]) -> NodeTerm:
    included: frozenset[str] | None = None
    excluded: frozenset[str] = frozenset()
    for field in items_in(entry, "matchFields"):
        values = frozenset(texts_in(field, "values"))
        if field.get("key") == "metadata.name" and field.get("operator") == "In":
            included = values if included is None else included & values
        elif field.get("key") == "metadata.name" and field.get("operator") == "NotIn":
            excluded |= values
    return NodeTerm(included, excluded)
