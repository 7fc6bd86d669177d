# SPDX-License-Identifier: Apache-2.0
"""The kernel's files of cgroups (cgroup-v2.rst), and nothing about what they should say. Every call blocks."""

import contextlib
import copy
import errno
import os
from collections.abc import Iterable
from itertools import islice
from typing import Final, Self

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError

from nri_backend.limits.difference import Limit

EXCLUSIVE: Final = "cpuset.cpus.exclusive"
PARTITION: Final = "cpuset.cpus.partition"
MOST_CHILDREN: Final = 4096
"""Cgroups in one cgroup that are listed; a node has some hundred pods."""
_PIECE_BYTES: Final = 1 << 16
# The kernel tells of a cgroup that was removed while its file is open, or between open and use.
_GONE: Final = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)


Seen = dict[tuple[str, str], bytes | None]
"""The content of files, by cgroup and name; None where there is no such file."""


class CgroupGoneError(Exception):
    """The cgroup does not exist (any more)."""


class CgroupAccessError(Exception):
    """The kernel refused a read or a write, or a file says what no kernel writes."""

    def __init__(self, file: str, reason: str, text: str = "") -> None:
        super().__init__(f"{file}: {reason}{f' when {text} was written' if text else ''}")


class MissingFileError(CgroupAccessError):
    """The cgroup exists without this file: the parent has not switched the controller on, or the kernel is too old."""

    def __init__(self, directory: str, name: str) -> None:
        controller, parent = name.partition(".")[0], directory.rpartition("/")[0]
        remedy = (
            "the kernel is older than 5.14"
            if controller == "cgroup"
            else f"the {controller} controller is not in {parent}/cgroup.subtree_control; "
            "let kubelet or systemd switch it on there"
        )
        super().__init__(f"{directory}/{name}", f"does not exist: {remedy}")


