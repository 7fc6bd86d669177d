# SPDX-License-Identifier: Apache-2.0
"""CPU and NUMA node lists in the kernel's list format (``0-3,8``), as sets of ints.

Pod authors can also supply such lists. The kernel writes its lists in ascending order and without overlaps
(lib/bitmap-str.c). Only that form is accepted, so the work for one list is bounded by the size of the largest possible
machine. A node has few distinct lists, which are parsed and formatted again and again; therefore the most recent
results of parsing and of formatting are cached.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from numa_contract.errors import MalformedError, shown

_ITEM = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
MAX_CPU: Final = 8191
"""Highest possible number of a CPU or NUMA node, since CONFIG_NR_CPUS is at most 8192."""
MAX_LIST: Final = 32 << 10
"""Maximum length of a list in bytes. A list of every other CPU of the largest machine takes 20 KB."""
# In the worst case, the caches take 28 MB: 12 MB each for 256 parsed and 256 formatted sets of 512 CPUs, and 4 MB for 8
# sets of 8192. The few lists on a real node take up only a small part of that.
_CACHED_SETS: Final = 256
_CACHED_LARGE_SETS: Final = 8
_MAX_TEXT: Final = 256
_MAX_SET: Final = 512


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parses ``"0-3,8"``. The empty string is the empty set. White space is allowed around the list, not inside it.

    Raises MalformedError for anything else: items that are not ascending, duplicate CPUs, the kernel's stride syntax
    (which no file read here uses), and lists longer than MAX_LIST.
    """
    if len(text) > MAX_LIST:
        raise MalformedError("CPU list", text, f"has more than {MAX_LIST} characters")
    text = text.strip()
    if len(text) > _MAX_TEXT:
        return _parse(text)
    small = _parsed_if_small(text)
    return _parsed_large(text) if small is None else small


def parse_or_none(text: str) -> frozenset[int] | None:
    """Parses a list. Returns None for a string that is not a valid list."""
    try:
        return parse_cpu_list(text)
    except MalformedError:
        return None


@lru_cache(_CACHED_SETS)
def _parsed_if_small(text: str) -> frozenset[int] | None:
    found = _parse(text)
    return found if len(found) <= _MAX_SET else None


def _parse(text: str) -> frozenset[int]:
    found: set[int] = set()
    next_free = 0
    for item in text.split(",") if text else ():
        match = _ITEM.fullmatch(item)
        if match is None:
            raise MalformedError("CPU list", text, f"{shown(item)} is neither a number nor a range such as 0-3")
        first = int(match[1])
        last = int(match[2] or first)
        if first > last:
            raise MalformedError("CPU list", text, f"the range {item} runs backwards")
        if last > MAX_CPU:
            raise MalformedError("CPU list", text, f"{last} exceeds the highest possible CPU number ({MAX_CPU})")
        if first < next_free:
            raise MalformedError(
                "CPU list", text, f"{item} must come after {next_free - 1}: write the list in ascending order"
            )
        found.update(range(first, last + 1))
        next_free = last + 1
    return frozenset(found)


_parsed_large = lru_cache(_CACHED_LARGE_SETS)(_parse)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Formats a set as the shortest list, ascending with merged ranges: ``{0, 1, 2, 8}`` becomes ``"0-2,8"``."""
    cpus = frozenset(cpus)
    return _formatted_small(cpus) if len(cpus) <= _MAX_SET else _format(cpus)


def _format(cpus: frozenset[int]) -> str:
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_formatted_small = lru_cache(_CACHED_SETS)(_format)
