# SPDX-License-Identifier: Apache-2.0
"""Whether machine and configuration fit each other. Pure."""

from collections.abc import Iterator
from typing import Final

from dra_frontend.devices.inventory import Inventory

from numa_tools.doctor.model import Check, Finding, Unread, note, problem


def _machine(machine: object) -> Iterator[Finding]:
    if isinstance(machine, Unread):
        yield problem(f"The machine cannot be read: {machine.why}.", "nothing can be offered", machine.remedy)


def _fits(machine: Inventory) -> Iterator[Finding]:
    for driver, text in machine.refused.items():
        yield problem(
            f"{driver} offers nothing: {text}.", "the setting can never be right on this machine", "correct it"
        )


def _present(machine: Inventory) -> Iterator[Finding]:
    for text in machine.warnings:
        yield problem(
            f"The machine does not fit the configuration: {text}.",
            "less is offered or reserved than is meant",
            "bring online what is missing, or correct the setting",
        )


def _offers(machine: Inventory) -> Iterator[Finding]:
    for pool in machine.pools[:2]:
        if not pool.devices and pool.driver not in machine.refused:
            why = "reserves and withheld CPUs or memory leave nothing for claims"
            yield problem(f"Pool {pool.name} of {pool.driver} has no device.", why, "reserve less")


def _reserves(machine: Inventory) -> Iterator[Finding]:
    if not machine.reserved_cpus:
        why = "kubelet, runtime and daemons run on whatever claims leave over, one CPU at least (minSharedCPUs)"
        yield note("No CPU is reserved for the system.", why, "set reservedCPUs to the kubelet's reservedSystemCPUs")


CHECKS: Final = (
    Check("config.machine", "The machine can be read.", ("machine",), _machine, always=True),
    Check("config.fits", "The configuration can be right on this machine.", ("machine",), _fits),
    Check("config.present", "What it names is present and online.", ("machine",), _present),
    Check("config.offers", "Something is left for claims.", ("machine",), _offers),
    Check("config.reserves", "CPUs are reserved for the system.", ("machine",), _reserves),
)
