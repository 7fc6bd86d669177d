# SPDX-License-Identifier: Apache-2.0
"""Parses ResourceClaims of ``resource.k8s.io/v1`` into immutable values.

A :class:`ClaimView` contains the claim's allocation results for our two drivers, the pods that the claim is reserved
for, and the claim's opaque parameters. Parameters for other drivers are skipped. Results for other drivers are included
only if the claim has ``matchAttribute`` constraints, because their devices may have to match ours.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final, TypeVar

from numa_contract.errors import MalformedError, shown
from numa_contract.names import CPU_CAPACITY, CPU_DRIVER, DRIVERS, MEMORY_CAPACITY, MEMORY_DRIVER, check_uid
from numa_contract.quantity import format_quantity, parse_quantity
from numa_contract.records import AllocationResult, ClaimReference, PodReference

from dra_frontend.devices.gates import SHARING_GATE

POD_CLAIM_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"
MAX_RESULTS: Final = 32
"""Maximum number of devices in a claim (k8s.io/api/resource/v1, AllocationResultsMaxSize)."""
MAX_CONSTRAINTS: Final = 32
"""Maximum number of constraints in a claim (DeviceConstraintsMaxSize)."""
# The API's own limits: a claim has at most 256 consumers, and its configuration at most 64 entries (32 from the device
# classes and 32 from the claim). No claim needs more than 32 entries for our two drivers.
_MAX_PODS: Final = 256
_MAX_CONFIGS: Final = 64
MAX_PARAMETERS: Final = 32
_MAX_TERMS: Final = 64
_AMOUNT_LIMIT: Final = 1 << 63
# Keys under which ``consumedCapacity`` may contain the amount, by driver: the published name, and the same name with
# the driver's domain added or removed.
_CAPACITIES: Final = {CPU_DRIVER: (CPU_CAPACITY, "cpu"), MEMORY_DRIVER: (MEMORY_CAPACITY, f"{MEMORY_DRIVER}/size")}
_UNITS: Final = {CPU_DRIVER: "CPUs", MEMORY_DRIVER: "bytes"}
_KINDS: Final[Mapping[type, str]] = {str: "a string", bool: "a boolean", list: "a list", dict: "an object"}
# Most claims request one of a few amounts, so parsed and formatted quantities are cached.
_parse_amount = lru_cache(256)(parse_quantity)
_format_amount = lru_cache(256)(format_quantity)
T = TypeVar("T")


class RefusedError(Exception):
    """Raised if a claim is refused. The message is one sentence that includes the remedy; the user sees it in the pod's
    Events.
    """


def covers(requests: frozenset[str], request: str) -> bool:
    """Returns True if a claim's list of request names includes the request with the given full name.

    An empty list includes every request. An entry is either a request's name, which includes all its subrequests, or
    the full name of one subrequest.
    """
    return not requests or request in requests or request.partition("/")[0] in requests


class Source(StrEnum):
    """Source of an opaque configuration."""

    DEVICE_CLASS = "FromClass"
    CLAIM = "FromClaim"

    @property
    def owner(self) -> str:
        """Object that contains the configuration, as named in messages."""
        return "the claim" if self is Source.CLAIM else "the DeviceClass"


@dataclass(frozen=True, slots=True)
class OpaqueConfig:
    """Parameters for one of our drivers, as written in a DeviceClass or in the claim."""

    source: Source
    driver: str
    requests: frozenset[str]
    """Base names or full names of the requests that the parameters apply to; empty for all requests."""
    parameters: Mapping[str, Any]

    def applies_to(self, driver: str, result: AllocationResult) -> bool:
        """Returns True if the parameters apply to a result for the given driver."""
        return self.driver == driver and covers(self.requests, result.request)


@dataclass(frozen=True, slots=True)
class Match:
    """A ``matchAttribute`` constraint: the devices of ``requests`` must have a common value for the attribute."""

    attribute: str
    requests: frozenset[str]
    """Base names or full names of the requests; empty for all requests of the claim."""

    def covers(self, request: str) -> bool:
        """Returns True if the constraint covers a result for the request with the given full name."""
        return covers(self.requests, request)


@dataclass(frozen=True, slots=True)
class OtherDevice:
    """An allocation result for another driver."""

    request: str
    """Full name, ``request`` or ``request/subrequest``."""
    driver: str
    pool: str
    device: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Driver, pool and name of the device."""
        return self.driver, self.pool, self.device


