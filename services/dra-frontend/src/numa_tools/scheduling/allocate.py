# SPDX-License-Identifier: Apache-2.0
"""Chooses devices for all of a pod's claims at once, as kube-scheduler's DRA plugin does.

The search goes depth-first through the requests of all claims, in order. For each request it tries every alternative
(``firstAvailable``), and for each alternative every combination of devices that the selectors admit, in the order of
the slices. A device is skipped if it lacks capacity, has a taint that is not tolerated, or violates a constraint of the
claim. When no device is left, the last choice is undone and the next one is tried. The first complete assignment is the
result:

  request a        request b
  takes dev-0      dev-0 is in use, dev-1 and dev-0 violate a constraint: undo the choice for request a
  takes dev-1      takes dev-0: found

A selector that this package cannot evaluate can make the outcome unknown. Up to two searches determine whether it
does:

* The exact search takes the same steps as the scheduler. If it ends before it reaches a device for which a selector is
  unknown, the scheduler's search ends at the same point, so the outcome is certain.
* Otherwise the generous search assumes that every unknown selector has the value that suits the request best, and skips
  devices for which evaluating a selector fails. If even this search finds no devices, none fit, whatever the selectors
  evaluate to.

Devices that might be allocated to a claim with an unknown outcome are disputed: a later claim is certain to fit only
if it needs none of them.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Final

from dra_frontend.allocation.claim import MAX_RESULTS

from numa_tools.scheduling.claim_spec import ClaimSpec, DeviceClass, SubRequest
from numa_tools.scheduling.constraints import ClaimConstraints, Effort
from numa_tools.scheduling.fit import AllocatedDevices, Candidate, Verdict, budget, class_of, matching, verdict
from numa_tools.scheduling.pod_requests import Option, PodRequest, device_limits, pod_requests, too_large, unmet
from numa_tools.scheduling.published import Key, SliceDevice
from numa_tools.scheduling.reading import ManifestError

# The scheduler gives up after 10 s (DRASchedulerFilterTimeout). A search that reaches the limit below takes only a few
# seconds.
_MAX_EFFORT: Final = 2_000_000
_MAX_REQUESTED: Final = 640
"""Maximum total number of requests and requested devices in all claims. It is limited because the search recurses once
for each of them.
"""
_STEP, _CAPACITY, _TAINT = 10, 10, 2


class UnschedulableError(Exception):
    """Raised if the node's devices do not meet all requests. ``reasons`` contains one entry for each unmet request."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


class UndecidedError(Exception):
    """Raised if it is unknown whether the node's devices meet all requests. ``reasons`` states why it is unknown."""

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(reasons))


class _TooManyStepsError(UndecidedError):
    """Raised if the search exceeds its limit before it is complete."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A device that is allocated to a claim."""

    claim: int
    """Index of the claim among the pod's claims."""
    subrequest: SubRequest
    device: SliceDevice
    consumed: Mapping[str, Fraction] | None


