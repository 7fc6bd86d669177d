# SPDX-License-Identifier: Apache-2.0
"""Finds processes that may run, or have run, on the CPUs of another pod's claim. All processes on the machine are
searched, not only those in pods.
"""

import time
from collections.abc import Collection
from pathlib import Path

from numa_contract.cpuset import parse_cpu_list

_KERNEL_THREAD = 0x00200000  # PF_KTHREAD


def _stat(directory: Path) -> tuple[str, list[str]]:
    """Returns a process's name and the fields that follow it in /proc/<pid>/stat."""
    name, _, fields = (directory / "stat").read_text().rpartition(") ")
    return name.partition("(")[2], fields.split()


def _processes() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_kernels(fields: list[str]) -> bool:
    return bool(int(fields[6]) & _KERNEL_THREAD)


def allowed_on(cpus: frozenset[int], cgroups: Collection[str]) -> dict[str, str]:
    """Returns the processes outside these cgroups whose Cpus_allowed_list contains one of the CPUs.

    Kernel threads are left out, since those bound to a CPU belong there.
    """
    found = {}
    for directory in _processes():
        try:
            name, fields = _stat(directory)
            if _is_kernels(fields) or _inside(directory, cgroups):
                continue
            status = (directory / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        allowed = next(line.split()[1] for line in status.splitlines() if line.startswith("Cpus_allowed_list"))
        if not cpus.isdisjoint(parse_cpu_list(allowed)):
            found[f"{name} ({directory.name})"] = allowed
    return found


def ran_on(cpus: frozenset[int], cgroups: Collection[str], seconds: float) -> dict[str, int]:
    """Returns the threads outside these cgroups that have run on one of the CPUs during this time, each with that CPU.

    The kernel also reports the last CPU of a thread that is sleeping, so only threads whose CPU time has grown are
    returned.
    """
    found: dict[str, int] = {}
    spent: dict[str, int] = {}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for directory in _processes():
            try:
                _, fields = _stat(directory)
                if _is_kernels(fields) or not _grown(directory.name, fields, spent) or _inside(directory, cgroups):
                    continue
                for thread in (directory / "task").iterdir():
                    name, fields = _stat(thread)
                    if _grown(f"{directory.name}/{thread.name}", fields, spent) and int(fields[36]) in cpus:
                        found[f"{name} ({thread.name})"] = int(fields[36])
            except (FileNotFoundError, ProcessLookupError):
                continue
        time.sleep(0.05)
    return found


def _grown(who: str, fields: list[str], spent: dict[str, int]) -> bool:
    """Returns True if the process or thread has used CPU time since the last call. The first call returns True for a
    process, so that its threads are examined, and False for a thread.
    """
    ticks, before = int(fields[11]) + int(fields[12]), spent.get(who)
    spent[who] = ticks
    return "/" not in who if before is None else ticks > before


def _inside(directory: Path, cgroups: Collection[str]) -> bool:
    text = (directory / "cgroup").read_text()
    path = next(line[3:].strip() for line in text.splitlines() if line.startswith("0::"))
    return any(path == one or path.startswith(f"{one}/") for one in cgroups)