@dataclass(frozen=True, slots=True)
class ClaimView:
    """Immutable snapshot of those ResourceClaim fields that the driver uses."""

    claim: ClaimReference
    pod_claim_name: str | None
    """The claim's name in the pod spec, for claims created from a template."""
    reserved_for: tuple[PodReference, ...]
    allocated: bool
    nodes: tuple[frozenset[str], ...]
    """For each term of the allocation's node selector, the node names that it requires. The set is empty if the term
    does not require a node name.
    """
    results: Mapping[str, tuple[AllocationResult, ...]]
    """Allocation results by driver name, in the order in which the scheduler wrote them."""
    monitored: Mapping[str, tuple[AllocationResult, ...]]
    """Results with administrative access, by driver name. Administrative access is for monitoring: the device stays
    available to other claims, and none of its capacity is consumed (KEP-5018).
    """
    configs: tuple[OpaqueConfig, ...]
    """Opaque parameters for both of our drivers. Later entries override earlier ones: device classes first, then the
    claim.
    """
    matches: tuple[Match, ...] = ()
    others: tuple[OtherDevice, ...] = ()
    """Allocation results for other drivers, in the scheduler's order; empty if the claim has no ``matchAttribute``
    constraints.
    """

    def __str__(self) -> str:
        return f"claim {self.claim.full_name}"

    def is_for(self, node: str, uid: str) -> bool:
        """Returns True if the claim has the given UID and is allocated, and its node selector does not exclude the
        given node. Node labels are not evaluated.
        """
        on_node = not self.nodes or any(not names or node in names for names in self.nodes)
        return on_node and self.allocated and self.claim.uid == uid

    def check_usable(self, uid: str) -> None:
        """Raises RefusedError unless the claim has the given UID, is allocated, and is reserved for at least one
        pod.
        """
        if self.claim.uid != uid:
            new = f"UID {uid} was replaced by {self.claim.uid}"
            raise RefusedError(f"{self}: {new}; delete the pod so that it is recreated for the new claim")
        if not self.allocated:
            raise RefusedError(f"{self}: not allocated; the scheduler allocates claims, so do not set nodeName by hand")
        if not self.reserved_for:
            none = "status.reservedFor contains no pod"
            raise RefusedError(
                f"{self}: {none}; the scheduler must add the pod to this list (pod groups are not supported)"
            )


def amount_of(driver: str, result: AllocationResult) -> Fraction | None:
    """Returns the device capacity that a result consumes, or None if the result consumes the whole device."""
    amount = [result.consumed[name] for name in _CAPACITIES[driver] if name in result.consumed]
    return _parse_amount(amount[0]) if amount else None


def count_of(driver: str, result: AllocationResult) -> int:
    """Returns the amount that a result consumes, in CPUs or bytes. Raises RefusedError unless it is a positive whole
    number.
    """
    amount, name, key = amount_of(driver, result), result.request, _CAPACITIES[driver][0]
    if amount is None:
        raise RefusedError(
            f"request {name}: the allocation of device {result.device} has no consumedCapacity {key!r}; "
            f"is the feature gate {SHARING_GATE} enabled in the API server and the scheduler?"
        )
    if not 0 < amount < _AMOUNT_LIMIT or amount.denominator != 1:
        raise RefusedError(
            f"request {name}: the value {shown(amount)} of consumedCapacity[{key}] is not a positive whole number of "
            f"{_UNITS[driver]}"
        )
    return int(amount)


def uid_of(document: object) -> str:
    """Returns a claim document's UID, even if the rest of the document cannot be parsed, or "" if it has no UID."""
    match document:
        case {"metadata": {"uid": str(uid)}}:
            return uid
    return ""


def name_of(document: object) -> tuple[str, str]:
    """Returns a claim document's namespace and name, even if the rest of the document cannot be parsed, or two empty
    strings if either is missing.
    """
    match document:
        case {"metadata": {"namespace": str(namespace), "name": str(name)}}:
            return namespace, name
    return "", ""


def claim_of(document: object, uid: str) -> ClaimView | None:
    """Parses the claim with the given UID. Returns None if the document is None or has another UID. Raises
    RefusedError.

    A document with another UID, valid or not, proves that the claim is gone. A document without a UID is refused.
    """
    if document is None or uid_of(document) not in ("", uid):
        return None
    return parse_claim(document)


def parse_claim(document: object) -> ClaimView:
    """Parses a claim in any state. Raises RefusedError if a field does not have the type that the API guarantees."""
    claim_text = "claim without a name"
    try:
        claim = _of_kind("document", document, dict)
        metadata, status = _field(claim, "metadata", dict, {}), _field(claim, "status", dict, {})
        namespace, name = _field(metadata, "namespace", str), _field(metadata, "name", str)
        claim_text = f"claim {namespace}/{name}"
        allocation = _field(status, "allocation", dict, {})
        devices, selector = _field(allocation, "devices", dict, {}), _field(allocation, "nodeSelector", dict, {})
        pods = [one for one in _objects(status, "reservedFor", _MAX_PODS) if one.get("resource") == "pods"]
        entries = _objects(devices, "results", MAX_RESULTS)
        results = [one for one in entries if one.get("driver") in DRIVERS]
        matches = _matches(_field(_field(claim, "spec", dict, {}), "devices", dict, {}))
        # (admin_access, driver, result) for each of our results.
        read = [(_field(one, "adminAccess", bool, False), one["driver"], _result(one)) for one in results]
        return ClaimView(
            claim=ClaimReference(uid=check_uid(_field(metadata, "uid", str)), namespace=namespace, name=name),
            pod_claim_name=_field(_field(metadata, "annotations", dict, {}), POD_CLAIM_ANNOTATION, str, "") or None,
            reserved_for=tuple([PodReference(uid=_field(p, "uid", str), name=_field(p, "name", str)) for p in pods]),
            allocated=bool(allocation),
            nodes=tuple([_node_names(term) for term in _objects(selector, "nodeSelectorTerms", _MAX_TERMS)]),
            results={driver: tuple([r for w, d, r in read if d == driver and not w]) for driver in DRIVERS},
            monitored={driver: tuple([r for w, d, r in read if d == driver and w]) for driver in DRIVERS},
            configs=_configs(devices),
            matches=matches,
            others=tuple([_other_device(one) for one in entries if one.get("driver") not in DRIVERS])
            if matches
            else (),
        )
    except (RefusedError, MalformedError) as error:
        raise RefusedError(f"{claim_text}: {error}; does the API server serve resource.k8s.io/v1?") from error


