# SPDX-License-Identifier: Apache-2.0
"""Affinities of device interrupts, the kernel's unbound workqueues, and irqbalance. Every call blocks.

The kernel's documentation is in Documentation/core-api/irq/irq-affinity.rst and Documentation/core-api/workqueue.rst.
"""

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list
from numa_node.files import is_shortage

from nri_backend.host_isolation.irqbalance import Irqbalance, IrqbalanceNotRunningError
from nri_backend.host_isolation.masks import format_mask, parse_mask
from nri_backend.host_isolation.plan import Cpus
from nri_backend.node.node_files import NodeFiles

DEFAULT_AFFINITY: Final = "default"
"""Name used for the kernel's default affinity, which applies to interrupts that are requested later."""
WORKQUEUES: Final = "workqueues"
"""Name used for the unbound workqueues' CPU mask."""
IRQBALANCE: Final = "irqbalance"
"""Name used for the CPUs that irqbalance may use."""


class Interrupts:
    """The affinities of interrupts, workqueues and irqbalance under a root that contains ``proc/irq`` and
    ``sys/devices/virtual/workqueue``.

    An interrupt's name is its number. The other names are this module's constants.
    """

    def __init__(self, root: str, irqbalance: Irqbalance, files: NodeFiles | None = None) -> None:
        self._files = files or NodeFiles()
        self._irqbalance = irqbalance
        self._irqs = Path(root, "proc/irq")
        self._default = self._irqs / "default_smp_affinity"
        self._workqueues = Path(root, "sys/devices/virtual/workqueue")

    @property
    def writable(self) -> bool:
        """True if affinities under this root can be written. A container's own /proc/irq is read-only."""
        return os.access(self._default, os.W_OK)

    @property
    def unwritable_workqueues(self) -> str:
        """Path of the unbound workqueues' CPU mask if it cannot be written, otherwise "".

        Every kernel has the file. It is missing only if the directory is not mounted.
        """
        path = self._workqueues / "cpumask"
        return "" if os.access(path, os.W_OK) else str(path)

    @property
    def irqbalance_mounted(self) -> bool:
        """True if the directory where irqbalance would create its socket is mounted."""
        return self._irqbalance.directory.is_dir()

    def affinities(self, cpus_to_vacate: Cpus, moved: Collection[str]) -> dict[str, Cpus | None]:
        """Returns the affinities of irqbalance, the workqueues, future interrupts, and some of the existing interrupts.

        The result includes the existing interrupts in ``moved``, and all others that have a handler and use CPUs that
        must be vacated. The value is None for an affinity that cannot currently be read.
        """
        found: dict[str, Cpus | None] = {}
        # irqbalance comes first, so that the ban is already in effect when interrupts are moved, and irqbalance does
        # not move them back.
        with contextlib.suppress(IrqbalanceNotRunningError):
            found[IRQBALANCE] = self._irqbalance.allowed()
        found[DEFAULT_AFFINITY] = parse_mask(self._default.read_text())
        found[WORKQUEUES] = self._requested_workqueue_cpus()
        for name in filter(str.isdecimal, os.listdir(self._irqs)):  # noqa: PTH208
            try:
                cpus = self._affinity(name)
                if name in moved or (not cpus.isdisjoint(cpus_to_vacate) and self._has_handler(name)):
                    found[name] = cpus
            except FileNotFoundError:
                # The interrupt was freed during the scan.
                continue
            except (OSError, ValueError):
                # The interrupt may still exist. If it were left out, its original would be discarded.
                if name in moved:
                    found[name] = None
        return found

    def set_affinity(self, name: str, cpus: Cpus) -> bool:
        """Writes an affinity. Returns False if the kernel rejects it, as it does for managed interrupts.

        Raises OSError if the file cannot be opened or written because file descriptors or memory have run out.
        """
        if name == IRQBALANCE:
            self._irqbalance.allow(cpus)
            return True
        masks = {DEFAULT_AFFINITY: self._default, WORKQUEUES: self._workqueues / "cpumask"}
        path = masks.get(name) or self._irqs / name / "smp_affinity_list"
        try:
            self._files.write(str(path), format_mask(cpus) if name in masks else format_cpu_list(cpus))
        except OSError as error:
            if is_shortage(error):
                raise
            return False
        return True

    def count_using(self, names: Iterable[str], cpus: Cpus) -> int:
        """Returns how many of the named interrupts are delivered to the CPUs.

        The kernel may deliver an interrupt to a single CPU of its affinity, so this reads the effective affinity.
        """
        count = 0
        for name in filter(str.isdecimal, names):
            with contextlib.suppress(OSError, ValueError):
                count += not self._affinity(name, "effective_affinity_list").isdisjoint(cpus)
        return count

    def _affinity(self, name: str, file: str = "smp_affinity_list") -> Cpus:
        # Reading without a buffer and without pathlib saves time: a node has thousands of these files.
        with open(f"{self._irqs}/{name}/{file}", "rb", buffering=0) as opened:  # noqa: PTH123
            return parse_cpu_list(opened.read().decode())

    def _has_handler(self, name: str) -> bool:
        """Returns True if a driver handles the interrupt, which then has a directory for each handler."""
        with os.scandir(f"{self._irqs}/{name}") as entries:
            return any(entry.is_dir() for entry in entries)

    def _requested_workqueue_cpus(self) -> Cpus | None:
        # Since Linux 6.8, ``cpumask`` contains the effective CPUs, without those of isolated partitions.
        requested = self._workqueues / "cpumask_requested"
        with contextlib.suppress(OSError, ValueError):
            return parse_mask((requested if requested.exists() else self._workqueues / "cpumask").read_text())
        return None
