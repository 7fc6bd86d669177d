# SPDX-License-Identifier: Apache-2.0
"""Page sizes in their various formats.

Kubernetes writes ``2Mi``, the OCI and cgroups ``2MB``, sysfs ``2048kB``, mount options ``2M``, and this driver ``2m``.
"""

import re
from functools import lru_cache
from typing import Final

from numa_contract.errors import MalformedError

_UNITS: Final = (("g", 1 << 30), ("m", 1 << 20), ("k", 1 << 10))
_TEXT = re.compile(r"(\d{1,9})([kmgKMG])(?:i|[bB])?", re.ASCII)


def _scaled(page_bytes: int) -> tuple[int, str]:
    for letter, unit in _UNITS:
        if page_bytes >= unit and page_bytes % unit == 0:
            return page_bytes // unit, letter
    raise MalformedError("page size", str(page_bytes), "is not a multiple of 1 KiB")


def short_page_size(page_bytes: int) -> str:
    """Formats a size as in names of devices, pools and classes, and in ``resource.kubernetes.io/pageSize``: ``2m``."""
    count, letter = _scaled(page_bytes)
    return f"{count}{letter}"


def kubernetes_page_size(page_bytes: int) -> str:
    """Formats a size as in ``hugepages-2Mi`` and ``dra.memory/pageSize``: ``2Mi``, ``4Ki``."""
    count, letter = _scaled(page_bytes)
    return f"{count}{letter.upper()}i"


@lru_cache(64)
def oci_page_size(page_bytes: int) -> str:
    """Formats a size as in the OCI specification and cgroup files (``hugetlb.2MB.max``): ``2MB``, ``64KB``."""
    count, letter = _scaled(page_bytes)
    return f"{count}{letter.upper()}B"


def mount_page_size(page_bytes: int) -> str:
    """Formats a size as in the hugetlbfs mount option ``pagesize=``: ``2M``."""
    count, letter = _scaled(page_bytes)
    return f"{count}{letter.upper()}"


def sysfs_page_size(page_bytes: int) -> str:
    """Formats a size as in the names of sysfs directories: ``hugepages-2048kB``."""
    return f"hugepages-{page_bytes >> 10}kB"


def parse_page_size(text: str) -> int:
    """Parses a page size in any of the module's formats and returns it in bytes. Raises MalformedError."""
    match = _TEXT.fullmatch(text.removeprefix("hugepages-"))
    if match is None or int(match[1]) == 0:
        raise MalformedError("page size", text, "is not a page size such as 2m, 2Mi, 2MB or hugepages-2048kB")
    return int(match[1]) * dict(_UNITS)[match[2].lower()]