def _node_names(term: Mapping[str, Any]) -> frozenset[str]:
    fields = _objects(term, "matchFields", _MAX_TERMS)
    demanded = [f for f in fields if f.get("key") == "metadata.name" and f.get("operator") == "In"]
    return frozenset(name for field in demanded for name in _texts(field, "values"))


def _matches(devices: Mapping[str, Any]) -> tuple[Match, ...]:
    """Returns the matchAttribute constraints in a claim's spec. Constraints of any other kind are left to the
    scheduler.
    """
    entries = _objects(devices, "constraints", MAX_CONSTRAINTS)
    return tuple(
        [
            Match(attribute, frozenset(_texts(one, "requests")))
            for one in entries
            if (attribute := _field(one, "matchAttribute", str, ""))
        ]
    )


def _other_device(entry: Mapping[str, Any]) -> OtherDevice:
    return OtherDevice(*[_field(entry, key, str) for key in ("request", "driver", "pool", "device")])


def _result(entry: Mapping[str, Any]) -> AllocationResult:
    consumed: dict[str, str] = {}
    for name, value in sorted(_field(entry, "consumedCapacity", dict, {}).items()):
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise RefusedError(f"field 'consumedCapacity[{name}]' must be a quantity, not {type(value).__name__}")
        try:
            consumed[name] = _format_amount(_parse_amount(value))
        except ValueError as error:
            raise RefusedError(f"field 'consumedCapacity[{name}]' is not a quantity: {error}") from error
    return AllocationResult(
        request=_field(entry, "request", str),
        pool=_field(entry, "pool", str),
        device=_field(entry, "device", str),
        share_id=_field(entry, "shareID", str, "") or None,
        consumed=consumed,
    )


def _configs(devices: Mapping[str, Any]) -> tuple[OpaqueConfig, ...]:
    entries = [(entry, _field(entry, "opaque", dict, {})) for entry in _objects(devices, "config", _MAX_CONFIGS)]
    our_entries = [(entry, opaque) for entry, opaque in entries if opaque.get("driver") in DRIVERS]
    if len(our_entries) > MAX_PARAMETERS:
        raise RefusedError(f"field 'config' has {len(our_entries)} entries for this driver, more than {MAX_PARAMETERS}")
    found = []
    for entry, opaque in our_entries:
        source, requests = _field(entry, "source", str), frozenset(_texts(entry, "requests"))
        if source not in list(Source):
            raise RefusedError(f"field 'source' is {shown(source)}, neither {Source.DEVICE_CLASS} nor {Source.CLAIM}")
        found.append(OpaqueConfig(Source(source), opaque["driver"], requests, _field(opaque, "parameters", dict, {})))
    # Precedence depends only on the source. An entry that names a subrequest does not override an entry that names the
    # whole request.
    return tuple(sorted(found, key=lambda config: config.source is Source.CLAIM))


def _field(document: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Returns a field of the given type, or the default if it is absent or null. If there is no default, "" is also
    refused.
    """
    value = document.get(key)
    if value is None and default is not None:
        return default
    if value == "" and default is None and kind is str:
        raise RefusedError(f"field {key!r} must not be empty")
    return _of_kind(f"field {key!r}", value, kind)


def _of_kind(field: str, value: object, kind: type[T]) -> T:
    if not isinstance(value, kind):
        found = "but is missing" if value is None else f"not {type(value).__name__}"
        raise RefusedError(f"{field} must be {_KINDS[kind]}, {found}")
    return value


def _objects(document: Mapping[str, Any], key: str, limit: int) -> list[Mapping[str, Any]]:
    items = _field(document, key, list, [])
    if len(items) > limit:
        raise RefusedError(f"field {key!r} has {len(items)} entries, more than {limit}")
    return [_of_kind(f"field '{key}[]'", item, dict) for item in items]


def _texts(document: Mapping[str, Any], key: str) -> list[str]:
    return [_of_kind(f"field '{key}[]'", item, str) for item in _field(document, key, list, [])]
