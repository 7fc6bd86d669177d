# SPDX-License-Identifier: Apache-2.0
"""Chooses devices for all claims of a pod at once, as kube-scheduler does: depth first, the first that fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from dra_frontend.scheduling.asked import Asked, Way, asked, room, too_large
from dra_frontend.scheduling.fit import InUse, Verdict, class_of, matching, verdict
from dra_frontend.scheduling.published import Published
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import MOST_RESULTS, Constraint, DeviceClass, Wanted, Wish

# The scheduler gives up after 10 s (DRASchedulerFilterTimeout); this is some seconds.
_MOST_STEPS: Final = 200_000


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
        self._requests: list[Asked] = []
        self._room: list[int] = []
        self._constraints: dict[int, tuple[Constraint, ...]] = {}
        self._chosen: list[Choice] = []
        self._steps, self._limited = 0, False

    def allocate(self, claims: Sequence[Wanted]) -> list[Choice]:
        """Returns devices for every request, which are in use from then on.

        Raises UnschedulableError, and then what is in use is as before.
        """
        self._constraints = {place: claim.constraints for place, claim in enumerate(claims)}
        self._chosen, self._steps, self._limited = [], 0, False
        before, done = self.in_use.copy(), False
        try:
            self._requests = asked(claims, self._classes, self._devices)
            if reasons := list(too_large(self._requests)):
                raise UnschedulableError(reasons)
            self._room = room(self._requests)
            done = self._from(0)
        except ManifestError as error:
            raise UnschedulableError([str(error)]) from error
        except RecursionError:
            many = f"{len(self._requests)} requests are more than can be simulated together"
            raise UnschedulableError([f"{many}; make several pods of it"]) from None
        finally:
            if not done:
                self.in_use = before
        if not done:
            raise UnschedulableError(self._missing())
        return self._chosen

    def verdicts(self, wish: Wish) -> list[Verdict]:
        """Returns what each device that the selectors admit is to a request by itself; raises ManifestError."""
        found = matching(wish, class_of(wish, self._classes), self._devices)
        return [verdict(wish, device, self.in_use) for device in found]

    def _from(self, place: int) -> bool:
        """Tells whether the requests from a place on can be met; if so they are."""
        if place == len(self._requests):
            return True
        request = self._requests[place]
        left = self._room[place] - sum(one.claim == request.claim for one in self._chosen)
        for way in request.ways:
            self._limited |= way.count > left
            if way.devices and way.count <= left and self._devices_for(place, way, way.count, 0):
                return True
        return False

    def _devices_for(self, place: int, way: Way, left: int, start: int) -> bool:
        """Tries the devices of one request in ascending order, so that a shared one is not taken twice for it."""
        for index in range(start, len(way.devices) - left + 1):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise UnschedulableError([f"no devices found in {_MOST_STEPS} combinations; simplify the constraints"])
            one = verdict(way.wish, way.devices[index], self.in_use)
            if one.missing:
                continue
            self._chosen.append(Choice(self._requests[place].claim, way.wish, one.device, one.consumed))
            self.in_use.add(one.device.key, one.consumed)
            if self._constrained() and (
                self._from(place + 1) if left == 1 else self._devices_for(place, way, left - 1, index + 1)
            ):
                return True
            self._chosen.pop()
            self.in_use.add(one.device.key, one.consumed, -1)
        return False

    def _constrained(self) -> bool:
        claim = self._chosen[-1].claim
        return all(self._holds(claim, one) for one in self._constraints[claim])

    def _holds(self, claim: int, constraint: Constraint) -> bool:
        covered = [one for one in self._chosen if one.claim == claim and constraint.covers(one.wish.name)]
        values = [_as_set(one.device.attributes.get(constraint.attribute)) for one in covered]
        if not all(values):
            return False
        if constraint.distinct:
            return sum(map(len, values)) == len(frozenset().union(*values))
        return not values or bool(frozenset.intersection(*values))

    def _missing(self) -> list[str]:
        """Returns what is missing for each request that cannot be met by itself, else what cannot be met together."""
        reasons: list[str] = []
        for request in self._requests:
            missing = [way.missing(self.in_use) for way in request.ways]
            reasons += missing if all(missing) else []
        if reasons:
            return reasons
        shared = sorted({one.attribute for constraints in self._constraints.values() for one in constraints})
        with_that = f", with {' and '.join(shared)} as the constraints say" if shared else ""
        limit = f", of {MOST_RESULTS} devices for each claim at most" if self._limited else ""
        return [f"each request can be met, but not all together{with_that}{limit}"]


def _as_set(found: Any) -> frozenset[tuple[type, Any]]:
    """Returns a list attribute as a set (KEP-5491), another as a set of one; values of different types never match."""
    if found is None:
        return frozenset()
    return frozenset((type(one), one) for one in (found if isinstance(found, list) else [found]))


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
        "status": {**claim.get("status", {}), "allocation": {"devices": {"results": results, "config": configs}}},
    }
