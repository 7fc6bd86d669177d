# SPDX-License-Identifier: Apache-2.0
"""Watches the machine: reads its fingerprint at each quiet tick (numa_node/ticks.py), and rediscovers the machine if
the fingerprint has changed.

The fingerprint is read on the event loop. The kernel prints these files from memory, without taking locks that other
operations hold for long: cpumap_print_to_pagebuf() and node_read_meminfo() in drivers/base, the hugepage counters in
mm/hugetlb_sysfs.c, and hugetlb_cgroup_read_numa_stat(), which walks the cgroups under RCU. Reading a few dozen files
takes a millisecond. In a thread, two context switches would double that time; such a thread used to cause most of the
process's wake-ups.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from math import inf
from typing import Final

from numa_contract.config import Config
from numa_contract.state.status import Notice, StatusCode
from numa_node.ticks import next_tick

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, InventoryError, build_inventory
from dra_frontend.machine.discovery import Fingerprint, discover, read_fingerprint, with_free_pages
from dra_frontend.machine.file_tree import FileTree, HostTreeError
from dra_frontend.machine.host_hugepages import HostPages, PageKey, held_pages, read_pod_pages
from dra_frontend.machine.model import Machine
from dra_frontend.node.error_watch import ErrorWatch

_log = logging.getLogger(__name__)
DOUBT_SECONDS: Final = 300.0
"""Interval between discoveries while any values are in doubt. The cause of a doubt may go away without a change to the
fingerprint, for example if a file could not be read for a while.
"""


def _sample(host: FileTree, cgroups: FileTree, sizes: frozenset[int]) -> tuple[Fingerprint, dict[PageKey, int], bool]:
    """Returns the fingerprint, the number of hugepages in use outside of pods for each pool, and whether the pods' use
    of hugepages is known for every size.

    The pods' use is read before and after the fingerprint, so that pages that a pod allocates or frees in between are
    treated as the pod's pages. If no page is in use, the second read is skipped.
    """
    before = read_pod_pages(cgroups, sizes)
    fingerprint = read_fingerprint(host)
    in_use = any(pool.free < pool.total for _, pools in fingerprint.nodes.values() for pool in pools)
    after = read_pod_pages(cgroups, sizes) if in_use else before
    held = {
        (number, pool.page_bytes): min(held_pages(number, pool, pods.get(pool.page_bytes)) for pods in (before, after))
        for number, (_, pools) in fingerprint.nodes.items()
        for pool in pools
    }
    return fingerprint, held, sizes <= before.keys() & after.keys()


class MachineWatch:
    """Holds the current inventory and replaces it as a whole. After an error, the last valid inventory is kept."""

    def __init__(
        self,
        host: FileTree,
        cgroups: FileTree,
        config: Config,
        node: str,
        ledger: Callable[[], Ledger],
        *,
        reserve: Callable[[], int | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the machine once. If the machine cannot be read, that is reported as a problem, and no devices are
        offered until it can be read.

        The root of ``cgroups`` is the cgroup2 mount. ``reserve`` returns the bytes of memory that the kubelet reserves,
        or None if unknown. Raises InventoryError if the node name is invalid or makes a pool's name too long.
        """
        self._host = host
        self._cgroups = cgroups
        self._config = config
        self._node = node
        self._ledger = ledger
        self._reserve = reserve
        self._clock = clock
        self._doubted_until = inf
        """Time at which the machine is discovered again because of its doubts, or infinity if there are none."""
        self._host_pages = HostPages()
        self.errors = ErrorWatch(host, config.hardware_errors)
        self._fingerprint = Fingerprint((None, None), {})
        self._shape: object = None
        self._counted: tuple[object, object] = (None, None)
        # No pools yet. Once the machine has been read, each driver has at least one pool, which may be empty.
        self.inventory = Inventory(Machine({}, {}), (), config.reserved_cpus, frozenset())
        self.problem = ""
        """Reason why the machine cannot be read, or "". As long as it cannot be read, the last successful read
        applies.
        """
        self.notices: tuple[Notice, ...] = ()
        """Warnings about settings that do not fit the machine and about files that cannot be read."""
        self.failures = 0
        """Number of failed reads since startup."""
        try:
            fingerprint = read_fingerprint(host)
            self._replace(self._build(fingerprint, frozenset()), fingerprint)
            self.errors.read(self.inventory.machine)
        except InventoryError:
            raise
        except HostTreeError as error:
            self._record_failure(str(error))
        except Exception as error:  # noqa: BLE001 - claims must be released on any machine
            self._record_bug(error)

    @property
    def machine(self) -> Machine:
        """The machine, with free hugepages as of the latest read."""
        return with_free_pages(self.inventory.machine, self._fingerprint)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warning messages about the machine and its inventory."""
        return tuple(notice.text for notice in self.notices)

    @property
    def host_pages(self) -> dict[PageKey, int]:
        """Number of hugepages treated as held by host processes, after smoothing."""
        return self._host_pages.counted

    async def run(self, changed: Callable[[], None], pause: Callable[[], Awaitable[None]] | None = None) -> None:
        """Calls :meth:`read` at each quiet tick, and then ``changed``, since claims may also have changed. Runs
        forever.

        The machine is read at every tick while the number of pages held by host processes changes, or if hugepages are
        allocated on demand, since claims may then be waiting for the watch to notice new pages. Tests replace the wait
        for the next tick with ``pause``.
        """
        while True:
            busy = bool(self._config.hugepages_on_demand) or not self._host_pages.is_settled
            await (pause or partial(next_tick, busy=busy))()
            await self.read()
            try:
                changed()
            except Exception as error:  # noqa: BLE001 - no state of the machine may end the process
                self._record_bug(error)

    async def read(self) -> None:
        """Reads the fingerprint, and rediscovers the whole machine if the fingerprint has changed. Does not raise."""
        try:
            if self.errors.is_due:
                self.errors.read(self.inventory.machine)
            if self._clock() >= self._doubted_until:
                self._shape = None
            sizes = frozenset(self.inventory.machine.page_sizes)
            fingerprint, held, pods_known = _sample(self._host, self._cgroups, sizes)
            self._host_pages.sample(held)
            if (fingerprint.shape, self.host_pages, self._reserve()) != (self._shape, *self._counted):
                await self._renew(fingerprint)
            self._fingerprint = fingerprint
        except HostTreeError as error:
            self._record_failure(str(error))
            return
        except Exception as error:  # noqa: BLE001 - as at startup
            self._record_bug(error)
            return
        if self.problem:
            _log.info("machine readable again")
        self.problem = ""
        self._warn(pods_known=pods_known)

    async def _renew(self, fingerprint: Fingerprint) -> None:
        """Replaces the inventory. Raises HostTreeError if the new inventory disables a driver whose devices are
        published.
        """
        counted = self.host_pages, self._reserve()
        inventory = await asyncio.to_thread(self._build, fingerprint, self._ledger().held_cpus())
        if inventory.refusals and self.inventory.pools and not self.inventory.refusals:
            raise HostTreeError("/sys", "; ".join(inventory.refusals.values()))
        self._replace(inventory, fingerprint)
        self._counted = counted

    def _replace(self, inventory: Inventory, fingerprint: Fingerprint) -> None:
        # If CPUs go online or offline while the files are being read, the files may contradict each other. Therefore,
        # if the doubts differ from those of the previous discovery, the next read discovers the machine again.
        unchanged = inventory.machine.doubts == self.inventory.machine.doubts
        if fingerprint.shape != self._shape:
            self._doubted_until = self._clock() + DOUBT_SECONDS if inventory.machine.doubts else inf
        self.inventory = inventory
        self._shape = fingerprint.shape if unchanged else None
        self._fingerprint = fingerprint

    def _build(self, fingerprint: Fingerprint, held: frozenset[int]) -> Inventory:
        before = self.inventory
        machine = before.machine if fingerprint.shape == self._shape else self._discover()
        return build_inventory(
            machine,
            self._config,
            self._node,
            held=held,
            host_pages=self.host_pages,
            withheld=before.withheld_cpus,
            kubelet_reserve=self._reserve(),
        )

    def _discover(self) -> Machine:
        start = time.perf_counter()
        machine = discover(self._host, self.inventory.machine)
        counts = {"cpus": len(machine.cpus), "nodes": len(machine.numa_nodes)}
        _log.info("machine read", extra={**counts, "seconds": round(time.perf_counter() - start, 3)})
        return machine

    def _record_bug(self, error: Exception) -> None:
        problem = f"internal error ({error!r}); see the log of dra-frontend"
        if problem != self.problem:
            _log.error("machine watch failed", exc_info=error)
        self._record_failure(problem)

    def _record_failure(self, problem: str) -> None:
        self.failures += 1
        if problem != self.problem:
            _log.error("cannot read machine, keeping last reading", extra={"error": problem})
        self.problem = problem

    def _warn(self, *, pods_known: bool) -> None:
        found = [(StatusCode.CONFIGURATION_DOES_NOT_FIT, text) for text in self.inventory.warnings]
        found += [(StatusCode.ERRORS_UNREADABLE, text) for text in self.errors.problems]
        if not pods_known:
            text = (
                "the number of hugepages held by host processes is unknown, so they are counted as free: "
                f"{self._config.cgroup_root} has no kubepods cgroup with hugetlb.<size>.numa_stat; "
                "mount the node's cgroup2 tree there (read-only; Linux 5.17 or newer with the hugetlb controller; in "
                "the chart, set hostHugepages.detect: true)"
            )
            found.append((StatusCode.HOST_HUGEPAGES_UNKNOWN, text))
        notices = tuple(Notice(code=code, text=text) for code, text in found)
        for notice in notices:
            if notice not in self.notices:
                _log.warning("machine warning", extra={"warning": notice.text})
        self.notices = notices
