# SPDX-License-Identifier: Apache-2.0
"""The kernel's interrupts of devices and its unbound workqueues. Every call blocks.

Documentation/core-api/irq/irq-affinity.rst, Documentation/core-api/workqueue.rst.
"""

import contextlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from numa_contract.cpuset import format_cpu_list, parse_cpu_list

from nri_backend.quiet.irqbalance import Irqbalance, NoBalancerError
from nri_backend.quiet.masks import format_mask, parse_mask
from nri_backend.quiet.moves import Cpus

DEFAULT: Final = "default"
"""The CPUs of interrupts that are requested from now on."""
WORKQUEUES: Final = "workqueues"
BALANCER: Final = "irqbalance"
"""The CPUs that irqbalance may use."""


class Interrupts:
    """Both, below a root that has ``proc/irq`` and ``sys/devices/virtual/workqueue``; interrupts go by their number."""

    def __init__(self, root: str, balancer: Irqbalance) -> None:
        self._balancer = balancer
        self._irqs = Path(root, "proc/irq")
        self._default = self._irqs / "default_smp_affinity"
        self._workqueues = Path(root, "sys/devices/virtual/workqueue")

    @property
    def writable(self) -> bool:
        """Whether interrupts can be moved here: a container sees its own /proc/irq read-only."""
        return os.access(self._default, os.W_OK)

    @property
    def unwritable_workqueues(self) -> str:
        """Returns the file with the CPUs of unbound workqueues if it cannot be written here, else "".

        Every kernel has it, so that it is missing only where the directory is not mounted.
        """
        path = self._workqueues / "cpumask"
        return "" if os.access(path, os.W_OK) else str(path)

    @property
    def balancer_visible(self) -> bool:
        """Whether the directory is mounted in which irqbalance creates its socket, if it runs."""
        return self._balancer.directory.is_dir()

    def present(self, taken: Cpus, moved: Collection[str]) -> dict[str, Cpus | None]:
        """Returns what interrupts say: those that were moved, and those of devices that are on taken CPUs."""
        found: dict[str, Cpus | None] = {}
        # First, so that it does not move back what is moved now.
        with contextlib.suppress(NoBalancerError):
            found[BALANCER] = self._balancer.allowed()
        found[DEFAULT] = parse_mask(self._default.read_text())
        found[WORKQUEUES] = self._requested()
        for name in filter(str.isdecimal, os.listdir(self._irqs)):  # noqa: PTH208
            # One that is freed meanwhile is gone.
            with contextlib.suppress(OSError, ValueError):
                cpus = self._affinity(name)
                if name in moved or (not cpus.isdisjoint(taken) and self._is_handled(name)):
                    found[name] = cpus
        return found

    def write(self, name: str, cpus: Cpus) -> bool:
        """Writes what they are to say; tells whether the kernel took it: managed interrupts it keeps to itself."""
        if name == BALANCER:
            self._balancer.allow(cpus)
            return True
        masks = {DEFAULT: self._default, WORKQUEUES: self._workqueues / "cpumask"}
        path = masks.get(name) or self._irqs / name / "smp_affinity_list"
        try:
            path.write_text(format_mask(cpus) if name in masks else format_cpu_list(cpus))
        except OSError:
            return False
        return True

    def staying(self, names: Iterable[str], taken: Cpus) -> int:
        """Returns how many of these interrupts arrive on taken CPUs: of its set the kernel may use one CPU."""
        count = 0
        for name in filter(str.isdecimal, names):
            with contextlib.suppress(OSError, ValueError):
                count += not self._affinity(name, "effective_affinity_list").isdisjoint(taken)
        return count

    def _affinity(self, name: str, file: str = "smp_affinity_list") -> Cpus:
        with open(f"{self._irqs}/{name}/{file}", "rb", buffering=0) as opened:  # noqa: PTH123 - of thousands
            return parse_cpu_list(opened.read().decode())

    def _is_handled(self, name: str) -> bool:
        """Tells whether a driver handles it: for each handler there is a directory."""
        with os.scandir(f"{self._irqs}/{name}") as entries:
            return any(entry.is_dir() for entry in entries)

    def _requested(self) -> Cpus | None:
        # Since 6.8 cpumask shows what is left of it beside isolated CPUs.
        requested = self._workqueues / "cpumask_requested"
        with contextlib.suppress(OSError, ValueError):
            return parse_mask((requested if requested.exists() else self._workqueues / "cpumask").read_text())
        return None
