# SPDX-License-Identifier: Apache-2.0
"""Reads and writes cgroup files (cgroup-v2.rst), and the kubelet's original limits, which are stored as an attribute of
the cgroup.

Plans with the desired contents of the files are computed elsewhere (containers/plan.py). Every call blocks.
"""

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Final, Self

from numa_contract.backend_codes import BackendCode
from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError

from nri_backend.limits.claimed import Limit, Note
from nri_backend.node.node_files import NodeFiles
from nri_backend.problems import NO_PROBLEM, CodedError, Problem, code_of

EXCLUSIVE: Final = "cpuset.cpus.exclusive"
PARTITION: Final = "cpuset.cpus.partition"
MAX_CHILDREN: Final = 4096
"""Maximum number of children to list for one cgroup; a node has a few hundred pods."""
_PIECE_BYTES: Final = 1 << 16
_ATTRIBUTE: Final = "user.dra-driver-numa"
# Errors for a cgroup that does not exist, including one that was removed after the file was opened.
_GONE: Final = (errno.ENOENT, errno.ENODEV, errno.ENOTDIR)


Seen = dict[tuple[str, str], bytes | None]
"""File contents, keyed by cgroup and name; None for a file that does not exist."""


class CgroupGoneError(Exception):
    """The cgroup does not exist, or no longer exists."""


class CgroupAccessError(CodedError):
    """The kernel rejected a read or a write, or the content of a file cannot be parsed."""

    code = BackendCode.CGROUP_FILE_REFUSED

    def __init__(self, file: str, reason: str, text: str = "") -> None:
        super().__init__(f"{file}: {reason}{f' when {text} was written' if text else ''}")

    @property
    def problem(self) -> Problem:
        """This error as a problem with a code."""
        return Problem(str(self), self.code)


class MissingFileError(CgroupAccessError):
    """The cgroup exists but lacks this file: the controller is not enabled in the parent, or the kernel is too old."""

    def __init__(self, directory: str, name: str) -> None:
        controller, parent = name.partition(".")[0], directory.rpartition("/")[0]
        remedy = (
            "the kernel is older than 5.14"
            if controller == "cgroup"
            else f"the {controller} controller is not in {parent}/cgroup.subtree_control; "
            "have the kubelet or systemd enable it there"
        )
        self.code = BackendCode.KERNEL_TOO_OLD if controller == "cgroup" else BackendCode.CONTROLLER_MISSING
        super().__init__(f"{directory}/{name}", f"does not exist: {remedy}")


def access_error(error: OSError, file: str, reason: str, text: str = "") -> CgroupAccessError:
    """Returns the error for a failed access, with the code for its errno."""
    refused = CgroupAccessError(file, reason, text)
    # The cgroup file system is never full: ENOSPC means that a cpuset would have no CPU.
    refused.code = CgroupAccessError.code if error.errno == errno.ENOSPC else code_of(error, CgroupAccessError.code)
    return refused


class CpusetWriteError(Exception):
    """A cpuset file would have to be written, but this view of the tree does not allow it. Nothing was written."""


