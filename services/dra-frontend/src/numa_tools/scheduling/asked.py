# SPDX-License-Identifier: Apache-2.0
"""The requests of all claims of a pod, each with the devices of its class that its selectors admit or may admit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_frontend.allocation.claim import MOST_RESULTS

from numa_tools.scheduling.fit import Candidate, InUse, budget, class_of, matching, named, verdict
from numa_tools.scheduling.published import Published
from numa_tools.scheduling.wanted import DeviceClass, Wanted, Wish


@dataclass(frozen=True, slots=True)
class Way:
    """One way to meet a request."""

    wish: Wish
    found: Sequence[Candidate]
    """Devices that the selectors do not exclude, in the scheduler's order."""

    @property
    def wants_all(self) -> bool:
        """True if all devices are requested, so that the scheduler evaluates the selectors for all of them."""
        return self.wish.count is None

    @property
    def possible(self) -> Sequence[Candidate]:
        """Returns the devices with which the request is easiest to meet, whatever unknown selectors evaluate to.

        A request for all devices is easiest to meet if no unknown selector admits one more.
        """
        usable = [one for one in self.found if one.usable]
        certain = [one for one in usable if not one.unknown]
        return certain if self.wants_all and certain else usable

    @property
    def unknown(self) -> str:
        """Returns a selector that cannot be evaluated for some device, or "" if there is none."""
        return next((one.unknown for one in self.found if one.unknown), "")

    @property
    def failed(self) -> str:
        """Returns a selector that fails for some device, or "" if there is none."""
        return next((one.failed for one in self.found if one.failed), "")

    @property
    def count(self) -> int:
        """Minimum number of devices that this way requires; 0 if it requests all devices and none is possible."""
        if self.wish.count is not None:
            return self.wish.count
        possible = self.possible
        return 1 if possible and possible[0].unknown else len(possible)

    def missing(self, in_use: InUse) -> str:
        """Returns the reason why this way cannot be used even without the other requests, or ""."""
        verdicts = [verdict(self.wish, one.device, in_use) for one in self.possible]
        reason = named(self.wish, self.count, verdicts)
        return reason and (self.failed or f"request {self.wish.name}: {reason}")


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    claim: int
    """The place of its claim."""
    name: str
    ways: tuple[Way, ...]

    @property
    def least(self) -> int:
        """Minimum number of devices that meet the request."""
        return min((way.count for way in self.ways), default=0)


def asked(claims: Sequence[Wanted], classes: Mapping[str, DeviceClass], devices: Sequence[Published]) -> list[Asked]:
    """Returns all requests in order. Raises ManifestError if a class is missing, which is an error of the scheduler."""
    requests = [(place, request) for place, claim in enumerate(claims) for request in claim.requests]
    for _, request in requests:
        for wish in request.wishes:
            class_of(wish, classes)
    whole = budget()
    found = []
    for place, request in requests:
        ways = (Way(wish, matching(wish, class_of(wish, classes), devices, whole)) for wish in request.wishes)
        found.append(Asked(place, request.name, tuple(ways)))
    return found


def too_large(requests: Sequence[Asked]) -> list[str]:
    """Returns a reason in the scheduler's words for each claim that requests more devices than a claim may have."""
    reasons = []
    for claim in sorted({one.claim for one in requests}):
        own = [one for one in requests if one.claim == claim]
        if (least := sum(one.least for one in own)) > MOST_RESULTS:
            names = ", ".join(one.name for one in own)
            limit = f"number of requested devices {least} exceeds the claim limit of {MOST_RESULTS}"
            reasons.append(f"requests {names}: {limit}; make several claims of it")
    return reasons


def unmet(requests: Sequence[Asked], in_use: InUse) -> list[str]:
    """Returns what is missing for each request that cannot be met even by itself."""
    reasons: list[str] = []
    for request in requests:
        missing = [way.missing(in_use) for way in request.ways]
        reasons += missing if all(missing) else []
    return reasons


def room(requests: Sequence[Asked]) -> list[int]:
    """Returns how many devices each request and the earlier ones of its claim may have together.

    The later requests of the claim need the rest of the maximum for a claim.
    """
    found, behind = [], Counter[int]()
    for one in reversed(requests):
        found.append(MOST_RESULTS - behind[one.claim])
        behind[one.claim] += one.least
    return found[::-1]
