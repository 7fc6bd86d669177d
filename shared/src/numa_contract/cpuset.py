# SPDX-License-Identifier: Apache-2.0
"""CPU and node lists in the kernel's list format (``0-3,8``), as a set of ints."""

import re
from collections.abc import Iterable

from numa_contract.errors import MalformedError

_ITEM = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
# Linux cannot be built for more (CONFIG_NR_CPUS stops at 8192); a wider range is damage, not a machine.
_HIGHEST = 65535


def parse_cpu_list(text: str) -> frozenset[int]:
    """Reads ``"0-3,8"``; the empty text is the empty set. White space around the whole is allowed, inside it is not.

    Raises MalformedError for anything else, also for the kernel's stride syntax, which no file we read uses.
    """
    text = text.strip()
    found: set[int] = set()
    for item in text.split(",") if text else ():
        match = _ITEM.fullmatch(item)
        if match is None:
            raise MalformedError("CPU list", text, f"{item!r} is neither a number nor a range such as 0-3")
        first = int(match[1])
        last = int(match[2] or first)
        if first > last:
            raise MalformedError("CPU list", text, f"the range {item} runs backwards")
        if last > _HIGHEST:
            raise MalformedError("CPU list", text, f"{last} is higher than any CPU number ({_HIGHEST})")
        found.update(range(first, last + 1))
    return frozenset(found)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Writes the shortest list, sorted, ranges merged: ``{0, 1, 2, 8}`` becomes ``"0-2,8"``."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
