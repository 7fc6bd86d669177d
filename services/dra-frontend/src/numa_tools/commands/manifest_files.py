# SPDX-License-Identifier: Apache-2.0
"""Reads manifests from files and standard input. Checks their size before parsing them."""

import sys
from collections.abc import Sequence

from numa_contract.config import ConfigError
from numa_node.config_file import MAX_FILE, parse_yaml_documents

from numa_tools.scheduling.manifests import Manifests
from numa_tools.scheduling.reading import ManifestError


def read_manifests(files: Sequence[str]) -> Manifests:
    """Reads the files. ``-`` stands for standard input. Raises a ConfigError that names the file and the object."""
    found = Manifests()
    for file in files:
        add_manifests(found, _read(file), "standard input" if file == "-" else file)
    return found


def add_manifests(found: Manifests, data: bytes, source: str) -> None:
    """Adds the documents in ``data``, the contents of the file ``source``, to ``found``. Raises ConfigError."""
    if len(data) > MAX_FILE:
        raise ConfigError(source, [f"is larger than {MAX_FILE} bytes; omit objects that are not simulated"])
    for document in parse_yaml_documents(data, source):
        try:
            found.add(document)
        except ManifestError as error:
            raise ConfigError(source, [str(error)]) from error


def _read(file: str) -> bytes:
    try:
        if file == "-":
            return sys.stdin.buffer.read(MAX_FILE + 1)
        with open(file, "rb") as opened:  # noqa: PTH123 - a pipe is a file, too
            return opened.read(MAX_FILE + 1)
    except OSError as error:
        raise ConfigError(file, [f"cannot be read: {error.strerror}"]) from error
