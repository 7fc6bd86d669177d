# SPDX-License-Identifier: Apache-2.0
"""Collects the requests in all of a pod's claims, each with the devices that its class and selectors admit or may
admit.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_frontend.allocation.claim import MAX_RESULTS

from numa_tools.scheduling.claim_spec import ClaimSpec, DeviceClass, SubRequest
from numa_tools.scheduling.fit import AllocatedDevices, Candidate, budget, class_of, matching, unmet_reason, verdict
from numa_tools.scheduling.published import SliceDevice


@dataclass(frozen=True, slots=True)
class Option:
    """One alternative in a request, with the devices that may satisfy it."""

    subrequest: SubRequest
    found: Sequence[Candidate]
    """Devices that the selectors do not exclude, in the scheduler's order."""

    @property
    def wants_all(self) -> bool:
        """True if the request is for all devices. The scheduler then evaluates the selectors for every device."""
        return self.subrequest.count is None

    @property
    def possible(self) -> Sequence[Candidate]:
        """Devices from which the scheduler could choose, in the best case for the request.

        The best case depends on the selectors that cannot be evaluated here:

        * For a request for a certain number of devices, the best case is that these selectors admit every device, so
          all usable devices are returned.
        * For a request for all devices, the best case is that these selectors admit no device, because the request then
          requires the fewest devices. Therefore only the devices that are known to match are returned. If no device is
          known to match, all usable devices are returned.
        """
        usable = [one for one in self.found if one.usable]
        certain = [one for one in usable if not one.unknown]
        return certain if self.wants_all and certain else usable

    @property
    def unknown(self) -> str:
        """A selector that cannot be evaluated for some device, or "" if there is no such selector."""
        return next((one.unknown for one in self.found if one.unknown), "")

    @property
    def failed(self) -> str:
        """A selector whose evaluation fails for some device, or "" if there is no such selector."""
        return next((one.failed for one in self.found if one.failed), "")

    @property
    def count(self) -> int:
        """Minimum number of devices that this alternative requires.

        The minimum is 0 if the request is for all devices and no device can match.
        """
        if self.subrequest.count is not None:
            return self.subrequest.count
        possible = self.possible
        return 1 if possible and possible[0].unknown else len(possible)

    def missing(self, in_use: AllocatedDevices) -> str:
        """Returns the reason why this alternative fails even without the other requests, or "" if it does not."""
        verdicts = [verdict(self.subrequest, one.device, in_use) for one in self.possible]
        reason = unmet_reason(self.subrequest, self.count, verdicts)
        return reason and (self.failed or f"request {self.subrequest.name}: {reason}")


@dataclass(frozen=True, slots=True)
class PodRequest:
    """One request in a claim, with its alternatives."""

    claim: int
    """Index of the claim among the pod's claims."""
    name: str
    options: tuple[Option, ...]

    @property
    def min_devices(self) -> int:
        """Minimum number of devices that the request needs."""
        return min((option.count for option in self.options), default=0)


def pod_requests(
    claims: Sequence[ClaimSpec], classes: Mapping[str, DeviceClass], devices: Sequence[SliceDevice]
) -> list[PodRequest]:
    """Returns all requests in order. Raises ManifestError if a class is missing, which is also an error in the
    scheduler.
    """
    requests = [(claim_index, request) for claim_index, claim in enumerate(claims) for request in claim.requests]
    for _, request in requests:
        for subrequest in request.subrequests:
            class_of(subrequest, classes)
    shared_budget = budget()
    found = []
    for claim_index, request in requests:
        options = (
            Option(subrequest, matching(subrequest, class_of(subrequest, classes), devices, shared_budget))
            for subrequest in request.subrequests
        )
        found.append(PodRequest(claim_index, request.name, tuple(options)))
    return found


def too_large(requests: Sequence[PodRequest]) -> list[str]:
    """Returns a message in the scheduler's words for each claim that requests more devices than a claim may have."""
    reasons = []
    for claim in sorted({one.claim for one in requests}):
        own = [one for one in requests if one.claim == claim]
        if (min_devices := sum(one.min_devices for one in own)) > MAX_RESULTS:
            names = ", ".join(one.name for one in own)
            limit = f"number of requested devices {min_devices} exceeds the claim limit of {MAX_RESULTS}"
            reasons.append(f"requests {names}: {limit}; split the claim into several claims")
    return reasons


def unmet(requests: Sequence[PodRequest], in_use: AllocatedDevices) -> list[str]:
    """Returns the reasons why requests cannot be met, one for each alternative of a request.

    Only requests that could not be met even without the other requests are included.
    """
    reasons: list[str] = []
    for request in requests:
        missing = [option.missing(in_use) for option in request.options]
        reasons += missing if all(missing) else []
    return reasons


def device_limits(requests: Sequence[PodRequest]) -> list[int]:
    """Returns, for each request, the maximum total number of devices that this request and the claim's earlier requests
    may get.

    The result is the maximum for the whole claim, minus the minimum number of devices that the claim's later requests
    need.
    """
    found, later = [], Counter[int]()
    for one in reversed(requests):
        found.append(MAX_RESULTS - later[one.claim])
        later[one.claim] += one.min_devices
    return found[::-1]
