# SPDX-License-Identifier: Apache-2.0
"""Reads a kubelet's configuration from configz, a given file, an archive, or the node's files. Every call blocks.

The node's files are not visible in the driver's containers unless they are mounted there. ``--host-root`` is the path
at which the node's root file system is mounted.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from numa_contract.config import ConfigError
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_node.config_file import MAX_FILE, parse_yaml, read_yaml
from numa_node.files import read_regular

from numa_tools.bundle.archive import KUBELET
from numa_tools.doctor.facts import Document, KubeletConfig
from numa_tools.doctor.kubelet_command import Command, FlagError, parse_command
from numa_tools.doctor.kubelet_config import (
    API_VERSION,
    KIND,
    SETTINGS,
    Part,
    Reading,
    kubelet_config,
    kubelet_of_reading,
    misspelled,
    unarchived,
)
from numa_tools.doctor.kubelet_paths import DISTRIBUTION_PATHS, ROOT, KubeletPaths
from numa_tools.doctor.model import Unread
from numa_tools.doctor.sources.kubelet_files import HostFiles, KubeletConfigError, read_drop_ins
from numa_tools.doctor.sources.kubelet_launch import find_launch
from numa_tools.doctor.sources.processes import START_SLACK_SECONDS

_STATES: Final = {"cpu": "cpu_manager_state", "memory": "memory_manager_state"}
_MAX_BYTES: Final = 1 << 20
_ASK: Final = (
    "run kubectl numa doctor {node}; or pass the output of kubectl get --raw /api/v1/nodes/{node}/proxy/configz, which "
    "is the whole configuration, with --kubelet-config"
)


def read_given_kubelet(path: str, node: str) -> KubeletConfig:
    """Reads a KubeletConfiguration or a ``configz`` response. The path ``-`` stands for standard input. Raises
    ConfigError.
    """
    # Opening /dev/stdin fails if the runtime passes a socket as standard input.
    document = parse_yaml(sys.stdin.buffer.read(MAX_FILE), "standard input") if path == "-" else read_yaml(path)
    try:
        if isinstance(document, dict) and "kubeletconfig" in document:
            return kubelet_config(document["kubeletconfig"], path)
        why = f"{path} is only one file, and the kubelet's drop-ins and flags may override its settings"
        found = kubelet_config(document, path)
    except MalformedError as error:
        raise ConfigError(path, [str(error)]) from error
    reading = Reading((_part(found.source, document),), incomplete=why)
    return kubelet_of_reading(reading, _ASK.format(node=node)) or found


def choose_kubelet(host_root: str, root: str, node: str, answer: Document | Unread) -> KubeletConfig | Unread:
    """Returns the kubelet's configuration from its configz response, or else from an archive, or else from files.

    ``root`` is the kubelet's root directory, and ``answer`` is the API server's response to the configz request.
    """
    if not isinstance(answer, Unread):
        try:
            return kubelet_config(answer, "configz")
        except (ConfigError, MalformedError) as error:
            answer = Unread(f"the kubelet's configz cannot be read: {error}", _ASK.format(node=node))
    if (found := read_archived_kubelet(host_root) or read_kubelet(host_root, root, node)) is not None:
        return found
    why = f"the kubelet's configuration is not visible from here: there is no {root}/config.yaml, and {answer.why}"
    return Unread(why, _ASK.format(node=node) if answer.intentional else answer.remedy, answer.intentional)


def read_archived_kubelet(host_root: str) -> KubeletConfig | None:
    """Returns the configuration from a ``gather`` archive, or None if the host root is not an archive."""
    path = Path(host_root, KUBELET)
    try:
        data = read_regular(str(path), _MAX_BYTES)
        return unarchived(parse_json(data, _MAX_BYTES, "kubelet's configuration", path.name))
    except (OSError, ConfigError, MalformedError):
        return None


def read_kubelet(host_root: str, root: str, node: str) -> KubeletConfig | None:
    """Returns the configuration from a node's files, or None if the node has no such files."""
    return kubelet_of_reading(read_files(host_root, root), _ASK.format(node=node))


