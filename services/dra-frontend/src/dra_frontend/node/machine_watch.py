# SPDX-License-Identifier: Apache-2.0
"""The machine as it is now: a cheap look every second, and a full discovery when something of it has changed."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from numa_contract.config import Config

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import InUse, Inventory, InventoryError, build_inventory, misfits
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import FileTree, HostTreeError
from dra_frontend.machine.fingerprint import Signs, read_signs, with_free_pages
from dra_frontend.machine.host_hugepages import (
    HostPages,
    PageKey,
    PodPages,
    find_pods_groups,
    held_pages,
    read_pod_pages,
)
from dra_frontend.machine.model import Machine

_LOG = logging.getLogger(__name__)

LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class HostTrees:
    """Where the machine is read."""

    host: FileTree
    cgroups: FileTree
    """Rooted at the cgroup2 mount."""


@dataclass(frozen=True, slots=True)
class FirstLook:
    """The machine as it was when the service started."""

    signs: Signs
    inventory: Inventory

    @classmethod
    def at(cls, host: FileTree, config: Config, node: str) -> "FirstLook":
        """Looks at the machine; raises HostTreeError and InventoryError, which name file or setting."""
        # Signs first: what changes meanwhile is then seen by the second look.
        signs = read_signs(host)
        return cls(signs, build_inventory(discover(host), config, node))


@dataclass(frozen=True, slots=True)
class _Look:
    signs: Signs
    pods: dict[int, PodPages | None]
    """By page size."""

    def held(self) -> dict[PageKey, int]:
        return {
            (number, pool.page_bytes): held_pages(number, pool, self.pods.get(pool.page_bytes))
            for number, node in self.signs.nodes.items()
            for pool in node.hugepages
        }


def _take_look(trees: HostTrees, sizes: frozenset[int]) -> _Look:
    """Looks at the machine between two looks at the pods: pages that a pod takes or frees meanwhile stay the pod's."""
    before = _pod_pages(trees.cgroups, sizes)
    signs = read_signs(trees.host)
    after = _pod_pages(trees.cgroups, sizes)
    pods = {size: one.most(two) if (one := before[size]) and (two := after[size]) else None for size in sizes}
    return _Look(signs, pods)


def _pod_pages(cgroups: FileTree, sizes: frozenset[int]) -> dict[int, PodPages | None]:
    try:
        groups = find_pods_groups(cgroups) if sizes else []
        return {size: read_pod_pages(cgroups, groups, size) for size in sizes}
    except HostTreeError as error:
        _LOG.debug("pods' hugepages not read error=%s", error)
        return dict.fromkeys(sizes)


class LiveMachine(Protocol):
    """The machine as it is now."""

    inventory: Inventory
    problem: str
    """Why it cannot be read; empty when it can."""
    warnings: tuple[str, ...]
    failures: int

    @property
    def machine(self) -> Machine:
        """The machine with the free hugepages of the latest look."""

    @property
    def host_pages(self) -> Mapping[PageKey, int]:
        """Hugepages that count as held by host processes."""


class MachineWatch:
    """Holds the inventory. It is replaced as a whole; after an error the last good one stays."""

    def __init__(
        self,
        trees: HostTrees,
        config: Config,
        node: str,
        first: FirstLook,
        ledger: Callable[[], Ledger],
    ) -> None:
        self._trees = trees
        self._config = config
        self._node = node
        self._ledger = ledger
        self._host_pages = HostPages()
        self._signs = first.signs
        self._shape = first.signs.shape
        self._counted: dict[PageKey, int] | None = None
        self.inventory = first.inventory
        self.problem = ""
        """Why the machine cannot be read; what was seen last still counts then."""
        self.warnings: tuple[str, ...] = ()
        """What does not fit, while everything works on."""
        self.failures = 0
        """Looks that failed since the start."""

    @property
    def machine(self) -> Machine:
        """The machine with the free hugepages of the latest look."""
        return with_free_pages(self.inventory.machine, self._signs)

    @property
    def host_pages(self) -> dict[PageKey, int]:
        """Hugepages that count as held by host processes."""
        return self._host_pages.counted

    async def run(self, changed: Callable[[], None]) -> None:
        """Looks every second, and calls ``changed`` after each look, as claims change too. Runs for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()
            changed()

    async def look(self) -> None:
        """Looks once; reads the whole machine again if something of it has changed."""
        sizes = frozenset(pool.page_bytes for node in self.machine.numa_nodes.values() for pool in node.hugepages)
        try:
            look = await asyncio.to_thread(_take_look, self._trees, sizes)
            self._host_pages.look(look.held())
            if look.signs.shape != self._shape or self.host_pages != self._counted:
                await self._renew(look.signs.shape)
            self._signs = look.signs
        except (HostTreeError, InventoryError) as error:
            self._failed(str(error))
            return
        if self.problem:
            _LOG.info("the machine can be read again")
        self.problem = ""
        self._warn(look)

    async def _renew(self, shape: tuple[object, ...]) -> None:
        """Makes a new inventory: of the same machine, if only what is in use has changed."""
        machine = self.inventory.machine
        if shape != self._shape:
            machine = await asyncio.to_thread(self._discover)
        in_use = InUse(self._ledger().held_cpus(), self.host_pages)
        self.inventory = await asyncio.to_thread(build_inventory, machine, self._config, self._node, in_use)
        self._shape, self._counted = shape, self.host_pages

    def _discover(self) -> Machine:
        began = time.perf_counter()
        machine = discover(self._trees.host, self.inventory.machine)
        seconds = time.perf_counter() - began
        _LOG.info("machine read cpus=%d nodes=%d seconds=%.3f", len(machine.cpus), len(machine.numa_nodes), seconds)
        return machine

    def _failed(self, problem: str) -> None:
        self.failures += 1
        if problem != self.problem:
            _LOG.error("the machine cannot be read, what was seen last counts error=%s", problem)
        self.problem = problem

    def _warn(self, look: _Look) -> None:
        warnings = [str(misfit) for misfit in misfits(self.inventory.machine, self._config)]
        if look.pods and None in look.pods.values():
            root = self._config.cgroup_root
            warnings.append(
                "hugepages held by host processes are not known and count as free: below "
                f"{root} is no kubepods group with hugetlb.<size>.numa_stat; mount the node's cgroup2 tree there "
                "(read-only, Linux 5.17 or newer, controller hugetlb)"
            )
        for warning in warnings:
            if warning not in self.warnings:
                _LOG.warning("%s", warning)
        self.warnings = tuple(warnings)
