# SPDX-License-Identifier: Apache-2.0
"""Finds the kubelet's command line from its process, systemd unit or distribution. Every call blocks."""

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree

from numa_tools.doctor.kubelet_paths import (
    ENVIRONMENT_FILES,
    MICROK8S_ARGUMENTS,
    RANCHER_DISTRIBUTIONS,
    ROOT,
    UNIT_DIRECTORIES,
    VARIABLES,
    RancherDistribution,
)
from numa_tools.doctor.sources.kubelet_files import HostFiles, KubeletConfigError
from numa_tools.doctor.sources.processes import find_processes
from numa_tools.doctor.unit_files import UnitError, arguments_of, parse_environment, parse_service, words

_MAX_UNIT_BYTES: Final = 256 << 10
_MAX_DROP_INS: Final = 64
_PROGRAMS: Final = ("kubelet", "kubelite")
"""Names of programs that contain the kubelet. MicroK8s uses the second name."""
_UNIT: Final = "kubelet.service"


@dataclass(frozen=True, slots=True)
class Launch:
    """Arguments that the kubelet runs with or would be started with."""

    origin: str
    arguments: tuple[str, ...]
    unclear: str = ""
    """Reason why some arguments may be missing, or "" if the arguments are complete."""
    started: float | None = None
    """The process's start time, in seconds since the epoch."""


class _UnitCommand(NamedTuple):
    """The command line and environment with which a unit starts a program."""

    arguments: tuple[str, ...]
    variables: frozenset[str]
    """Names of the program's environment variables."""


def find_launch(files: HostFiles, root: str) -> Launch | None:
    """Returns the command line, or None if there is no trace of a kubelet on the node. Raises KubeletConfigError if the
    command line is ambiguous.

    If a kubelet is running, its command line is returned. Otherwise, the command line is that of the installed unit or
    distribution. If several are found, for example because an earlier installation left files behind, the command line
    is ambiguous. If none is visible, or if the unit runs a wrapper script, the flags are read from environment files,
    which may contain only some of the flags.
    """
    if running := list(_running(files)):
        if len({one.arguments for one in running}) > 1:
            raise KubeletConfigError(f"several kubelets are running: {', '.join(one.origin for one in running)}")
        return running[0]
    installed = [one for one in (_from_unit(files), _from_microk8s(files), *_from_rancher_distributions(files)) if one]
    if len(installed) > 1:
        raise KubeletConfigError(f"several kubelets are installed: {', '.join(one.origin for one in installed)}")
    # If the unit runs a wrapper script, the kubelet's arguments are unknown, but the environment files still contain
    # the flags.
    if installed and not (installed[0].unclear and not installed[0].arguments):
        return installed[0]
    return _from_environment_files(files, root, installed[0].unclear if installed else "")


def _running(files: HostFiles) -> Iterator[Launch]:
    """Yields the running kubelets: root processes in the host's PID namespace, in which ordinary pods do not run.

    Raises KubeletConfigError.
    """
    try:
        found = [one for one in find_processes(HostTree(files.root), _PROGRAMS) if one.is_root and one.namespaces == 1]
    except HostTreeError as error:
        raise KubeletConfigError(str(error)) from error
    for process in found:
        origin = f"the command line of process {process.pid}"
        if process.program == "kubelet":
            unclear = "" if process.command else f"{origin} cannot be read"
            yield Launch(origin, process.command[1:], unclear, process.started)
            continue
        given = [one.partition("=")[2] for one in process.command if one.startswith("--kubelet-args-file=")]
        launch = _from_microk8s(files, given[0]) if given else None
        if launch is None:
            yield Launch(origin, (), f"{origin}: its --kubelet-args-file is not visible")
        else:
            yield replace(launch, started=process.started)


def _from_unit(files: HostFiles) -> Launch | None:
    origin = f"the unit {_UNIT}"
    try:
        found = _unit_arguments(files, _UNIT, "kubelet")
    except (UnitError, KubeletConfigError) as error:
        return Launch(origin, (), f"{origin}: {error}")
    return None if found is None else Launch(origin, found.arguments)


def _unit_arguments(files: HostFiles, unit: str, program: str) -> _UnitCommand | None:
    """Returns the arguments with which a unit starts a program, or None if the unit does not exist. Raises UnitError
    and KubeletConfigError.
    """
    texts = _unit_texts(files, unit)
    if not texts:
        return None
    service = parse_service(texts, unit)
    environment: dict[str, str] = {}
    for file in service.files:
        path = file.removeprefix("-")
        text = files.text(path, _MAX_UNIT_BYTES)
        if text is None and not file.startswith("-"):
            raise UnitError(f"its environment file {path} is not visible")
        environment |= parse_environment(text or "")
    variables = {*environment, *(one.partition("=")[0] for one in service.variables)}
    return _UnitCommand(arguments_of(service, environment, program), frozenset(variables))


def _unit_texts(files: HostFiles, unit: str) -> list[str]:
    """Returns the contents of a unit's fragment and drop-ins in systemd's order, or nothing if there is no fragment."""
    fragment = next(
        (text for directory in UNIT_DIRECTORIES if (text := _unit_text(files, f"{directory}/{unit}"))), None
    )
    if fragment is None:
        return []
    drop_ins: dict[str, str] = {}
    for directory in UNIT_DIRECTORIES:
        for name in files.names(f"{directory}/{unit}.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{directory}/{unit}.d/{name}")
    if len(drop_ins) > _MAX_DROP_INS:
        raise KubeletConfigError(f"{unit} has more than {_MAX_DROP_INS} drop-ins")
    return [fragment, *(_unit_text(files, drop_ins[name]) or "" for name in sorted(drop_ins))]


