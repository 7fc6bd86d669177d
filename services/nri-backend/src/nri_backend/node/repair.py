# SPDX-License-Identifier: Apache-2.0
"""Makes the files of one cgroup true: write what differs, look again. Blocks."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nri_backend.limits.diff import Fault, Seen, faults
from nri_backend.limits.wants import CgroupWants
from nri_backend.node.cgroups import CgroupRefusedError, CgroupTree, MissingFileError


@dataclass(slots=True)
class Work:
    """The faults of one job so far."""

    repaired: list[Fault] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    """What could not be made true, in words that name file, wanted and seen, or the controller."""


def repair(tree: CgroupTree, path: str, wants: CgroupWants, seen: Seen, look: Callable[[], Seen], work: Work) -> Seen:
    """Returns the last look at the cgroup; ``seen`` is the first one.

    CgroupGoneError; CgroupRefusedError where a file cannot be read.
    """
    found = faults(wants, seen)
    if not found:
        return seen
    failed: dict[str, str] = {}
    for fault in found:
        try:
            if fault.absent:
                raise MissingFileError(f"{tree.root}/{path}", fault.file)
            tree.write(path, fault.file, fault.wanted)
        except CgroupRefusedError as error:
            failed[fault.file] = str(error)
    seen = look()
    still = {fault.file: fault for fault in faults(wants, seen)}
    work.repaired += [fault for fault in found if fault.file not in still]
    work.left += [failed.get(file, f"{tree.root}/{path}/{fault}") for file, fault in still.items()]
    return seen
