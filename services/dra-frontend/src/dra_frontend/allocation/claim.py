# SPDX-License-Identifier: Apache-2.0
"""A ResourceClaim document as values: what was allocated of our devices, for whom, with which opaque parameters.

Reads the form of ``resource.k8s.io/v1``. Results and parameters of other drivers are not read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

from numa_contract.errors import MalformedError, shown
from numa_contract.names import (
    CPU_CAPACITY,
    CPU_DRIVER,
    DRIVERS,
    MEMORY_CAPACITY,
    MEMORY_DRIVER,
    base_request,
    check_uid,
)
from numa_contract.records import AllocationResult, ClaimReference, PodReference

from dra_frontend.allocation.errors import Refused
from dra_frontend.allocation.fields import (
    flag_in,
    items_in,
    object_in,
    optional_text_in,
    quantities_in,
    text_in,
    texts_in,
)
from dra_frontend.devices.quantity import format_quantity

POD_CLAIM_ANNOTATION: Final = "resource.kubernetes.io/pod-claim-name"
# The API's own limits (k8s.io/api/resource/v1): 32 results and 256 consumers of a claim; entries of a class and of the
# claim make up to 64 of the config. More than 32 for our two drivers are nobody's.
_MOST_RESULTS: Final = 32
_MOST_PODS: Final = 256
_MOST_CONFIGS: Final = 64
MOST_PARAMETERS: Final = 32
_MOST_TERMS: Final = 64
_HIGHEST_AMOUNT: Final = 1 << 63
# Under which names a capacity is found: as published, or with or without the driver before it.
_CAPACITIES: Final = {CPU_DRIVER: (CPU_CAPACITY, "cpu"), MEMORY_DRIVER: (MEMORY_CAPACITY, f"{MEMORY_DRIVER}/size")}
# Claims ask for the same few amounts.
_canonical = lru_cache(256)(format_quantity)
_UNITS: Final = {CPU_DRIVER: "CPUs", MEMORY_DRIVER: "bytes"}


class Source(StrEnum):
    """Who wrote an opaque configuration."""

    DEVICE_CLASS = "FromClass"
    CLAIM = "FromClaim"


@dataclass(frozen=True, slots=True)
class Result:
    """One allocated device of ours, or one share of a device."""

    driver: str
    recorded: AllocationResult
    """What a record keeps of it."""
    amount: Fraction | None
    """What is taken of the device's capacity; None: all of it."""
    admin_access: bool
    """Monitoring only: it neither takes the device from its owner nor counts as use (KEP-5018)."""

    @property
    def request(self) -> str:
        """The request's base name: what the kubelet and containers call it."""
        return base_request(self.recorded.request)

    def count(self) -> int:
        """Returns the amount in CPUs or bytes; Refused unless it is a positive whole number."""
        name, key = self.recorded.request, _CAPACITIES[self.driver][0]
        if self.amount is None:
            raise Refused(
                f"request {name}: the allocation of device {self.recorded.device} has no consumedCapacity {key!r}; "
                "is the feature gate DRAConsumableCapacity on in API server and scheduler?"
            )
        if not 0 < self.amount < _HIGHEST_AMOUNT or self.amount.denominator != 1:
            what = f"a positive whole number of {_UNITS[self.driver]}"
            raise Refused(f"request {name}: {shown(self.amount)} of {key} is not {what}")
        return int(self.amount)


@dataclass(frozen=True, slots=True)
class OpaqueConfig:
    """Parameters for one of our drivers, from a DeviceClass or from the claim, as they were written."""

    source: Source
    driver: str
    requests: frozenset[str]
    """None at all means all; else base names or full names."""
    parameters: Mapping[str, Any]

    def applies_to(self, result: Result) -> bool:
        """Tells whether the parameters are meant for a result."""
        if self.driver != result.driver:
            return False
        return not self.requests or result.recorded.request in self.requests or result.request in self.requests


@dataclass(frozen=True, slots=True)
class ClaimView:
    """An allocated claim. Everything that the driver needs of it, and nothing that changes under its hands."""

    claim: ClaimReference
    pod_claim_name: str | None
    """Name inside the pod, for claims made from a template."""
    reserved_for: tuple[PodReference, ...]
    results: tuple[Result, ...]
    """Of both our drivers, in the order of the scheduler."""
    configs: tuple[OpaqueConfig, ...]
    """For both our drivers. Later ones override earlier ones: those of classes come first, then the claim's."""

    def __str__(self) -> str:
        return f"claim {self.claim.namespace}/{self.claim.name}"

    def taken(self, driver: str) -> tuple[Result, ...]:
        """Returns the results of one driver that take something of a device."""
        return tuple([r for r in self.results if r.driver == driver and not r.admin_access])


