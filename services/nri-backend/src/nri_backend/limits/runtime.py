# SPDX-License-Identifier: Apache-2.0
"""Parses a container's cgroup path and limits as the runtime sends them.

The format of a cgroup path depends on the cgroup driver. With the systemd driver it is ``slice:prefix:id``, and a
slice's name contains the names of the slices above it (systemd.slice(5)). With the cgroupfs driver it is the path
itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from numa_contract.errors import MalformedError
from numa_contract.pagesize import parse_page_size

from nri_backend.nri.model import Resources

PERIOD: Final = 100_000
"""The kernel's default CFS period, in microseconds."""
# Slice that the OCI runtimes use if the path contains none (runc, libcontainer/cgroups/systemd).
_DEFAULT_SLICE: Final = "system.slice"
_SUFFIX: Final = ".slice"
# PATH_MAX (linux/limits.h). A slice's directory repeats the slice's name for each of its parts, so a name of 32 KB
# would expand to 256 MB.
_MAX_PATH: Final = 4096
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class CpuLimit:
    """A CFS quota and its period, in microseconds."""

    quota: int
    period: int = PERIOD


@dataclass(frozen=True, slots=True)
class RuntimeLimits:
    """A container's limits, as received from the runtime."""

    hugepages: Mapping[int, int] = field(default_factory=dict)
    """Hugepage limits in bytes, by page size in bytes."""
    cpu: CpuLimit | None = None
    memory: int | None = None
    """Memory limit in bytes."""
    include_claims: bool = False
    """True if the hugepage limits include the container's claims: an instance of this driver has added them in its
    answer to CreateContainer or to the last update, and the runtime has stored that answer.
    """
    kubelet_pins: frozenset[str] = frozenset()
    """The kubelet's static managers (``cpu``, ``memory``) that appear to be in use, since requests for the container
    contained CPUs or NUMA nodes. Another NRI plugin may have set these instead.
    """

    def updated(self, wanted: Resources, *, requested: bool = False) -> "RuntimeLimits":
        """Returns the limits after an update. The update contains only the values that change.

        ``requested`` has the same meaning as in parse_limits().
        """
        now = parse_limits(wanted, requested=requested)
        return replace(
            self,
            hugepages={**self.hugepages, **now.hugepages},
            cpu=self.cpu if wanted.cpu_quota is None else now.cpu,
            memory=self.memory if wanted.memory_limit is None else wanted.memory_limit,
            kubelet_pins=self.kubelet_pins | now.kubelet_pins,
        )


def parse_limits(resources: Resources, *, requested: bool = False) -> RuntimeLimits:
    """Returns the limits in a container's resources.

    A quota of -1 means no limit. Hugepage limits with an invalid page size are left out.

    ``requested`` is True if the resources come from a kubelet request. Only such a request shows whether the kubelet
    uses its static managers. With the static CPU manager, the kubelet sends a cpuset for every container; for
    containers that are not Guaranteed, it is the default set. With the static Memory Manager, it sends mems for
    Guaranteed containers. Otherwise it sends neither. A request looks the same if an NRI plugin that the runtime calls
    earlier has set CPUs or mems: NRI writes each plugin's answer into the request for the next one (adjustResources()
    in its pkg/adaptation/result.go). Resources that a runtime has stored reveal nothing about the kubelet, since they
    contain this plugin's own answers.
    """
    hugepages: dict[int, int] = {}
    for size, limit in resources.hugepage_limits.items():
        try:
            hugepages[parse_page_size(size)] = limit
        except MalformedError:
            continue
    quota = resources.cpu_quota
    cpu = None if quota is None or quota < 0 else CpuLimit(quota, resources.cpu_period or PERIOD)
    cpuset = (("cpu", resources.cpus), ("memory", resources.mems)) if requested else ()
    return RuntimeLimits(
        hugepages, cpu, resources.memory_limit, kubelet_pins=frozenset(manager for manager, text in cpuset if text)
    )


class CgroupPathError(ValueError):
    """The runtime sent a cgroup path that cannot be resolved to a directory under the cgroup root."""

    def __init__(self, text: str, reason: str) -> None:
        self.text = text
        self.reason = reason
        super().__init__(f"cgroup {text!r}: {reason}")


def cgroup_directory(path: str) -> str:
    """Returns the directory under the cgroup root that a runtime's cgroup path denotes. Raises CgroupPathError.

    The path is ``slice:prefix:id`` for a container with the systemd driver, a slice name or a path for a pod, and a
    path for a container with the cgroupfs driver.
    """
    if len(path) > _MAX_PATH:
        raise CgroupPathError(f"{path[:_SHOWN]}...", f"is longer than {_MAX_PATH} characters")
    slice_name, below = "", path
    if path.count(":") == 2:
        parent, prefix, name = path.split(":")
        if not name or "/" in prefix or "/" in name:
            raise CgroupPathError(path, "is not of the form slice:prefix:id")
        slice_name = parent.rpartition("/")[2] or _DEFAULT_SLICE
        # A name that ends in .slice is the unit's name. Any other name gets the prefix and .scope (runc, getUnitName).
        below = name if name.endswith(_SUFFIX) else "-".join(filter(None, (prefix, name))) + ".scope"
    elif path.endswith(_SUFFIX) and "/" not in path:
        slice_name, below = path, ""
    directory = f"{expand_slice(slice_name)}/{below}" if slice_name else below
    parts = [part for part in directory.split("/") if part not in ("", ".")]
    if not parts:
        raise CgroupPathError(path, "is the cgroup root itself")
    if ".." in parts or "\0" in directory:
        raise CgroupPathError(path, "leaves the cgroup root")
    return "/".join(parts)


def expand_slice(name: str) -> str:
    """Returns a slice's directory: ``a.slice/a-b.slice`` for ``a-b.slice``, and "" for the root ``-.slice``.

    Raises CgroupPathError.
    """
    stem = name.removesuffix(_SUFFIX)
    if stem == name or "/" in name or not stem:
        raise CgroupPathError(name, "is not the name of a slice")
    if stem == "-":
        return ""
    parts = stem.split("-")
    if not all(parts):
        raise CgroupPathError(name, "has an empty part between dashes")
    return "/".join("-".join(parts[: length + 1]) + _SUFFIX for length in range(len(parts)))
