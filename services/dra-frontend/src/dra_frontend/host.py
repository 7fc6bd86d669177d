# SPDX-License-Identifier: Apache-2.0
"""The host's file tree as the settings want it seen."""

from pathlib import Path

from dra_frontend.config import Settings, read_yaml
from dra_frontend.file_tree import FileTree
from dra_frontend.overlay import OverlayTree, parse_overlay
from dra_frontend.sysfs import HostTree


def open_host(settings: Settings) -> FileTree:
    """Returns the tree; the overlay is read once, here. Raises ConfigError."""
    host, overlay = HostTree(settings.host_root), settings.config.sysfs_overlay
    files = parse_overlay(read_yaml(Path(overlay)), overlay) if overlay else {}
    return OverlayTree(host, files) if files else host
