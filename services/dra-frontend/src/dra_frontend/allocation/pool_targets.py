# SPDX-License-Identifier: Apache-2.0
"""Computes how many pages each on-demand hugepage pool must have, and which waiting claims already have their pages.
This module does no I/O.

The kernel has one pool for each NUMA node and page size. The size of an on-demand pool follows the claims:

  needed pages = (bytes in records + reserved bytes + bytes requested by waiting claims) / page size, rounded up
  requested    = needed, but at most the configured limit; a pool that already exceeds the limit is not grown

A waiting claim is allocated to this node and has no record yet: its pages must exist before it is prepared. Existing
pages that belong neither to a record nor to the reserve are assigned to waiting claims one after another; a claim that
does not fit keeps waiting, and the reason is reported. A pool does not shrink while the hugepages of a lost claim are
unknown, since the pages that seem free may be in use by that claim's containers.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from numa_contract.config import Config
from numa_contract.names import MEMORY_DRIVER
from numa_contract.records import AllocationResult

from dra_frontend.allocation.claim import ClaimView
from dra_frontend.allocation.device_status import Key
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.model import MemoryDevice


@dataclass(frozen=True, slots=True)
class WaitingClaim:
    """A claim that is allocated to this node and has no record yet."""

    view: ClaimView
    sizes: tuple[tuple[AllocationResult, int], ...]
    """The claim's results on this node's devices, with their sizes in bytes."""


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """The number of pages that one pool must have."""

    device: MemoryDevice
    waiting: tuple[tuple[str, AllocationResult, int], ...]
    """(claim UID, result, bytes) for each result that is waiting for the device's pages."""
    held: int
    """Bytes in existing records plus the reserve, which is never allocated to claims."""
    needed: int
    """Number of pages required for ``held`` plus the waiting claims' bytes."""
    limit: int
    """Maximum number of pages that the configuration allows."""
    may_shrink: bool
    """False while some pages may belong to a claim whose record was lost."""

    def pages(self, present: int) -> int:
        """Returns the number of pages to request from the kernel, which currently has ``present`` pages. The request
        never exceeds the larger of the limit and ``present``.
        """
        return min(self.needed, max(self.limit, present))


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """The result of resizing one pool."""

    pages: int = 0
    growth_requested: bool = False
    """True if more pages were requested."""
    problem: str = ""
    helper_silent: bool = False
    """True if the helper did not respond, in which case the state of the kernel's pool is unknown."""


def pool_target(
    pool: str, device: MemoryDevice, waiting: dict[str, WaitingClaim], ledger: Ledger, config: Config
) -> PoolTarget:
    """Returns the number of pages that a device's pool must have for records, waiting claims and the reserve."""
    waiting_results = tuple(
        (uid, result, size)
        for uid, claim in waiting.items()
        for result, size in claim.sizes
        if (result.pool, result.device) == (pool, device.name)
    )
    held = ledger.claimed_bytes().get(device.name, 0) + device.reserved_bytes
    needed = -(-(held + sum(size for _, _, size in waiting_results)) // device.page_bytes)
    limit = config.pages_on_demand(device.numa_node, device.page_bytes)
    return PoolTarget(device, waiting_results, held, needed, limit, may_shrink=not has_unknown_pages(ledger))


def page_problems(target: PoolTarget, outcome: PoolOutcome) -> Iterator[tuple[Key, str, str]]:
    """Yields, for each waiting result, the key of its ``status.devices`` entry, its claim's UID, and the reason why its
    pages do not exist yet, or "" if they exist.
    """
    left = outcome.pages * target.device.page_bytes - target.held
    shortfall = f"the kernel has allocated {outcome.pages} of {target.needed} pages of {target.device.name}"
    for uid, result, size in target.waiting:
        key = Key(MEMORY_DRIVER, result.pool, result.device, result.share_id or "")
        yield key, uid, "" if size <= left else outcome.problem or shortfall
        left -= size if size <= left else 0


def has_unknown_pages(ledger: Ledger) -> bool:
    """Returns True if some pages may belong to a claim whose record was lost."""
    return ledger.needs_listing or bool(ledger.unresolved(MEMORY_DRIVER, ignoring=""))
