# SPDX-License-Identifier: Apache-2.0
"""Reads the driver's directories on the node: the run directory, claim files and sockets. Every call blocks."""

import os
from pathlib import Path
from typing import Final

from dra_frontend.claims.journal import Journal
from numa_contract.names import CLAIMS_JOURNAL, DRIVERS, STATE_SOCKET
from numa_node.claim_directory import ClaimDirectory

from numa_tools.doctor.facts import Claims, RunDirectory, Space
from numa_tools.doctor.model import Unread
from numa_tools.doctor.sources.endpoint import is_served

_MAX_ENTRIES: Final = 256


def read_space(path: Path) -> Space:
    """Returns the free space on a directory's file system. Raises OSError."""
    status = os.statvfs(path)
    return Space(str(path), status.f_bavail * status.f_frsize, status.f_favail if status.f_files else None)


def read_run_directory(path: Path) -> RunDirectory | Unread:
    """Returns the state of the run directory."""
    try:
        mode = path.stat().st_mode & 0o7777
        instances = {}
        for entry in sorted(path.iterdir())[:_MAX_ENTRIES]:
            if not entry.is_symlink() and (entry / STATE_SOCKET).is_socket():
                instances[entry.name] = is_served(entry / STATE_SOCKET)
        link = path / STATE_SOCKET
        active = link.readlink().parent.name if link.is_symlink() else None
        journal = Journal(path / CLAIMS_JOURNAL)
        if (path / CLAIMS_JOURNAL).exists():
            journal.read()
        return RunDirectory(str(path), mode, active, instances, journal.problem, read_space(path))
    except OSError as error:
        return Unread(f"{path} cannot be read: {error.strerror}", "mount the run directory, or correct runDir")


def read_claims(path: Path) -> Claims | Unread:
    """Returns the claim files, with any problems."""
    try:
        view = ClaimDirectory(str(path)).refresh()
        return Claims(view.files, view.problems, view.detached, read_space(path))
    except OSError as error:
        return Unread(f"{path} cannot be read: {error.strerror}", "mount the CDI directory, or correct cdiDir")


def read_sockets(kubelet_root: Path) -> dict[str, str] | Unread:
    """Returns, for each driver, the reason why the kubelet cannot reach the driver's socket, or "" if it can."""
    if not (kubelet_root / "plugins_registry").is_dir():
        return Unread(f"{kubelet_root}/plugins_registry is not visible from here", "correct kubeletRootDir")
    found = {}
    for driver in DRIVERS:
        registry = kubelet_root / "plugins_registry" / driver
        try:
            sockets = [one for one in registry.iterdir() if one.is_socket() and not one.name.startswith(".")]
        except OSError as error:
            found[driver] = f"{registry}: {error.strerror}"
            continue
        served = [one for one in sockets if is_served(one)]
        silent = ", ".join(sorted(one.name for one in sockets if one not in served))
        found[driver] = "" if served else f"{registry} has no socket that responds" + (f" ({silent})" if silent else "")
    return found
