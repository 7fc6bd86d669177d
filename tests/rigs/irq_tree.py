# SPDX-License-Identifier: Apache-2.0
"""A directory tree that behaves like /proc/irq and the workqueues of sysfs, as far as sets of CPUs go."""

from pathlib import Path

from nri_backend.quiet.interrupts import DEFAULT, WORKQUEUES, Interrupts
from nri_backend.quiet.irqbalance import Irqbalance
from nri_backend.quiet.masks import format_mask, parse_mask
from numa_contract.cpuset import format_cpu_list, parse_cpu_list


class IrqTree(Interrupts):
    """Plain files; interrupts that are managed, and those that would be left without a CPU, refuse to be written."""

    def __init__(self, root: Path, cpus: str = "0-7") -> None:
        super().__init__(str(root), Irqbalance(str(root), str(root)))
        self.root = root
        self.managed: set[str] = set()
        self.online = parse_cpu_list(cpus)
        self.written: list[str] = []
        """Names, in the order of the writes, refused ones among them."""
        (root / "proc/irq").mkdir(parents=True)
        (root / "sys/devices/virtual/workqueue").mkdir(parents=True)
        every = format_mask(parse_cpu_list(cpus)) + "\n"
        (root / "sys/devices/system/cpu").mkdir(parents=True, exist_ok=True)
        (root / "sys/devices/system/cpu/possible").write_text(f"{cpus}\n")
        (root / "proc/irq/default_smp_affinity").write_text(every)
        (root / "sys/devices/virtual/workqueue/cpumask").write_text(every)

    def add(self, number: int, cpus: str, handler: str = "eth0", *, managed: bool = False) -> None:
        """An interrupt; of its CPUs it uses the first one."""
        directory = self.root / f"proc/irq/{number}"
        directory.mkdir()
        if handler:
            (directory / handler).mkdir()
        if managed:
            self.managed.add(str(number))
        self.set(str(number), cpus)

    def set(self, name: str, cpus: str) -> None:
        """Somebody writes an affinity."""
        directory = self.root / "proc/irq" / name
        (directory / "smp_affinity_list").write_text(f"{cpus}\n")
        (directory / "effective_affinity_list").write_text(f"{min(parse_cpu_list(cpus))}\n")

    def next_instance(self) -> None:
        """Whoever looks now has not told irqbalance anything."""
        self._balancer = Irqbalance(str(self.root), str(self.root))

    def says(self) -> dict[str, str]:
        """What everything says, by name, as lists."""
        irqs = self.root / "proc/irq"
        workqueues = self.root / "sys/devices/virtual/workqueue"
        masks = {DEFAULT: irqs / "default_smp_affinity", WORKQUEUES: workqueues / "cpumask"}
        found = {name: format_cpu_list(parse_mask(path.read_text())) for name, path in masks.items()}
        lists = {path.parent.name: path.read_text().strip() for path in irqs.glob("*/smp_affinity_list")}
        return found | lists

    def write(self, name: str, cpus: frozenset[int]) -> bool:
        """Writes as the kernel would let us."""
        self.written.append(name)
        # Without a CPU that is online, EINVAL (write_irq_affinity in kernel/irq/proc.c).
        offline = name.isdecimal() and not cpus & self.online
        if name in self.managed or offline or not super().write(name, cpus):
            return False
        if name.isdecimal():
            self.set(name, format_cpu_list(cpus))
        return True
