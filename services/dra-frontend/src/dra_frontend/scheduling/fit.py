# SPDX-License-Identifier: Apache-2.0
"""Whether a device meets a request, or what is missing, in the scheduler's terms."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Final

from dra_frontend.scheduling.cel import selected
from dra_frontend.scheduling.cel_tokens import CelUnsupportedError
from dra_frontend.scheduling.cel_values import Budget, CelError
from dra_frontend.scheduling.published import Key, Published, Share
from dra_frontend.scheduling.reading import ManifestError
from dra_frontend.scheduling.wanted import DeviceClass, Wish

NO_CLASS: Final = "there is no DeviceClass"
"""How the refusal of a request begins whose class is not known."""
_MOST_VALUES: Final = 10_000_000
_MOST_NAMED: Final = 4
_KEEPS_AWAY: Final = ("NoSchedule", "NoExecute")


@dataclass(slots=True)
class InUse:
    """What claims have of the devices."""

    whole: set[Key] = field(default_factory=set)
    """Devices of which one claim has all."""
    parts: dict[Key, dict[str, Fraction]] = field(default_factory=dict)
    """What is consumed of each capacity of shared devices."""

    def add(self, key: Key, consumed: Mapping[str, Fraction] | None, sign: int = 1) -> None:
        """Counts a result; ``sign`` -1 takes it back. None: all of the device."""
        if consumed is None:
            (self.whole.add if sign > 0 else self.whole.discard)(key)
            return
        sums = self.parts.setdefault(key, {})
        for name, amount in consumed.items():
            sums[name] = sums.get(name, Fraction(0)) + sign * amount

    def copy(self) -> "InUse":
        """Returns the same, which goes its own way from here."""
        return InUse(set(self.whole), {key: dict(sums) for key, sums in self.parts.items()})

    def free(self, device: Published, capacity: str) -> Fraction:
        """Returns what is left of a capacity."""
        used = self.parts.get(device.key, {}).get(capacity, Fraction(0))
        return max(Fraction(0), device.capacity[capacity].value - used)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one device is to one request."""

    device: Published
    why: Callable[[], str] | None = None
    """Says why it does not do, since a search asks for the words of few; None where it does."""
    consumed: Mapping[str, Fraction] | None = None
    """What the request takes of a shared device; None: all of the device."""

    @property
    def missing(self) -> str:
        """Returns why it does not do; nothing where it does."""
        return self.why() if self.why else ""


def class_of(wish: Wish, classes: Mapping[str, DeviceClass]) -> DeviceClass:
    """Returns the class that a request names; raises ManifestError."""
    if wish.device_class not in classes:
        raise ManifestError(f"{NO_CLASS} {wish.device_class}")
    return classes[wish.device_class]


def budget() -> Budget:
    """Returns what the selectors of one pod may cost together, which is some seconds."""
    return Budget(_MOST_VALUES, "with all selectors before it, it handles")


def matching(wish: Wish, device_class: DeviceClass, devices: Iterable[Published], whole: Budget) -> list[Published]:
    """Returns the devices that the selectors of class and request admit, which spend of a budget.

    Raises ManifestError for a selector that fails, which ends a real attempt, too.
    """
    return [
        device
        for device in devices
        if _admitted(device_class.selectors, f"DeviceClass {wish.device_class}", device, whole)
        and _admitted(wish.selectors, f"request {wish.name}", device, whole)
    ]


def _admitted(selectors: Iterable[str], whose: str, device: Published, whole: Budget) -> bool:
    for place, expression in enumerate(selectors):
        where = f"{whose}: selectors[{place}]"
        try:
            if not selected(expression, device.in_cel, whole):
                return False
        except CelError as error:
            remedy = '; ask first, with: "name" in device.attributes["domain"]' if "no such key" in str(error) else ""
            raise ManifestError(f"{where}: device {device.name}: {error}{remedy}") from error
        except CelUnsupportedError as error:
            raise ManifestError(f"{where}: {error}") from error
    return True


def verdict(wish: Wish, device: Published, in_use: InUse) -> Verdict:
    """Returns what a device that the selectors admit is to a request."""
    for key, said, effect in device.taints:
        tolerated = any(
            one.key in ("", key) and one.value in (None, said) and one.effect in ("", effect)
            for one in wish.tolerations
        )
        if effect in _KEEPS_AWAY and not tolerated:
            return Verdict(device, partial("has the taint {}".format, key))
    if device.key in in_use.whole:
        return Verdict(device, _allocated)
    if unknown := wish.capacity.keys() - device.capacity.keys():
        return Verdict(device, partial(_unknown, device, unknown))
    return _shared(wish, device, in_use) if device.shared else _whole(wish, device, in_use)


def _allocated() -> str:
    return "is allocated to a claim"


def _unknown(device: Published, names: Iterable[str]) -> str:
    return f"has no capacity {min(names)} (it has: {', '.join(sorted(device.capacity)) or 'none'})"


def _whole(wish: Wish, device: Published, in_use: InUse) -> Verdict:
    if in_use.parts.get(device.key):
        return Verdict(device, _allocated)
    for name, asked in wish.capacity.items():
        share = device.capacity[name]
        if asked > share.value:
            return Verdict(device, partial(_too_large, name, share, asked))
    return Verdict(device)


def _too_large(name: str, share: Share, asked: Fraction) -> str:
    return f"has {share.text(share.value)} of {name}, {share.text(asked)} wanted"


def _shared(wish: Wish, device: Published, in_use: InUse) -> Verdict:
    consumed = {}
    for name, share in device.capacity.items():
        asked = wish.capacity.get(name)
        amount = share.consumed(asked)
        if amount is None:
            return Verdict(device, partial(_too_much, name, share, share.default if asked is None else asked))
        if amount > (free := in_use.free(device, name)):
            return Verdict(device, partial(_too_little, name, share, free, amount))
        consumed[name] = amount
    return Verdict(device, consumed=consumed)


def _too_much(name: str, share: Share, asked: Fraction) -> str:
    largest = share.choices[-1] if share.choices else share.maximum or share.value
    return f"gives {share.text(largest)} of {name} at most, {share.text(asked)} wanted"


def _too_little(name: str, share: Share, free: Fraction, wanted: Fraction) -> str:
    return f"{share.text(free)} of {share.text(share.value)} {name} free, {share.text(wanted)} wanted"


def named(wish: Wish, verdicts: Sequence[Verdict]) -> str:
    """Returns what is missing for a request by itself; nothing where it can be met."""
    if not verdicts:
        return f"no device of this node is of class {wish.device_class}" + (
            " and meets the selectors" if wish.selectors else ""
        )
    missing = [f"{one.device.name} {one.missing}" for one in verdicts if one.why]
    fitting, count = len(verdicts) - len(missing), wish.count or len(verdicts)
    if fitting >= count:
        return ""
    wanted = [f"{fitting} of {count} devices"] if fitting or (wish.count or 1) > 1 else []
    more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
    return "; ".join([*wanted, *([", ".join(missing[:_MOST_NAMED]) + more] if missing else [])])
