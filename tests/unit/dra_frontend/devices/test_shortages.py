# SPDX-License-Identifier: Apache-2.0
"""How long a device stays tainted after its hugepages could not be allocated."""

from dra_frontend.devices.shortages import FIRST_SECONDS, MAX_SECONDS, SILENCE_SECONDS, ShortageKind, Shortages

DEVICE = "hugepages-1g-numa000"


class Clock:
    """A clock that the test sets."""

    now = 1000.0

    def __call__(self) -> float:
        """Returns the time in seconds."""
        return self.now


def period(shortages: Shortages, clock: Clock) -> float:
    """Reports a failed allocation and returns the number of seconds until the shortage ends."""
    shortages.growth_failed(DEVICE, "no memory")
    began = clock.now
    while shortages.by_device:
        clock.now += 10
        shortages.expire()
    return clock.now - began


def test_each_consecutive_failure_doubles_the_duration() -> None:
    """The duration grows to at most an hour. A success, or an hour without a failure, resets it."""
    clock = Clock()
    shortages = Shortages(clock)
    assert [period(shortages, clock) for _ in range(6)] == [300, 600, 1200, 2400, 3600, 3600]
    shortages.growth_succeeded(DEVICE)
    assert period(shortages, clock) == FIRST_SECONDS
    clock.now += MAX_SECONDS
    assert period(shortages, clock) == FIRST_SECONDS


def test_failures_during_a_shortage_do_not_prolong_it() -> None:
    """Several claims may fail at the same time, and some of them may tolerate the taint."""
    clock = Clock()
    shortages = Shortages(clock)
    for _ in range(5):
        shortages.growth_failed(DEVICE, "no memory")
        clock.now += 50
    assert period(shortages, clock) == FIRST_SECONDS - 250
    assert period(shortages, clock) == 2 * FIRST_SECONDS


def test_the_mapping_of_shortages_is_replaced_only_after_a_change() -> None:
    """The publisher compares the mapping by identity."""
    clock = Clock()
    shortages = Shortages(clock)
    empty = shortages.by_device
    shortages.expire()
    shortages.growth_succeeded(DEVICE)
    shortages.helper_answered(DEVICE)
    assert shortages.by_device is empty
    shortages.helper_failed(DEVICE, "read-only")
    found = shortages.by_device
    shortages.helper_failed(DEVICE, "read-only")
    assert shortages.by_device is found is not empty
    (notice,) = shortages.notices
    assert (notice.code, notice.subject, notice.text) == ("HugepagesUnavailable", DEVICE, f"{DEVICE}: read-only")


def test_a_silent_helper_counts_as_a_shortage_after_ten_seconds() -> None:
    """The shortage lasts until the helper responds, however long that takes."""
    clock = Clock()
    shortages = Shortages(clock)
    assert not shortages.helper_silent(DEVICE, "refused")
    clock.now += SILENCE_SECONDS
    assert shortages.helper_silent(DEVICE, "refused")
    clock.now += 2 * MAX_SECONDS
    shortages.expire()
    assert {name: one.kind for name, one in shortages.by_device.items()} == {DEVICE: ShortageKind.HELPER_UNAVAILABLE}
    shortages.helper_answered(DEVICE)
    assert not shortages.by_device
    assert not shortages.helper_silent(DEVICE, "refused")


def test_a_response_from_the_helper_does_not_end_a_memory_shortage() -> None:
    """A response from the helper means that the helper can resize the pool again, but the kernel still has no
    contiguous memory for the pages.
    """
    shortages = Shortages(Clock())
    shortages.growth_failed(DEVICE, "no memory")
    shortages.helper_answered(DEVICE)
    assert DEVICE in shortages.by_device
