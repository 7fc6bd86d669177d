# SPDX-License-Identifier: Apache-2.0
"""Runs one command with its parsed arguments. The service never imports this module."""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.settings import load_settings, open_host
from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_contract.errors import printable
from numa_node.config_file import read_yaml

from numa_tools.commands.classes import device_classes
from numa_tools.commands.forms import object_list, structured
from numa_tools.commands.inspect import claimable, claimable_table, machine_table, report
from numa_tools.commands.node_files import check, read_node
from numa_tools.commands.provision import preview, provision, rows_table
from numa_tools.commands.provision import report as provision_report
from numa_tools.commands.provision_plan import plan, read_requested

_FAILED, _BAD_INPUT, _DOES_NOT_FIT, _UNKNOWN = 1, 2, 3, 4
_NODE: Final = "simulated"
"""Placeholder for the node name in commands that do not publish anything. It has no effect."""
_WATCH_SECONDS: Final = 2.0
_TEXT_OUTPUTS: Final = ("table", "wide")
"""Values of ``-o`` that print a table or text."""
_CLEAR: Final = "\x1b[2J\x1b[H"


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """Runs the command that the arguments name. Returns its output, which may be empty, and its exit status.

    Raises ConfigError, InventoryError, HostTreeError and OSError.
    """
    with _source(arguments):
        answer = _HANDLERS[arguments.command](arguments)
    return (answer, 0) if isinstance(answer, str) else answer


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[None]:
    """Unpacks the archive given by --from and uses it as the host root.

    Its configuration and node name become the defaults.
    """
    if getattr(arguments, "source", None) is None:
        yield
        return
    from numa_tools.commands.gather import CONFIG, node_of, unpacked  # noqa: PLC0415 - needed with --from alone

    with unpacked(arguments.source) as root:
        arguments.host_root = str(root)
        arguments.config = arguments.config or str(root / CONFIG)
        arguments.node = arguments.node or node_of(root)
        yield


def _inspect(arguments: argparse.Namespace) -> str:
    settings = load_settings(arguments)
    inventory = read_node(settings, _NODE, empty=True).inventory
    check(inventory, settings.config)
    if arguments.output in _TEXT_OUTPUTS:
        return f"{machine_table(inventory.machine, wide=_wide(arguments))}\n\n{claimable_table(inventory)}"
    return structured(report(inventory.machine) | claimable(inventory), arguments.output)


def _slices(arguments: argparse.Namespace) -> str:
    settings = load_settings(arguments)
    inventory = read_node(settings, settings.node_name, empty=True).inventory
    check(inventory, settings.config)
    counted, node = settings.config.publish_node_allocatable_resource_mapping, settings.node_name
    items = [one for pool in inventory.pools for one in slice_documents(pool, node, counted=counted)]
    return object_list(items, arguments.output)


def _classes(arguments: argparse.Namespace) -> str:
    return object_list(device_classes(discover(open_host(load_settings(arguments)))), arguments.output)


