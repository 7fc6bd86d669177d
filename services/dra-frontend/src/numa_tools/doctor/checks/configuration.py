# SPDX-License-Identifier: Apache-2.0
"""Whether machine and configuration fit each other. Pure."""

from collections.abc import Iterator
from typing import Final

from dra_frontend.devices.inventory import Inventory, MisfitKind

from numa_tools.doctor.model import Check, Finding, Unread, problem

_OTHER: Final = "correct the setting that is named, in driverConfig of the chart; docs/configuration.md"
_REMEDIES: Final = {
    MisfitKind.ABSENT: "bring it online, or take it out of the setting",
    MisfitKind.NOTHING_LEFT: "reserve less of it: reservedCPUs, minSharedCPUs, reservedMemory in driverConfig",
    MisfitKind.DOUBT: (
        "update the firmware or the hypervisor of the machine, or replace the files that are named by sysfsOverlay"
    ),
    MisfitKind.NO_PAGE_SIZE: "take this size out of reservedMemory, or boot a kernel that has it",
    MisfitKind.TOO_LONG: _OTHER,
}


def _machine(machine: object) -> Iterator[Finding]:
    if isinstance(machine, Unread):
        yield problem(f"The machine cannot be read: {machine.why}.", "nothing can be offered", machine.remedy)


def _fits(machine: Inventory) -> Iterator[Finding]:
    for driver, text in machine.refused.items():
        why = "the setting can never be right on this machine, so the driver offers nothing rather than too much"
        yield problem(f"{driver} offers nothing: {text}.", why, _OTHER)
    for one in machine.misfits:
        why = "less is offered or reserved than the configuration asks for"
        yield problem(f"The machine does not fit the configuration: {one.text}.", why, _REMEDIES[one.kind])


CHECKS: Final = (
    Check("config.machine", "The machine can be read.", ("machine",), _machine, always=True),
    Check(
        "config.fits", "The machine has what the configuration names, and claims get a part of it.", ("machine",), _fits
    ),
)
