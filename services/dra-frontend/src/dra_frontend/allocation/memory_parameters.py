# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters for ``dra.memory``: how a request's memory or hugepages are bound, limited, protected, mounted."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Final, Literal

from numa_contract.config import MemoryProtection
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.records import MemoryMount, MemoryParameters
from pydantic import AfterValidator, Field

from dra_frontend.allocation.parameters import MEMORY_KEY, Fields, Given, Section, refusal
from dra_frontend.devices.model import MemoryDevice

# What the kernel takes of hugetlbfs's mode= (fs/hugetlbfs/inode.c): permissions and the sticky bit.
_MODE: Final = re.compile(r"0?[01]?[0-7]{3}", re.ASCII)
_LONGEST_PATH: Final = 4095
_ONLY: Final = "name only such requests under config[].requests"


def _mount_path(text: str) -> str:
    parts = [part for part in text.split("/") if part]
    if not text.startswith("/") or not {".", ".."}.isdisjoint(parts):
        raise ValueError("must be an absolute path without '.' and '..', as the container sees it")
    if not text.isprintable() or len(text.encode()) > _LONGEST_PATH:
        raise ValueError(f"must be at most {_LONGEST_PATH} bytes of printable text")
    if not parts or parts[0] == "proc" or parts in (["dev"], ["sys"]):
        raise ValueError("belongs to the runtime; choose a directory of its own, such as /dev/hugepages")
    return "/" + "/".join(parts)


def _mode(text: str) -> str:
    if not _MODE.fullmatch(text):
        raise ValueError('must be octal permissions, such as "0770" or "1777"')
    return text


class MountConfig(Fields):
    """The fields of ``mount``."""

    path: Annotated[str, AfterValidator(_mount_path)]
    mode: Annotated[str, AfterValidator(_mode)] = MemoryMount.model_fields["mode"].default


class MemoryConfig(Section):
    """The fields of ``memoryConfig``."""

    KEY: ClassVar[str] = MEMORY_KEY

    binding: Literal["strict", "preferred", "interleave"] | None = None
    limit: Literal["none", "claim"] | None = None
    protect: Literal["none", "low", "min"] | None = None
    high: Annotated[float, Field(gt=0, le=1)] | None = None
    mount: MountConfig | None = None


_PLAIN: Final = ("limit", "protect", "high")
"""Fields about memory that cgroups charge; hugepages are not charged there."""


def memory_parameters(
    stated: Mapping[str, Given], devices: Sequence[MemoryDevice], size: int, protection: MemoryProtection
) -> MemoryParameters:
    """Returns how one request wants its memory: ``size`` bytes in sum of all its devices. Raises Refused."""
    pages = sorted({device.page_bytes for device in devices if device.hugepages})
    if pages:
        _check_hugepages(stated, pages)
    if "mount" in stated:
        _check_mount(stated["mount"], pages, all(device.hugepages for device in devices))
    if "high" in stated:
        _check_high(stated["high"], size, devices[0].page_bytes)
    if "protect" in stated:
        _check_protection(stated["protect"], protection)
    values = {name: given.value for name, given in stated.items() if name not in ("sharing", "mount")}
    mount = MemoryMount(**stated["mount"].value.model_dump()) if "mount" in stated else None
    return MemoryParameters(**values, mount=mount)


def _check_hugepages(stated: Mapping[str, Given], pages: Sequence[int]) -> None:
    for name in _PLAIN:
        if name in stated and stated[name].value != "none":
            reason = (
                f"{stated[name].value} is for plain memory, and the request is of "
                f"{kubernetes_page_size(pages[0])} hugepages, which have a limit of their own; {_ONLY}"
            )
            raise refusal(stated[name].source, MemoryConfig.path(name), reason)


def _check_mount(mount: Given, pages: Sequence[int], hugepages: bool) -> None:
    if not hugepages:
        reason = f"is for hugepages, and the request is of plain memory; {_ONLY}"
    elif len(pages) > 1:
        sizes = ", ".join(map(kubernetes_page_size, pages))
        reason = f"is of one page size, and the request has pages of {sizes}; make a request for each size"
    else:
        return
    raise refusal(mount.source, MemoryConfig.path("mount"), reason)


def _check_high(high: Given, size: int, page_bytes: int) -> None:
    if int(high.value * size) < page_bytes:
        reason = f"{high.value} of {size} bytes is less than a page, so that nothing could run; choose a larger one"
        raise refusal(high.source, MemoryConfig.path("high"), reason)


def _check_protection(protect: Given, protection: MemoryProtection) -> None:
    if protect.value not in ("none", *protection.allowed):
        allowed = " or ".join(("none", *protection.allowed))
        reason = f"{protect.value} is not allowed on this node (memoryProtection.allowed); ask for {allowed}"
        raise refusal(protect.source, MemoryConfig.path("protect"), reason)
