# SPDX-License-Identifier: Apache-2.0
"""Sets of CPUs as the kernel's hexadecimal masks: groups of 32 bits, the highest first, with commas between them."""

import re
from collections.abc import Collection
from typing import Final

from numa_contract.cpuset import HIGHEST_CPU
from numa_contract.errors import MalformedError

_GROUP_BITS: Final = 32
_MASK: Final = re.compile(r"[0-9a-f]{1,8}(,[0-9a-f]{8})*", re.ASCII)
_LONGEST: Final = HIGHEST_CPU // 4 + HIGHEST_CPU // _GROUP_BITS + 2


def parse_mask(text: str) -> frozenset[int]:
    """Reads a mask such as ``ff,00000001``; MalformedError for anything else."""
    text = text.strip()
    if len(text) > _LONGEST or not _MASK.fullmatch(text):
        raise MalformedError("CPU mask", text, "is not a mask as the kernel writes it")
    bits = int(text.replace(",", ""), 16)
    return frozenset(cpu for cpu in range(bits.bit_length()) if bits >> cpu & 1)


def format_mask(cpus: Collection[int]) -> str:
    """Writes a mask; ``0`` for no CPU."""
    bits = sum(1 << cpu for cpu in cpus)
    groups = range(max(cpus, default=0) // _GROUP_BITS, -1, -1)
    return ",".join(f"{bits >> group * _GROUP_BITS & 0xFFFFFFFF:08x}" for group in groups)
