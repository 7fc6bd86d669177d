# SPDX-License-Identifier: Apache-2.0
"""CPU and node lists in the kernel's list format (``0-3,8``), as a set of ints.

Texts come from pod authors too. The kernel writes its lists ascending and disjoint (lib/bitmap-str.c), and only that
form is read: so the work for a text is bounded by the largest machine, whatever it repeats. A node has few distinct
lists and they are read and written over and over, so both ways remember the latest ones.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from numa_contract.errors import MalformedError, shown

_ITEM = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?", re.ASCII)
HIGHEST_CPU: Final = 8191
"""Linux cannot be built for more CPUs (CONFIG_NR_CPUS stops at 8192), nor for as many NUMA nodes."""
LONGEST_LIST: Final = 32 << 10
"""Maximum size of a list in bytes. Every second CPU of the largest machine takes 20 KB."""
# What is remembered stays below 4 MB, whatever is written: 256 sets of 512 CPUs share their ints, as do 8 of 8192.
_REMEMBERED: Final = 256
_REMEMBERED_LARGE: Final = 8
_LONGEST_TEXT: Final = 256
_LARGEST_SET: Final = 512


def parse_cpu_list(text: str) -> frozenset[int]:
    """Reads ``"0-3,8"``; the empty text is the empty set. White space around the whole is allowed, inside it is not.

    Raises MalformedError for anything else: items that are not ascending, CPUs named twice, the kernel's stride syntax,
    which no file that is read here uses, and whatever is longer than LONGEST_LIST.
    """
    if len(text) > LONGEST_LIST:
        raise MalformedError("CPU list", text, f"has more than {LONGEST_LIST} characters")
    text = text.strip()
    if len(text) > _LONGEST_TEXT:
        return _parse(text)
    small = _parsed_if_small(text)
    return _parsed_large(text) if small is None else small


def parse_or_none(text: str) -> frozenset[int] | None:
    """Reads a list; None for anything else."""
    try:
        return parse_cpu_list(text)
    except MalformedError:
        return None


@lru_cache(_REMEMBERED)
def _parsed_if_small(text: str) -> frozenset[int] | None:
    found = _parse(text)
    return found if len(found) <= _LARGEST_SET else None


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
        if last > HIGHEST_CPU:
            raise MalformedError("CPU list", text, f"{last} is higher than any CPU number ({HIGHEST_CPU})")
        if first < next_free:
            raise MalformedError(
                "CPU list", text, f"{item} must come after {next_free - 1}: write it in ascending order"
            )
        found.update(range(first, last + 1))
        next_free = last + 1
    return frozenset(found)


_parsed_large = lru_cache(_REMEMBERED_LARGE)(_parse)


def format_cpu_list(cpus: Iterable[int]) -> str:
    """Writes the shortest list, sorted, ranges merged: ``{0, 1, 2, 8}`` becomes ``"0-2,8"``."""
    cpus = frozenset(cpus)
    return _formatted_small(cpus) if len(cpus) <= _LARGEST_SET else _format(cpus)


def _format(cpus: frozenset[int]) -> str:
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


_formatted_small = lru_cache(_REMEMBERED)(_format)
