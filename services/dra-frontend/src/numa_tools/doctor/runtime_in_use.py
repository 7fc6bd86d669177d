# SPDX-License-Identifier: Apache-2.0
"""Determines which of a node's container runtimes the kubelet uses. This module does no I/O.

A node may have the files of several runtimes: Docker's containerd alongside k3s's own, or leftovers from a removed
distribution. The evidence, strongest first, is: the runtime that the kubelet reports to the API server or that the
backend is connected to; the running processes; the socket in the kubelet's configuration; and the existing sockets. A
containerd whose CRI service is disabled is ruled out. If several runtimes remain, the results of the checks are
unknown, and the finding names all of these runtimes.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from numa_contract.reports import BackendStatus
from numa_node.runtimes.containerd import CRI_OF_1, Documents, Dump, Release, resolve_var_run
from numa_node.runtimes.settings import CONTAINERD, CRI_O

from numa_tools.doctor.facts import KubeletConfig
from numa_tools.doctor.model import Unread
from numa_tools.doctor.runtime_settings import (
    CriDisabledError,
    RuntimeConfig,
    containerd_settings,
    crio_settings,
    printed_settings,
    unclear,
)

CRIO_STATUS: Final = "crio status config"
_K3S: Final = ("k3s", "RKE2")
_REPORTED: Final = re.compile(r"([\w-]+)(?:://|\s+|\Z)(?:v?(\d{1,4})\.(\d{1,4})\.(\d{1,4}))?(\S*)", re.ASCII)
# First containerd 2 release whose dump includes settings for which the configuration files use the 1.7 names.
_COMPLETE_DUMPS: Final = (2, 0, 6)
# For each dump version: the first containerd release that writes it, and the first later release that no longer writes
# it.
_DUMP_OF: Final = {2: ((1, 7), (2, 0)), 3: ((2, 0), (2, 3)), 4: ((2, 3), (3, 0))}


@dataclass(frozen=True, slots=True)
class RuntimeInstallation:
    """A container runtime, as installed by a distribution."""

    owner: str
    software: str
    config: str
    """Path to the runtime's configuration file."""
    socket: str
    """Socket on which the runtime serves the kubelet, or "" if unknown."""
    program: str = "containerd"
    """Program on the node that prints the settings in use."""

    @property
    def command(self) -> str:
        """Returns the command that prints the settings in use."""
        if self.software == CRI_O:
            return CRIO_STATUS
        option = "" if self.config == _PLAIN.config else f" --config {self.config}"
        return f"{self.program}{option} config dump"


_PLAIN: Final = RuntimeInstallation(
    CONTAINERD, CONTAINERD, "/etc/containerd/config.toml", "/run/containerd/containerd.sock"
)
_K3S_SOCKET: Final = "/run/k3s/containerd/containerd.sock"
INSTALLATIONS: Final = (
    _PLAIN,
    RuntimeInstallation(
        "k3s",
        CONTAINERD,
        "/var/lib/rancher/k3s/agent/etc/containerd/config.toml",
        _K3S_SOCKET,
        "/var/lib/rancher/k3s/data/current/bin/containerd",
    ),
    RuntimeInstallation(
        "RKE2",
        CONTAINERD,
        "/var/lib/rancher/rke2/agent/etc/containerd/config.toml",
        _K3S_SOCKET,
        "/var/lib/rancher/rke2/bin/containerd",
    ),
    RuntimeInstallation(
        "k0s", CONTAINERD, "/etc/k0s/containerd.toml", "/run/k0s/containerd.sock", "/var/lib/k0s/bin/containerd"
    ),
    RuntimeInstallation(
        "MicroK8s",
        CONTAINERD,
        "/var/snap/microk8s/current/args/containerd.toml",
        "/var/snap/microk8s/common/run/containerd.sock",
        "/snap/microk8s/current/bin/containerd",
    ),
    RuntimeInstallation("Talos", CONTAINERD, "/etc/cri/containerd.toml", "/run/containerd/containerd.sock"),
    RuntimeInstallation(CRI_O, CRI_O, "/etc/crio/crio.conf", "/run/crio/crio.sock", "crio"),
)
"""Distributions and their paths, as stated in their documentation and systemd units."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A runtime whose files are on the node."""

    installation: RuntimeInstallation
    documents: Documents
    """The configuration files, in the order in which the runtime reads them."""
    fault: str = ""
    """Reason why these files do not determine the settings, or "" if they do."""
    remedy: str = ""
    """Remedy for the fault, or "" if printing the settings resolves it."""
    runs: bool = False
    stray: tuple[str, ...] = ()
    """Drop-ins that mention NRI or CDI but are not imported by any file."""

    @property
    def path(self) -> str:
        """Path of the main configuration file."""
        return self.documents[0][0] if self.documents else self.installation.config


