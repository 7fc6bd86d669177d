# SPDX-License-Identifier: Apache-2.0
"""The scheduler's view of published slices: usable devices, a subset of CEL, and the capacity that requests consume."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.fakes import quantities

Document = dict[str, Any]
_ATTRIBUTE = r'device\.attributes\["([^"]+)"\]\.([A-Za-z_]\w*)'
_COMPARED = re.compile(rf'{_ATTRIBUTE}\s*(==|!=)\s*("[^"]*"|-?\d+|true|false)')
_LISTED = re.compile(rf"{_ATTRIBUTE}\s+in\s+(\[.*\])")
_PRESENT = re.compile(rf"(!?)has\({_ATTRIBUTE}\)")
_BARE = re.compile(rf"(!?){_ATTRIBUTE}")
_DRIVER = re.compile(r'device\.driver\s*(==|!=)\s*"([^"]*)"')


@dataclass(frozen=True)
class Candidate:
    """A published device."""

    driver: str
    pool: str
    node: str
    device: Document

    @property
    def key(self) -> tuple[str, str, str]:
        """Returns the device's identity in the form used in allocation results."""
        return self.driver, self.pool, str(self.device["name"])

    @property
    def shared(self) -> bool:
        """Returns True if several claims may share the device."""
        return bool(self.device.get("allowMultipleAllocations"))

    def attribute(self, domain: str, name: str) -> object:
        """Returns the value, or None if the device does not have the attribute. A name without a domain belongs to the
        driver.
        """
        attributes = self.device.get("attributes") or {}
        found = attributes.get(f"{domain}/{name}") or (attributes.get(name) if domain == self.driver else None)
        return next(iter(found.values())) if found else None


def candidates(slices: Iterable[Document], node: str) -> Iterator[Candidate]:
    """Returns the devices of complete and valid pools that the node can reach, in the allocator's order."""
    pools: dict[tuple[str, str], list[Document]] = {}
    for document in sorted(slices, key=lambda document: str(document["metadata"]["name"])):
        spec = document["spec"]
        if spec.get("allNodes") or spec.get("nodeName") == node:
            pools.setdefault((spec["driver"], spec["pool"]["name"]), []).append(spec)
    for (driver, pool), specs in sorted(pools.items()):
        newest = max(spec["pool"]["generation"] for spec in specs)
        specs = [spec for spec in specs if spec["pool"]["generation"] == newest]
        devices = [device for spec in specs for device in spec.get("devices") or []]
        unique = len({device["name"] for device in devices}) == len(devices)
        if unique and all(spec["pool"]["resourceSliceCount"] == len(specs) for spec in specs):
            yield from (Candidate(driver, pool, node, device) for device in devices)


def selected(candidate: Candidate, expression: str) -> bool:
    """Evaluates a CEL selector that consists of terms, or ``(term || term)``, joined by ``&&``. Raises ValueError for
    any other CEL.

    As in CEL, reading an attribute that the device does not have is an error.
    """
    return all(_any_term(candidate, part.strip()) for part in expression.split("&&"))


def _any_term(candidate: Candidate, part: str) -> bool:
    if part.startswith("(") and part.endswith(")"):
        return any(_term(candidate, term.strip()) for term in part[1:-1].split("||"))
    return _term(candidate, part)


def _term(candidate: Candidate, term: str) -> bool:
    if match := _DRIVER.fullmatch(term):
        return bool(candidate.driver == match[2]) == (match[1] == "==")
    if match := _PRESENT.fullmatch(term):
        return (candidate.attribute(match[2], match[3]) is not None) != bool(match[1])
    if match := _COMPARED.fullmatch(term):
        equal = bool(_known(candidate, match[1], match[2]) == _literal(match[4]))
        return equal == bool(match[3] == "==")
    if match := _LISTED.fullmatch(term):
        return _known(candidate, match[1], match[2]) in json.loads(match[3])
    if match := _BARE.fullmatch(term):
        return bool(_known(candidate, match[2], match[3])) != bool(match[1])
    raise ValueError(f"this scheduler does not understand the CEL expression {term!r}")


def _known(candidate: Candidate, domain: str, name: str) -> object:
    value = candidate.attribute(domain, name)
    if value is None:
        raise ValueError(f"no such key: device {candidate.key} has no attribute {domain}/{name}")
    return value


def _literal(text: str) -> object:
    if text.startswith('"'):
        return text[1:-1]
    return {"true": True, "false": False}.get(text) if text in {"true", "false"} else int(text)


def tainted(candidate: Candidate) -> bool:
    """Returns True if the device has a taint with the effect NoSchedule or NoExecute."""
    return any(taint.get("effect") in {"NoSchedule", "NoExecute"} for taint in candidate.device.get("taints") or [])


def consumption(candidate: Candidate, requests: Mapping[str, Any], used: Mapping[str, int]) -> dict[str, str] | None:
    """Returns the amounts that the request consumes from a shared device, by capacity. Returns None if the request does
    not fit or contains an unknown key.
    """
    capacities = candidate.device.get("capacity") or {}
    if not requests.keys() <= capacities.keys():
        return None
    consumed = {}
    for key, capacity in capacities.items():
        amount = _rounded(capacity, requests.get(key))
        if amount is None or used.get(key, 0) + quantities.whole(amount) > quantities.whole(capacity["value"]):
            return None
        consumed[key] = amount
    return consumed


def _rounded(capacity: Document, asked: Any) -> str | None:
    """Returns the amount rounded by the request policy, or None if the policy does not allow an amount that is large
    enough.
    """
    policy = capacity.get("requestPolicy") or {}
    if asked is None:
        return quantities.canonical(policy.get("default", capacity["value"]))
    if choices := policy.get("validValues"):
        return next((str(one) for one in choices if quantities.parse(one) >= quantities.parse(asked)), None)
    span = policy.get("validRange")
    if not span:
        return quantities.canonical(asked)
    least = quantities.whole(span["min"])
    amount = max(quantities.whole(asked), least)
    if span.get("step") is not None:
        step = quantities.whole(span["step"])
        amount = least + -(-(amount - least) // step) * step
    if amount > quantities.whole(span.get("max", capacity["value"])):
        return None
    return quantities.binary(amount)
