# SPDX-License-Identifier: Apache-2.0
"""Allocates a claim without a directory or a lock."""

from collections.abc import Mapping
from typing import Any

import pytest
from dra_frontend.allocation.allocate import allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import ClaimView, RefusedError, parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, build_inventory
from numa_contract.config import Config
from numa_contract.records import AllocationRecord
from numa_contract.reports import ClaimUse, ContainerReport

from tests.rigs.builders import NODE, claim, files_of, report
from tests.strategies.machines import machine

INVENTORY = build_inventory(machine(), Config(reserved_cpus=frozenset({0})), NODE)
"""The devices of a small machine where CPU 0 is reserved."""


def view(uid: str, *results: dict[str, Any], **more: Any) -> ClaimView:
    """Returns a parsed claim."""
    return parse_claim(claim(uid, *results, **more))


def decided(
    found: ClaimView,
    driver: str = "dra.cpu",
    ledger: Ledger | None = None,
    inventory: Inventory = INVENTORY,
    config: Config | None = None,
) -> AllocationRecord:
    """Returns the claim's record. Raises RefusedError."""
    return allocate_claim(
        parse_driver_claim(found, driver, inventory, config or Config()), inventory, ledger or Ledger({})
    )


def refused(
    found: ClaimView,
    driver: str = "dra.cpu",
    ledger: Ledger | None = None,
    inventory: Inventory = INVENTORY,
    config: Config | None = None,
) -> str:
    """Returns the message with which the claim is refused."""
    with pytest.raises(RefusedError) as caught:
        decided(found, driver, ledger, inventory, config)
    return str(caught.value)


def holding(*records: AllocationRecord, containers: tuple[ContainerReport, ...] = ()) -> Ledger:
    """Returns a ledger with these records."""
    return Ledger(files_of(*records), containers=containers)


def lost(uid: str, seen: Mapping[str, frozenset[int]], driver: str = "dra.cpu") -> Ledger:
    """Returns a ledger that has lost a claim's record. The claim's container runs on these CPUs, given by request (""
    for a single request).
    """
    uses = [ClaimUse(uid=uid, driver=driver, requests=(r,) if r else (), cpus=cpus) for r, cpus in seen.items()]
    return Ledger({}, containers=(report(unknown_claims=uses),))
