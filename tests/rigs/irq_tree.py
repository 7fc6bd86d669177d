# SPDX-License-Identifier: Apache-2.0
"""A directory tree with the CPU affinity files of /proc/irq and of the workqueues in sysfs."""

from pathlib import Path

from nri_backend.host_isolation.interrupts import DEFAULT_AFFINITY, WORKQUEUES, Interrupts
from nri_backend.host_isolation.irqbalance import Irqbalance
from nri_backend.host_isolation.masks import format_mask, parse_mask
from numa_contract.cpuset import format_cpu_list, parse_cpu_list


class IrqTree(Interrupts):
    """A tree of regular files. Writes to managed interrupts fail, and so do writes that would leave an affinity without
    an online CPU.
    """

    def __init__(self, root: Path, cpus: str = "0-7") -> None:
        super().__init__(str(root), Irqbalance(str(root), str(root)))
        self.root = root
        self.managed: set[str] = set()
        self.online = parse_cpu_list(cpus)
        self.written: list[str] = []
        """Names of the interrupts and workqueues whose affinity was written, in write order, including failed
        writes.
        """
        (root / "proc/irq").mkdir(parents=True)
        (root / "sys/devices/virtual/workqueue").mkdir(parents=True)
        every = format_mask(parse_cpu_list(cpus)) + "\n"
        (root / "sys/devices/system/cpu").mkdir(parents=True, exist_ok=True)
        (root / "sys/devices/system/cpu/possible").write_text(f"{cpus}\n")
        (root / "proc/irq/default_smp_affinity").write_text(every)
        (root / "sys/devices/virtual/workqueue/cpumask").write_text(every)

    def add(self, number: int, cpus: str, handler: str = "eth0", *, managed: bool = False) -> None:
        """Adds an interrupt. It is delivered to the first CPU of its affinity."""
        directory = self.root / f"proc/irq/{number}"
        directory.mkdir()
        if handler:
            (directory / handler).mkdir()
        if managed:
            self.managed.add(str(number))
        self.set(str(number), cpus)

    def set(self, name: str, cpus: str) -> None:
        """Writes an affinity as another program would."""
        directory = self.root / "proc/irq" / name
        (directory / "smp_affinity_list").write_text(f"{cpus}\n")
        (directory / "effective_affinity_list").write_text(f"{min(parse_cpu_list(cpus))}\n")

    def next_instance(self) -> None:
        """Forgets the CPU ban requested from irqbalance, as a new process does."""
        self._irqbalance = Irqbalance(str(self.root), str(self.root))

    def all_affinities(self) -> dict[str, str]:
        """Returns all affinities by name, as CPU lists."""
        irqs = self.root / "proc/irq"
        workqueues = self.root / "sys/devices/virtual/workqueue"
        masks = {DEFAULT_AFFINITY: irqs / "default_smp_affinity", WORKQUEUES: workqueues / "cpumask"}
        found = {name: format_cpu_list(parse_mask(path.read_text())) for name, path in masks.items()}
        lists = {path.parent.name: path.read_text().strip() for path in irqs.glob("*/smp_affinity_list")}
        return found | lists

    def set_affinity(self, name: str, cpus: frozenset[int]) -> bool:
        """Writes an affinity, or returns False if the kernel would reject it."""
        self.written.append(name)
        # EINVAL without an online CPU (write_irq_affinity in kernel/irq/proc.c).
        offline = name.isdecimal() and not cpus & self.online
        if name in self.managed or offline or not super().set_affinity(name, cpus):
            return False
        if name.isdecimal():
            self.set(name, format_cpu_list(cpus))
        return True