class CgroupTree:
    """The cgroup hierarchy below a root. Paths are relative to it, as cgroup_path gives them."""

    def __init__(self, root: str) -> None:
        self.root = root.rstrip("/")
        self.seen: Seen | None = None
        """What was read, where that is kept."""
        self._capable = False

    def recording(self) -> Self:
        """Returns the same tree, which keeps what is read."""
        twin = copy.copy(self)
        twin.seen = {}
        return twin

    def leaf(self, path: str) -> str:
        """Returns the sub-cgroup that crun made in a container's cgroup, "" where there is none.

        crun delegates the scope and sets limits on ``container`` below it (run.oci.systemd.subgroup); processes are
        there alone. A container that may write to its cgroup can make one of that name, too.
        """
        leaf = f"{path}/container"
        if not os.path.isdir(f"{self.root}/{leaf}"):  # noqa: PTH112
            return ""
        try:
            return "" if self.read(path, "cgroup.procs") else leaf
        except MissingFileError:
            return leaf

    def inode(self, path: str) -> int | None:
        """Returns the inode of a cgroup, which no other one has as long as the machine runs; None if there is none."""
        try:
            return os.stat(f"{self.root}/{path}").st_ino if path else None  # noqa: PTH116
        except OSError:
            return None

    def has(self, path: str, name: str) -> bool:
        """Returns True if a cgroup has a file."""
        return os.path.exists(f"{self.root}/{path}/{name}")  # noqa: PTH110

    def is_mounted(self) -> bool:
        """Tells whether the tree is there at all."""
        return os.path.exists(f"{self.root}/cgroup.controllers")  # noqa: PTH110

    def read(self, path: str, name: str) -> str:
        """Returns a file's text without its end of line. CgroupGoneError, MissingFileError, CgroupAccessError."""
        try:
            # In two thirds of the time that open() and its read() take.
            descriptor = os.open(f"{self.root}/{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = piece = os.read(descriptor, _PIECE_BYTES)
                while piece:
                    data += (piece := os.read(descriptor, _PIECE_BYTES))
            finally:
                os.close(descriptor)
        except OSError as error:
            translated = self._translated(error, path, name)
            if self.seen is not None and isinstance(translated, MissingFileError):
                self.seen[path, name] = None
            raise translated from error
        if self.seen is not None:
            self.seen[path, name] = data
        return data.decode(errors="replace").strip()

    def write(self, path: str, name: str, text: str) -> None:
        """Writes a file in one system call. The same errors as of read()."""
        if not text or not path:
            # An empty cpuset means "as the parent", and the root is everybody's: nobody here could want either.
            raise ValueError(f"{text!r} must not be written to {name} of {path!r}")
        self._put(path, name, text)

    def clear_exclusive(self, path: str) -> None:
        """Lets a cgroup keep no CPUs for itself or for those below it. The same errors as of read()."""
        self._put(path, EXCLUSIVE, "\n")

    def _put(self, path: str, name: str, text: str) -> None:
        try:
            fd = os.open(f"{self.root}/{path}/{name}", os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC)
            try:
                os.write(fd, text.encode())
            finally:
                os.close(fd)
        except OSError as error:
            raise self._translated(error, path, name, text) from error

    def _translated(self, error: OSError, path: str, name: str, text: str = "") -> Exception:
        directory = f"{self.root}/{path}"
        if error.errno in _GONE:
            if error.errno == errno.ENOENT and os.path.isdir(directory):  # noqa: PTH112
                return MissingFileError(directory, name)
            return CgroupGoneError(f"the cgroup {directory} does not exist")
        reason = error.strerror or repr(error)
        if error.errno == errno.EACCES:
            # A container with a writable cgroup mount can change owner and mode of its files: docs/adr/0012.
            reason += " (nri-backend lacks the capability DAC_OVERRIDE, or a security module denies the access)"
        return CgroupAccessError(f"{directory}/{name}", reason, text)

    def read_set(self, path: str, name: str) -> frozenset[int] | None:
        """Returns a file that holds a list of CPUs or nodes; None when a cgroup that exists does not have the file."""
        try:
            return parse_cpu_list(self.read(path, name))
        except MissingFileError:
            return None
        except MalformedError as error:
            raise CgroupAccessError(f"{self.root}/{path}/{name}", str(error)) from error

    def read_limits(self, path: str, names: Iterable[str]) -> dict[str, Limit]:
        """Returns the limits that exist, by file."""
        found: dict[str, Limit] = {}
        for name in names:
            try:
                # cpu.max holds a period behind its limit, which stays when the limit alone is written.
                text = self.read(path, name).partition(" ")[0]
                found[name] = None if text == "max" else int(text)
            except MissingFileError:
                continue
            except ValueError as error:
                raise CgroupAccessError(f"{self.root}/{path}/{name}", "holds no number") from error
        return found

    def partition_obstacle(self) -> str:
        """Returns the reason why the kernel cannot create remote partitions in this tree, or "" if it can.

        Every cgroup but the topmost has ``cpuset.cpus.exclusive``. If the root of this tree has the file, the node is
        itself a container (kind), and the cgroups above its root would have to reserve the CPUs, too.
        """
        # A kernel never loses the feature, and one false reading would move every container of the node twice.
        if self._capable:
            return ""
        if os.path.exists(f"{self.root}/{EXCLUSIVE}"):  # noqa: PTH110
            return f"{self.root} is not the topmost cgroup, so this node is itself a container (as in kind)"
        try:
            children = self.children("")
        except CgroupAccessError as error:
            return f"it is unknown whether the kernel has {EXCLUSIVE}: {error}"
        if not any(os.path.exists(f"{self.root}/{child}/{EXCLUSIVE}") for child in children):  # noqa: PTH110
            return f"the kernel has no {EXCLUSIVE}; boot Linux 6.7 or later"
        self._capable = True
        return ""

    def make(self, path: str) -> None:
        """Creates a cgroup. Raises OSError."""
        os.mkdir(f"{self.root}/{path}")  # noqa: PTH102

    def remove(self, path: str) -> None:
        """Removes a cgroup without processes and children. Raises OSError."""
        os.rmdir(f"{self.root}/{path}")  # noqa: PTH106

    def children(self, path: str) -> list[str]:
        """Returns the names of the cgroups in a cgroup; none if it is gone.

        Raises CgroupAccessError if they cannot be read, which does not mean that there are none, or are too many: a
        part of them would look like all.
        """
        try:
            with os.scandir(f"{self.root}/{path}") as entries:
                directories = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                found = list(islice(directories, MOST_CHILDREN + 1))
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise CgroupAccessError(f"{self.root}/{path}", error.strerror or repr(error)) from error
        if len(found) > MOST_CHILDREN:
            raise CgroupAccessError(f"{self.root}/{path}", f"has more than {MOST_CHILDREN} cgroups")
        return found

    def populated(self, path: str) -> bool:
        """Returns True if a process lives in the cgroup or below it, and False if none does or the cgroup is gone.

        Raises CgroupAccessError if the kernel does not show it, or the tree is not mounted.
        """
        try:
            return "populated 1" in self.read(path, "cgroup.events").splitlines()
        except (CgroupGoneError, MissingFileError):
            if self.is_mounted():
                return False
            raise CgroupAccessError(self.root, "is not mounted") from None

    def kill(self, path: str) -> None:
        """Kills every process of the cgroup at once. One that is gone is no error."""
        with contextlib.suppress(CgroupGoneError):
            self.write(path, "cgroup.kill", "1")
