# SPDX-License-Identifier: Apache-2.0
"""The kubelet's claim cache: checks before Prepare, the checkpoint, and the CDI ids that a container gets."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Document = Mapping[str, Any]


class PrepareError(Exception):
    """The pod cannot start; the real kubelet would retry after 60 to 90 s."""


class UnprepareError(Exception):
    """The pod cannot terminate; the real kubelet would retry after 10 to 15 s."""


@dataclass(frozen=True, slots=True)
class DriverCall:
    """A call to a driver with its outcome."""

    driver: str
    method: str
    claims: int
    seconds: float


@dataclass(slots=True)
class CachedDevice:
    """A device as a driver returned it."""

    requests: list[str]
    pool: str
    device: str
    cdi_ids: list[str]
    share_id: str | None = None


@dataclass(slots=True)
class CachedClaim:
    """A claim that is prepared, or is about to be prepared, on this node."""

    namespace: str
    name: str
    uid: str
    drivers: list[str]
    pods: list[str] = field(default_factory=list)
    devices: dict[str, list[CachedDevice]] = field(default_factory=dict)
    prepared: bool = False

    def cdi_ids(self, request: str | None) -> list[str]:
        """Returns the CDI ids for a container that uses the whole claim or, if ``request`` is given, only the request
        with this base name.
        """
        return [
            cdi_id
            for devices in self.devices.values()
            for device in devices
            if request is None or not device.requests or request in device.requests
            for cdi_id in device.cdi_ids
        ]


class ClaimCache:
    """All claims on the node by (namespace, name), with a checkpoint file that survives kubelet restarts."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.claims: dict[tuple[str, str], CachedClaim] = {}

    def save(self) -> None:
        """Writes the checkpoint."""
        self._checkpoint.write_text(json.dumps([asdict(claim) for claim in self.claims.values()]))

    def load(self) -> None:
        """Reads the checkpoint after a restart: claims keep their CDI ids, but none is considered prepared."""
        self.claims.clear()
        if not self._checkpoint.exists():
            return
        for entry in json.loads(self._checkpoint.read_text()):
            entry["devices"] = {
                driver: [CachedDevice(**device) for device in devices] for driver, devices in entry["devices"].items()
            }
            claim = CachedClaim(**{**entry, "prepared": False})
            self.claims[claim.namespace, claim.name] = claim

    def of_pod(self, pod_uid: str) -> list[CachedClaim]:
        """Returns the claims that a pod uses."""
        return [claim for claim in self.claims.values() if pod_uid in claim.pods]

    def admit(self, pod: Document, document: Document) -> CachedClaim:
        """Checks a claim for a pod and returns its cache entry, or a new entry that is not cached yet."""
        metadata = document["metadata"]
        shown = f"ResourceClaim {metadata['namespace']}/{metadata['name']}"
        status = document.get("status") or {}
        reserved = [entry["uid"] for entry in status.get("reservedFor") or [] if entry.get("resource") == "pods"]
        if pod["metadata"]["uid"] not in reserved:
            raise PrepareError(f"{shown} is not reserved for the pod")
        if status.get("allocation") is None:
            raise PrepareError(f"{shown} is not allocated")
        cached = self.claims.get((metadata["namespace"], metadata["name"]))
        if cached is not None and cached.uid != metadata["uid"]:
            raise PrepareError(f"an old {shown} with another UID is still prepared here")
        results = (status["allocation"].get("devices") or {}).get("results") or []
        drivers = list(dict.fromkeys(result["driver"] for result in results))
        return cached or CachedClaim(metadata["namespace"], metadata["name"], metadata["uid"], drivers)


def _pod_claim(pod: Document, claim: Document) -> Document | None:
    """Returns the pod's entry for the claim. For a template, the pod's status contains the generated claim's name."""
    made = (pod.get("status") or {}).get("resourceClaimStatuses") or []
    entries = [*((pod.get("spec") or {}).get("resourceClaims") or []), *made]
    return next((one for one in entries if one.get("resourceClaimName") == claim["metadata"]["name"]), None)


def container_devices(
    pod: Document, claims: Iterable[Document], cache: Mapping[tuple[str, str], CachedClaim]
) -> dict[str, list[str]]:
    """Returns the CDI ids of each container as they are sent in the CRI request."""
    by_pod_name: dict[str, CachedClaim] = {}
    for claim in claims:
        entry = _pod_claim(pod, claim)
        if entry is not None:
            by_pod_name[entry["name"]] = cache[claim["metadata"]["namespace"], claim["metadata"]["name"]]
    spec = pod.get("spec") or {}
    given = {
        container["name"]: [
            cdi_id
            for use in (container.get("resources") or {}).get("claims") or []
            if use["name"] in by_pod_name
            for cdi_id in by_pod_name[use["name"]].cdi_ids(use.get("request") or None)
        ]
        for container in spec.get("containers") or []
    }
    # A claim that the scheduler created for extended resources is not in the pod's spec (KEP-5004).
    extended = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    for mapping in extended.get("requestMappings") or []:
        special = cache[pod["metadata"]["namespace"], extended["resourceClaimName"]]
        given[mapping["containerName"]] += special.cdi_ids(mapping["requestName"])
    return given
