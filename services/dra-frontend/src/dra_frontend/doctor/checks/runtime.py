# SPDX-License-Identifier: Apache-2.0
"""Whether the container runtime lets the driver see containers and hands claims to them. Pure."""

import posixpath
import re
from collections.abc import Iterator
from typing import Any, Final, cast

from numa_contract.config import Config
from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION
from numa_contract.reports import BackendStatus

from dra_frontend.doctor.facts import Document, RuntimeConfig
from dra_frontend.doctor.model import Check, Finding, Unread, note, problem, unknown

_NRI: Final = "io.containerd.nri.v1.nri"
_VALIDATOR: Final = (_NRI, "default_validator")
_FORMER: Final = 2
"""The version of containerd 1.7's configuration."""
_CRI_FORMER: Final = "io.containerd.grpc.v1.cri"
_CRI_NOW: Final = "io.containerd.cri.v1.runtime"
_LEAST_REQUEST: Final = 2.0
_LEAST_REGISTRATION: Final = 5.0
_OLDEST: Final = {"containerd": (1, 7, 16), "cri-o": (1, 30, 0)}
_SET_UP: Final = (
    "run nri-backend setup-runtime from its image on the node (docs/runtime.md), add the drop-in, restart containerd"
)


def _cri_value(runtime: RuntimeConfig, key: str) -> Any:
    """Returns what the CRI plugin's section says, under its newer or its former name: files may mix both."""
    said = runtime.value(_CRI_NOW, key)
    return runtime.value(_CRI_FORMER, key) if said is None else said


def _defaults_off(runtime: RuntimeConfig, node: object) -> bool:
    """Whether what is not said is off, as in containerd 1.7; the files' version tells it where the node does not."""
    name, version = ("", None) if isinstance(node, Unread) else _software(cast("Document", node))
    return version < (2, 0, 0) if version and name == "containerd" else runtime.version <= _FORMER


def _same_place(path: str) -> str:
    path = posixpath.normpath(path)
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _connected(backend: BackendStatus) -> Iterator[Finding]:
    if not backend.synchronized:
        yield problem(
            "The backend is not connected to the container runtime.",
            "containers of claims are not pinned, so no claim is prepared on this node",
            "switch NRI on and set nriSocket to its socket; docs/runtime.md",
        )


def _switched_on(runtime: RuntimeConfig | Unread, node: object) -> Iterator[Finding]:
    if isinstance(runtime, Unread):
        yield unknown(runtime)
        return
    off = runtime.value(_NRI, "disable")
    if _NRI in runtime.disabled or off is True or (off is None and _defaults_off(runtime, node)):
        yield problem("containerd's configuration switches NRI off.", "the backend sees no container", _SET_UP)


def _cdi(runtime: RuntimeConfig | Unread, node: object) -> Iterator[Finding]:
    if isinstance(runtime, Unread):
        yield unknown(runtime)
        return
    on = _cri_value(runtime, "enable_cdi")
    if on is False or (on is None and _defaults_off(runtime, node)):
        why = 'pods with claims fail with "unresolvable CDI devices"'
        yield problem("containerd's configuration switches CDI off.", why, _SET_UP)


def _cdi_directories(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    said = _cri_value(runtime, "cdi_spec_dirs")
    known = map(str, said) if isinstance(said, list) else ("/etc/cdi", "/var/run/cdi")
    if _same_place(config.cdi_dir) not in map(_same_place, known):
        why = "claim files are written where the runtime does not look"
        yield problem(f"containerd's cdi_spec_dirs do not name {config.cdi_dir}.", why, _SET_UP)


def _socket(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    said = str(runtime.value(_NRI, "socket_path") or "/var/run/nri/nri.sock")
    if _same_place(said) != _same_place(config.nri_socket):
        why = "the backend waits for a socket that is never made"
        yield problem(
            f"containerd's NRI socket is {said}, nriSocket is {config.nri_socket}.", why, "make them the same"
        )


def _hugetlb(runtime: RuntimeConfig | Unread, node: object) -> Iterator[Finding]:
    if isinstance(runtime, Unread):
        yield unknown(runtime)
    elif _defaults_off(runtime, node) and _cri_value(runtime, "disable_hugetlb_controller") is not False:
        why = "containers get no hugepage limits from the runtime; the backend writes those of claims itself"
        yield note("containerd 1.7 has its hugetlb controller switched off.", why, _SET_UP)


def _required(runtime: RuntimeConfig) -> Iterator[Finding]:
    required = runtime.value(*_VALIDATOR, "required_plugins")
    if not runtime.value(*_VALIDATOR, "enable") or NRI_PLUGIN_NAME not in (required or ()):
        yield note(
            "The runtime starts containers while the driver is away.",
            "one with a claim that starts then runs unpinned until the backend is back, about a second",
            "require the plugin (containerd 2.2): docs/runtime.md, after the pods that the driver needs are annotated",
        )


def _tolerated(runtime: RuntimeConfig) -> Iterator[Finding]:
    required = NRI_PLUGIN_NAME in (runtime.value(*_VALIDATOR, "required_plugins") or ())
    said = runtime.value(*_VALIDATOR, "tolerate_missing_plugins_annotation")
    if required and said != TOLERATE_MISSING_ANNOTATION:
        yield problem(
            f"The runtime requires the plugin, and no pod can be excepted by {TOLERATE_MISSING_ANNOTATION}.",
            "the driver's own pod needs a container to be created before the plugin is there: it can never start",
            f'set tolerate_missing_plugins_annotation = "{TOLERATE_MISSING_ANNOTATION}"',
        )


def _drop_ins(runtime: RuntimeConfig) -> Iterator[Finding]:
    if runtime.stray:
        yield problem(
            f"{', '.join(runtime.stray)} is imported by no configuration file (read: {', '.join(runtime.files)}).",
            "what it says about NRI or CDI is not in force",
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
    """Returns name and version of the runtime, as the kubelet says."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    name, _, version = str(info.get("containerRuntimeVersion", "")).partition("://")
    numbers = re.match(r"v?(\d{1,4})\.(\d{1,4})\.(\d{1,4})", version, re.ASCII)
    return name, tuple(map(int, numbers.groups())) if numbers else None


_WITH_NODE: Final = ("runtime", "node")
CHECKS: Final = (
    Check("runtime.nri", "The backend is connected to the runtime by NRI.", ("backend",), _connected),
    Check("runtime.nri-enabled", "containerd's configuration has NRI on.", _WITH_NODE, _switched_on, always=True),
    Check("runtime.nri-socket", "NRI's socket is where nriSocket says.", ("runtime", "config"), _socket),
    Check("runtime.cdi-enabled", "containerd's configuration has CDI on.", _WITH_NODE, _cdi, always=True),
    Check("runtime.cdi-directories", "The runtime reads cdiDir.", ("runtime", "config"), _cdi_directories),
    Check("runtime.hugetlb", "containerd 1.7 has its hugetlb controller on.", _WITH_NODE, _hugetlb, always=True),
    Check("runtime.required-plugin", "No container starts while the driver is away.", ("runtime",), _required),
    Check("runtime.tolerated-pods", "Where it is required, annotated pods start without it.", ("runtime",), _tolerated),
    Check("runtime.drop-in", "Each drop-in about NRI or CDI is imported.", ("runtime",), _drop_ins),
    Check("runtime.request-timeout", "The runtime gives a hook 2 s or more.", ("backend",), _request_timeout),
    Check("runtime.registration-timeout", "It gives a registration 5 s or more.", ("backend",), _registration_timeout),
    Check("runtime.release", "The runtime is of a release that is known to work.", ("node",), _release),
)
