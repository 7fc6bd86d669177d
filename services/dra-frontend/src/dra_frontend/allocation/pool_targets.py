# SPDX-License-Identifier: Apache-2.0
"""How many pages a pool of hugepages on demand must have, and which claims have theirs. Pure."""

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
    """A claim that is allocated on this node and has no record yet."""

    view: ClaimView
    sizes: tuple[tuple[AllocationResult, int], ...]
    """Its results on devices of this node, with their bytes."""


@dataclass(frozen=True, slots=True)
class PoolTarget:
    """The pages that one pool must have."""

    device: MemoryDevice
    waiting: tuple[tuple[str, AllocationResult, int], ...]
    """UID, result and bytes of each claim that waits for pages of the device."""
    held: int
    """Bytes of records, and bytes that claims never get."""
    needed: int
    """Pages for all of these."""
    limit: int
    """Pages that the configuration allows."""
    may_shrink: bool
    """False while pages may belong to a claim whose record is lost."""

    def pages(self, present: int) -> int:
        """Returns the pages to request of the kernel, which has ``present``. Never grows beyond the configuration."""
        return min(self.needed, max(self.limit, present))


@dataclass(frozen=True, slots=True)
class PoolOutcome:
    """The result of resizing one pool."""

    pages: int = 0
    grown: bool = False
    """True if growth was requested."""
    problem: str = ""
    helper_silent: bool = False
    """True if the helper did not answer, so that nothing is known of the kernel."""


def pool_target(
    pool: str, device: MemoryDevice, waiting: dict[str, WaitingClaim], ledger: Ledger, config: Config
) -> PoolTarget:
    """Returns the pages that the pool of a device must have for records, waiting claims and the reserve."""
    asked = tuple(
        (uid, one, size)
        for uid, claim in waiting.items()
        for one, size in claim.sizes
        if (one.pool, one.device) == (pool, device.name)
    )
    held = ledger.claimed_bytes().get(device.name, 0) + device.kept
    needed = -(-(held + sum(size for _, _, size in asked)) // device.page_bytes)
    limit = config.pages_on_demand(device.numa_node, device.page_bytes)
    return PoolTarget(device, asked, held, needed, limit, may_shrink=not has_unknown_pages(ledger))


def shares(target: PoolTarget, outcome: PoolOutcome) -> Iterator[tuple[Key, str, str]]:
    """Yields for each waiting result, by UID, the reason why its pages do not exist, or "" if they do."""
    left = outcome.pages * target.device.page_bytes - target.held
    short = f"the kernel has made {outcome.pages} of {target.needed} pages of {target.device.name}"
    for uid, one, size in target.waiting:
        key = Key(MEMORY_DRIVER, one.pool, one.device, one.share_id or "")
        yield key, uid, "" if size <= left else outcome.problem or short
        left -= size if size <= left else 0


def has_unknown_pages(ledger: Ledger) -> bool:
    """Returns True if pages may belong to a claim whose record is lost."""
    return ledger.unlisted or bool(ledger.unanswered(MEMORY_DRIVER, besides=""))