@dataclass(frozen=True, slots=True)
class FoundRuntimes:
    """A node's runtimes, as found in its files and processes."""

    candidates: tuple[Candidate, ...]
    sockets: frozenset[str] = frozenset()
    """Sockets that exist on the node, among those of the known distributions and of the candidates."""
    endpoint: str = ""
    """The kubelet's runtime endpoint, with or without ``unix://``, or "" if it is unknown."""


@dataclass(frozen=True, slots=True)
class ReportedRuntime:
    """A runtime as reported by the kubelet or by the runtime itself."""

    software: str
    """CONTAINERD, CRI_O, or the name of an unsupported runtime."""
    release: Release | None
    """Release, or None if it cannot be compared with other releases."""
    suffix: str
    """Text that follows the release, such as ``-k3s1``."""


def reported_runtime(node: Mapping[str, Any] | Unread, backend: BackendStatus | Unread) -> ReportedRuntime | None:
    """Returns the runtime in the Node's status, or else the one that the backend is connected to, or else None."""
    texts = []
    if not isinstance(node, Unread):
        info = (node.get("status") or {}).get("nodeInfo") or {}
        texts.append(str(info.get("containerRuntimeVersion", "")))
    if not isinstance(backend, Unread):
        texts.append(backend.runtime)
    found = next(filter(None, (_REPORTED.match(text) for text in texts)), None)
    if found is None:
        return None
    software = {"containerd": CONTAINERD, "cri-o": CRI_O, "crio": CRI_O}.get(found[1].lower(), found[1])
    release = tuple(int(found[number]) for number in (2, 3, 4)) if found[2] else None
    return ReportedRuntime(software, release, found[5])


def with_endpoint(found: FoundRuntimes, kubelet: KubeletConfig | Unread) -> FoundRuntimes:
    """Returns ``found`` with the endpoint from the kubelet's configuration, which also reflects the kubelet's flags.

    If that endpoint is unknown or not set, the endpoint from a running kubelet's command line is kept.
    """
    configured = "" if isinstance(kubelet, Unread) else kubelet.runtime_endpoint
    return replace(found, endpoint=configured or found.endpoint)


def runtime_in_use(
    found: FoundRuntimes, reported: ReportedRuntime | None, not_visible_remedy: str
) -> RuntimeConfig | Unread:
    """Returns the settings of the kubelet's runtime. ``not_visible_remedy`` is the remedy if the runtime's files are
    not visible.
    """
    left = _kubelet_candidates(found, reported)
    if not left:
        return _none_visible(found, reported, not_visible_remedy)
    useful = [one for one in left if _has_cri(one, reported)]
    if not useful:
        files = " and ".join(one.path for one in left)
        return Unread(
            f"containerd's CRI service is disabled in {files}, so the kubelet cannot be using this configuration",
            _dump_remedy(_PLAIN.command),
        )
    if len(useful) > 1:
        owners = " and ".join(f"{one.installation.owner} ({one.path})" for one in useful)
        return Unread(
            f"which runtime the kubelet uses cannot be determined: the node has files from {owners}",
            " or ".join(dict.fromkeys(_dump_remedy(one.installation.command) for one in useful)),
        )
    return _config_of(useful[0], reported)


def given_runtime(text: str, reported: ReportedRuntime | None) -> RuntimeConfig | Unread:
    """Parses settings that a runtime printed. Raises RuntimeConfigError for any other output."""
    software, settings, dump = printed_settings(text)
    command = CRIO_STATUS if software == CRI_O else "containerd config dump"
    if reported is not None and reported.software != software:
        right = CRIO_STATUS if reported.software == CRI_O else "containerd config dump"
        return Unread(f"the given output is from {software}; the kubelet uses {reported.software}", _dump_remedy(right))
    if dump is not None and (doubt := _dump_doubt(dump, reported.release if reported else None)):
        return doubt
    return RuntimeConfig(
        software,
        f"the output of {command}",
        command,
        settings,
        reported.release if reported else None,
        incomplete="the output cannot show whether there are drop-ins that the runtime does not read",
        remedy=_NO_DUMP,
    )


