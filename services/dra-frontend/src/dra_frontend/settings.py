# SPDX-License-Identifier: Apache-2.0
"""Resolves the settings for a run: flags override the configuration file, which overrides the defaults. Also reads the
environment.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from numa_contract.config import Config
from numa_node.addresses import node_name, parse_bind_address, pod_uid
from numa_node.config_file import DEPRECATED_FLAGS, load_config, read_yaml

from dra_frontend.machine.file_tree import FileTree
from dra_frontend.machine.overlay import OverlayTree, parse_overlay
from dra_frontend.node.host_tree import HostTree

# Flags, each of which overrides one key in the configuration file.
_CONFIG_FLAGS = {
    **DEPRECATED_FLAGS,
    "--group-by": "groupBy",
    "--hostname-override": "hostnameOverride",
    "--kubeconfig": "kubeconfig",
    "--kubelet-root-dir": "kubeletRootDir",
    "--cdi-dir": "cdiDir",
    "--run-dir": "runDir",
    "--log-level": "logLevel",
    "--log-format": "logFormat",
}

_MOUNTED_CONFIG = "/etc/dra-driver-numa/config.yaml"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of this process, from flags, environment and configuration file."""

    config: Config
    node_name: str
    pod_uid: str
    host_root: str
    bind: tuple[str, int] | None
    """Host ("" for all addresses) and TCP port for metrics and probes, or None to disable both."""
    in_pod: bool = False
    """True if this process runs in a container started by a kubelet."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the service's flags."""
    parser.add_argument("--config", metavar="FILE", help="configuration file (YAML)")
    for flag, key in _CONFIG_FLAGS.items():
        text = (
            f"deprecated, use {key} in the configuration file"
            if flag in DEPRECATED_FLAGS
            else f"overrides {key} in the configuration file"
        )
        parser.add_argument(flag, dest=key, metavar="VALUE", help=text)
    parser.add_argument(
        "--expose-pcie-roots",
        dest="exposePCIeRoots",
        type=_parse_flag,
        nargs="?",
        const=True,
        metavar="BOOL",
        help="overrides exposePCIeRoots in the configuration file",
    )
    parser.add_argument("--node", metavar="NAME", help="node name (default: NODE_NAME, hostnameOverride, host name)")
    parser.add_argument("--pod-uid", metavar="UID", help="UID of this pod (default: POD_UID)")
    parser.add_argument(
        "--host-root", metavar="DIR", default="/", help="directory under which the host's /sys and /proc are mounted"
    )
    parser.add_argument(
        "--bind-address", metavar="HOST:PORT", default=":8080", help="address for metrics and probes, or 'off'"
    )


def _parse_flag(text: str) -> bool:
    # The spellings accepted by Go's strconv.ParseBool, so that existing arguments of dra-driver-cpu keep working.
    values = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def load_settings(arguments: argparse.Namespace) -> Settings:
    """Resolves flags, file and environment. Without --config, uses the file mounted by the chart. Raises
    ConfigError if the file cannot be read or a setting is invalid.
    """
    if arguments.config is None and Path(_MOUNTED_CONFIG).exists():
        arguments.config = _MOUNTED_CONFIG
    flags = {key: getattr(arguments, key) for key in {*_CONFIG_FLAGS.values(), "exposePCIeRoots"}}
    config = load_config(arguments.config, {key: value for key, value in flags.items() if value is not None})
    return Settings(
        config=config,
        node_name=node_name(arguments.node, os.environ.get("NODE_NAME"), config.hostname_override),
        pod_uid=pod_uid(arguments.pod_uid or os.environ.get("POD_UID") or f"local-{os.getpid()}"),
        host_root=arguments.host_root,
        bind=parse_bind_address(arguments.bind_address),
        # The kubelet sets this variable in every container. Processes outside containers do not have it.
        in_pod="KUBERNETES_SERVICE_HOST" in os.environ,
    )


def open_host(settings: Settings) -> FileTree:
    """Returns the host's file tree with the configured overlay. Reads the overlay only once. Raises ConfigError if the
    overlay cannot be read or is invalid.
    """
    host, overlay = HostTree(settings.host_root), settings.config.sysfs_overlay
    files = parse_overlay(read_yaml(overlay), overlay) if overlay else {}
    return OverlayTree(host, files) if files else host
