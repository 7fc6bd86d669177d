# SPDX-License-Identifier: Apache-2.0
"""Checks that the container runtime is connected to the driver and passes claims to containers. This module does no
I/O.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION
from numa_contract.reports import BackendStatus
from numa_node.runtimes.containerd import UndeterminedError, resolve_var_run
from numa_node.runtimes.settings import CRI_O, MIN_SECONDS, NEEDED_SETTINGS, OLDEST, required_value

from numa_tools.doctor.facts import Document
from numa_tools.doctor.model import Check, Finding, Level, Unread, problem, unknown
from numa_tools.doctor.runtime_in_use import remedy_of, reported_runtime
from numa_tools.doctor.runtime_settings import RuntimeConfig

_FAULTS: Final = {
    "nri": ("NRI is switched off", "the backend does not see any containers"),
    "connections": ("externally started NRI plugins are rejected", "the backend does not see any containers"),
    "cdi": ("CDI is switched off", 'pods with claims fail with "unresolvable CDI devices"'),
    "cdi_directories": (
        "cdi_spec_dirs does not contain {cdi_dir}",
        "claim files are written to a directory that the runtime does not read",
    ),
    "hugetlb": (
        "the hugetlb controller of containerd 1.7 is switched off",
        "the runtime sets no hugepage limits, so containers have only the limits that the backend writes for claims",
    ),
}
"""For each setting: the fault if the setting has the wrong value, and the effect of the fault."""
_HARMLESS: Final = frozenset({"hugetlb"})
_TIMEOUT_EFFECTS: Final = {
    "plugin_request_timeout": "if a hook takes longer, the runtime starts the container without the plugin",
    "plugin_registration_timeout": "on a busy node the backend may never connect",
}
_TOLERATED: Final = ("tolerate_missing_plugins_annotation", "nri_validator_tolerate_missing_plugins_annotation")
"""Keys in containerd's and CRI-O's configuration that name the annotation for pods that may start without the plugin.
"""
_NO_BACKEND: Final = Unread("", "")


def _setting_remedy(runtime: RuntimeConfig, option: str = "") -> str:
    """Returns the remedy for a runtime setting."""
    if runtime.software == CRI_O:
        return "correct it in a file under /etc/crio/crio.conf.d as shown in docs/runtime.md, and restart CRI-O"
    return f"add the drop-in that nri-backend setup-runtime{option} prints, and restart containerd (docs/runtime.md)"


def _connected(backend: BackendStatus) -> Iterator[Finding]:
    if not backend.synchronized:
        yield problem(
            "The backend is not connected to the container runtime.",
            "containers with claims are not pinned, so no claim is prepared on this node",
            "enable NRI and set nriSocket to the path of its socket (docs/runtime.md)",
        )


def _settings(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    wrong, unclear = _compared(runtime, NEEDED_SETTINGS, config)
    if wrong:
        level = Level.NOTE if _HARMLESS.issuperset(wrong) else Level.PROBLEM
        facts = [_FAULTS[name][0].format(cdi_dir=config.cdi_dir) for name in wrong]
        effects = dict.fromkeys(_FAULTS[name][1] for name in wrong)
        what = f"{runtime.software}'s configuration lacks settings that the driver needs ({runtime.source})."
        yield Finding(level, what, "; ".join(effects), _setting_remedy(runtime), tuple(facts))
    yield from unclear


def _compared(runtime: RuntimeConfig, names: Sequence[str], config: Config) -> tuple[list[str], list[Finding]]:
    """Returns the settings that differ from the driver's requirements, and a finding for each setting whose value is
    unknown.
    """
    wrong: list[str] = []
    unclear: dict[str, Finding] = {}
    for name in names:
        try:
            found = runtime.value(name)
        except UndeterminedError as error:
            unclear[str(error)] = unknown(Unread(f"{runtime.source}: {error}", remedy_of(runtime)))
            continue
        if found != required_value(name, found, config.cdi_dir):
            wrong.append(name)
    return wrong, list(unclear.values())


def _socket(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    socket = runtime.value("socket")
    if resolve_var_run(socket) != resolve_var_run(config.nri_socket):
        yield problem(
            f"{runtime.software}'s NRI socket is {socket}, but nriSocket is {config.nri_socket}.",
            "the backend waits for a socket that is never created",
            f"set nriSocket to {socket} in driverConfig, or change the runtime's socket path",
        )


def _required(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("validator") or NRI_PLUGIN_NAME not in runtime.value("required"):
        yield Finding(
            Level.NOTE,
            "The runtime starts containers while the driver is not connected.",
            "if a container with a claim starts during this time, it runs unpinned until the backend has reconnected, "
            "which takes about a second",
            "annotate the pods that must start before the driver, then require the plugin (containerd 2.2, CRI-O "
            f"1.34): {_setting_remedy(runtime, ' --require-plugin')}",
        )
    elif runtime.value("tolerated") != TOLERATE_MISSING_ANNOTATION:
        yield problem(
            f"The runtime requires the plugin, but the annotation {TOLERATE_MISSING_ANNOTATION} does not exempt pods.",
            "the driver's own pod must be created before the plugin exists, so this pod can never start",
            f'set {_TOLERATED[runtime.software == CRI_O]} = "{TOLERATE_MISSING_ANNOTATION}": '
            f"{_setting_remedy(runtime, ' --require-plugin')}",
        )


def _drop_ins(runtime: RuntimeConfig) -> Iterator[Finding]:
    if runtime.incomplete:
        yield unknown(Unread(f"{runtime.source}: {runtime.incomplete}", remedy_of(runtime)))
    elif runtime.stray:
        yield problem(
            f"No configuration file imports {', '.join(runtime.stray)} (files read: {', '.join(runtime.files)}).",
            "settings for NRI and CDI in a file that is not imported have no effect",
            'add imports = ["/etc/containerd/conf.d/*.toml"] to config.toml, and restart containerd',
        )


def _timeouts(backend: BackendStatus) -> Iterator[Finding]:
    given: Mapping[str, float | None] = {
        "plugin_request_timeout": backend.request_timeout,
        "plugin_registration_timeout": backend.registration_timeout,
    }
    short = {key: seconds for key, seconds in given.items() if seconds is not None and seconds < MIN_SECONDS[key]}
    if short:
        needed = " and ".join(f"{key} to {MIN_SECONDS[key]}s" for key in short)
        yield problem(
            "The runtime's timeouts for plugins are shorter than the defaults.",
            "; ".join(_TIMEOUT_EFFECTS[key] for key in short),
            f"set {needed} or more in the runtime's NRI section; for containerd, nri-backend setup-runtime prints a "
            "drop-in with these settings",
            [f"{key} is {seconds:g} s" for key, seconds in short.items()],
        )


def _release(node: Document) -> Iterator[Finding]:
    found = reported_runtime(node, _NO_BACKEND)
    oldest = OLDEST.get(found.software) if found else None
    if found and oldest and found.release and found.release < oldest:
        needed, there = (".".join(map(str, one)) for one in (oldest, found.release))
        why = "this release's NRI lacks functions that the backend needs"
        yield problem(
            f"The container runtime is {found.software} {there}.",
            why,
            f"upgrade it to {found.software} {needed} or later",
        )


def _unless_unclear(judge: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
    """Returns a check whose result is unknown if a runtime setting that the check needs cannot be determined."""

    def run(runtime: RuntimeConfig, *more: Any) -> Iterator[Finding]:
        try:
            yield from judge(runtime, *more)
        except UndeterminedError as error:
            yield unknown(Unread(f"{runtime.source}: {error}", remedy_of(runtime)))

    return run


_WITH_CONFIG: Final = ("runtime", "config")
CHECKS: Final = (
    Check("runtime.nri", "The backend is connected to the runtime through NRI.", ("backend",), _connected),
    Check("runtime.settings", "NRI and CDI are on, and the runtime reads cdiDir.", _WITH_CONFIG, _settings),
    Check(
        "runtime.nri-socket",
        "nriSocket is the path of the runtime's NRI socket.",
        _WITH_CONFIG,
        _unless_unclear(_socket),
    ),
    Check(
        "runtime.required-plugin",
        "No container starts while the driver is not connected, except in annotated pods.",
        ("runtime",),
        _unless_unclear(_required),
    ),
    Check("runtime.drop-in", "Every drop-in for NRI or CDI is imported.", ("runtime",), _drop_ins),
    Check(
        "runtime.timeouts",
        "The runtime allows 2 s for a hook and 5 s for plugin registration.",
        ("backend",),
        _timeouts,
    ),
    Check("runtime.release", "The runtime's release is known to work.", ("node",), _release),
)
