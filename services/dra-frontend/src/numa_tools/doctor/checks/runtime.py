# SPDX-License-Identifier: Apache-2.0
"""Whether the container runtime lets the driver see containers and hands claims to them. Pure."""

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION
from numa_contract.reports import BackendStatus
from numa_node.runtimes.containerd import UndeterminedError, same_place
from numa_node.runtimes.settings import CRI_O

from numa_tools.doctor.facts import Document
from numa_tools.doctor.model import Check, Finding, Unread, note, problem, unknown
from numa_tools.doctor.runtime_in_use import remedy_of
from numa_tools.doctor.runtime_settings import RuntimeConfig

_LEAST_REQUEST: Final = 2.0
_LEAST_REGISTRATION: Final = 5.0
_OLDEST: Final = {"containerd": (1, 7, 16), "cri-o": (1, 30, 0)}


def _set_up(runtime: RuntimeConfig) -> str:
    """Returns the remedy for a setting of the runtime."""
    if runtime.software == CRI_O:
        return "correct it in a file below /etc/crio/crio.conf.d as docs/runtime.md lists it, and restart CRI-O"
    return "correct it as docs/runtime.md describes (nri-backend setup-runtime prints the drop-in); restart containerd"


_Judge = Callable[..., Iterator[Finding]]


def _unknown_if_undetermined(judge: _Judge) -> _Judge:
    """Makes a check of the runtime's settings unknown if one of them cannot be determined."""

    @wraps(judge)
    def judged(runtime: RuntimeConfig, *more: Any) -> Iterator[Finding]:
        try:
            yield from judge(runtime, *more)
        except UndeterminedError as error:
            yield unknown(Unread(f"{runtime.source}: {error}", remedy_of(runtime)))

    return judged


def _connected(backend: BackendStatus) -> Iterator[Finding]:
    if not backend.synchronized:
        yield problem(
            "The backend is not connected to the container runtime.",
            "containers of claims are not pinned, so no claim is prepared on this node",
            "switch NRI on and set nriSocket to its socket; docs/runtime.md",
        )


