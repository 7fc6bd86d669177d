# SPDX-License-Identifier: Apache-2.0
"""What can be moved, as the one who moves it sees it; and what was moved, kept on disk. Every call blocks."""

import contextlib
import os
from collections.abc import Collection, Mapping
from typing import Final, Protocol

from numa_node.files import read_regular, replace_file
from pydantic import TypeAdapter, ValidationError

from nri_backend.quiet.moves import Cpus, Moved, Store

_MOST_BYTES: Final = 16 << 20
_STORE: Final = TypeAdapter(dict[str, Moved])


class Things(Protocol):
    """Things of one kind, each with a set of CPUs."""

    def present(self, taken: Cpus, moved: Collection[str]) -> Mapping[str, Cpus | None]:
        """Returns what things say: those that were moved, and at least those others that are on taken CPUs.

        None of those that are there and do not tell just now.
        """

    def write(self, name: str, cpus: Cpus) -> bool:
        """Gives a thing another set; tells whether it could. OSError where that is no property of the thing."""

    def staying(self, names: Collection[str], taken: Cpus) -> int:
        """Returns how many of those that could not be moved are really at work on taken CPUs."""


class StoreFile:
    """What was moved; absent where nothing was."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._stamp: tuple[int, int] | None = None
        """Of the file as it was last read; the content is kept, since thousands of sets take 0.1 s to read."""
        self._content: Store = {}

    def load(self) -> Store:
        """Returns what was kept. OSError or ValueError if it cannot be read."""
        try:
            status = os.stat(self._path)  # noqa: PTH116
            if self._stamp != (stamp := (status.st_ino, status.st_mtime_ns)):
                self._content, self._stamp = _STORE.validate_json(read_regular(self._path, _MOST_BYTES)), stamp
            return self._content
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            raise ValueError(f"{self._path} is damaged; remove it when what it kept is put right by hand") from error

    def save(self, moved: Store) -> None:
        """Keeps it. OSError leaves all as it was."""
        if moved:
            replace_file(self._path, _STORE.dump_json(dict(moved)), 0o600)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
