# SPDX-License-Identifier: Apache-2.0
"""Interface to a host's file tree, and typed reads from it."""

import re
from typing import Protocol

from numa_contract.cpuset import parse_cpu_list
from numa_contract.errors import MalformedError, shown

from dra_frontend.machine.model import DoubtTopic

_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
# The kernel prints masks as 32-bit words, highest first. Only the highest word may be shorter (lib/vsprintf.c, %pb).
_MASK = re.compile(r"[0-9a-f]{1,8}(?:,[0-9a-f]{8}){0,2047}", re.ASCII | re.IGNORECASE)


class HostTreeError(Exception):
    """Raised if a host file cannot be used. The message names the file's path on the host."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class FileTree(Protocol):
    """A read-only file tree. Paths are absolute on the host. Methods raise HostTreeError if a file cannot be read."""

    def read(self, path: str) -> str | None:
        """Returns the text of a file, or None if it does not exist."""

    def names(self, path: str) -> list[str] | None:
        """Returns the sorted names in a directory, or None if it does not exist."""

    def live_page_bytes(self) -> int | None:
        """Returns the base page size if the tree belongs to the running machine, or else None."""


class Reader:
    """Typed reads from a tree. A return value of None means that the file does not exist; any other problem raises
    HostTreeError.
    """

    def __init__(self, tree: FileTree) -> None:
        self._tree = tree
        self.live_page_bytes = tree.live_page_bytes()
        self.doubts: dict[DoubtTopic, str] = {}
        """Doubts about the kernel's files by topic, each with the file and the reason."""
        # Parsed masks, keyed by their text. They are cached because hundreds of CPUs share the same few masks.
        self._masks: dict[str, frozenset[int]] = {}

    def text(self, path: str) -> str | None:
        """Returns the file's text without leading and trailing whitespace, or None if the file does not exist."""
        text = self._tree.read(path)
        return None if text is None else text.strip()

    def names(self, path: str, pattern: str) -> dict[int, str] | None:
        """Returns the entries of a directory that match a pattern, keyed by the number that the pattern's first group
        matches.
        """
        names = self._tree.names(path)
        if names is None:
            return None
        matches = (re.fullmatch(pattern, name, re.ASCII) for name in names)
        return dict(sorted((int(match[1]), match[0]) for match in matches if match))

    def all_names(self, path: str) -> list[str] | None:
        """Returns the entries of a directory."""
        return self._tree.names(path)

    def integer(self, path: str, lowest: int = 0) -> int | None:
        """Returns the single number in a file. A number below ``lowest`` is an error."""
        text = self.text(path)
        if text is None:
            return None
        if not _INTEGER.fullmatch(text) or int(text) < lowest:
            raise HostTreeError(path, f"{shown(text, 40)} is not a number greater than or equal to {lowest}")
        return int(text)

    def cpu_set(self, mask_path: str, list_path: str) -> tuple[frozenset[int], str] | None:
        """Returns a set of IDs and the path of the file that contains it, or None if neither file exists. The mask
        file, which all kernels provide, is preferred; the list file is read only if the tree contains no mask file.
        """
        for path, read in ((mask_path, self.cpu_mask), (list_path, self.cpu_list)):
            cpus = read(path)
            if cpus is not None:
                return cpus, path
        return None

    def cpu_list(self, path: str) -> frozenset[int] | None:
        """Returns a set of IDs in list format."""
        text = self.text(path)
        try:
            return None if text is None else parse_cpu_list(text)
        except MalformedError as error:
            raise HostTreeError(path, f"is not a CPU list: {error.reason}") from error

    def cpu_mask(self, path: str) -> frozenset[int] | None:
        """Returns a set of IDs in mask format."""
        text = self.text(path)
        if text is None:
            return None
        if not _MASK.fullmatch(text):
            raise HostTreeError(path, f"{shown(text, 40)} is not a CPU mask")
        if text not in self._masks:
            bits = int(text.replace(",", ""), 16)
            self._masks[text] = frozenset(bit for bit in range(bits.bit_length()) if bits >> bit & 1)
        return self._masks[text]
