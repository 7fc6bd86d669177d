# SPDX-License-Identifier: Apache-2.0
"""Who may use a claim: one answer for both drivers, since one container uses the whole claim. Core."""

from typing import Final, Literal

from numa_contract.names import CPU_DRIVER, MEMORY_DRIVER

from dra_frontend.allocation.claim import ClaimView, Result
from dra_frontend.allocation.cpu_parameters import CpuConfig
from dra_frontend.allocation.errors import RefusedError
from dra_frontend.allocation.memory_parameters import MemoryConfig
from dra_frontend.allocation.parameters import Given, ParametersError, Section, entries, merge

_SECTIONS: Final[dict[str, type[Section]]] = {CPU_DRIVER: CpuConfig, MEMORY_DRIVER: MemoryConfig}


def _stated(claim: ClaimView, result: Result) -> Given | None:
    section = _SECTIONS.get(result.driver)
    if section is None or result.admin_access:
        return None
    try:
        return merge(entries(claim, result, section)).get("sharing")
    except ParametersError as error:
        raise RefusedError(f"request {result.request}: {error}") from error


def claim_sharing(claim: ClaimView) -> Literal["container", "pod"]:
    """Returns how the claim is shared, from what is said for its requests of either driver.

    Requests that say nothing follow those that do. RefusedError, the same for both drivers, where two differ or the
    parameters of one cannot be read.
    """
    stated = {(r.base_request, r.driver): given for r in claim.results if (given := _stated(claim, r))}
    if len({given.value for given in stated.values()}) > 1:
        shown = ", ".join(f"{name} of {driver}: {each.value} {each.source}" for (name, driver), each in stated.items())
        raise RefusedError(
            f"parameters: sharing: holds for the whole claim, but its requests differ ({shown}); give all the same"
        )
    return "pod" if any(given.value == "pod" for given in stated.values()) else "container"
