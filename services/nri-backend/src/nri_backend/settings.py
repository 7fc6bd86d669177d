# SPDX-License-Identifier: Apache-2.0
"""One frozen settings object from flags, the configuration file and the environment; nothing else reads either."""

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

# Flags that win over the file: key of the file, help.
_FLAGS: Final = {
    "--run-dir": ("runDir", "directory shared by all instances on the node (state sockets, locks)"),
    "--cdi-dir": ("cdiDir", "directory of the claims' CDI files"),
    "--nri-socket": ("nriSocket", "the runtime's NRI socket"),
    "--cgroup-root": ("cgroupRoot", "the node's cgroup v2 root"),
    "--log-level": ("logLevel", "debug, info, warning or error"),
    "--log-format": ("logFormat", "text (key=value) or json (one object per line)"),
}


class UsageError(ValueError):
    """The command line, the environment or the configuration file cannot be used; the text is one line."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Flags, environment and configuration file of this process."""

    config: Config
    """What both containers read, with the flags that win over it."""
    pod_uid: str
    node_name: str
    host_root: str
    kernel_root: str
    """Where the node's proc/irq and sys/devices/virtual/workqueue can be written; empty: interrupts are left alone."""
    bind: tuple[str, int] | None
    """Host ("" for every address) and TCP port of the probes; None switches them off."""
    plugin_index: str
    notes: tuple[str, ...] = ()
    """Warnings about the settings, logged once at the start."""

    @property
    def state_socket(self) -> str:
        """The state socket of the frontend in the same pod."""
        return state_socket_path(self.config.run_dir, self.pod_uid)

    @property
    def own_dir(self) -> str:
        """The part of the run directory that backends write; all of them on the node share it."""
        return f"{self.config.run_dir}/{BACKEND_DIRECTORY}"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {COMMAND} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        COMMAND,
        description="NRI plugin: enforces what dra-frontend decided on containers.",
        epilog=f"Other commands: {COMMAND} setup-runtime checks the configuration of containerd (see its --help), "
        f"{COMMAND} version.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration that both containers read")
    defaults = Config().model_dump()
    for option, (key, text) in _FLAGS.items():
        parser.add_argument(option, dest=key, metavar="VALUE", help=f"{text} (default {defaults[key]})")
    parser.add_argument("--host-root", metavar="DIR", default="/", help="where sys/ and proc/ are read (default /)")
    text = "where proc/irq and sys/devices/virtual/workqueue are written (default: nowhere, interrupts stay)"
    parser.add_argument("--kernel-root", metavar="DIR", default="", help=text)
    parser.add_argument("--pod-uid", metavar="UID", help="UID of this pod (default: POD_UID of the environment)")
    parser.add_argument("--bind-address", metavar="HOST:PORT|off", default=":8081", help="probes (default :8081)")
    parser.add_argument(
        "--plugin-index", metavar="NN", default=NRI_PLUGIN_INDEX, help=f"place among plugins ({NRI_PLUGIN_INDEX})"
    )
    for option, key in DEPRECATED_FLAGS.items():
        parser.add_argument(option, dest=key, metavar="VALUE", help=f"deprecated, use {key} in the file")
    return parser


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Returns what flags, file and environment say, flags first. UsageError or ConfigError when they cannot be used.

    ``--help`` and ``--version`` print and leave through SystemExit, as argparse does.
    """
    environment = os.environ if environment is None else environment
    flags = vars(_parser().parse_args(arguments))
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
        notes=tuple(
            f"{option} is deprecated and wins over the file; use {key} in the file given by --config"
            for option, key in DEPRECATED_FLAGS.items()
            if flags[key] is not None
        ),
    )
