# SPDX-License-Identifier: Apache-2.0
"""Reads the specs of ResourceClaims and DeviceClasses (resource.k8s.io/v1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from dra_frontend.allocation.claim import MAX_CONSTRAINTS, covers

from numa_tools.scheduling.reading import ManifestError, items, mapping, quantities, texts, value

# Limits on lists that the API server enforces (resource.k8s.io, DeviceRequestsMaxSize and so on).
_MAX_REQUESTS: Final = 32
_MAX_ALTERNATIVES: Final = 8
_MAX_SELECTORS: Final = 32
_MAX_TOLERATIONS: Final = 16
_MAX_CONFIGS: Final = 32
_MAX_COUNT: Final = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration in a request. An empty key or effect matches any key or effect."""

    key: str
    value: str | None
    """The value to match, or None for any value (operator Exists)."""
    effect: str


@dataclass(frozen=True, slots=True)
class SubRequest:
    """One alternative in a request: a number of devices of one class."""

    name: str
    """``request`` or ``request/subrequest``, as in allocation results."""
    device_class: str
    selectors: tuple[str, ...]
    capacity: Mapping[str, Fraction]
    count: int | None
    """Number of devices, or None for all devices that match."""
    tolerations: tuple[Toleration, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """A request, with its alternatives in the order in which the scheduler tries them (``firstAvailable``)."""

    name: str
    subrequests: tuple[SubRequest, ...]


@dataclass(frozen=True, slots=True)
class Constraint:
    """An attribute whose value the devices for certain requests must share, or must not share."""

    requests: frozenset[str]
    """Names of the requests that the constraint applies to. If empty, it applies to all requests."""
    attribute: str
    distinct: bool

    def covers(self, request: str) -> bool:
        """Returns True if the constraint applies to a request. The request's name may include a subrequest."""
        return covers(self.requests, request)


@dataclass(frozen=True, slots=True)
class ClaimSpec:
    """A claim's parsed spec."""

    requests: tuple[Request, ...]
    constraints: tuple[Constraint, ...]
    configs: tuple[Mapping[str, Any], ...]

    @property
    def constraint_documents(self) -> list[dict[str, Any]]:
        """The constraints as they appear in a ResourceClaim's spec."""
        return [
            {"requests": sorted(one.requests), "distinctAttribute" if one.distinct else "matchAttribute": one.attribute}
            for one in self.constraints
        ]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """A parsed DeviceClass."""

    name: str
    selectors: tuple[str, ...]
    configs: tuple[Mapping[str, Any], ...] = ()
    extended_resource: str = ""


def read_class(document: Mapping[str, Any]) -> DeviceClass:
    """Parses a DeviceClass. Raises ManifestError."""
    spec = mapping(document, "spec")
    return DeviceClass(
        name=value(mapping(document, "metadata"), "name", str),
        selectors=items(spec, "selectors", _expression, _MAX_SELECTORS),
        configs=items(spec, "config", lambda config: config, _MAX_CONFIGS),
        extended_resource=value(spec, "extendedResourceName", str, ""),
    )


def read_claim_spec(spec: Mapping[str, Any]) -> ClaimSpec:
    """Parses the ``spec`` of a ResourceClaim. Raises ManifestError."""
    devices = mapping(spec, "devices")
    requests = items(devices, "requests", _request, _MAX_REQUESTS)
    names = [request.name for request in requests]
    constraints = items(devices, "constraints", _constraint, MAX_CONSTRAINTS)
    known = {*names, *(subrequest.name for request in requests for subrequest in request.subrequests)}
    for place, constraint in enumerate(constraints):
        if unknown := sorted(constraint.requests - known):
            raise ManifestError(f"constraints[{place}].requests: the claim has no request {unknown[0]}")
    if len(set(names)) < len(names):
        raise ManifestError("requests: two requests have the same name")
    return ClaimSpec(requests, constraints, items(devices, "config", lambda config: config, _MAX_CONFIGS))


def _expression(selector: Mapping[str, Any]) -> str:
    return value(mapping(selector, "cel"), "expression", str)


def _request(document: Mapping[str, Any]) -> Request:
    name = value(document, "name", str)
    if document.get("firstAvailable"):

        def subrequest(sub: Mapping[str, Any]) -> SubRequest:
            return _subrequest(f"{name}/{value(sub, 'name', str)}", sub)

        return Request(name, items(document, "firstAvailable", subrequest, _MAX_ALTERNATIVES))
    if document.get("exactly") is None:
        old = "deviceClassName" in document
        form = "this is the resource.k8s.io/v1beta1 form; in v1, these fields belong inside exactly" if old else ""
        raise ManifestError(f"{name}: has neither exactly nor firstAvailable" + (f": {form}" if form else ""))
    return Request(name, (_subrequest(name, mapping(document, "exactly")),))


def _subrequest(name: str, document: Mapping[str, Any]) -> SubRequest:
    mode = value(document, "allocationMode", str, "ExactCount")
    if mode not in ("ExactCount", "All"):
        raise ManifestError(f"{name}: allocationMode: must be ExactCount or All")
    if value(document, "adminAccess", bool, False):
        raise ManifestError(f"{name}: adminAccess: is not simulated; such a request allocates no device")
    count = value(document, "count", int, 1)
    if not 1 <= count <= _MAX_COUNT:
        raise ManifestError(f"{name}: count: must be a positive 64-bit number")
    return SubRequest(
        name=name,
        device_class=value(document, "deviceClassName", str),
        selectors=items(document, "selectors", _expression, _MAX_SELECTORS),
        capacity=quantities(mapping(document, "capacity"), "requests"),
        count=None if mode == "All" else count,
        tolerations=items(document, "tolerations", _toleration, _MAX_TOLERATIONS),
    )


def _toleration(document: Mapping[str, Any]) -> Toleration:
    exists = value(document, "operator", str, "Equal") == "Exists"
    tolerated_value = None if exists else value(document, "value", str, "")
    return Toleration(value(document, "key", str, ""), tolerated_value, value(document, "effect", str, ""))


def _constraint(document: Mapping[str, Any]) -> Constraint:
    kinds = [kind for kind in ("matchAttribute", "distinctAttribute") if document.get(kind) is not None]
    if len(kinds) != 1:
        raise ManifestError("must have either matchAttribute or distinctAttribute")
    attribute = value(document, kinds[0], str)
    if not all(attribute.partition("/")):
        raise ManifestError(f"{kinds[0]}: must have a domain, such as resource.kubernetes.io/numaNode")
    return Constraint(frozenset(texts(document, "requests")), attribute, kinds[0] == "distinctAttribute")