def _dump_doubt(dump: Dump, release: Release | None) -> Unread | None:
    """Returns the reason why a dump may not show the settings of the kubelet's containerd, or None if there is no such
    reason.
    """
    first, end = _DUMP_OF[dump.version]
    if dump.is_disabled(dump.cri) or dump.is_disabled(CRI_OF_1):
        why = "the given dump is from a containerd without the CRI service, which the kubelet cannot use"
        return Unread(why, f"pass the configuration of the kubelet's containerd with --config; or {_NO_DUMP}")
    if release is not None and not first <= release < end:
        why = f"the given dump is not from containerd {'.'.join(map(str, release))}, which the kubelet uses"
        return Unread(why, f"dump the configuration with the containerd that the kubelet uses; or {_NO_DUMP}")
    if dump.of_2_0 and (release is None or release < _COMPLETE_DUMPS):
        why = "a dump from containerd 2.0.0 to 2.0.5 lacks settings for which the files use the 1.7 names"
        return Unread(why, f"update containerd; or {_NO_DUMP}")
    return None


_NO_DUMP: Final = "run the doctor with --host-root, without --runtime-config (docs/doctor.md)"


def _dump_remedy(command: str) -> str:
    return (
        f"on the node as root, run {command} >FILE, and pass FILE to the doctor with --runtime-config (docs/doctor.md)"
    )


def remedy_of(runtime: RuntimeConfig) -> str:
    """Returns the remedy for settings that can be determined neither from the runtime's files nor from its output."""
    return runtime.remedy or _dump_remedy(runtime.command)


def _none_visible(found: FoundRuntimes, reported: ReportedRuntime | None, not_visible_remedy: str) -> Unread:
    installations = [one for one in INSTALLATIONS if _may_match(one, reported)]
    if not installations:
        why = (
            f"the kubelet uses {reported.software if reported else ''}, whose configuration this command does not read"
        )
        return Unread(why, "docs/runtime.md lists the settings that the driver needs")
    others = [one.path for one in found.candidates]
    why = f"the existing files belong to another runtime: {', '.join(others)}"
    commands = dict.fromkeys(one.command for one in installations if one.owner in (CONTAINERD, CRI_O, *_K3S))
    if reported is None:
        commands = dict.fromkeys((_PLAIN.command, CRIO_STATUS))
    return Unread(
        "the configuration of the container runtime that the kubelet uses is not visible from here: "
        + (why if others else f"there is no {', '.join(one.config for one in installations)}"),
        f"on the node as root, run {' or '.join(commands)}, and pass the output with --runtime-config "
        "(docs/doctor.md); "
        f"or {not_visible_remedy}",
    )


def _may_match(installation: RuntimeInstallation, reported: ReportedRuntime | None) -> bool:
    """Returns True if the reported runtime may be the one that a distribution installs.

    Only the containerd of k3s and RKE2 has a version suffix.
    """
    return reported is None or (
        installation.software == reported.software and (installation.owner in _K3S) == ("k3s" in reported.suffix)
    )


def _kubelet_candidates(found: FoundRuntimes, reported: ReportedRuntime | None) -> list[Candidate]:
    """Returns the candidates that the evidence does not rule out."""
    left = [one for one in found.candidates if _may_match(one.installation, reported)]
    if any(one.runs for one in found.candidates):
        left = [one for one in left if one.runs]
    sockets = [_path_of(found.endpoint)] if found.endpoint else found.sockets
    if sockets:
        serving = set(map(resolve_var_run, sockets))
        left = [
            one for one in left if not one.installation.socket or resolve_var_run(one.installation.socket) in serving
        ]
    return left


def _path_of(endpoint: str) -> str:
    """Returns an endpoint's socket path. Accepts a URL or a bare path, as the kubelet does."""
    return f"/{endpoint.removeprefix('unix:').lstrip('/')}"


def _has_cri(candidate: Candidate, reported: ReportedRuntime | None) -> bool:
    try:
        _settings(candidate, reported)
    except CriDisabledError:
        return False
    return True


def _settings(candidate: Candidate, reported: ReportedRuntime | None) -> Mapping[str, Any]:
    release = reported.release if reported else None
    if candidate.installation.software == CRI_O:
        found: Mapping[str, Any] = crio_settings(candidate.documents, release)
    else:
        found = containerd_settings(candidate.documents, release)
    return unclear(candidate.fault) if candidate.fault else found


def _config_of(candidate: Candidate, reported: ReportedRuntime | None) -> RuntimeConfig:
    installation = candidate.installation
    return RuntimeConfig(
        software=installation.software,
        source=candidate.path,
        command=installation.command,
        settings=_settings(candidate, reported),
        release=reported.release if reported else None,
        files=tuple(path for path, _ in candidate.documents),
        stray=candidate.stray,
        incomplete=candidate.fault,
        remedy=candidate.remedy,
    )