@_unknown_if_undetermined
def _switched_on(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("nri"):
        what = f"{runtime.software}'s configuration switches NRI off ({runtime.source})."
        yield problem(what, "the backend sees no container", _set_up(runtime))
    elif not runtime.value("connections"):
        what = f"{runtime.software}'s configuration refuses NRI plugins that connect by themselves ({runtime.source})."
        yield problem(what, "the backend sees no container", _set_up(runtime))


@_unknown_if_undetermined
def _cdi(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("cdi"):
        why = 'pods with claims fail with "unresolvable CDI devices"'
        yield problem(f"{runtime.software}'s configuration switches CDI off ({runtime.source}).", why, _set_up(runtime))


@_unknown_if_undetermined
def _cdi_directories(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    if same_place(config.cdi_dir) not in map(same_place, runtime.value("cdi_directories")):
        why = "claim files are written where the runtime does not look"
        yield problem(f"{runtime.software}'s cdi_spec_dirs do not name {config.cdi_dir}.", why, _set_up(runtime))


@_unknown_if_undetermined
def _socket(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    socket = runtime.value("socket")
    if same_place(socket) != same_place(config.nri_socket):
        why = "the backend waits for a socket that is never made"
        yield problem(
            f"{runtime.software}'s NRI socket is {socket}, nriSocket is {config.nri_socket}.",
            why,
            "make them the same",
        )


@_unknown_if_undetermined
def _hugetlb(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("hugetlb"):
        why = "containers get no hugepage limits from the runtime; the backend writes those of claims itself"
        yield note("containerd 1.7 has its hugetlb controller switched off.", why, _set_up(runtime))


@_unknown_if_undetermined
def _required(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("validator") or NRI_PLUGIN_NAME not in runtime.value("required"):
        yield note(
            "The runtime starts containers while the driver is away.",
            "one with a claim that starts then runs unpinned until the backend is back, about a second",
            "require the plugin (2.2 of containerd, 1.34 of CRI-O): docs/runtime.md; first annotate the pods that the "
            "driver needs",
        )


@_unknown_if_undetermined
def _tolerated(runtime: RuntimeConfig) -> Iterator[Finding]:
    required = runtime.value("validator") and NRI_PLUGIN_NAME in runtime.value("required")
    if required and runtime.value("tolerated") != TOLERATE_MISSING_ANNOTATION:
        key = "nri_validator_tolerate_missing_plugins_annotation"
        yield problem(
            f"The runtime requires the plugin, and no pod can be excepted by {TOLERATE_MISSING_ANNOTATION}.",
            "the driver's own pod needs a container to be created before the plugin is there: it can never start",
            f'set {key if runtime.software == CRI_O else key[14:]} = "{TOLERATE_MISSING_ANNOTATION}"',
        )


def _drop_ins(runtime: RuntimeConfig) -> Iterator[Finding]:
    if runtime.incomplete:
        yield unknown(Unread(f"{runtime.source}: {runtime.incomplete}", remedy_of(runtime)))
    elif runtime.stray:
        yield problem(
            f"{', '.join(runtime.stray)} is imported by no configuration file (read: {', '.join(runtime.files)}).",
            "its settings for NRI and CDI are not in force",
            'add imports = ["/etc/containerd/conf.d/*.toml"] to config.toml, and restart containerd',
        )


def _request_timeout(backend: BackendStatus) -> Iterator[Finding]:
    if backend.request_timeout is not None and backend.request_timeout < _LEAST_REQUEST:
        yield problem(
            f"The runtime waits {backend.request_timeout:g} s for an answer of a plugin (plugin_request_timeout).",
            "a hook that takes longer gets the plugin thrown out, and the container starts without it",
            f"set plugin_request_timeout to {_LEAST_REQUEST:g}s or more",
        )


def _registration_timeout(backend: BackendStatus) -> Iterator[Finding]:
    if backend.registration_timeout is not None and backend.registration_timeout < _LEAST_REGISTRATION:
        yield problem(
            f"The runtime waits {backend.registration_timeout:g} s for a plugin to register.",
            "on a busy node the backend may never get in",
            f"set plugin_registration_timeout to {_LEAST_REGISTRATION:g}s or more",
        )


def _release(node: Document) -> Iterator[Finding]:
    name, version = _software(node)
    oldest = _OLDEST.get(name)
    if oldest and version and version < oldest:
        needed, found = (".".join(map(str, one)) for one in (oldest, version))
        why = "NRI of this release lacks what the backend needs"
        yield problem(f"The container runtime is {name} {found}.", why, f"update it to {name} {needed} or later")


def _software(node: Document) -> tuple[str, tuple[int, ...] | None]:
    """Returns the name and version of the runtime that the kubelet reports."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    name, _, version = str(info.get("containerRuntimeVersion", "")).partition("://")
    numbers = re.match(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version, re.ASCII)
    return name, tuple(map(int, numbers.groups())) if numbers else None


_RUNTIME: Final = ("runtime",)
_WITH_CONFIG: Final = ("runtime", "config")
CHECKS: Final = (
    Check("runtime.nri", "The backend is connected to the runtime by NRI.", ("backend",), _connected),
    Check("runtime.nri-enabled", "The runtime's configuration has NRI on.", _RUNTIME, _switched_on),
    Check("runtime.nri-socket", "NRI's socket is where nriSocket says.", _WITH_CONFIG, _socket),
    Check("runtime.cdi-enabled", "The runtime's configuration has CDI on.", _RUNTIME, _cdi),
    Check("runtime.cdi-directories", "The runtime reads cdiDir.", _WITH_CONFIG, _cdi_directories),
    Check("runtime.hugetlb", "containerd 1.7 has its hugetlb controller on.", _RUNTIME, _hugetlb),
    Check("runtime.required-plugin", "No container starts while the driver is away.", _RUNTIME, _required),
    Check("runtime.tolerated-pods", "Where it is required, annotated pods start without it.", _RUNTIME, _tolerated),
    Check("runtime.drop-in", "Each drop-in about NRI or CDI is imported.", _RUNTIME, _drop_ins),
    Check("runtime.request-timeout", "The runtime gives a hook 2 s or more.", ("backend",), _request_timeout),
    Check("runtime.registration-timeout", "It gives a registration 5 s or more.", ("backend",), _registration_timeout),
    Check("runtime.release", "The runtime is of a release that is known to work.", ("node",), _release),
)
