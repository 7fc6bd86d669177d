# SPDX-License-Identifier: Apache-2.0
"""Where a container's and a pod's cgroup is, below the cgroup root.

Two spellings exist. With the systemd driver it is ``slice:prefix:id``, and a slice lies inside the slices that its name
is made of (systemd.slice(5)). With the cgroupfs driver it is the path itself.
"""


class CgroupPathError(ValueError):
    """The runtime named a cgroup in a form that leads nowhere below the cgroup root."""

    def __init__(self, text: str, reason: str) -> None:
        self.text = text
        self.reason = reason
        super().__init__(f"cgroup {text!r}: {reason}")


# What the OCI runtimes use where the slice is left out (runc, libcontainer/cgroups/systemd).
_DEFAULT_SLICE = "system.slice"
_SUFFIX = ".slice"


def expand_slice(name: str) -> str:
    """Returns the directory of a slice: ``a-b.slice`` lies in ``a.slice/a-b.slice``; ``-.slice`` is the root ("")."""
    stem = name.removesuffix(_SUFFIX)
    if stem == name or "/" in name or not stem:
        raise CgroupPathError(name, "is no slice name")
    if stem == "-":
        return ""
    parts = stem.split("-")
    if not all(parts):
        raise CgroupPathError(name, "has an empty part between dashes")
    return "/".join("-".join(parts[: length + 1]) + _SUFFIX for length in range(len(parts)))


def _checked(text: str, path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        raise CgroupPathError(text, "is the cgroup root itself")
    if ".." in parts or "\0" in path:
        raise CgroupPathError(text, "leaves the cgroup root")
    return "/".join(parts)


def container_directory(cgroups_path: str) -> str:
    """Returns a container's directory below the cgroup root. CgroupPathError."""
    parts = cgroups_path.split(":")
    if len(parts) != 3:
        return _checked(cgroups_path, cgroups_path)
    parent, prefix, name = parts
    if not name or "/" in prefix or "/" in name:
        raise CgroupPathError(cgroups_path, "is no slice:prefix:id")
    # A name that ends in .slice is a slice of its own and gets no prefix (runc, getUnitName).
    unit = name if name.endswith(_SUFFIX) else "-".join(filter(None, (prefix, name))) + ".scope"
    return _checked(cgroups_path, f"{expand_slice(parent.rpartition('/')[2] or _DEFAULT_SLICE)}/{unit}")


def pod_directory(cgroup_parent: str) -> str:
    """Returns a pod's directory below the cgroup root: from a slice's name, or from a path. CgroupPathError."""
    if cgroup_parent.endswith(_SUFFIX) and "/" not in cgroup_parent:
        return _checked(cgroup_parent, expand_slice(cgroup_parent))
    return _checked(cgroup_parent, cgroup_parent)