class Search:
    """A search on one node: its devices, the cluster's classes, the devices in use and the choices made so far."""

    def __init__(
        self, devices: Sequence[SliceDevice], classes: Mapping[str, DeviceClass], in_use: AllocatedDevices | None = None
    ) -> None:
        self._devices, self._classes = devices, classes
        self.in_use = in_use or AllocatedDevices()
        # Shared by all calls to verdicts(), because explain makes one call for each request.
        self._budget = budget()
        self._requests: list[PodRequest] = []
        self._device_limits: list[int] = []
        self._claims: Sequence[ClaimSpec] = ()
        self._constraints: list[ClaimConstraints] = []
        self._chosen: list[Choice] = []
        self._taken: Counter[int] = Counter()
        self._steps, self._effort, self._limit_reached = 0, Effort(), False
        self._exact = True
        self._disputed: set[Key] = set()

    def allocate(self, claims: Sequence[ClaimSpec]) -> list[Choice]:
        """Allocates devices to every request and marks them as in use.

        Raises UnschedulableError if the requests cannot be met, and UndecidedError if it cannot be determined whether
        they can be met. After either error, the devices in use are unchanged.
        """
        self._claims = claims
        try:
            self._requests = pod_requests(claims, self._classes, self._devices)
            if reasons := too_large(self._requests) or unmet(self._requests, self.in_use):
                raise UnschedulableError(reasons)
            self._check_size()
            self._device_limits = device_limits(self._requests)
            return self._choose_devices()
        except ManifestError as error:
            raise UnschedulableError([str(error)]) from error
        except UndecidedError:
            self._disputed |= self._allocatable()
            raise

    def _allocatable(self) -> set[Key]:
        """Returns every device that could be allocated to some request if there were no other requests."""
        options = [option for request in self._requests for option in request.options]
        tried = ((option.subrequest, one.device) for option in options for one in option.found if one.usable)
        return {device.key for subrequest, device in tried if not verdict(subrequest, device, self.in_use).why}

    def _choose_devices(self) -> list[Choice]:
        """Returns the devices that the scheduler would choose. Raises UnschedulableError or UndecidedError.

        Requests for all devices are checked first, since the scheduler evaluates their selectors before it searches.
        """
        wanting_all = [option for one in self._requests for option in one.options if option.wants_all]
        if failed := next((option.failed for option in wanting_all if option.failed), ""):
            raise UnschedulableError([failed])
        try:
            if unknown := next((option.unknown for option in wanting_all if option.unknown), ""):
                raise UndecidedError([unknown])
            if self._search(exact=True):
                return self._chosen
        except _TooManyStepsError:
            raise
        except UndecidedError:
            if self._search(exact=False, keep=False):
                raise
        raise UnschedulableError([f"each request can be met, but not all of them together{self._limits_text()}"])

    def _search(self, *, exact: bool, keep: bool = True) -> bool:
        """Returns True if the requests can be met together. In that case, also marks their devices as in use if
        ``keep`` is true.
        """
        self._steps, self._effort, self._limit_reached = 0, Effort(), False
        self._constraints = [ClaimConstraints(one.constraints, self._effort) for one in self._claims]
        self._chosen, self._taken, self._exact = [], Counter(), exact
        before, done = self.in_use.copy(), False
        try:
            done = self._search_from(0)
        finally:
            if not done or not keep:
                self.in_use = before
        return done

    def _check_size(self) -> None:
        """Raises UndecidedError if there are too many requests and devices for one search."""
        size = sum(1 + max((option.count for option in one.options), default=0) for one in self._requests)
        if size > _MAX_REQUESTED:
            many = f"{len(self._requests)} requests for {size - len(self._requests)} devices"
            raise UndecidedError([f"{many} are too many to simulate at once; split them into several pods"])

    def verdicts(self, subrequest: SubRequest) -> list[Verdict]:
        """Returns a verdict on each device that the selectors admit or may admit.

        Raises ManifestError if the class is missing or evaluating a selector fails.
        """
        option = Option(
            subrequest, matching(subrequest, class_of(subrequest, self._classes), self._devices, self._budget)
        )
        if option.failed:
            raise ManifestError(option.failed)
        judged = ((one, verdict(subrequest, one.device, self.in_use)) for one in option.found if one.usable)
        return [replace(each, unknown="" if each.why else one.unknown) for one, each in judged]

    def _search_from(self, request_index: int) -> bool:
        """Returns True if all requests from an index onward can be met. If so, also marks their devices as in use."""
        if request_index == len(self._requests):
            return True
        request = self._requests[request_index]
        left = self._device_limits[request_index] - self._taken[request.claim]
        for option in request.options:
            self._limit_reached |= option.count > left
            found = option.found if self._exact else option.possible
            if (
                found
                and option.count <= left
                and self._devices_for(request_index, option.subrequest, found, option.count, 0)
            ):
                return True
        return False

    def _devices_for(
        self, request_index: int, subrequest: SubRequest, found: Sequence[Candidate], left: int, start: int
    ) -> bool:
        """Returns True if the remaining devices of a request can be chosen and all later requests can then be met. If
        so, also marks their devices as in use.

        Devices are chosen in list order, so a request never gets the same shared device twice.
        """
        for index in range(start, len(found) - left + 1):
            self._check_selectors(found[index])
            one = verdict(subrequest, found[index].device, self.in_use)
            self._check_undisputed(one)
            if self._try_device(self._requests[request_index].claim, subrequest, one):
                if (
                    self._search_from(request_index + 1)
                    if left == 1
                    else self._devices_for(request_index, subrequest, found, left - 1, index + 1)
                ):
                    return True
                self._undo_last()
        # The scheduler also evaluates the selectors for the remaining devices, even though too few devices are left to
        # meet the request.
        for other in found[max(start, len(found) - left + 1) :]:
            self._check_selectors(other)
        return False

    def _check_selectors(self, candidate: Candidate) -> None:
        """Raises UndecidedError if a selector's value for the device is unknown, and UnschedulableError if evaluating a
        selector fails.
        """
        if not self._exact:
            return
        if candidate.failed:
            raise UnschedulableError([candidate.failed])
        if candidate.unknown:
            raise UndecidedError([candidate.unknown])

    def _check_undisputed(self, one: Verdict) -> None:
        """Raises UndecidedError if a suitable device might already be allocated to an earlier, undecided claim."""
        if self._exact and not one.why and one.device.key in self._disputed:
            text = f"device {one.device.name} may be allocated to an earlier claim whose outcome is unknown"
            raise UndecidedError([text])

    def _try_device(self, claim: int, subrequest: SubRequest, one: Verdict) -> bool:
        """Allocates a device and returns True, unless its verdict or one of the claim's constraints rules it out."""
        self._charge(one.device)
        if one.why or not self._constraints[claim].add(subrequest.name, one.device):
            return False
        self._chosen.append(Choice(claim, subrequest, one.device, one.consumed))
        self._taken[claim] += 1
        self.in_use.add(one.device.key, one.consumed)
        return True

    def _undo_last(self) -> None:
        last = self._chosen.pop()
        self._taken[last.claim] -= 1
        self.in_use.add(last.device.key, last.consumed, -1)
        self._constraints[last.claim].remove(last.subrequest.name, last.device)

    def _charge(self, device: SliceDevice) -> None:
        """Adds the cost of trying a device to the search's total cost. Raises UndecidedError if the total exceeds the
        limit.
        """
        self._steps += 1
        self._effort.spent += _STEP + _CAPACITY * len(device.capacity) + _TAINT * len(device.taints)
        if self._effort.spent > _MAX_EFFORT:
            simpler = ", or simplify the constraints" if any(one.constraints for one in self._claims) else ""
            text = f"no devices found in {self._steps} combinations, and the scheduler may give up as well"
            raise _TooManyStepsError([f"{text}: request fewer devices in total{simpler}"])

    def _limits_text(self) -> str:
        """Returns the end of the error message. It names the constraints, and also the limit on a claim's devices if
        the search reached this limit.
        """
        shared = sorted({one.attribute for claim in self._claims for one in claim.constraints})
        with_that = f" under the {' and '.join(shared)} constraints" if shared else ""
        return with_that + (f", with at most {MAX_RESULTS} devices for each claim" if self._limit_reached else "")


