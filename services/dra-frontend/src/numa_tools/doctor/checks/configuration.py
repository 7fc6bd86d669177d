# SPDX-License-Identifier: Apache-2.0
"""Checks that the configuration suits the machine. This module does no I/O."""

from collections.abc import Iterator
from typing import Final

from dra_frontend.devices.inventory import Inventory, MismatchKind

from numa_tools.doctor.model import Check, Finding, Unread, problem

_OTHER_REMEDY: Final = "correct the named setting in the chart's driverConfig (docs/configuration.md)"
_REMEDIES: Final = {
    MismatchKind.ABSENT: "bring the missing CPU or NUMA node online, or remove it from the setting",
    MismatchKind.NOTHING_LEFT: "reserve less: reservedCPUs, withheldCPUs, reservedMemory in driverConfig",
    MismatchKind.DOUBT: ("update the machine's firmware or hypervisor, or replace the named files with sysfsOverlay"),
    MismatchKind.NO_PAGE_SIZE: "remove this size from reservedMemory, or boot a kernel that supports it",
    MismatchKind.TOO_LONG: _OTHER_REMEDY,
}


def _machine(machine: object) -> Iterator[Finding]:
    if isinstance(machine, Unread):
        yield problem(
            f"The machine's topology cannot be read: {machine.why}.", "no devices can be offered", machine.remedy
        )


def _fits(machine: Inventory) -> Iterator[Finding]:
    for driver, text in machine.refusals.items():
        why = "this machine cannot satisfy the setting, so the driver offers nothing rather than offering too much"
        yield problem(f"{driver} offers nothing: {text}.", why, _OTHER_REMEDY)
    for one in machine.mismatches:
        why = "less is offered or reserved than the configuration requests"
        yield problem(f"The machine does not match the configuration: {one.text}.", why, _REMEDIES[one.kind])


CHECKS: Final = (
    Check("config.machine", "The machine's topology can be read.", ("machine",), _machine, accepts_unread=True),
    Check(
        "config.fits",
        "The machine has the resources that the configuration specifies, and some are left for claims.",
        ("machine",),
        _fits,
    ),
)
