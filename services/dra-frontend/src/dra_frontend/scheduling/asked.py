# SPDX-License-Identifier: Apache-2.0
"""The requests of all claims of a pod, each with the devices that are of its class and that its selectors admit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dra_frontend.scheduling.cel_values import Budget
from dra_frontend.scheduling.fit import InUse, budget, class_of, matching, named, verdict
from dra_frontend.scheduling.published import Published
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import MOST_RESULTS, DeviceClass, Wanted, Wish


@dataclass(frozen=True, slots=True)
class Way:
    """One way to meet a request."""

    wish: Wish
    found: Sequence[Published] | ManifestError
    """What matches; or which selector fails, which is an error only where the search comes to it."""

    @property
    def devices(self) -> Sequence[Published]:
        """Returns what matches; raises ManifestError."""
        if isinstance(self.found, ManifestError):
            raise self.found
        return self.found

    @property
    def count(self) -> int:
        """Returns how many devices it takes; none are all where none matches or a selector fails."""
        if self.wish.count is not None:
            return self.wish.count
        return 0 if isinstance(self.found, ManifestError) else len(self.found)

    def missing(self, in_use: InUse) -> str:
        """Returns why it cannot be gone even without the other requests; nothing where it can."""
        if isinstance(self.found, ManifestError):
            return str(self.found)
        reason = named(self.wish, [verdict(self.wish, device, in_use) for device in self.found])
        return f"request {self.wish.name}: {reason}" if reason else ""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    claim: int
    """The place of its claim."""
    name: str
    ways: tuple[Way, ...]

    @property
    def least(self) -> int:
        """Returns how many devices it takes at least."""
        return min((way.count for way in self.ways), default=0)


def asked(claims: Sequence[Wanted], classes: Mapping[str, DeviceClass], devices: Sequence[Published]) -> list[Asked]:
    """Returns all requests in order; raises ManifestError for a class that is not there, as the scheduler does."""
    requests = [(place, request) for place, claim in enumerate(claims) for request in claim.requests]
    for _, request in requests:
        for wish in request.wishes:
            class_of(wish, classes)
    whole = budget()
    return [
        Asked(
            claim, request.name, tuple(_way(wish, class_of(wish, classes), devices, whole) for wish in request.wishes)
        )
        for claim, request in requests
    ]


def _way(wish: Wish, device_class: DeviceClass, devices: Sequence[Published], whole: Budget) -> Way:
    try:
        return Way(wish, matching(wish, device_class, devices, whole))
    except ManifestError as error:
        return Way(wish, error)


def too_large(requests: Sequence[Asked]) -> list[str]:
    """Returns, in the scheduler's words, why claims cannot be allocated that want more devices than one can have."""
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
    """Returns how many devices each request and those before it in its claim may have, as those behind need theirs."""
    found, behind = [], Counter[int]()
    for one in reversed(requests):
        found.append(MOST_RESULTS - behind[one.claim])
        behind[one.claim] += one.least
    return found[::-1]
