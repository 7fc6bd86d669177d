# SPDX-License-Identifier: Apache-2.0
"""Reads a node from its files: the machine, the prepared claims, and the free CPUs and memory.

No file contains the amount of memory that the kubelet reserves, so that amount is read from the running service.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import Inventory, InventoryError, build_inventory
from dra_frontend.devices.reserves import is_explicit
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.host_hugepages import PageKey, held_pages, read_pod_pages
from dra_frontend.machine.model import Machine
from dra_frontend.node.host_tree import HostTree, host_path
from dra_frontend.settings import Settings, open_host
from numa_contract.config import Config
from numa_contract.documents import TOO_DEEP, json_too_deep
from numa_node.claim_directory import ClaimDirectory, DirectoryView

from numa_tools.state_client import NoServiceError, StateClient


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """A snapshot of a node's files."""

    inventory: Inventory
    claims: DirectoryView
    """Claim files. Empty for a machine without a CDI directory."""

    @property
    def ledger(self) -> Ledger:
        """Returns the allocations in the claim files."""
        return Ledger(self.claims.files)


def read_node(settings: Settings, node: str, *, empty: bool = False) -> NodeFiles:
    """Reads the node, without its claims if ``empty``. Raises HostTreeError, and InventoryError for unusable names."""
    machine = discover(open_host(settings))
    claims = DirectoryView() if empty else claim_files(settings)
    inventory = build_inventory(
        machine,
        settings.config,
        node,
        held=Ledger(claims.files).held_cpus(),
        host_pages={} if empty else _host_pages(machine, settings.host_root, settings.config),
        kubelet_reserve=kubelet_reserve(settings),
    )
    return NodeFiles(inventory, claims)


def kubelet_reserve(settings: Settings) -> int | None:
    """Returns the number of bytes of memory that the kubelet reserves, or None if the node's service has not reported
    it.

    The value comes from the service's document: from the copy in the archive, or on a node from the service itself.
    """
    from numa_tools.bundle.archive import STATE  # noqa: PLC0415 - the service imports this module and no archives

    if is_explicit(settings.config):
        return None
    kept = Path(settings.host_root, STATE)
    try:
        if kept.is_dir():
            machine = read_archived(kept / "machine.json")
        else:
            machine = StateClient(host_path(settings.host_root, settings.config.run_dir)).document("/v1/machine")
        found = machine["kubeletReservedBytes"]
    except (OSError, ValueError, NoServiceError, KeyError, TypeError):
        return None
    return found if isinstance(found, int) and found >= 0 else None


def read_archived(path: Path) -> Any:
    """Parses a JSON file in an archive. Raises OSError or ValueError.

    Only the nesting depth is validated, because the commands display any unexpected values unchanged.
    """
    data = path.read_bytes()
    if json_too_deep(data):
        raise ValueError(TOO_DEEP)
    return json.loads(data)


def claim_files(settings: Settings) -> DirectoryView:
    """Returns the node's claim files, or an empty view if the node has no CDI directory."""
    return ClaimDirectory(host_path(settings.host_root, settings.config.cdi_dir)).refresh()


def check(inventory: Inventory, config: Config, claims: DirectoryView | None = None) -> None:
    """Prints warnings to standard error. Raises InventoryError if a driver cannot offer anything."""
    for text in inventory.refusals.values():
        raise InventoryError(text)
    for text in (*config.former_names, *inventory.warnings, *(claims.problems.values() if claims else ())):
        print(f"dra-frontend: warning: {text}", file=sys.stderr)


def _host_pages(machine: Machine, host_root: str, config: Config) -> dict[PageKey, int]:
    """Returns the numbers of hugepages in use outside pods. A number is 0 if the cgroups do not report the hugepage
    usage of pods.
    """
    cgroups = HostTree(host_path(host_root, config.cgroup_root))
    pods = read_pod_pages(cgroups, machine.page_sizes)
    return {
        (node.id, pool.page_bytes): held_pages(node.id, pool, pods.get(pool.page_bytes))
        for node in machine.numa_nodes.values()
        for pool in node.hugepages
    }
