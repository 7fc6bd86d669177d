# SPDX-License-Identifier: Apache-2.0
"""Reads a kubelet's configuration files under a host root, within limits and without following links that lead out of
the root.
"""

import os
import stat
from collections.abc import Iterator
from typing import Any, Final

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import host_path
from numa_contract.config import ConfigError
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_node.config_file import parse_yaml
from numa_node.files import read_regular

from numa_tools.doctor.kubelet_config import API_VERSION, KIND

_MAX_BYTES: Final = 256 << 10
"""Maximum size of a file. A KubeletConfiguration fills about one screen."""
_MAX_TOTAL_BYTES: Final = 4 << 20
"""Maximum total size of all files."""
_MAX_DROP_INS: Final = 256
_MAX_ENTRIES: Final = 4096
_MAX_LEVELS: Final = 16
_SUFFIX: Final = ".conf"


class KubeletConfigError(Exception):
    """Raised if a part of the configuration could not be read. The message names the part and the reason."""


class HostFiles:
    """Reads the node's files. Every call blocks."""

    def __init__(self, host_root: str) -> None:
        self.root = host_root
        self._left = _MAX_TOTAL_BYTES
        self.changed: dict[str, float] = {}
        """Modification time of each file and directory that was read, in seconds since the epoch."""

    def host_path(self, path: str) -> str:
        """Resolves a path on the node to a path on this host. Raises KubeletConfigError."""
        try:
            return host_path(self.root, path)
        except HostTreeError as error:
            raise KubeletConfigError(str(error)) from error

    def data(self, path: str, max_bytes: int = _MAX_BYTES) -> bytes | None:
        """Returns a file's content, or None if the file does not exist. Raises KubeletConfigError."""
        try:
            real = self.host_path(path)
            data = read_regular(real, min(max_bytes, self._left), follow=True)
            self._left -= len(data)
            self._remember(path, real)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise KubeletConfigError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise KubeletConfigError(f"{path[:200]!r} is not a path: {error}") from error
        return data

    def text(self, path: str, max_bytes: int = _MAX_BYTES) -> str | None:
        """Returns a file's text, or None if the file does not exist. Raises KubeletConfigError."""
        data = self.data(path, max_bytes)
        try:
            return None if data is None else data.decode()
        except UnicodeDecodeError as error:
            raise KubeletConfigError(f"{path} is not UTF-8: {error.reason}") from error

    def names(self, path: str, max_entries: int = _MAX_ENTRIES) -> list[str]:
        """Returns the names in a directory in the order of Go's os.ReadDir. Raises KubeletConfigError.

        Returns no names if the directory does not exist.
        """
        try:
            found = os.listdir(self.host_path(path))  # noqa: PTH208 - names are all that is needed
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise KubeletConfigError(f"{path} cannot be listed: {error.strerror}") from error
        if len(found) > max_entries:
            raise KubeletConfigError(f"{path} has more than {max_entries} entries")
        return sorted(found, key=os.fsencode)

    def document(self, path: str) -> Any:
        """Returns a YAML or JSON file's value, or None if the file does not exist. Raises KubeletConfigError."""
        data = self.data(path)
        if data is None:
            return None
        try:
            if data.lstrip()[:1] == b"{":
                return _json_or_yaml(data, path)
            return parse_yaml(data, path)
        except ConfigError as error:
            raise KubeletConfigError(str(error)) from error

    def drop_ins(self, directory: str) -> Iterator[str]:
        """Yields the drop-ins in ``--config-dir`` in the kubelet's order. Raises KubeletConfigError.

        The kubelet walks the directory with filepath.WalkDir, which visits the entries in lexical order and descends
        into each directory when it reaches it. The walk does not follow symbolic links to directories, even if
        ``--config-dir`` itself is such a link. The kubelet reads every other entry whose name ends in .conf, and does
        not start if the drop-in directory is missing.
        """
        mode = self._mode(directory)
        if mode is None:
            raise KubeletConfigError(f"{directory} does not exist, so the kubelet will not start")
        if stat.S_ISDIR(mode):
            yield from self._walk(directory, _MAX_LEVELS, [_MAX_ENTRIES])

    def _walk(self, directory: str, levels: int, left: list[int]) -> Iterator[str]:
        if not levels:
            raise KubeletConfigError(f"{directory} is nested more than {_MAX_LEVELS} directories deep")
        names = self.names(directory)
        self._remember(directory, self.host_path(directory))
        for name in names:
            left[0] -= 1
            if left[0] < 0:
                raise KubeletConfigError(f"{directory}: the drop-in directory has more than {_MAX_ENTRIES} entries")
            path = f"{directory}/{name}"
            if stat.S_ISDIR(self._mode(path) or 0):
                yield from self._walk(path, levels - 1, left)
            elif name.endswith(_SUFFIX):
                yield path

    def _mode(self, path: str) -> int | None:
        """Returns an entry's mode without following a symbolic link."""
        above, _, name = path.rstrip("/").rpartition("/")
        try:
            return os.lstat(f"{self.host_path(above or '/')}/{name}").st_mode
        except (OSError, ValueError):
            return None

    def _remember(self, path: str, real: str) -> None:
        self.changed[path] = os.stat(real).st_mtime  # noqa: PTH116 - a path that was just opened


def read_drop_ins(files: HostFiles, directory: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the path and content of each drop-in.

    Raises KubeletConfigError if a drop-in cannot be read or the kubelet would reject it.
    """
    for number, path in enumerate(files.drop_ins(directory)):
        if number >= _MAX_DROP_INS:
            raise KubeletConfigError(f"{directory} has more than {_MAX_DROP_INS} drop-ins")
        document = files.document(path)
        if not isinstance(document, dict) or (document.get("apiVersion"), document.get("kind")) != (API_VERSION, KIND):
            raise KubeletConfigError(
                f"{path} is not a {KIND} with apiVersion {API_VERSION}, so the kubelet will not start with it"
            )
        yield path, document


def _json_or_yaml(data: bytes, path: str) -> Any:
    """Parses a string that begins with a brace and is therefore JSON or flow-style YAML."""
    try:
        return parse_json(data, _MAX_BYTES, "file", path)
    except MalformedError:
        return parse_yaml(data, path)
