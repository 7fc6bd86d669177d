# SPDX-License-Identifier: Apache-2.0
"""The settings of one run, resolved once: flags over the configuration file over defaults. Reads the environment."""

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from numa_contract.config import Config, ConfigError, parse_config
from numa_contract.errors import MalformedError
from numa_contract.names import check_uid
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, ScalarNode

from dra_frontend.machine.file_tree import FileTree
from dra_frontend.machine.overlay import OverlayTree, parse_overlay
from dra_frontend.node.host_tree import HostTree

# Flags that set a key of the configuration file; the seeds' spellings are kept and win over the file.
_CONFIG_FLAGS = {
    "--cpu-device-mode": "cpuDeviceMode",
    "--cpu-device-group-by": "groupBy",
    "--group-by": "groupBy",
    "--reserved-cpus": "reservedCPUs",
    "--hostname-override": "hostnameOverride",
    "--kubeconfig": "kubeconfig",
    "--kubelet-root-dir": "kubeletRootDir",
    "--cdi-dir": "cdiDir",
    "--run-dir": "runDir",
    "--log-level": "logLevel",
    "--log-format": "logFormat",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """What this process was told to be."""

    config: Config
    node_name: str
    pod_uid: str
    host_root: str
    bind_address: str
    """``host:port`` of the metrics listener, or ``off``."""


class _StrictLoader(yaml.SafeLoader):
    """A safe loader that refuses a key given twice: YAML would silently keep the last one."""

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        # The keys as they are written: what `<<` brings is laid beneath them later, and may be overridden.
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, ScalarNode) and key.value in seen:
                raise ComposerError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return node


def read_yaml(path: Path) -> Any:
    """Returns the value of a YAML file; raises ConfigError naming the file and the place."""
    try:
        return yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)  # noqa: S506 - a SafeLoader with one rule more
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), [f"cannot be read: {getattr(error, 'strerror', None) or error}"]) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(str(path), [f"is no valid YAML: {' '.join(str(error).split())}"]) from error


def load_config(path: str | None, overrides: dict[str, Any] | None = None) -> Config:
    """Returns the configuration of a file (None: the defaults) with flags laid over it. Raises ConfigError."""
    document = read_yaml(Path(path)) if path else {}
    if overrides and isinstance(document, dict | None):
        document = {**(document or {}), **overrides}
    return parse_config(document, path or "flags")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the flags of the service itself."""
    parser.add_argument("--config", metavar="FILE", help="configuration file (YAML)")
    for flag, key in _CONFIG_FLAGS.items():
        parser.add_argument(flag, dest=key, metavar="VALUE", help=f"overrides {key} of the configuration file")
    parser.add_argument(
        "--expose-pcie-roots",
        dest="exposePCIeRoots",
        type=_flag,
        nargs="?",
        const=True,
        metavar="BOOL",
        help="overrides exposePCIeRoots of the configuration file",
    )
    parser.add_argument("--node", metavar="NAME", help="node name (default: NODE_NAME, hostnameOverride, host name)")
    parser.add_argument("--pod-uid", metavar="UID", help="UID of this pod (default: POD_UID)")
    parser.add_argument("--host-root", metavar="DIR", default="/", help="where the host's sys and proc are mounted")
    parser.add_argument("--bind-address", metavar="HOST:PORT", default=":8080", help="metrics listener, or 'off'")


def _flag(text: str) -> bool:
    # The spellings of Go's strconv.ParseBool: existing arguments of the CPU peer must go on to work.
    values = {"1": True, "t": True, "true": True, "0": False, "f": False, "false": False}
    if text.lower() not in values:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def _bind_address(text: str) -> str:
    port = text.rpartition(":")[2]
    if text != "off" and (":" not in text or not (port.isascii() and port.isdigit() and int(port) < 65536)):
        raise ConfigError("flags", [f"--bind-address: {text!r} is neither host:port, such as ':8080', nor 'off'"])
    return text


def _pod_uid(text: str) -> str:
    try:
        return check_uid(text)
    except MalformedError as error:
        raise ConfigError("flags", [f"--pod-uid or POD_UID: {error}"]) from error


def _node_name(given: str | None, config: Config) -> str:
    name = given or os.environ.get("NODE_NAME") or config.hostname_override or socket.gethostname()
    return name.strip().lower()


def load_settings(arguments: argparse.Namespace) -> Settings:
    """Resolves flags, file and environment; raises ConfigError."""
    flags = {key: getattr(arguments, key) for key in {*_CONFIG_FLAGS.values(), "exposePCIeRoots"}}
    config = load_config(arguments.config, {key: value for key, value in flags.items() if value is not None})
    return Settings(
        config=config,
        node_name=_node_name(arguments.node, config),
        pod_uid=_pod_uid(arguments.pod_uid or os.environ.get("POD_UID") or f"local-{os.getpid()}"),
        host_root=arguments.host_root,
        bind_address=_bind_address(arguments.bind_address),
    )


def open_host(settings: Settings) -> FileTree:
    """Returns the host's file tree as the settings want it seen; the overlay is read once, here. Raises ConfigError."""
    host, overlay = HostTree(settings.host_root), settings.config.sysfs_overlay
    files = parse_overlay(read_yaml(Path(overlay)), overlay) if overlay else {}
    return OverlayTree(host, files) if files else host
