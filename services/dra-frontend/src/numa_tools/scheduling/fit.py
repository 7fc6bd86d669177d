# SPDX-License-Identifier: Apache-2.0
"""Decides whether a device meets a request, and describes in the scheduler's terms what is missing."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Final

from numa_contract.errors import MalformedError, shown
from numa_contract.pagesize import kubernetes_page_size, parse_page_size

from numa_tools.cel.evaluate import selected
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import Budget, CelError
from numa_tools.scheduling.claim_spec import DeviceClass, SubRequest
from numa_tools.scheduling.published import DeviceCapacity, Key, SliceDevice
from numa_tools.scheduling.reading import ManifestError

NO_CLASS: Final = "there is no DeviceClass"
"""Beginning of the message about a request that names an unknown class."""
_MAX_VALUES: Final = 10_000_000
_MAX_NAMED: Final = 4
_HUGEPAGES: Final = "dra.hugepages-"
"""Prefix of the names of this driver's hugepage DeviceClasses."""
_EXHAUSTED: Final = "the preceding selectors used up the evaluation limit"
_MAX_SHOWN: Final = 400
"""Maximum number of characters of a selector that are shown in a message."""
_REPELLING_EFFECTS: Final = ("NoSchedule", "NoExecute")


@dataclass(slots=True)
class AllocatedDevices:
    """The devices that are allocated to claims."""

    whole: set[Key] = field(default_factory=set)
    """Devices that are allocated as a whole, each to one claim."""
    parts: dict[Key, dict[str, Fraction]] = field(default_factory=dict)
    """Consumed amount of each capacity, for shared devices."""

    def add(self, key: Key, consumed: Mapping[str, Fraction] | None, sign: int = 1) -> None:
        """Adds an allocation, or removes it if ``sign`` is -1. ``consumed`` is None for a device that is
        allocated as a whole.
        """
        if consumed is None:
            (self.whole.add if sign > 0 else self.whole.discard)(key)
            return
        sums = self.parts.setdefault(key, {})
        for name, amount in consumed.items():
            sums[name] = sums.get(name, Fraction(0)) + sign * amount

    def copy(self) -> "AllocatedDevices":
        """Returns an independent copy."""
        return AllocatedDevices(set(self.whole), {key: dict(sums) for key, sums in self.parts.items()})

    def free(self, device: SliceDevice, capacity: str) -> Fraction:
        """Returns the amount of a capacity that is still free."""
        used = self.parts.get(device.key, {}).get(capacity, Fraction(0))
        return max(Fraction(0), device.capacity[capacity].value - used)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing one device with one request."""

    device: SliceDevice
    why: Callable[[], str] | None = None
    """Function that returns the reason why the device does not meet the request, or None if the device meets it.

    A search displays only a few verdicts, so each reason is formatted only on demand.
    """
    consumed: Mapping[str, Fraction] | None = None
    """Amounts of a shared device that the request consumes, or None if the request gets the whole device."""
    unknown: str = ""
    """Selector that decides the verdict but cannot be evaluated, or ""."""

    @property
    def missing(self) -> str:
        """Reason why the device does not meet the request, or "" if it meets the request."""
        return self.why() if self.why else ""


def class_of(subrequest: SubRequest, classes: Mapping[str, DeviceClass]) -> DeviceClass:
    """Returns the DeviceClass that a request names. Raises ManifestError if the class does not exist."""
    if subrequest.device_class not in classes:
        raise ManifestError(f"{NO_CLASS} {subrequest.device_class}")
    return classes[subrequest.device_class]


def budget() -> Budget:
    """Returns the budget that one pod's selectors share. It corresponds to a few seconds of evaluation."""
    return Budget(_MAX_VALUES, "this and all preceding selectors handle")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A device that must be considered for a request: the selectors of the request and of the request's DeviceClass
    admit the device, may admit it, or cause an error when they are evaluated for it.
    """

    device: SliceDevice
    unknown: str = ""
    """Selector whose value for this device is unknown, or "" if the device is admitted."""
    failed: str = ""
    """Selector whose evaluation fails for this device, or "". The scheduler then stops with an error at this device."""
    excluded: bool = False
    """True if the device cannot meet the request, whatever the unknown selector evaluates to."""

    @property
    def usable(self) -> bool:
        """True if the selectors admit the device, or would admit it if the unknown selector were true."""
        return not (self.failed or self.excluded)


def matching(
    subrequest: SubRequest, device_class: DeviceClass, devices: Iterable[SliceDevice], shared_budget: Budget
) -> list[Candidate]:
    """Returns the devices that the selectors of a request and its DeviceClass do not exclude. The selectors share one
    budget.
    """
    selectors = [
        (f"DeviceClass {subrequest.device_class}: selectors[{n}]", e) for n, e in enumerate(device_class.selectors)
    ]
    selectors += [(f"request {subrequest.name}: selectors[{n}]", e) for n, e in enumerate(subrequest.selectors)]
    if shared_budget.exhausted and selectors:
        return [Candidate(device, f"{selectors[0][0]}: cannot be evaluated: {_EXHAUSTED}") for device in devices]
    found = (_admitted(selectors, device, shared_budget) for device in devices)
    return [one for one in found if one is not None]


def _admitted(selectors: Iterable[tuple[str, str]], device: SliceDevice, shared_budget: Budget) -> Candidate | None:
    """Evaluates the selectors in the scheduler's order until one is false or its evaluation fails.

    If this happens after an unknown selector, the device is excluded but remains in the list: evaluating the
    unknown selector may fail in the cluster, and the scheduler would then stop with an error at this device.
    """
    unknown = ""
    for where, expression in selectors:
        try:
            if not selected(expression, device.cel_value, shared_budget):
                return Candidate(device, unknown, excluded=True) if unknown else None
        except CelError as error:
            remedy = (
                '; test for the attribute first: "name" in device.attributes["domain"]'
                if "no such key" in str(error)
                else ""
            )
            failed = "" if unknown else f"{where}: device {device.name}: {error}{remedy}"
            return Candidate(device, unknown, failed, excluded=True)
        except CelUnsupportedError as error:
            unknown = unknown or f"{where}: cannot be evaluated: {error}: {shown(expression, _MAX_SHOWN)}"
            if shared_budget.exhausted:
                break
    return Candidate(device, unknown)


def verdict(subrequest: SubRequest, device: SliceDevice, in_use: AllocatedDevices) -> Verdict:
    """Compares a request with a device that its selectors admit."""
    for key, taint_value, effect in device.taints:
        tolerated = any(
            one.key in ("", key) and one.value in (None, taint_value) and one.effect in ("", effect)
            for one in subrequest.tolerations
        )
        if effect in _REPELLING_EFFECTS and not tolerated:
            return Verdict(device, partial("has the taint {}".format, key))
    if device.key in in_use.whole:
        return Verdict(device, _allocated)
    if unknown := subrequest.capacity.keys() - device.capacity.keys():
        return Verdict(device, partial(_unknown, device, unknown))
    return _shared(subrequest, device, in_use) if device.shared else _whole(subrequest, device, in_use)


def _allocated() -> str:
    return "is allocated to a claim"


def _unknown(device: SliceDevice, names: Iterable[str]) -> str:
    return f"has no capacity {min(names)} (it has: {', '.join(sorted(device.capacity)) or 'none'})"


def _whole(subrequest: SubRequest, device: SliceDevice, in_use: AllocatedDevices) -> Verdict:
    if in_use.parts.get(device.key):
        return Verdict(device, _allocated)
    for name, requested in subrequest.capacity.items():
        capacity = device.capacity[name]
        if requested > capacity.value:
            return Verdict(device, partial(_too_large, name, capacity, requested))
    return Verdict(device)


def _too_large(name: str, capacity: DeviceCapacity, requested: Fraction) -> str:
    return f"has {capacity.text(capacity.value)} of {name}, {capacity.text(requested)} requested"


def _shared(subrequest: SubRequest, device: SliceDevice, in_use: AllocatedDevices) -> Verdict:
    consumed = {}
    for name, capacity in device.capacity.items():
        requested = subrequest.capacity.get(name)
        amount = capacity.consumed(requested)
        if amount is None:
            return Verdict(
                device, partial(_too_much, name, capacity, capacity.default if requested is None else requested)
            )
        if amount > (free := in_use.free(device, name)):
            return Verdict(device, partial(_too_little, name, capacity, free, amount))
        consumed[name] = amount
    return Verdict(device, consumed=consumed)


def _too_much(name: str, capacity: DeviceCapacity, requested: Fraction) -> str:
    largest = capacity.choices[-1] if capacity.choices else capacity.maximum or capacity.value
    return f"allows at most {capacity.text(largest)} of {name}, {capacity.text(requested)} requested"


def _too_little(name: str, capacity: DeviceCapacity, free: Fraction, wanted: Fraction) -> str:
    return f"{capacity.text(free)} of {capacity.text(capacity.value)} {name} free, {capacity.text(wanted)} requested"


def unmet_reason(subrequest: SubRequest, count: int, verdicts: Sequence[Verdict]) -> str:
    """Returns the reason why a request for ``count`` devices could not be met even if there were no other requests, or
    "" if it could be met.
    """
    if not verdicts:
        text = f"no device on this node is of class {subrequest.device_class}"
        if subrequest.selectors:
            return f"{text} and meets the selectors"
        pages = _hugepages_of_class(subrequest.device_class)
        return f"this node has no {pages} hugepages: {text}" if pages else text
    missing = [f"{one.device.name} {one.missing}" for one in verdicts if one.why]
    fitting = len(verdicts) - len(missing)
    if fitting >= count:
        return ""
    wanted = [f"{fitting} of {count} devices"] if fitting or (subrequest.count or 1) > 1 else []
    more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
    return "; ".join([*wanted, *missing[:_MAX_NAMED]]) + more


def _hugepages_of_class(name: str) -> str:
    """Returns the page size, such as ``2Mi``, of a local hugepage DeviceClass of this driver, or "" for any other
    class.
    """
    if not name.startswith(_HUGEPAGES):
        return ""
    try:
        return kubernetes_page_size(parse_page_size(name.removeprefix(_HUGEPAGES)))
    except MalformedError:  # includes "-far" classes: other NUMA nodes may have pages of this size
        return ""