class CgroupTree:
    """The cgroup hierarchy below a root. Paths are relative to the root, as cgroup_directory() returns them."""

    def __init__(self, root: str, files: NodeFiles | None = None) -> None:
        self.root = root.rstrip("/")
        self.files = files or NodeFiles()
        """Writer that makes the changes to the tree, or only records them."""
        self.observes = self.files.observes
        """True if writes are only recorded, not made (``enforcement: observe``)."""
        self.seen: Seen | None = None
        """Contents of the files that were read, if this is a recording tree; else None."""
        self.writes_cpusets = True
        """False for a view that must not write cpuset files."""
        self._can_partition = False

    def recording(self) -> Self:
        """Returns a view of the same tree that stores the content of every file it reads in ``seen``."""
        copy = self._copy()
        copy.seen = {}
        return copy

    def without_cpusets(self) -> Self:
        """Returns a view of the same tree that raises CpusetWriteError instead of writing a cpuset file."""
        copy = self._copy()
        copy.writes_cpusets = False
        return copy

    def _copy(self) -> Self:
        # This takes a tenth of the time that copy.copy() takes.
        copy = object.__new__(type(self))
        copy.__dict__.update(self.__dict__)
        return copy

    def leaf(self, path: str) -> str:
        """Returns the sub-cgroup that crun has created in a container's cgroup, or "" if there is none.

        crun delegates the scope and sets limits on the cgroup ``container`` inside it (run.oci.systemd.subgroup); all
        processes are in that sub-cgroup. A container that may write to its cgroup can create a cgroup with this name as
        well, so the sub-cgroup is used only if no process is directly in the container's cgroup.
        """
        leaf = f"{path}/container"
        if not os.path.isdir(f"{self.root}/{leaf}"):  # noqa: PTH112
            return ""
        try:
            return "" if self.read(path, "cgroup.procs") else leaf
        except MissingFileError:
            return leaf

    def inode(self, path: str) -> int | None:
        """Returns a cgroup's inode, which is unique until the next reboot, or None if there is no such cgroup."""
        try:
            return os.stat(f"{self.root}/{path}").st_ino if path else None  # noqa: PTH116
        except OSError:
            return None

    def has(self, path: str, name: str) -> bool:
        """Returns True if a cgroup has this file."""
        return os.path.exists(f"{self.root}/{path}/{name}")  # noqa: PTH110

    def is_mounted(self) -> bool:
        """Returns True if the cgroup tree is mounted."""
        return os.path.exists(f"{self.root}/cgroup.controllers")  # noqa: PTH110

    def read(self, path: str, name: str) -> str:
        """Returns a file's content without the trailing newline.

        Raises CgroupGoneError, MissingFileError or CgroupAccessError.
        """
        try:
            # This takes two thirds of the time that open() and read() on a file object take. One read() returns the
            # whole content of a file that fits into the buffer: the kernel formats the content as one record, and never
            # returns only part of a record (seq_read_iter() in fs/seq_file.c). In cgroup.procs each process is a
            # record; only the first one matters.
            descriptor = os.open(f"{self.root}/{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                data = piece = os.read(descriptor, _PIECE_BYTES)
                while len(piece) == _PIECE_BYTES:
                    data += (piece := os.read(descriptor, _PIECE_BYTES))
            finally:
                os.close(descriptor)
        except OSError as error:
            translated = self._translate(error, path, name)
            if self.seen is not None and isinstance(translated, MissingFileError):
                self.seen[path, name] = None
            raise translated from error
        if self.seen is not None:
            self.seen[path, name] = data
        return data.decode(errors="replace").strip()

    def write(self, path: str, name: str, text: str) -> None:
        """Writes a file in one system call. Raises the same errors as read(), and CpusetWriteError if this view must
        not write the file.
        """
        if not text or not path:
            # An empty cpuset means the parent's cpuset, and the root cgroup affects all processes. No caller
            # deliberately writes an empty cpuset, or writes to the root cgroup.
            raise ValueError(f"{text!r} must not be written to {name} of {path!r}")
        if not self.writes_cpusets and name.startswith("cpuset."):
            raise CpusetWriteError
        try:
            self.files.write(f"{self.root}/{path}/{name}", text)
        except OSError as error:
            raise self._translate(error, path, name, text) from error
        finally:
            if self.seen is not None:
                # The content read earlier is out of date, and the new content is not known until the next read.
                self.seen.pop((path, name), None)

    def clear_exclusive(self, path: str) -> None:
        """Removes all CPUs from a cgroup's ``cpuset.cpus.exclusive``. Raises the same errors as read()."""
        self.write(path, EXCLUSIVE, "\n")

    def _translate(self, error: OSError, path: str, name: str, text: str = "") -> Exception:
        directory = f"{self.root}/{path}"
        if error.errno in _GONE:
            if error.errno == errno.ENOENT and os.path.isdir(directory):  # noqa: PTH112
                return MissingFileError(directory, name)
            return CgroupGoneError(f"the cgroup {directory} does not exist")
        reason = error.strerror or repr(error)
        if error.errno == errno.EACCES:
            # A container with a writable cgroup mount can change the owner and mode of its cgroup's files: see
            # docs/adr/0012.
            reason += " (nri-backend lacks the capability DAC_OVERRIDE, or a security module denies access)"
        return access_error(error, f"{directory}/{name}", reason, text)

    def read_set(self, path: str, name: str) -> frozenset[int] | None:
        """Parses a file with a list of CPUs or nodes. Returns None if the cgroup exists but does not have the file.

        Raises CgroupGoneError or CgroupAccessError.
        """
        try:
            return parse_cpu_list(self.read(path, name))
        except MissingFileError:
            return None
        except MalformedError as error:
            raise CgroupAccessError(f"{self.root}/{path}/{name}", str(error)) from error

    def read_limits(self, path: str, names: Iterable[str]) -> dict[str, Limit]:
        """Parses the limits in the files that exist. Raises CgroupGoneError or CgroupAccessError."""
        found: dict[str, Limit] = {}
        for name in names:
            try:
                # In cpu.max, the period follows the limit. Writing only the limit leaves the period unchanged.
                text = self.read(path, name).partition(" ")[0]
                found[name] = None if text == "max" else int(text)
            except MissingFileError:
                continue
            except ValueError as error:
                raise CgroupAccessError(f"{self.root}/{path}/{name}", "contains no number") from error
        return found

    def partition_obstacle(self) -> Problem:
        """Returns the reason why the kernel cannot create remote partitions in this tree, or NO_PROBLEM if it can.

        Every cgroup but the topmost one has ``cpuset.cpus.exclusive``. If the root of this tree has the file, the node
        is itself a container (kind), and the cgroups above that root would have to reserve the CPUs as well.
        """
        # Once found, the feature is not looked for again: a kernel never loses it, and a single wrong reading would
        # move every container on the node twice.
        if self._can_partition:
            return NO_PROBLEM
        if os.path.exists(f"{self.root}/{EXCLUSIVE}"):  # noqa: PTH110
            text = f"{self.root} is not the topmost cgroup, so this node is itself a container (as in kind)"
            return Problem(text, BackendCode.NODE_IS_CONTAINER)
        try:
            children = self.children("")
        except CgroupAccessError as error:
            return Problem(f"cannot tell whether the kernel has {EXCLUSIVE}: {error}", error.code)
        if not any(os.path.exists(f"{self.root}/{child}/{EXCLUSIVE}") for child in children):  # noqa: PTH110
            return Problem(f"the kernel has no {EXCLUSIVE}; boot Linux 6.7 or later", BackendCode.KERNEL_TOO_OLD)
        self._can_partition = True
        return NO_PROBLEM

    def make(self, path: str) -> None:
        """Creates a cgroup. Raises OSError."""
        self.files.make_cgroup(f"{self.root}/{path}")

    def remove(self, path: str) -> None:
        """Removes a cgroup that has neither processes nor children. Raises OSError."""
        self.files.remove_cgroup(f"{self.root}/{path}")

    def children(self, path: str) -> list[str]:
        """Returns the names of a cgroup's children, or none if the cgroup does not exist.

        Raises CgroupAccessError if they cannot be read, or if there are more than MAX_CHILDREN, since callers need the
        complete list.
        """
        try:
            with os.scandir(f"{self.root}/{path}") as entries:
                directories = (entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                found = list(islice(directories, MAX_CHILDREN + 1))
        except OSError as error:
            if error.errno in _GONE:
                return []
            raise access_error(error, f"{self.root}/{path}", error.strerror or repr(error)) from error
        if len(found) > MAX_CHILDREN:
            raise CgroupAccessError(f"{self.root}/{path}", f"has more than {MAX_CHILDREN} cgroups")
        return found

    def populated(self, path: str) -> bool:
        """Returns True if the cgroup or one of its descendants contains a process, and False if none does or the cgroup
        is gone.

        Raises CgroupAccessError if this cannot be determined, or if the tree is not mounted.
        """
        try:
            return "populated 1" in self.read(path, "cgroup.events").splitlines()
        except (CgroupGoneError, MissingFileError):
            if self.is_mounted():
                return False
            raise CgroupAccessError(self.root, "is not mounted") from None

    def kill(self, path: str) -> None:
        """Kills every process in the cgroup at once. Does nothing if the cgroup does not exist."""
        with contextlib.suppress(CgroupGoneError):
            self.write(path, "cgroup.kill", "1")


class OriginalLimits:
    """Stores the original limits of cgroups, and the values that the backend has written in their place
    (limits.claimed.Note).

    These notes are stored as an attribute of the cgroup, so that the kernel removes them together with the cgroup. Only
    pods' cgroups and the cgroups above them have notes; no container can see these cgroups in its cgroup namespace.
    cgroup2 has supported user attributes since Linux 5.7, and preflight.py requires 5.14. If an attribute still cannot
    be set (because of a security module, or in a tree made by a test), the notes are kept in memory. If the backend
    then restarts, the notes are lost, and the backend raises a limit a second time.
    """

    def __init__(self, root: str, files: NodeFiles | None = None) -> None:
        self._root = root.rstrip("/")
        self._files = files or NodeFiles()
        self._cache: dict[str, Mapping[str, Note]] = {}

    def load(self, path: str) -> Mapping[str, Note]:
        """Returns the notes, keyed by file, or an empty mapping if there are none or they cannot be parsed."""
        if path in self._cache:
            return self._cache[path]
        try:
            # The kernel limits an attribute to 64 KiB, and no container can write to any of these cgroups.
            document = json.loads(os.getxattr(f"{self._root}/{path}", _ATTRIBUTE))
            notes: dict[str, Note] = {file: (own, *ours) for file, (own, *ours) in document.items()}
            if all(limit is None or type(limit) is int for note in notes.values() for limit in note):
                return notes
            return {}
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return {}

    def store(self, path: str, notes: Mapping[str, Note]) -> None:
        """Stores the notes as ``{file: [original limit, written value, ...]}``."""
        try:
            if notes:
                self._files.set_attribute(f"{self._root}/{path}", _ATTRIBUTE, json.dumps(dict(notes)).encode())
            else:
                self._files.remove_attribute(f"{self._root}/{path}", _ATTRIBUTE)
            self._cache.pop(path, None)
        except OSError:
            if notes:
                self._cache[path] = notes
            else:
                self.forget(path)

    def forget(self, path: str) -> None:
        """Discards the in-memory notes for a cgroup that no longer exists."""
        self._cache.pop(path, None)
