# SPDX-License-Identifier: Apache-2.0
"""Chooses devices for all claims of a pod at once, as kube-scheduler does: depth first, the first that fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from dra_frontend.scheduling.fit import InUse, Verdict, class_of, matching, verdict
from dra_frontend.scheduling.published import Published
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import Constraint, DeviceClass, Request, Wanted, Wish

# The scheduler gives up after 10 s (DRASchedulerFilterTimeout); this is some seconds.
_MOST_STEPS: Final = 200_000
_MOST_NAMED: Final = 4


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
        self._matching: dict[tuple[int, str], list[Published] | ManifestError] = {}
        self._requests: list[tuple[int, Request]] = []
        self._constraints: dict[int, tuple[Constraint, ...]] = {}
        self._chosen: list[Choice] = []
        self._steps = 0

    def allocate(self, claims: Sequence[Wanted]) -> list[Choice]:
        """Returns devices for every request, which are in use from then on.

        Raises UnschedulableError, and then what is in use is as before.
        """
        self._requests = [(place, one) for place, claim in enumerate(claims) for one in claim.requests]
        self._constraints = {place: claim.constraints for place, claim in enumerate(claims)}
        self._chosen, self._steps = [], 0
        before, done = self.in_use.copy(), False
        try:
            self._match()
            done = self._from(0)
        except ManifestError as error:
            raise UnschedulableError([str(error)]) from error
        finally:
            if not done:
                self.in_use = before
        if not done:
            raise UnschedulableError(self._missing())
        return self._chosen

    def verdicts(self, wish: Wish) -> list[Verdict]:
        """Returns what each device that the selectors admit is to a request by itself; raises ManifestError."""
        return self._verdicts(wish, matching(wish, class_of(wish, self._classes), self._devices))

    def _verdicts(self, wish: Wish, devices: Sequence[Published]) -> list[Verdict]:
        return [verdict(wish, device, self.in_use) for device in devices]

    def _match(self) -> None:
        """Finds the devices that selectors admit, before the search goes deep; raises ManifestError: there is no class.

        A selector that fails is an error only where the search comes to it, as in the scheduler.
        """
        wishes = [(place, wish) for place, (_, request) in enumerate(self._requests) for wish in request.wishes]
        of_wishes = [class_of(wish, self._classes) for _, wish in wishes]
        self._matching = {}
        for (place, wish), device_class in zip(wishes, of_wishes, strict=True):
            try:
                self._matching[place, wish.name] = matching(wish, device_class, self._devices)
            except ManifestError as error:
                self._matching[place, wish.name] = error

    def _from(self, place: int) -> bool:
        """Tells whether the requests from a place on can be met; if so they are."""
        if place == len(self._requests):
            return True
        for wish in self._requests[place][1].wishes:
            found = self._matched(place, wish)
            count = len(found) if wish.count is None else wish.count
            if count and self._devices_for(place, wish, count, 0):
                return True
        return False

    def _matched(self, place: int, wish: Wish) -> list[Published]:
        found = self._matching[place, wish.name]
        if isinstance(found, ManifestError):
            raise found
        return found

    def _devices_for(self, place: int, wish: Wish, left: int, start: int) -> bool:
        """Tries the devices of one request in ascending order, so that a shared one is not taken twice for it."""
        if not left:
            return self._from(place + 1)
        found = self._matched(place, wish)
        for index in range(start, len(found) - left + 1):
            self._steps += 1
            if self._steps > _MOST_STEPS:
                raise UnschedulableError([f"no devices found in {_MOST_STEPS} combinations; simplify the constraints"])
            one = verdict(wish, found[index], self.in_use)
            if one.missing:
                continue
            self._chosen.append(Choice(self._requests[place][0], wish, one.device, one.consumed))
            self.in_use.add(one.device.key, one.consumed)
            if self._constrained() and self._devices_for(place, wish, left - 1, index + 1):
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
        for place, (_, request) in enumerate(self._requests):
            missing: list[str] = []
            for wish in request.wishes:
                found = self._matching[place, wish.name]
                if isinstance(found, ManifestError):
                    missing.append(str(found))
                elif not _met(wish, verdicts := self._verdicts(wish, found)):
                    missing.append(f"request {wish.name}: {_named(wish, verdicts)}")
            if len(missing) == len(request.wishes):
                reasons += missing
        if reasons:
            return reasons
        shared = sorted({one.attribute for constraints in self._constraints.values() for one in constraints})
        with_that = f", with {' and '.join(shared)} as the constraints say" if shared else ""
        return [f"each request can be met, but not all together{with_that}"]


def _met(wish: Wish, verdicts: Sequence[Verdict]) -> bool:
    fitting = sum(not one.missing for one in verdicts)
    return fitting >= wish.count if wish.count is not None else bool(verdicts) and fitting == len(verdicts)


def _named(wish: Wish, verdicts: Sequence[Verdict]) -> str:
    if not verdicts:
        return f"no device of this node is of class {wish.device_class}" + (
            " and meets the selectors" if wish.selectors else ""
        )
    missing = [f"{one.device.name} {one.missing}" for one in verdicts if one.missing]
    fitting = len(verdicts) - len(missing)
    wanted = [f"{fitting} of {wish.count or len(verdicts)} devices"] if fitting or (wish.count or 1) > 1 else []
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return "; ".join([*wanted, *([", ".join(missing[:_MOST_NAMED]) + more] if missing else [])])


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
