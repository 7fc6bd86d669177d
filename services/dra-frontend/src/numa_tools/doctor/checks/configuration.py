# SPDX-License-Identifier: Apache-2.0
"""Whether machine and configuration fit each other. Pure."""

from collections.abc import Iterator
from typing import Final

from dra_frontend.devices.inventory import Inventory

from numa_tools.doctor.model import Check, Finding, Unread, problem

_REMEDIES: Final = (
    (("is offline", "is not present", "is not there"), "bring it online, or take it out of the setting"),
    (("left for claims",), "reserve less of it: reservedCPUs, minSharedCPUs, reservedMemory in driverConfig"),
    (
        ("told apart by their ids", "have no L3 cache here", "are not known"),
        "update the firmware or the hypervisor of the machine, or replace the files that are named by sysfsOverlay",
    ),
    (("this kernel has no hugepages",), "take this size out of reservedMemory, or boot a kernel that has it"),
)
"""Remedy by words of a warning of the inventory; the first row counts."""
_OTHER: Final = "correct the setting that is named, in driverConfig of the chart; docs/configuration.md"


def _machine(machine: object) -> Iterator[Finding]:
    if isinstance(machine, Unread):
        yield problem(f"The machine cannot be read: {machine.why}.", "nothing can be offered", machine.remedy)


def _fits(machine: Inventory) -> Iterator[Finding]:
    for driver, text in machine.refused.items():
        why = "the setting can never be right on this machine, so the driver offers nothing rather than too much"
        yield problem(f"{driver} offers nothing: {text}.", why, _OTHER)
    for text in machine.warnings:
        remedy = next((one for words, one in _REMEDIES if any(word in text for word in words)), _OTHER)
        why = "less is offered or reserved than the configuration asks for"
        yield problem(f"The machine does not fit the configuration: {text}.", why, remedy)


CHECKS: Final = (
    Check("config.machine", "The machine can be read.", ("machine",), _machine, always=True),
    Check(
        "config.fits", "The machine has what the configuration names, and claims get a part of it.", ("machine",), _fits
    ),
)
