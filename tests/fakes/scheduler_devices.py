# SPDX-License-Identifier: Apache-2.0
"""What a scheduler makes of published slices: usable devices, a little CEL, and how much a request consumes."""

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
    """One published device."""

    driver: str
    pool: str
    node: str
    device: Document

    @property
    def key(self) -> tuple[str, str, str]:
        """What an allocation result names."""
        return self.driver, self.pool, str(self.device["name"])

    @property
    def shared(self) -> bool:
        """True if several claims may have a part of it."""
        return bool(self.device.get("allowMultipleAllocations"))

    def attribute(self, domain: str, name: str) -> object:
        """The value, None where the device has no such attribute; a name without domain is the driver's."""
        attributes = self.device.get("attributes") or {}
        found = attributes.get(f"{domain}/{name}") or (attributes.get(name) if domain == self.driver else None)
        return next(iter(found.values())) if found else None


def candidates(slices: Iterable[Document], node: str) -> Iterator[Candidate]:
    """Devices of complete and valid pools that the node can reach, in the allocator's order."""
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
    """Evaluates a CEL selector: terms, or ``(term || term)``, joined by ``&&``; ValueError for any more CEL than that.

    As in CEL, an attribute that the device does not have is an error where it is reached.
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
    """True if a taint keeps pods away."""
    return any(taint.get("effect") in {"NoSchedule", "NoExecute"} for taint in candidate.device.get("taints") or [])


def consumption(candidate: Candidate, requests: Mapping[str, Any], used: Mapping[str, int]) -> dict[str, str] | None:
    """What the request takes of every capacity of a shared device; None if it does not fit or asks for another key."""
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
    """The amount by the request policy; None where the policy allows none that is large enough."""
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
