# SPDX-License-Identifier: Apache-2.0
"""Tracks on-demand hugepage devices whose pages could not be allocated, so that new claims avoid them.

If a device's pool could not be grown, the device is tainted for FIRST_SECONDS; then new claims may try again. Each
additional consecutive failure doubles the time, up to MAX_SECONDS. In the meantime the device's pool is not grown: an
attempt would evict the node's page cache for pages that no claim requests. See docs/adr/0023.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from numa_contract.state.status import Notice, StatusCode

FIRST_SECONDS: Final = 300.0
MAX_SECONDS: Final = 3600.0
SILENCE_SECONDS: Final = 10.0
"""Time from the first unanswered request until a shortage is reported. It allows for a restart of the helper container,
which takes a few seconds.

For a request that the helper accepts but does not answer, this time starts when the request times out
(``node/pool_client.py``).
"""


class ShortageKind(StrEnum):
    """Cause of a shortage, used as the value of the taint."""

    GROWTH_FAILED = "growth-failed"
    """The kernel allocated fewer pages than requested."""
    HELPER_UNAVAILABLE = "helper-unavailable"
    """The helper container does not respond, or cannot resize the pool."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """Reason why a device should not currently get new claims."""

    kind: ShortageKind
    text: str


@dataclass(slots=True)
class _Failures:
    in_a_row: int
    until: float
    """Clock time after which new claims may try again."""


class Shortages:
    """This node's device shortages, by device name. The shortages are lost on a restart."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: dict[str, _Failures] = {}
        self._silent_since: dict[str, float] = {}
        self.by_device: Mapping[str, Shortage] = {}
        """Current shortages; replaced by a different object after each change."""

    def growth_failed(self, device: str, text: str) -> None:
        """Records that the kernel found too few pages for a device."""
        now, known = self._clock(), self._failures.get(device)
        if known is None or now >= known.until + MAX_SECONDS:
            known = self._failures[device] = _Failures(1, now + FIRST_SECONDS)
        elif now >= known.until:
            known.in_a_row += 1
            known.until = now + min(FIRST_SECONDS * 2 ** (known.in_a_row - 1), MAX_SECONDS)
        minutes = round((known.until - now) / 60)
        self._set(
            device, Shortage(ShortageKind.GROWTH_FAILED, f"{text}; new claims avoid the device for {minutes} min")
        )

    def growth_succeeded(self, device: str) -> None:
        """Records that the kernel found all pages that a device needed."""
        self._failures.pop(device, None)
        self._remove(device)

    def helper_silent(self, device: str, text: str) -> bool:
        """Records that the helper did not respond. Returns True if the silence has lasted long enough to count as a
        shortage.
        """
        lasts = self._clock() - self._silent_since.setdefault(device, self._clock())
        if lasts >= SILENCE_SECONDS:
            self._set(device, Shortage(ShortageKind.HELPER_UNAVAILABLE, text))
        return lasts >= SILENCE_SECONDS

    def helper_failed(self, device: str, text: str) -> None:
        """Records that the helper responded but cannot resize a device's pool."""
        self._silent_since.pop(device, None)
        self._set(device, Shortage(ShortageKind.HELPER_UNAVAILABLE, text))

    def helper_answered(self, device: str) -> None:
        """Records that the helper can resize a device's pool."""
        self._silent_since.pop(device, None)
        if device in self.by_device and self.by_device[device].kind is ShortageKind.HELPER_UNAVAILABLE:
            self._remove(device)

    def expire(self) -> None:
        """Ends the shortages that have expired."""
        now = self._clock()
        for device, failures in self._failures.items():
            shortage = self.by_device.get(device)
            if shortage is not None and shortage.kind is ShortageKind.GROWTH_FAILED and now >= failures.until:
                self._remove(device)

    @property
    def notices(self) -> list[Notice]:
        """A warning for each shortage."""
        return [
            Notice(code=StatusCode.HUGEPAGES_UNAVAILABLE, subject=device, text=f"{device}: {shortage.text}")
            for device, shortage in sorted(self.by_device.items())
        ]

    def _set(self, device: str, shortage: Shortage) -> None:
        if self.by_device.get(device) != shortage:
            self.by_device = {**self.by_device, device: shortage}

    def _remove(self, device: str) -> None:
        if device in self.by_device:
            self.by_device = {name: one for name, one in self.by_device.items() if name != device}