def _unit_text(files: HostFiles, path: str) -> str | None:
    return files.text(path, _MAX_UNIT_BYTES)


def _from_microk8s(files: HostFiles, path: str = MICROK8S_ARGUMENTS) -> Launch | None:
    """Returns the arguments from MicroK8s' file, which contains one argument per line, with the snap's variables
    replaced.
    """
    try:
        text = files.text(path, _MAX_UNIT_BYTES)
    except KubeletConfigError as error:
        return Launch(path, (), str(error))
    if text is None:
        return None
    variables = {"SNAP_DATA": posixpath.dirname(posixpath.dirname(path)), "SNAP_COMMON": "/var/snap/microk8s/common"}
    lines = (line.strip() for line in text.splitlines())
    kept = [one for one in lines if one and not one.startswith("#")]
    for name, value in variables.items():
        kept = [one.replace(f"${{{name}}}", value).replace(f"${name}", value) for one in kept]
    try:
        return Launch(path, tuple(word for one in kept for word in words(one)))
    except UnitError as error:
        return Launch(path, (), f"{path}: {error}")


def _from_rancher_distributions(files: HostFiles) -> list[Launch]:
    found = []
    for rancher in RANCHER_DISTRIBUTIONS:
        try:
            launch = _from_rancher_distribution(files, rancher)
        except (UnitError, KubeletConfigError) as error:
            launch = Launch(rancher.name, (), f"{rancher.name}: {error}")
        if launch:
            found.append(launch)
    return found


def _from_rancher_distribution(files: HostFiles, rancher: RancherDistribution) -> Launch | None:
    """Returns the kubelet's arguments under k3s or RKE2. Raises UnitError and KubeletConfigError.

    The ``kubelet-arg`` lists from the configuration file and the command line are concatenated. The distribution copies
    the ``--config`` file and the ``--config-dir`` directory into its own drop-in directory, the only one that the
    kubelet reads (extractConfigArgs in pkg/daemons/agent/agent.go of k3s).
    """
    started = next((one for unit in rancher.units if (one := _unit_arguments(files, unit, rancher.name))), None)
    given = started.arguments if started else ()
    settings = _rancher_settings(files, rancher, given)
    kubelet_arguments = [*_listed(settings.get("kubelet-arg")), *_values(given, "--kubelet-arg")]
    data = (_values(given, "--data-dir", "-d") or _listed(settings.get("data-dir")) or [rancher.data])[-1]
    own = f"{data}/agent/etc/kubelet.conf.d"
    has_own = bool(files.names(own))
    if started is None and not settings and not has_own:
        return None
    arguments = [f"--{one.removeprefix('--')}" for one in kubelet_arguments]
    if has_own:
        arguments = [one for one in arguments if one.partition("=")[0] not in ("--config", "--config-dir")]
        arguments.append(f"--config-dir={own}")
    unclear = "" if started else f"no {rancher.name} unit is visible, and its command line may contain more flags"
    if started and started.variables & {f"{rancher.name.upper()}_{name}" for name in ("CONFIG_FILE", "DATA_DIR")}:
        unclear = f"an environment variable relocates {rancher.name}'s files"
    if any(one.partition("=")[0].endswith(("+", "-")) for one in arguments):
        unclear = f"{rancher.name} is given a kubelet-arg that extends the value of another argument"
    return Launch(f"the configuration of {rancher.name}", tuple(arguments), unclear)


def _rancher_settings(files: HostFiles, rancher: RancherDistribution, given: tuple[str, ...]) -> Mapping[str, Any]:
    """Returns the configuration file merged with its drop-ins. Later values replace earlier ones; ``KEY+`` appends."""
    path = ([*_values(given, "--config", "-c"), rancher.configuration])[0]
    directory = f"{path}.d"
    drop_ins = [f"{directory}/{name}" for name in files.names(directory) if name.endswith((".yaml", ".yml"))]
    settings: dict[str, Any] = {}
    for one in [path, *drop_ins[:_MAX_DROP_INS]]:
        document = files.document(one)
        for key, value in document.items() if isinstance(document, dict) else ():
            name = str(key).removesuffix("+")
            added = _listed(settings.get(name)) if str(key).endswith("+") else []
            settings[name] = [*added, *_listed(value)]
    return settings


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _values(arguments: tuple[str, ...], *names: str) -> list[str]:
    """Returns all values of a flag on a command line. Accepts ``--flag value`` and ``--flag=value``."""
    found = []
    for index, one in enumerate(arguments):
        name, equals, value = one.partition("=")
        if name in names:
            found.append(value if equals else "".join(arguments[index + 1 : index + 2]))
    return found


def _from_environment_files(files: HostFiles, root: str, why: str) -> Launch | None:
    """Returns the flags from the environment files of a unit that is not visible or runs a script."""
    origins, arguments = [], []
    for path in (one.replace(ROOT, root) for one in ENVIRONMENT_FILES):
        try:
            text = files.text(path, _MAX_UNIT_BYTES)
            variables = parse_environment(text or "")
            flags = [word for name, one in variables.items() if name.startswith(VARIABLES) for word in words(one)]
        except (UnitError, KubeletConfigError) as error:
            why = why or f"{path}: {error}"
            continue
        if flags:
            origins.append(path)
            arguments += flags
    if not arguments and not why:
        return None
    return Launch(
        ", ".join(origins), tuple(arguments), why or "the unit that passes flags to the kubelet is not visible"
    )
