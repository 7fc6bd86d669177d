# SPDX-License-Identifier: Apache-2.0
"""Stores the original affinities of moved interrupts or slices in a file, so that they survive restarts. Every call
blocks.
"""

import contextlib
import os
from typing import Final

from numa_node.files import read_regular, replace_file
from pydantic import TypeAdapter, ValidationError

from nri_backend.host_isolation.plan import OriginalAffinity, Originals

_MAX_BYTES: Final = 16 << 20
_ORIGINALS: Final = TypeAdapter(dict[str, OriginalAffinity])


class OriginalsFile:
    """Stores the originals of either interrupts or slices. The file exists only while there are originals to
    restore.
    """

    def __init__(self, path: str, *, read_only: bool = False) -> None:
        self._path = path
        self._read_only = read_only
        self._cached_stamp: tuple[int, int] | None = None
        """Inode and modification time of the file whose content is cached. Parsing thousands of CPU sets takes 0.1 s.
        """
        self._cached: Originals = {}

    def load(self) -> Originals:
        """Returns the stored originals. Raises OSError or ValueError if the file cannot be read."""
        try:
            status = os.stat(self._path)  # noqa: PTH116
            if self._cached_stamp != (stamp := (status.st_ino, status.st_mtime_ns)):
                self._cached = _ORIGINALS.validate_json(read_regular(self._path, _MAX_BYTES))
                self._cached_stamp = stamp
            return self._cached
        except FileNotFoundError:
            return {}
        except ValidationError as error:
            raise ValueError(
                f"{self._path} is damaged; restore the listed affinities by hand, then remove it"
            ) from error

    def save(self, originals: Originals) -> None:
        """Replaces the file, or removes it if there are no originals.

        Raises OSError if that fails; the file is then unchanged. Does nothing if ``read_only`` is set.
        """
        if self._read_only:
            return
        if originals:
            replace_file(self._path, _ORIGINALS.dump_json(dict(originals), by_alias=True), 0o600)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)  # noqa: PTH108