def read_files(host_root: str, root: str) -> Reading:
    """Returns all parts of the configuration that are in a node's files."""
    files = HostFiles(host_root)
    try:
        launch = find_launch(files, root)
        command = parse_command(launch.arguments if launch else ())
    except (KubeletConfigError, FlagError) as error:
        return Reading(running=_states(files, root), incomplete=str(error))
    incomplete = "the kubelet's command line is not visible" if launch is None else launch.unclear
    documents, parts = HostFiles(host_root), []
    try:
        for part in _parts(documents, command, root, is_complete=not incomplete):
            parts.append(part)  # noqa: PERF402 - the parts before an error are kept
    except KubeletConfigError as error:
        incomplete = str(error)
    if launch and command.settings:
        parts.append(Part(launch.origin, command.settings, is_command_line=True))
    if launch and launch.started:
        changed = documents.changed | {path: time for path, time in files.changed.items() if path == launch.origin}
        late = [path for path, time in changed.items() if time > launch.started + START_SLACK_SECONDS]
        incomplete = f"{late[0]} was changed after the kubelet started" if late else incomplete
    return Reading(tuple(parts), _states(files, command.root_dir or root), incomplete)


def _parts(files: HostFiles, command: Command, root: str, *, is_complete: bool) -> Iterator[Part]:
    """Yields the ``--config`` file and the drop-ins. Raises KubeletConfigError."""
    paths = KubeletPaths(command.config, command.config_dir)
    if not is_complete and not paths.config:
        likely = _likely_paths(files, root)
        paths = KubeletPaths(likely.config, paths.drop_ins or likely.drop_ins)
    for path in filter(None, (paths.config, paths.drop_ins)):
        if not path.startswith("/"):
            raise KubeletConfigError(f"{path} is relative to the kubelet's working directory")
    if paths.config:
        yield _part(paths.config, _base(files, paths.config, is_complete=is_complete))
    for path, document in read_drop_ins(files, paths.drop_ins) if paths.drop_ins else ():
        yield _part(path, document)
        if misspelled_keys := misspelled(document):
            raise KubeletConfigError(f"{path} has {misspelled_keys[0]!r}, which may hide the correctly spelled setting")


def _part(path: str, document: dict[str, Any]) -> Part:
    return Part(path, {key: document[key] for key in SETTINGS if key in document})


def _base(files: HostFiles, path: str, *, is_complete: bool) -> dict[str, Any]:
    document = files.document(path)
    if document is None:
        raise KubeletConfigError(f"{path}, which the kubelet's command line specifies, is not visible")
    if not _is_configuration(document, bare=not is_complete):
        raise KubeletConfigError(
            f"{path} is not a {KIND} with apiVersion {API_VERSION}, so the kubelet will not start with it"
        )
    settings: dict[str, Any] = document
    return settings


def _is_configuration(document: object, *, bare: bool) -> bool:
    """Returns True for a KubeletConfiguration. If ``bare`` is true, apiVersion and kind may be missing."""
    if not isinstance(document, dict):
        return False
    return (document.get("apiVersion", API_VERSION if bare else ""), document.get("kind", KIND if bare else "")) == (
        API_VERSION,
        KIND,
    )


def _likely_paths(files: HostFiles, root: str) -> KubeletPaths:
    """Returns the paths for the distribution whose files exist. Raises KubeletConfigError if there are files from
    several distributions.
    """
    own = f"{root}/config.yaml"
    candidates = [replace(one, config=one.config.replace(ROOT, root)) for one in DISTRIBUTION_PATHS]
    found = [one for one in candidates if _may_be_configuration(files, one.config, bare=one.config == own)]
    if len(found) > 1:
        raise KubeletConfigError(f"any of {', '.join(one.config for one in found)} may be the kubelet's configuration")
    drop_ins = [one.drop_ins for one in found or candidates if one.drop_ins and files.names(one.drop_ins)]
    return KubeletPaths(found[0].config if found else "", drop_ins[0] if len(drop_ins) == 1 else "")


def _may_be_configuration(files: HostFiles, path: str, *, bare: bool) -> bool:
    """Returns True for a KubeletConfiguration, and also for an unreadable file, so that the caller reads it later and
    reports the error.
    """
    try:
        return _is_configuration(files.document(path), bare=bare)
    except KubeletConfigError:
        return True


def _states(files: HostFiles, root: str) -> dict[str, str]:
    """Returns each manager's policy in use, from its state file."""
    found: dict[str, str] = {}
    for manager, name in _STATES.items():
        try:
            data = files.data(f"{root}/{name}", _MAX_BYTES) or b""
            policy = parse_json(data, _MAX_BYTES, "kubelet state", name)["policyName"]
        except (KubeletConfigError, MalformedError, TypeError, KeyError):
            continue
        if isinstance(policy, str) and policy:
            found[manager] = policy
    return found
