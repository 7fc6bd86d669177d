# SPDX-License-Identifier: Apache-2.0
"""Whether the container runtime lets the driver see containers and hands claims to them. Pure."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from numa_contract.config import Config
from numa_contract.names import NRI_PLUGIN_NAME, TOLERATE_MISSING_ANNOTATION
from numa_contract.reports import BackendStatus
from numa_node.runtimes.containerd import UndeterminedError, same_place
from numa_node.runtimes.settings import CRI_O, LEAST_SECONDS, NEEDED, OLDEST, required_value

from numa_tools.doctor.facts import Document
from numa_tools.doctor.model import Check, Finding, Level, Unread, problem, unknown
from numa_tools.doctor.runtime_in_use import remedy_of, reported_runtime
from numa_tools.doctor.runtime_settings import RuntimeConfig

_WRONG: Final = {
    "nri": ("NRI is switched off", "the backend sees no container"),
    "connections": ("NRI plugins that connect by themselves are refused", "the backend sees no container"),
    "cdi": ("CDI is switched off", 'pods with claims fail with "unresolvable CDI devices"'),
    "cdi_directories": (
        "cdi_spec_dirs do not name {cdi_dir}",
        "claim files are written where the runtime does not look",
    ),
    "hugetlb": (
        "the hugetlb controller of containerd 1.7 is switched off",
        "containers get no hugepage limits from the runtime; the backend writes those of claims itself",
    ),
}
"""By setting, what is wrong and its effect."""
_HARMLESS: Final = frozenset({"hugetlb"})
_TIMEOUT_EFFECTS: Final = {
    "plugin_request_timeout": "after a hook that takes longer the runtime starts the container without the plugin",
    "plugin_registration_timeout": "on a busy node the backend may never get in",
}
_TOLERATED: Final = ("tolerate_missing_plugins_annotation", "nri_validator_tolerate_missing_plugins_annotation")
"""Key of the annotation in containerd's configuration, and in CRI-O's."""
_NO_BACKEND: Final = Unread("", "")


def _set_up(runtime: RuntimeConfig, option: str = "") -> str:
    """Returns the remedy for a setting of the runtime."""
    if runtime.software == CRI_O:
        return "correct it in a file below /etc/crio/crio.conf.d as docs/runtime.md lists it, and restart CRI-O"
    return f"add the drop-in that nri-backend setup-runtime{option} prints, and restart containerd: docs/runtime.md"


def _connected(backend: BackendStatus) -> Iterator[Finding]:
    if not backend.synchronized:
        yield problem(
            "The backend is not connected to the container runtime.",
            "containers of claims are not pinned, so no claim is prepared on this node",
            "switch NRI on and set nriSocket to its socket; docs/runtime.md",
        )


def _settings(runtime: RuntimeConfig, config: Config) -> Iterator[Finding]:
    wrong, unclear = _compared(runtime, NEEDED, config)
    if wrong:
        level = Level.NOTE if _HARMLESS.issuperset(wrong) else Level.PROBLEM
        facts = [_WRONG[name][0].format(cdi_dir=config.cdi_dir) for name in wrong]
        effects = dict.fromkeys(_WRONG[name][1] for name in wrong)
        what = f"{runtime.software}'s configuration lacks settings that the driver needs ({runtime.source})."
        yield Finding(level, what, "; ".join(effects), _set_up(runtime), tuple(facts))
    yield from unclear


def _compared(runtime: RuntimeConfig, names: Sequence[str], config: Config) -> tuple[list[str], list[Finding]]:
    """Returns the settings that differ from what the driver requires, and a finding for those that are not known."""
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
    if same_place(socket) != same_place(config.nri_socket):
        yield problem(
            f"{runtime.software}'s NRI socket is {socket}, nriSocket is {config.nri_socket}.",
            "the backend waits for a socket that is never made",
            f"set nriSocket to {socket} in driverConfig, or change the runtime's",
        )


def _required(runtime: RuntimeConfig) -> Iterator[Finding]:
    if not runtime.value("validator") or NRI_PLUGIN_NAME not in runtime.value("required"):
        yield Finding(
            Level.NOTE,
            "The runtime starts containers while the driver is away.",
            "one with a claim that starts then runs unpinned until the backend is back, about a second",
            "annotate the pods that must start before the driver, then require the plugin (containerd 2.2, CRI-O "
            f"1.34): {_set_up(runtime, ' --require-plugin')}",
        )
    elif runtime.value("tolerated") != TOLERATE_MISSING_ANNOTATION:
        yield problem(
            f"The runtime requires the plugin, and no pod can be excepted by {TOLERATE_MISSING_ANNOTATION}.",
            "the driver's own pod needs a container to be created before the plugin is there: it can never start",
            f'set {_TOLERATED[runtime.software == CRI_O]} = "{TOLERATE_MISSING_ANNOTATION}": '
            f"{_set_up(runtime, ' --require-plugin')}",
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


def _timeouts(backend: BackendStatus) -> Iterator[Finding]:
    given: Mapping[str, float | None] = {
        "plugin_request_timeout": backend.request_timeout,
        "plugin_registration_timeout": backend.registration_timeout,
    }
    short = {key: seconds for key, seconds in given.items() if seconds is not None and seconds < LEAST_SECONDS[key]}
    if short:
        needed = " and ".join(f"{key} to {LEAST_SECONDS[key]}s" for key in short)
        yield problem(
            "The runtime waits for plugins less long than by default.",
            "; ".join(_TIMEOUT_EFFECTS[key] for key in short),
            f"set {needed} or more in the runtime's NRI section; nri-backend setup-runtime prints it for containerd",
            [f"{key} is {seconds:g} s" for key, seconds in short.items()],
        )


def _release(node: Document) -> Iterator[Finding]:
    found = reported_runtime(node, _NO_BACKEND)
    oldest = OLDEST.get(found.software) if found else None
    if found and oldest and found.release and found.release < oldest:
        needed, there = (".".join(map(str, one)) for one in (oldest, found.release))
        why = "NRI of this release lacks what the backend needs"
        yield problem(
            f"The container runtime is {found.software} {there}.",
            why,
            f"update it to {found.software} {needed} or later",
        )


def _unless_unclear(judge: Callable[..., Iterator[Finding]]) -> Callable[..., Iterator[Finding]]:
    """Returns a check that is unknown if a setting of the runtime that it needs cannot be determined."""

    def run(runtime: RuntimeConfig, *more: Any) -> Iterator[Finding]:
        try:
            yield from judge(runtime, *more)
        except UndeterminedError as error:
            yield unknown(Unread(f"{runtime.source}: {error}", remedy_of(runtime)))

    return run


_WITH_CONFIG: Final = ("runtime", "config")
CHECKS: Final = (
    Check("runtime.nri", "The backend is connected to the runtime by NRI.", ("backend",), _connected),
    Check("runtime.settings", "NRI and CDI are on, and the runtime reads cdiDir.", _WITH_CONFIG, _settings),
    Check("runtime.nri-socket", "NRI's socket is where nriSocket says.", _WITH_CONFIG, _unless_unclear(_socket)),
    Check(
        "runtime.required-plugin",
        "No container starts while the driver is away, except those of annotated pods.",
        ("runtime",),
        _unless_unclear(_required),
    ),
    Check("runtime.drop-in", "Each drop-in about NRI or CDI is imported.", ("runtime",), _drop_ins),
    Check("runtime.timeouts", "The runtime gives a hook 2 s, and a registration 5 s.", ("backend",), _timeouts),
    Check("runtime.release", "The runtime is of a release that is known to work.", ("node",), _release),
)
