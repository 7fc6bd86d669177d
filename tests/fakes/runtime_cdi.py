# SPDX-License-Identifier: Apache-2.0
"""CDI as implemented by the library that the runtimes use: strict validation of files and their versions, detection of
conflicting devices, and injection into a container.

There are two differences. The directories are read again for every container, while the library waits for inotify
events. Only JSON files and ``env`` and ``mounts`` edits are supported.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes._pb import nri_pb2 as pb
from tests.fakes.runtime_merge import env_of

_VERSIONS = ("0.1.0", "0.2.0", "0.3.0", "0.4.0", "0.5.0", "0.6.0", "0.7.0", "0.8.0", "1.0.0", "1.1.0")
_KIND = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?/[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_.:-]*[A-Za-z0-9])?")
_TOP = {"cdiVersion", "kind", "annotations", "devices", "containerEdits"}
_DEVICE = {"name", "annotations", "containerEdits"}
_EDITS = {"env", "mounts"}
_MOUNT = {"hostPath", "containerPath", "options", "type"}


class UnresolvableError(Exception):
    """A container refers to CDI devices that no valid file contains, so it is not created."""


class InvalidSpecError(ValueError):
    """A CDI file that the library rejects as a whole."""


@dataclass
class CdiScan:
    """The result of one scan of the directories."""

    devices: dict[str, tuple[Path, Mapping[str, Any], Mapping[str, Any]]] = field(default_factory=dict)
    """File, device edits and file edits, by qualified name."""
    errors: dict[Path, str] = field(default_factory=dict)


def inject(container: pb.Container, ids: Sequence[str], directories: Iterable[Path]) -> None:
    """Applies the devices' edits to env and mounts. If a device cannot be resolved, the container is not changed, and
    UnresolvableError is raised.
    """
    if not ids:
        return
    scan = scan_directories(directories)
    wanted = list(dict.fromkeys(ids))
    if missing := [name for name in wanted if name not in scan.devices]:
        raise UnresolvableError(f"unresolvable CDI devices {', '.join(missing)}")
    used: set[Path] = set()
    for name in wanted:
        path, device_edits, file_edits = scan.devices[name]
        if path not in used:
            used.add(path)
            _apply(container, file_edits)
        _apply(container, device_edits)


def scan_directories(directories: Iterable[Path]) -> CdiScan:
    """Reads every ``*.json``. Later directories take precedence; a device that appears twice in one directory is
    dropped.
    """
    scan = CdiScan()
    for directory in directories:
        here: dict[str, tuple[Path, Mapping[str, Any], Mapping[str, Any]]] = {}
        conflicts: set[str] = set()
        for path in sorted(directory.glob("*.json")):
            try:
                document = _load(path)
            except InvalidSpecError as error:
                scan.errors[path] = str(error)
                continue
            for device in document["devices"]:
                name = f"{document['kind']}={device['name']}"
                if name in here:
                    conflicts.add(name)
                    scan.errors[path] = f"conflicting device {name}"
                here[name] = (path, device["containerEdits"], document.get("containerEdits", {}))
        scan.devices |= {name: entry for name, entry in here.items() if name not in conflicts}
        for name in conflicts:
            scan.devices.pop(name, None)
    return scan


def _load(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidSpecError(str(error)) from error
    _keys(document, _TOP, {"cdiVersion", "kind", "devices"}, "file")
    version = str(document["cdiVersion"]).removeprefix("v")
    if version not in _VERSIONS:
        raise InvalidSpecError(f"invalid version {version!r}")
    if not _KIND.fullmatch(document["kind"]):
        raise InvalidSpecError(f"invalid kind {document['kind']!r}")
    if not document["devices"]:
        raise InvalidSpecError("no devices")
    _check_edits(document.get("containerEdits", {}))
    for device in document["devices"]:
        _keys(device, _DEVICE, {"name", "containerEdits"}, "device")
        if not _NAME.fullmatch(device["name"]):
            raise InvalidSpecError(f"invalid device name {device['name']!r}")
        if not any(device["containerEdits"].values()):
            raise InvalidSpecError(f"device {device['name']!r} has empty edits")
        _check_edits(device["containerEdits"])
    if _VERSIONS.index(version) < _VERSIONS.index(needed := _minimum(document)):
        raise InvalidSpecError(f"version {version} is below {needed}, which the content requires")
    return dict(document)


def _check_edits(edits: Mapping[str, Any]) -> None:
    _keys(edits, _EDITS, set(), "containerEdits")
    for entry in edits.get("env", ()):
        if "=" not in entry[1:]:
            raise InvalidSpecError(f"invalid env {entry!r}")
    for mount in edits.get("mounts", ()):
        _keys(mount, _MOUNT, {"hostPath", "containerPath"}, "mount")
        if not mount["hostPath"] or not mount["containerPath"]:
            raise InvalidSpecError("a mount has an empty path")


def _keys(value: Any, known: set[str], needed: set[str], what: str) -> None:
    if not isinstance(value, dict):
        raise InvalidSpecError(f"a {what} must be an object")
    if unknown := set(value) - known:
        raise InvalidSpecError(f"unknown key {min(unknown)!r} in a {what}")
    if missing := needed - set(value):
        raise InvalidSpecError(f"a {what} has no {min(missing)!r}")


def _minimum(document: Mapping[str, Any]) -> str:
    devices = document["devices"]
    edits = [document.get("containerEdits", {}), *(device["containerEdits"] for device in devices)]
    if "annotations" in document or any("annotations" in device for device in devices):
        return "0.6.0"
    if any(device["name"][0].isdigit() for device in devices):
        return "0.5.0"
    if any("type" in mount for edit in edits for mount in edit.get("mounts", ())):
        return "0.4.0"
    return "0.3.0"


def _apply(container: pb.Container, edits: Mapping[str, Any]) -> None:
    env = env_of(container.env) | env_of(edits.get("env", ()))
    del container.env[:]
    container.env.extend(f"{name}={value}" for name, value in env.items())
    for mount in edits.get("mounts", ()):
        kept = [other for other in container.mounts if other.destination != mount["containerPath"]]
        kept.append(
            pb.Mount(
                destination=mount["containerPath"],
                source=mount["hostPath"],
                type=mount.get("type", "bind"),
                options=mount.get("options", ()),
            )
        )
        del container.mounts[:]
        container.mounts.extend(sorted(kept, key=lambda one: one.destination.count("/")))