def _simulate(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.simulate import outcome_table, read_simulation, simulate  # noqa: PLC0415 - used only here

    settings = load_settings(arguments)
    if not arguments.claim + arguments.pod:
        raise ConfigError("command line", ["simulate needs --claim FILE or --pod FILE"])
    # A placeholder is used because the name under which a test machine was captured may be invalid.
    node = read_node(settings, _NODE, empty=arguments.empty)
    check(node.inventory, settings.config, node.claims)
    inputs = read_simulation(arguments.claim, arguments.pod, node, settings.config, settings.node_name)
    outcome = simulate(*inputs, arguments.times)
    text = outcome_table(outcome) if arguments.output in _TEXT_OUTPUTS else structured(outcome, arguments.output)
    if outcome["fit"] + outcome["unknown"] < outcome["of"]:
        return text, _DOES_NOT_FIT
    return text, _UNKNOWN if outcome["unknown"] else 0


def _explain(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.explain import explain  # noqa: PLC0415 - the API server's library costs the others 0.5 s
    from numa_tools.explain.subjects import UnknownSubjectError  # noqa: PLC0415 - no other command needs it
    from numa_tools.explain.text import explanation_text  # noqa: PLC0415 - no other command needs it

    try:
        found, problems = explain(load_settings(arguments), arguments.subject, is_archive=arguments.source is not None)
    except UnknownSubjectError as error:
        print(printable(f"dra-frontend: {error}"), file=sys.stderr)
        return "", _BAD_INPUT
    if arguments.output in _TEXT_OUTPUTS:
        return explanation_text(found, problems), _FAILED if problems else 0
    return structured({**found, "problems": problems}, arguments.output), _FAILED if problems else 0


def _gather(arguments: argparse.Namespace) -> str:
    from numa_tools.commands.gather import gather  # noqa: PLC0415 - no other command needs it

    summary = gather(load_settings(arguments), arguments.output, masked=arguments.mask)
    print(summary, file=sys.stderr)
    return ""


def _doctor(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.doctor.gather import gather  # noqa: PLC0415 - no other command needs it
    from numa_tools.doctor.table import CHECKS, examine, report  # noqa: PLC0415 - no other command needs it
    from numa_tools.doctor.text import findings_text, rules_text  # noqa: PLC0415 - no other command needs it

    if arguments.list:
        return rules_text(CHECKS), 0
    if arguments.kubelet_config == arguments.runtime_config == "-":
        fault = "only one of --kubelet-config and --runtime-config can be read from standard input"
        raise ConfigError("command line", [fault])
    settings = load_settings(arguments)
    verdicts = examine(asyncio.run(gather(settings, arguments.kubelet_config, arguments.runtime_config)))
    found = report(verdicts, settings.node_name)
    as_text = arguments.output in _TEXT_OUTPUTS
    shown = findings_text(verdicts, settings.node_name) if as_text else structured(found, arguments.output)
    return shown, (found["problems"] > 0) * _FAILED


def _status(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.status import read_status  # noqa: PLC0415 - no other command needs it

    settings = load_settings(arguments)
    try:
        while True:
            status = read_status(settings)
            shown = _status_shown(status, arguments)
            if not arguments.watch:
                break
            # Clear the terminal and move the cursor to the top left corner.
            print(f"{_CLEAR}{shown}" if sys.stdout.isatty() else shown, flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return "", 0
    return shown, bool(status["problems"]) * _FAILED


def _status_shown(status: dict[str, Any], arguments: argparse.Namespace) -> str:
    from numa_tools.commands.status import status_screen  # noqa: PLC0415 - no other command needs it

    if arguments.output in _TEXT_OUTPUTS:
        return status_screen(status, wide=_wide(arguments))
    # A line with --- separates the YAML documents in a stream.
    return ("---\n" if arguments.watch and arguments.output == "yaml" else "") + structured(status, arguments.output)


def _wide(arguments: argparse.Namespace) -> bool:
    return bool(arguments.output == "wide")


def _provision(arguments: argparse.Namespace) -> str | tuple[str, int]:
    tree = HostTree(arguments.host_root)
    requested = [one for file in arguments.files for one in read_requested(read_yaml(file), file)]
    targets = plan(discover(tree), requested)
    pools = KernelPools(HostTree(arguments.pool_root) if arguments.pool_root else tree)
    try:
        rows = preview(targets, pools) if arguments.dry_run else provision(targets, pools, arguments.timeout)
    except HostTreeError as error:
        if not arguments.pool_root:
            raise
        # The error is raised here because the caller would report the path under --host-root, which is a different
        # directory.
        raise ConfigError(f"--pool-root {arguments.pool_root}", [str(error)]) from error
    failed = any(row["short"] or "problem" in row for row in rows)
    as_text = arguments.output in _TEXT_OUTPUTS
    shown = rows_table(rows) if as_text else structured(provision_report(rows), arguments.output)
    return shown, failed * _FAILED


def _version(_: argparse.Namespace) -> str:
    return f"dra-frontend {__version__}"


_HANDLERS: Final[dict[str, Callable[[argparse.Namespace], str | tuple[str, int]]]] = {
    "inspect": _inspect,
    "slices": _slices,
    "classes": _classes,
    "simulate": _simulate,
    "explain": _explain,
    "gather": _gather,
    "status": _status,
    "doctor": _doctor,
    "provision": _provision,
    "version": _version,
}
