# SPDX-License-Identifier: Apache-2.0
"""One frozen settings object from flags, the configuration file and the environment; nothing else reads either."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import yaml
from numa_contract import __version__
from numa_contract.config import Config, parse_config
from numa_contract.errors import MalformedError
from numa_contract.names import NRI_PLUGIN_INDEX, check_uid, state_socket_path

COMMAND: Final = "nri-backend"
# A configuration is a screen of text; whatever is larger was mounted by mistake.
_MAX_FILE: Final = 1 << 20
_INDEX = re.compile(r"\d\d", re.ASCII)

# Flags that win over the file: option, key of the configuration model, help.
_FLAGS: Final = (
    ("run-dir", "run_dir", "directory shared by all instances on the node (lock file, state sockets)"),
    ("cdi-dir", "cdi_dir", "directory of the claims' CDI files"),
    ("nri-socket", "nri_socket", "the runtime's NRI socket"),
    ("cgroup-root", "cgroup_root", "the node's cgroup v2 root"),
    ("log-level", "log_level", "debug, info, warning or error"),
    ("log-format", "log_format", "text (key=value) or json (one object per line)"),
)
# Spelled like this by the two drivers that this one replaces: option, key of the model, key of the file.
_DEPRECATED: Final = (
    ("reserved-cpus", "reserved_cpus", "reservedCPUs"),
    ("cpu-device-mode", "cpu_device_mode", "cpuDeviceMode"),
    ("cpu-device-group-by", "group_by", "groupBy"),
)


class UsageError(ValueError):
    """The command line, the environment or the configuration file cannot be used; the text is one line."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that this process was told."""

    pod_uid: str
    node_name: str
    run_dir: str
    cdi_dir: str
    nri_socket: str
    cgroup_root: str
    host_root: str
    bind: tuple[str, int] | None
    """Host ("" for every address) and TCP port of metrics and probes; None switches them off."""
    plugin_index: str
    reserved_cpus: frozenset[int]
    lazy_pool: bool
    """Running containers without a claim get released CPUs with their next change only."""
    hugepage_guard: bool
    log_level: str
    log_format: str
    notes: tuple[str, ...] = ()
    """What the log should say once about how it was told."""

    @property
    def state_socket(self) -> str:
        """The state socket of the frontend in the same pod."""
        return state_socket_path(self.run_dir, self.pod_uid)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {COMMAND} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        COMMAND,
        description="NRI plugin: enforces what dra-frontend decided on containers.",
        epilog=f"{COMMAND} setup-runtime --help: switches CDI and NRI on in a containerd configuration.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{COMMAND} {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML configuration that both containers read")
    for option, key, text in _FLAGS:
        default = Config.model_fields[key].default
        parser.add_argument(f"--{option}", dest=key, metavar="VALUE", help=f"{text} (default {default})")
    parser.add_argument("--host-root", metavar="DIR", default="/", help="where sys/ and proc/ are read (default /)")
    parser.add_argument("--pod-uid", metavar="UID", help="UID of this pod (default: POD_UID of the environment)")
    parser.add_argument(
        "--bind-address", metavar="HOST:PORT|off", default=":8081", help="metrics and probes (default :8081)"
    )
    parser.add_argument(
        "--plugin-index", metavar="NN", default=NRI_PLUGIN_INDEX, help=f"place among plugins ({NRI_PLUGIN_INDEX})"
    )
    for option, key, file_key in _DEPRECATED:
        parser.add_argument(f"--{option}", dest=key, metavar="VALUE", help=f"deprecated, use {file_key} in the file")
    return parser


def _refuse_duplicate_keys(node: yaml.Node | None, source: str, seen: set[int]) -> None:
    # PyYAML keeps the last of two equal keys without a word; the YAML specification (3.2.1.1) wants them unique.
    if node is None or id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in keys:
                raise UsageError(f"{source}: line {key.start_mark.line + 1}: key {key.value!r} is given twice")
            keys.add(str(key.value))
            _refuse_duplicate_keys(value, source, seen)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_duplicate_keys(item, source, seen)


def parse_yaml(data: bytes, source: str) -> Any:
    """Reads one YAML document with the safe loader, refusing duplicate keys; UsageError names the line."""
    try:
        text = data.decode()
        _refuse_duplicate_keys(yaml.compose(text, Loader=yaml.SafeLoader), source, set())
        return yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UsageError(f"{source}: {line}{error.problem or error.context}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{source}: is no YAML ({' '.join(str(error).split())})") from error


def _read(path: str) -> Config:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > _MAX_FILE:
        raise UsageError(f"{path}: is larger than {_MAX_FILE} bytes, that is no configuration")
    return parse_config(parse_yaml(data, path), path)


def parse_bind_address(text: str) -> tuple[str, int] | None:
    """Reads ``HOST:PORT``, ``:PORT``, ``[IPv6]:PORT`` or ``off``."""
    if text == "off":
        return None
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > 65535 or (":" in host and not bracketed):
        raise UsageError(f"--bind-address {text!r}: must be HOST:PORT, :PORT, [IPv6]:PORT or off")
    return host.strip("[]"), int(port)


def _pod_uid(given: str | None) -> str:
    if not given:
        raise UsageError("the pod's UID is unknown: set POD_UID from metadata.uid (downward API) or give --pod-uid")
    try:
        return check_uid(given)
    except MalformedError as error:
        raise UsageError(f"--pod-uid or POD_UID: {error}") from error


def load_settings(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Settings:
    """Returns what flags, file and environment say, flags first. UsageError or ConfigError when they cannot be used.

    ``--help`` and ``--version`` print and leave through SystemExit, as argparse does.
    """
    environment = os.environ if environment is None else environment
    flags = vars(_parser().parse_args(arguments))
    if not _INDEX.fullmatch(flags["plugin_index"]):
        raise UsageError(f"--plugin-index {flags['plugin_index']!r}: must be two digits")
    config = _read(flags["config"]) if flags["config"] is not None else Config()
    given = {key: flags[key] for _, key, _ in (*_FLAGS, *_DEPRECATED) if flags[key] is not None}
    told = parse_config({Config.model_fields[key].alias or key: value for key, value in given.items()}, "command line")
    config = config.model_copy(update={key: getattr(told, key) for key in given})
    return Settings(
        pod_uid=_pod_uid(flags["pod_uid"] or environment.get("POD_UID")),
        node_name=environment.get("NODE_NAME") or config.hostname_override or os.uname().nodename,
        run_dir=config.run_dir,
        cdi_dir=config.cdi_dir,
        nri_socket=config.nri_socket,
        cgroup_root=config.cgroup_root,
        host_root=flags["host_root"],
        bind=parse_bind_address(flags["bind_address"]),
        plugin_index=flags["plugin_index"],
        reserved_cpus=config.reserved_cpus,
        lazy_pool=config.shared_pool.grow == "lazy",
        hugepage_guard=config.hugepage_guard,
        log_level=config.log_level,
        log_format=config.log_format,
        notes=tuple(
            f"--{option} is deprecated and wins over the file; use {file_key} in the file given by --config"
            for option, key, file_key in _DEPRECATED
            if key in given
        ),
    )
