# SPDX-License-Identifier: Apache-2.0
"""Allocates a ResourceClaim to published devices as kube-scheduler does, for common forms of claims.

Not supported: ``firstAvailable``, admin access, tolerations, and constraints other than ``matchAttribute``.
"""

import copy
import json
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from tests.fakes import quantities
from tests.fakes.scheduler_devices import Candidate, Document, candidates, consumption, selected, tainted

_MAX_TRIES = 20_000
"""Maximum number of devices tried for one claim. Constraints that cannot be met make the search exponential;
kube-scheduler gives up after ten seconds.
"""


class UnschedulableError(Exception):
    """No node currently has devices for the claim."""


@dataclass(frozen=True)
class Slot:
    """One device to be found; a request with count 2 has two slots."""

    request: str
    exact_request: Document
    device_class: Document

    @property
    def selectors(self) -> list[str]:
        """The class's and the request's CEL selectors."""
        both = (self.device_class.get("spec") or {}, self.exact_request)
        return [one["cel"]["expression"] for part in both for one in part.get("selectors") or []]


@dataclass
class _Search:
    """A depth-first search through the slots, first fit in the allocator's order."""

    devices: list[Candidate]
    constraints: Sequence[Document]
    taken: set[tuple[str, str, str]]
    used: dict[tuple[str, str, str], dict[str, int]]
    results: list[tuple[Slot, Candidate, dict[str, str] | None]] = field(default_factory=list)
    tries: int = 0

    def run(self, slots: Sequence[Slot], start: int = 0) -> bool:
        """Tries the devices from index ``start`` on for the first slot, and all devices for the others. Returns True
        with ``results`` filled if every slot got a device. Raises UnschedulableError after too many tries.
        """
        if not slots:
            return True
        for place, candidate in enumerate(self.devices[start:], start):
            self.tries += 1
            if self.tries > _MAX_TRIES:
                raise UnschedulableError(f"no devices were found in {_MAX_TRIES} tries")
            fits, consumed = self._try(slots[0], candidate)
            if not fits:
                continue
            self.results.append((slots[0], candidate, consumed))
            # A request's devices are tried in ascending order so that it does not get the same shared device twice.
            more = len(slots) > 1 and slots[1] is slots[0]
            if self._constrained() and self._continue(slots, candidate, consumed, place + 1 if more else 0):
                return True
            self.results.pop()
        return False

    def _continue(
        self, slots: Sequence[Slot], candidate: Candidate, consumed: dict[str, str] | None, start: int
    ) -> bool:
        before = dict(self.used.get(candidate.key, {})), set(self.taken)
        _account(self.used, self.taken, candidate.key, consumed)
        if self.run(slots[1:], start):
            return True
        self.used[candidate.key], self.taken = before
        return False

    def _try(self, slot: Slot, candidate: Candidate) -> tuple[bool, dict[str, str] | None]:
        if not all(selected(candidate, expression) for expression in slot.selectors):
            return False, None
        if tainted(candidate) or candidate.key in self.taken:
            return False, None
        requests = (slot.exact_request.get("capacity") or {}).get("requests") or {}
        if candidate.shared:
            consumed = consumption(candidate, requests, self.used.get(candidate.key, {}))
            return consumed is not None, consumed
        capacity = candidate.device.get("capacity") or {}
        enough = all(
            key in capacity and quantities.parse(capacity[key]["value"]) >= quantities.parse(amount)
            for key, amount in requests.items()
        )
        return enough and not self.used.get(candidate.key), None

    def _constrained(self) -> bool:
        return all(self._holds(constraint) for constraint in self.constraints)

    def _holds(self, constraint: Document) -> bool:
        domain, _, attribute = constraint["matchAttribute"].rpartition("/")
        names = constraint.get("requests") or []
        values = [
            candidate.attribute(domain, attribute)
            for slot, candidate, _ in self.results
            if not names or slot.request in names
        ]
        return None not in values and bool(frozenset.intersection(*map(_as_set, values)) if values else True)


def _as_set(value: object) -> frozenset[tuple[type, object]]:
    """Returns a list attribute as a set, and any other attribute as a set of one value (KEP-5491). Values of different
    types are never equal.
    """
    return frozenset((type(one), one) for one in (value if isinstance(value, list) else [value]))


def allocate(
    claim: Document,
    slices: Iterable[Document],
    classes: Mapping[str, Document],
    *,
    others: Iterable[Document] = (),
    pods: Sequence[Document] = (),
    node: str | None = None,
) -> Document:
    """Returns the claim with ``status.allocation`` and ``reservedFor``.

    ``others`` are claims that may hold devices. ``pods`` contains ``{"name", "uid"}`` objects; ``node`` limits the
    choice to one node. Raises UnschedulableError.
    """
    published = list(slices)
    nodes = sorted({one["spec"]["nodeName"] for one in published if one["spec"].get("nodeName")})
    spec = claim["spec"].get("devices") or {}
    for place in [node] if node else nodes:
        used, taken = _in_use(others)
        search = _Search(list(candidates(published, place)), spec.get("constraints") or [], taken, used)
        if search.run([slot for request in spec.get("requests") or [] for slot in _slots(request, classes)]):
            return _allocated(claim, search, place, pods)
    names = ", ".join(request["name"] for request in spec.get("requests") or [])
    raise UnschedulableError(f"no node has devices for the requests {names} of claim {claim['metadata']['name']}")