def is_allocated(document: object, uid: str, node: str) -> bool:
    """Tells whether a document is the claim of this UID, allocated, and possibly to this node.

    Of the node selector only names are read, not labels. Raises Refused for what is not a claim.
    """
    allocation = object_in(document, "status").get("allocation")
    if object_in(document, "metadata").get("uid") != uid or allocation is None:
        return False
    terms = items_in(object_in(allocation, "nodeSelector"), "nodeSelectorTerms", _MOST_TERMS)
    demanded = [_names(term) for term in terms]
    return not demanded or any(not names or node in names for names in demanded)


def _names(term: Mapping[str, Any]) -> frozenset[str]:
    """Returns the node names that a term of a node selector demands; none where it demands none."""
    fields = items_in(term, "matchFields", _MOST_TERMS)
    demanded = [f for f in fields if f.get("key") == "metadata.name" and f.get("operator") == "In"]
    return frozenset(name for field in demanded for name in texts_in(field, "values"))


def read_claim(document: object, uid: str | None = None) -> ClaimView:
    """Reads a claim that some pod may use; with ``uid`` another object of that name is refused. Raises Refused."""
    who = "claim without a name"
    try:
        metadata = object_in(document, "metadata")
        namespace, name = text_in(metadata, "namespace"), text_in(metadata, "name")
        who = f"claim {namespace}/{name}"
        reference = ClaimReference(uid=check_uid(text_in(metadata, "uid")), namespace=namespace, name=name)
        status = object_in(document, "status")
        allocation = object_in(status, "allocation")
        pods = [one for one in items_in(status, "reservedFor", _MOST_PODS) if one.get("resource") == "pods"]
        view = ClaimView(
            claim=reference,
            pod_claim_name=optional_text_in(object_in(metadata, "annotations"), POD_CLAIM_ANNOTATION),
            reserved_for=tuple([PodReference(uid=text_in(pod, "uid"), name=text_in(pod, "name")) for pod in pods]),
            results=_results(object_in(allocation, "devices")),
            configs=_configs(object_in(allocation, "devices")),
        )
    except (Refused, MalformedError) as error:
        raise Refused(f"{who}: {error}; is resource.k8s.io/v1 what the server speaks?") from error
    if uid is not None and reference.uid != uid:
        new = f"UID {uid} was replaced by {reference.uid}"
        raise Refused(f"{who}: {new}; delete the pod, so that it is made again for the new claim")
    if not allocation:
        raise Refused(f"{who}: not allocated; the scheduler does that, do not set nodeName by hand")
    if not view.reserved_for:
        none = "reserved for no pod in status.reservedFor"
        raise Refused(f"{who}: {none}; the scheduler adds it (pod groups are not supported)")
    return view


def _results(devices: Mapping[str, Any]) -> tuple[Result, ...]:
    found = items_in(devices, "results", _MOST_RESULTS)
    return tuple([_result(entry, entry["driver"]) for entry in found if entry.get("driver") in DRIVERS])


def _result(entry: Mapping[str, Any], driver: str) -> Result:
    consumed = quantities_in(entry, "consumedCapacity")
    recorded = AllocationResult(
        request=text_in(entry, "request"),
        pool=text_in(entry, "pool"),
        device=text_in(entry, "device"),
        share_id=optional_text_in(entry, "shareID"),
        consumed={key: _canonical(value) for key, value in sorted(consumed.items())},
    )
    amounts = [consumed[name] for name in _CAPACITIES[driver] if name in consumed]
    return Result(driver, recorded, amounts[0] if amounts else None, flag_in(entry, "adminAccess"))


def _configs(devices: Mapping[str, Any]) -> tuple[OpaqueConfig, ...]:
    entries = [(entry, object_in(entry, "opaque")) for entry in items_in(devices, "config", _MOST_CONFIGS)]
    found = [_config(entry, opaque) for entry, opaque in entries if opaque.get("driver") in DRIVERS]
    if len(found) > MOST_PARAMETERS:
        raise Refused(f"field 'config' has {len(found)} entries for this driver, more than {MOST_PARAMETERS}")
    # Only who wrote them counts; naming a subrequest gives no precedence over naming its request.
    return tuple(sorted(found, key=lambda config: config.source is Source.CLAIM))


def _config(entry: Mapping[str, Any], opaque: Mapping[str, Any]) -> OpaqueConfig:
    source = text_in(entry, "source")
    if source not in list(Source):
        raise Refused(f"field 'source' is {shown(source)}, neither {Source.DEVICE_CLASS} nor {Source.CLAIM}")
    requests = frozenset(texts_in(entry, "requests"))
    return OpaqueConfig(Source(source), opaque["driver"], requests, object_in(opaque, "parameters"))