def allocated(
    claim: Mapping[str, Any], spec: ClaimSpec, choices: Sequence[Choice], classes: Mapping[str, DeviceClass]
) -> dict[str, Any]:
    """Returns a claim with its allocation as the scheduler would write it. ``choices`` are the devices chosen for the
    claim.
    """
    results: list[dict[str, Any]] = []
    configs: list[dict[str, Any]] = []
    for index, one in enumerate(choices):
        driver, pool, device = one.device.key
        result: dict[str, Any] = {"request": one.subrequest.name, "driver": driver, "pool": pool, "device": device}
        if one.consumed is not None:
            texts = {name: one.device.capacity[name].text(amount) for name, amount in one.consumed.items()}
            result |= {"shareID": f"share-{index}", "consumedCapacity": texts}
        results.append(result)
    for subrequest in {one.subrequest.name: one.subrequest for one in choices}.values():
        configs += [
            {"source": "FromClass", "requests": [subrequest.name], **one}
            for one in classes[subrequest.device_class].configs
        ]
    configs += [{"source": "FromClaim", **one} for one in spec.configs]
    return {
        **claim,
        "spec": {"devices": {"constraints": spec.constraint_documents}},
        "status": {**claim.get("status", {}), "allocation": {"devices": {"results": results, "config": configs}}},
    }
