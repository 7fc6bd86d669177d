# SPDX-License-Identifier: Apache-2.0
"""Chooses devices for all claims of a pod at once, as kube-scheduler does: depth first, the first that fit."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from dra_frontend.scheduling.asked import Asked, Way, asked, room, too_large, unmet
from dra_frontend.scheduling.constraints import Agreement, Effort
from dra_frontend.scheduling.fit import InUse, Verdict, budget, class_of, matching, verdict
from dra_frontend.scheduling.published import Published
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import MOST_RESULTS, DeviceClass, Wanted, Wish

# The scheduler gives up after 10 s (DRASchedulerFilterTimeout); this is some seconds, by what takes the time.
_MOST_EFFORT: Final = 2_000_000
_MOST_TOGETHER: Final = 640
"""Maximum sum of devices and requests of all claims: the search recurses once for each of them."""
_STEP, _CAPACITY, _TAINT = 10, 10, 2


class UnschedulableError(Exception):
    """No devices of this node meet all requests; ``reasons`` say what is missing, one for each request."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


@dataclass(frozen=True, slots=True)
class Choice:
    """A device that a claim gets."""

    claim: int
    """Its place among the claims."""
    wish: Wish
    device: Published
    consumed: Mapping[str, Fraction] | None


class Search:
    """One node: its devices, the cluster's classes, and what claims have."""

    def __init__(
        self, devices: Sequence[Published], classes: Mapping[str, DeviceClass], in_use: InUse | None = None
    ) -> None:
        self._devices, self._classes = devices, classes
        self.in_use = in_use or InUse()
        # Of all verdicts: who explains a claim asks once for each request.
        self._budget = budget()
        self._requests: list[Asked] = []
        self._room: list[int] = []
        self._claims: Sequence[Wanted] = ()
        self._agreements: list[Agreement] = []
        self._chosen: list[Choice] = []
        self._taken: Counter[int] = Counter()
        self._steps, self._effort, self._limited = 0, Effort(), False

    def allocate(self, claims: Sequence[Wanted]) -> list[Choice]:
        """Returns devices for every request, which are in use from then on.

        Raises UnschedulableError, and then what is in use is as before.
        """
        self._steps, self._effort, self._limited = 0, Effort(), False
        self._claims, self._agreements = claims, [Agreement(one.constraints, self._effort) for one in claims]
        self._chosen, self._taken = [], Counter()
        before, done = self.in_use.copy(), False
        try:
            self._requests = asked(claims, self._classes, self._devices)
            if reasons := too_large(self._requests) or unmet(self._requests, self.in_use):
                raise UnschedulableError(reasons)
            self._check_size()
            self._room = room(self._requests)
            done = self._from(0)
        except ManifestError as error:
            raise UnschedulableError([str(error)]) from error
        finally:
            if not done:
                self.in_use = before
        if not done:
            raise UnschedulableError([f"each request can be met, but not all together{self._limits()}"])
        return self._chosen

    def _check_size(self) -> None:
        """Raises UnschedulableError if the requests are more than the search can try together."""
        most = sum(1 + max((way.count for way in one.ways), default=0) for one in self._requests)
        if most > _MOST_TOGETHER:
            many = f"{len(self._requests)} requests for {most - len(self._requests)} devices"
            raise UnschedulableError([f"{many} are more than can be simulated together; make several pods of it"])

    def verdicts(self, wish: Wish) -> list[Verdict]:
        """Returns what each device that the selectors admit is to a request by itself; raises ManifestError."""
        found = matching(wish, class_of(wish, self._classes), self._devices, self._budget)
        return [verdict(wish, device, self.in_use) for device in found]

    def _from(self, place: int) -> bool:
        """Tells whether the requests from a place on can be met; if so they are."""
        if place == len(self._requests):
            return True
        request = self._requests[place]
        left = self._room[place] - self._taken[request.claim]
        for way in request.ways:
            self._limited |= way.count > left
            if way.devices and way.count <= left and self._devices_for(place, way, way.count, 0):
                return True
        return False

    def _devices_for(self, place: int, way: Way, left: int, start: int) -> bool:
        """Tries the devices of one request in ascending order, so that a shared one is not taken twice for it."""
        for index in range(start, len(way.devices) - left + 1):
            one = verdict(way.wish, way.devices[index], self.in_use)
            if self._take(self._requests[place].claim, way.wish, one):
                if self._from(place + 1) if left == 1 else self._devices_for(place, way, left - 1, index + 1):
                    return True
                self._give_back()
        return False

    def _take(self, claim: int, wish: Wish, one: Verdict) -> bool:
        """Takes a device that does for a request, by itself and with those that the claim has, or says no."""
        self._count(one.device)
        if one.why or not self._agreements[claim].add(wish.name, one.device):
            return False
        self._chosen.append(Choice(claim, wish, one.device, one.consumed))
        self._taken[claim] += 1
        self.in_use.add(one.device.key, one.consumed)
        return True

    def _give_back(self) -> None:
        last = self._chosen.pop()
        self._taken[last.claim] -= 1
        self.in_use.add(last.device.key, last.consumed, -1)
        self._agreements[last.claim].remove(last.wish.name, last.device)

    def _count(self, device: Published) -> None:
        """Counts one combination and what it costs; raises UnschedulableError where all together cost too much."""
        self._steps += 1
        self._effort.spent += _STEP + _CAPACITY * len(device.capacity) + _TAINT * len(device.taints)
        if self._effort.spent > _MOST_EFFORT:
            simpler = ", or simplify the constraints" if any(one.constraints for one in self._claims) else ""
            text = f"no devices found in {self._steps} combinations, and the scheduler may give up as well"
            raise UnschedulableError([f"{text}: ask for fewer devices together{simpler}"])

    def _limits(self) -> str:
        """Returns what requests that can be met by themselves must hold to together."""
        shared = sorted({one.attribute for claim in self._claims for one in claim.constraints})
        with_that = f", with {' and '.join(shared)} as the constraints say" if shared else ""
        return with_that + (f", of {MOST_RESULTS} devices for each claim at most" if self._limited else "")


def allocated(
    claim: Mapping[str, Any], wanted: Wanted, choices: Sequence[Choice], classes: Mapping[str, DeviceClass]
) -> dict[str, Any]:
    """Returns the claim as the scheduler leaves it in the API server: ``choices`` are its own."""
    results: list[dict[str, Any]] = []
    configs: list[dict[str, Any]] = []
    for index, one in enumerate(choices):
        driver, pool, device = one.device.key
        result: dict[str, Any] = {"request": one.wish.name, "driver": driver, "pool": pool, "device": device}
        if one.consumed is not None:
            texts = {name: one.device.capacity[name].text(amount) for name, amount in one.consumed.items()}
            result |= {"shareID": f"share-{index}", "consumedCapacity": texts}
        results.append(result)
    for wish in {one.wish.name: one.wish for one in choices}.values():
        configs += [
            {"source": "FromClass", "requests": [wish.name], **one} for one in classes[wish.device_class].configs
        ]
    configs += [{"source": "FromClaim", **one} for one in wanted.configs]
    return {
        **claim,
        "spec": {"devices": {"constraints": wanted.constraint_documents}},
        "status": {**claim.get("status", {}), "allocation": {"devices": {"results": results, "config": configs}}},
    }
