# SPDX-License-Identifier: Apache-2.0
"""What giving CPUs and giving memory have in common. Core."""

from dra_frontend.allocation.claim import Result


class RefusedError(Exception):
    """Ends the preparation of one claim; the text reaches the pod's events."""


def amount(result: Result, key: str, what: str) -> int:
    """Returns how much of a capacity a result has; raises RefusedError unless that is a positive whole number."""
    value = result.consumption(key)
    if value is None:
        raise RefusedError(
            f"request {result.request}: the allocation of device {result.device} has no consumedCapacity {key!r}; "
            "is the feature gate DRAConsumableCapacity on in API server and scheduler?"
        )
    if value <= 0 or value.denominator != 1:
        raise RefusedError(f"request {result.request}: {value} of {key} is no positive whole number of {what}")
    return int(value)
