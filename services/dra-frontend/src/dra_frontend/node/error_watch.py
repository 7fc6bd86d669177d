# SPDX-License-Identifier: Apache-2.0
"""Reads the kernel's counters for memory and CPU errors every ten seconds."""

import time
from collections.abc import Callable
from string import digits
from typing import Final

from numa_contract.config import HardwareErrors

from dra_frontend.machine.errors import ErrorCounter, read_errors
from dra_frontend.machine.faults import ErrorRates, Fault
from dra_frontend.machine.file_tree import FileTree, Reader
from dra_frontend.machine.model import Machine

_READ_SECONDS: Final = 10.0


class ErrorWatch:
    """Error counters and faults as of the latest read. ``faults`` stays the same object as long as nothing changes."""

    def __init__(self, host: FileTree, limits: HardwareErrors, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._rates = ErrorRates(limits)
        self._due = float("-inf")
        self.counters: tuple[ErrorCounter, ...] = ()
        self.faults: tuple[Fault, ...] = ()
        self.problems: tuple[str, ...] = ()
        """Reasons why some counters cannot be read. Until these counters can be read again, their last values apply."""

    @property
    def is_due(self) -> bool:
        """True if it is time to read the counters again."""
        return self._clock() >= self._due

    def read(self, machine: Machine) -> None:
        """Reads a machine's error counters from a few sysfs files per memory controller. Does not raise."""
        self._due = self._clock() + _READ_SECONDS
        counters, problems = read_errors(Reader(self._host), machine)
        unread = (one for one in self.counters if {one.source, one.source.rstrip(digits)} & problems.keys())
        self.counters = (*counters, *unread)
        self.problems = tuple(problems.values())
        if (faults := self._rates.sample(self.counters, self._clock())) != self.faults:
            self.faults = faults
