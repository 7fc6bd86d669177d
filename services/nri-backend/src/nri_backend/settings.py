# SPDX-License-Identifier: Apache-2.0
"""Loads the flags, the configuration file and the environment into one frozen object. No other module reads them."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

from numa_contract import __version__
from numa_contract.config import Config
from numa_contract.names import BACKEND_DIRECTORY, NRI_PLUGIN_INDEX, state_socket_path
from numa_node.addresses import node_name, parse_bind_address, pod_uid
from numa_node.config_file import DEPRECATED_FLAGS, load_config

COMMAND: Final = "nri-backend"
_INDEX = re.compile(r"\d\d", re.ASCII)

# Flags that override keys in the configuration file, each with its key and its help text.
_FLAGS: Final = {
    "--run-dir": ("runDir", "directory shared by all instances on the node (state sockets, locks)"),
    "--cdi-dir": ("cdiDir", "directory for the claims' CDI files"),
    "--nri-socket": ("nriSocket", "the runtime's NRI socket"),
    "--cgroup-root": ("cgroupRoot", "the node's cgroup v2 root"),
    "--log-level": ("logLevel", "debug, info, warning or error"),
    "--log-format": ("logFormat", "text (key=value) or json (one object per line)"),
}

_DESCRIPTION: Final = f"""\
NRI plugin that enforces dra-frontend's allocations on containers.

Other commands: "{COMMAND} setup-runtime" checks containerd's configuration (see its --help), and
"{COMMAND} version" prints the version."""
_EPILOG: Final = f"""\
examples:
  # As the chart starts it
  {COMMAND} --config /etc/dra-driver-numa/config.yaml --kernel-root /host
  # The version
  {COMMAND} version

Exit status: 0 after SIGTERM or SIGINT; 1 if the service cannot run on this node; 2 for a usage error or an unusable
configuration."""


class UsageError(ValueError):
    """The command line is invalid. The message is a single line."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags, environment and configuration file of this process."""

    config: Config
    """The configuration that both containers read, with flags applied."""
    pod_uid: str
    node_name: str
    host_root: str
    kernel_root: str
    """Root under which the node's proc/irq and sys/devices/virtual/workqueue are writable. If empty, interrupts are not
    moved."""
    bind: tuple[str, int] | None
    """Host ("" for all addresses) and TCP port for the probes, or None if they are disabled."""
    plugin_index: str
    warnings: tuple[str, ...] = ()
    """Warnings about the settings, to be logged once at startup."""

    @property
    def state_socket(self) -> str:
        """Path of the state socket that belongs to the frontend in the same pod."""
        return state_socket_path(self.config.run_dir, self.pod_uid)

    @property
    def backend_dir(self) -> str:
        """Subdirectory of the run directory that all backends on the node share and write to."""
        return f"{self.config.run_dir}/{BACKEND_DIRECTORY}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {COMMAND} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser for the service's arguments."""
    parser = _Parser(
        COMMAND,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"{COMMAND} {__version__}", help="print the version and exit"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML configuration file for both containers")
    defaults = Config().model_dump()
    for option, (key, text) in _FLAGS.items():
        parser.add_argument(option, dest=key, metavar="VALUE", help=f"{text} (default {defaults[key]})")
    parser.add_argument(
        "--host-root", metavar="DIR", default="/", help="root of the sys/ and proc/ trees to read (default /)"
    )
    text = "root of the writable proc/irq and sys/devices/virtual/workqueue (default: none, interrupts are not moved)"
    parser.add_argument("--kernel-root", metavar="DIR", default="", help=text)
    parser.add_argument("--pod-uid", metavar="UID", help="UID of this pod (default: POD_UID in the environment)")
    parser.add_argument(
        "--bind-address", metavar="HOST:PORT|off", default=":8081", help="address for the probes (default :8081)"
    )
    parser.add_argument(
        "--plugin-index", metavar="NN", default=NRI_PLUGIN_INDEX, help=f"NRI plugin index (default {NRI_PLUGIN_INDEX})"
    )
    for option, key in DEPRECATED_FLAGS.items():
        parser.add_argument(option, dest=key, metavar="VALUE", help=f"deprecated; use {key} in the file")
    return parser


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Loads the settings; flags override the file. Raises UsageError or ConfigError if they are invalid.

    ``--help`` and ``--version`` print and raise SystemExit, as argparse does.
    """
    environment = os.environ if environment is None else environment
    flags = vars(build_parser().parse_args(arguments))
    if not _INDEX.fullmatch(flags["plugin_index"]):
        raise UsageError(f"--plugin-index {flags['plugin_index']!r}: must be two digits")
    keys = [*(key for key, _ in _FLAGS.values()), *DEPRECATED_FLAGS.values()]
    config = load_config(flags["config"], {key: flags[key] for key in keys if flags[key] is not None})
    return Settings(
        config=config,
        pod_uid=pod_uid(flags["pod_uid"] or environment.get("POD_UID")),
        node_name=node_name(environment.get("NODE_NAME"), config.hostname_override),
        host_root=flags["host_root"],
        kernel_root=flags["kernel_root"],
        bind=parse_bind_address(flags["bind_address"]),
        plugin_index=flags["plugin_index"],
        warnings=tuple(
            f"{option} is deprecated and overrides the file; use {key} in the file given by --config"
            for option, key in DEPRECATED_FLAGS.items()
            if flags[key] is not None
        ),
    )