def _slots(request: Document, classes: Mapping[str, Document]) -> list[Slot]:
    name, exact_request = request["name"], request["exactly"]
    if exact_request.get("allocationMode", "ExactCount") != "ExactCount":
        raise ValueError(f"request {name}: this scheduler supports only allocationMode ExactCount")
    if exact_request["deviceClassName"] not in classes:
        raise UnschedulableError(f"request {name}: there is no DeviceClass {exact_request['deviceClassName']}")
    return [Slot(name, exact_request, classes[exact_request["deviceClassName"]])] * int(exact_request.get("count", 1))


def _in_use(
    claims: Iterable[Document],
) -> tuple[dict[tuple[str, str, str], dict[str, int]], set[tuple[str, str, str]]]:
    used: dict[tuple[str, str, str], dict[str, int]] = {}
    taken: set[tuple[str, str, str]] = set()
    for claim in claims:
        allocation = (claim.get("status") or {}).get("allocation") or {}
        for result in allocation.get("devices", {}).get("results") or []:
            key = result["driver"], result["pool"], result["device"]
            _account(used, taken, key, result.get("consumedCapacity"))
    return used, taken


def _account(
    used: dict[tuple[str, str, str], dict[str, int]],
    taken: set[tuple[str, str, str]],
    key: tuple[str, str, str],
    consumed: Mapping[str, str] | None,
) -> None:
    if consumed is None:
        taken.add(key)
        return
    sums = used.setdefault(key, {})
    for name, amount in consumed.items():
        sums[name] = sums.get(name, 0) + quantities.whole(amount)


def _allocated(claim: Document, search: _Search, node: str, pods: Sequence[Document]) -> Document:
    claim = copy.deepcopy(claim)
    term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
    devices = {"results": [_result(*one) for one in search.results], "config": list(_configs(claim, search))}
    claim["status"] = {
        **(claim.get("status") or {}),
        "allocation": {
            "devices": {key: value for key, value in devices.items() if value},
            "nodeSelector": {"nodeSelectorTerms": [term]},
        },
        "reservedFor": [{"resource": "pods", "name": pod["name"], "uid": pod["uid"]} for pod in pods],
    }
    return claim


def _result(slot: Slot, candidate: Candidate, consumed: dict[str, str] | None) -> Document:
    driver, pool, device = candidate.key
    result: Document = {"request": slot.request, "driver": driver, "pool": pool, "device": device}
    conditions = {key: candidate.device.get(key) for key in ("bindingConditions", "bindingFailureConditions")}
    result |= {key: value for key, value in conditions.items() if value}
    if consumed is not None:
        result |= {"shareID": str(uuid.uuid4()), "consumedCapacity": consumed}
    return result


def may_bind(claim: Document) -> bool:
    """Returns True if every binding condition of the allocated devices is true. Raises UnschedulableError if one has
    failed.
    """
    conditions = {
        (one["driver"], one["pool"], one["device"]): {c["type"]: c for c in one.get("conditions") or []}
        for one in claim["status"].get("devices") or []
    }
    results = claim["status"]["allocation"]["devices"]["results"]
    said = [(one, conditions.get((one["driver"], one["pool"], one["device"]), {})) for one in results]
    for result, found in said:
        for kind in result.get("bindingFailureConditions") or []:
            if found.get(kind, {}).get("status") == "True":
                raise UnschedulableError(f"binding failed: {found[kind]['message']}")
    awaited = [found.get(kind, {}) for result, found in said for kind in result.get("bindingConditions") or []]
    return all(one.get("status") == "True" for one in awaited)


def _configs(claim: Document, search: _Search) -> Iterator[Document]:
    """Returns the configuration entries. Those of the claim come last, because later entries override earlier ones."""
    for slot in {slot.request: slot for slot, _, _ in search.results}.values():
        for config in (slot.device_class.get("spec") or {}).get("config") or []:
            yield {"source": "FromClass", "requests": [slot.request], **config}
    for config in claim["spec"]["devices"].get("config") or []:
        yield {"source": "FromClaim", **config}


def schedule(
    server: str, namespace: str, name: str, *, pods: Sequence[Document] = (), node: str | None = None
) -> Document:
    """Reads everything from an API server, allocates the claim and writes its status. This call blocks."""
    base = f"{server}/apis/resource.k8s.io/v1"
    path = f"{base}/namespaces/{namespace}/resourceclaims/{name}"
    classes = {one["metadata"]["name"]: one for one in _ask(f"{base}/deviceclasses")["items"]}
    others = _ask(f"{base}/resourceclaims")["items"]
    slices = _ask(f"{base}/resourceslices")["items"]
    claim = allocate(_ask(path), slices, classes, others=others, pods=pods, node=node)
    return _ask(f"{path}/status", claim)


def _ask(url: str, body: Document | None = None) -> Document:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method="PUT" if data else "GET")
    # Proxy settings in the environment must not apply to a server on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as response:
        answer: Document = json.load(response)
    return answer
