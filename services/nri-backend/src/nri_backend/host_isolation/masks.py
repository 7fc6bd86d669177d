# SPDX-License-Identifier: Apache-2.0
"""Parses and formats the kernel's hexadecimal CPU masks: comma-separated 32-bit groups, most significant first."""

import re
from collections.abc import Collection
from typing import Final

from numa_contract.cpuset import MAX_CPU
from numa_contract.errors import MalformedError

_GROUP_BITS: Final = 32
_MASK: Final = re.compile(r"[0-9a-f]{1,8}(,[0-9a-f]{8})*", re.ASCII)
_MAX_LENGTH: Final = MAX_CPU // 4 + MAX_CPU // _GROUP_BITS + 2


def parse_mask(text: str) -> frozenset[int]:
    """Parses a mask such as ``ff,00000001``. Raises MalformedError if the string is not a mask."""
    text = text.strip()
    if len(text) > _MAX_LENGTH or not _MASK.fullmatch(text):
        raise MalformedError("CPU mask", text, "is not a CPU mask in the kernel's format")
    bits = int(text.replace(",", ""), 16)
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def format_mask(cpus: Collection[int]) -> str:
    """Formats a mask in full groups of eight digits; an empty set becomes ``00000000``."""
    bits = sum(1 << cpu for cpu in cpus)
    groups = range(max(cpus, default=0) // _GROUP_BITS, -1, -1)
    return ",".join(f"{bits >> group * _GROUP_BITS & 0xFFFFFFFF:08x}" for group in groups)
