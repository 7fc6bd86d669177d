# SPDX-License-Identifier: Apache-2.0
"""The command ``dra-frontend``: runs the service, or shows what it would see, publish and allocate on a machine."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from dra_frontend.devices.inventory import InventoryError
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.hugepage_pools import KernelPools
from dra_frontend.settings import add_run_arguments, load_settings, open_host
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
"""Any name does where nothing is published."""
_OF_ARCHIVES: Final = ("inspect", "classes", "simulate", "explain")
_MOST_TIMES: Final = 1024
_WATCH_SECONDS: Final = 2.0
_CLEAR: Final = "\x1b[2J\x1b[H"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-frontend",
        description="DRA drivers for CPUs, memory and hugepages. Without a command: runs the service.",
    )
    parser.add_argument("--version", action="version", version=f"dra-frontend {__version__}")
    add_run_arguments(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text) for name, (_, text, _) in _COMMANDS.items()}
    for name, command in made.items():
        if forms := _COMMANDS[name][2]:
            command.add_argument("-o", "--output", choices=forms, default=forms[0])
        # SUPPRESS: an absent flag must not hide the one given before the command.
        command.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="configuration file (YAML)")
        command.add_argument("--host-root", metavar="DIR", default=argparse.SUPPRESS, help="another root than /")
    made["slices"].add_argument("--node", metavar="NAME", default=argparse.SUPPRESS, help="name of the Node object")
    slices_of = "of ResourceSlices of several nodes use this one's"
    made["simulate"].add_argument("--node", metavar="NAME", default=argparse.SUPPRESS, help=slices_of)
    _add_simulate_arguments(made["simulate"])
    subject = "claim or pod ([NAMESPACE/]NAME or UID), CPU or device; claim/, pod/, cpu/, device/ before it says which"
    made["explain"].add_argument("subject", metavar="CLAIM|POD|CPU|DEVICE", help=subject)
    made["gather"].add_argument("-o", "--output", metavar="FILE", required=True, help="archive; - is standard output")
    masks = "replace the names of pods, containers, namespaces, claims and the node by numbers"
    made["gather"].add_argument("--mask", action="store_true", help=masks)
    for name in _OF_ARCHIVES:
        text = "what gather has packed, or where that was unpacked: its machine, claims and configuration"
        made[name].add_argument("--from", dest="source", metavar="FILE-or-DIR", help=text)
    made["status"].add_argument("--watch", action="store_true", help="draw the screen again every 2 s")
    made["doctor"].add_argument("--list", action="store_true", help="print every check with its rule; look at nothing")
    text = "file with the kubelet's configuration or the answer of its configz; - reads standard input"
    made["doctor"].add_argument("--kubelet-config", metavar="FILE", default="", help=text)
    text = "file with the output of containerd config dump or crio status config; - reads standard input"
    made["doctor"].add_argument("--runtime-config", metavar="FILE", default="", help=text)
    pages = made["provision"]
    pages.add_argument("files", metavar="FILE", nargs="+", help="HugePageProvision (YAML)")
    pages.add_argument("--dry-run", action="store_true", help="check the files and show what there is; change nothing")
    pages.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help="give up after (default: 60)")
    return parser


def _add_simulate_arguments(command: argparse.ArgumentParser) -> None:
    for kind, what in (("claim", "claims and claim templates"), ("pod", "pods, or what makes pods")):
        text = f"simulate the {what} of this manifest (YAML; - is standard input); may be repeated"
        command.add_argument(f"--{kind}", metavar="FILE", action="append", default=[], help=text)
    command.add_argument("-n", dest="times", metavar="N", type=_count, default=1, help="number of copies (default: 1)")
    command.add_argument("--empty", action="store_true", help="ignore the claims that are prepared on this node")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MOST_TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MOST_TIMES}")
    return int(text)


def _inspect(arguments: argparse.Namespace) -> str:
    inventory = read_node(load_settings(arguments), _NODE, empty=True).inventory
    check(inventory)
    if arguments.output == "table":
        return f"{machine_table(inventory.machine)}\n\n{claimable_table(inventory)}"
    return structured(report(inventory.machine) | claimable(inventory), arguments.output)


def _slices(arguments: argparse.Namespace) -> str:
    settings = load_settings(arguments)
    inventory = read_node(settings, settings.node_name, empty=True).inventory
    check(inventory)
    counted, node = settings.config.publish_node_allocatable_resource_mapping, settings.node_name
    items = [one for pool in inventory.pools for one in slice_documents(pool, node, counted=counted)]
    return object_list(items, arguments.output)


def _classes(arguments: argparse.Namespace) -> str:
    return object_list(device_classes(discover(open_host(load_settings(arguments)))), arguments.output)


def _simulate(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.simulate import outcome_table, prepared, simulate  # noqa: PLC0415 - only for people

    settings = load_settings(arguments)
    if not arguments.claim + arguments.pod:
        raise ConfigError("command line", ["simulate needs --claim FILE or --pod FILE"])
    # A made-up machine may have been captured under a name that is not valid.
    node = read_node(settings, _NODE, empty=arguments.empty)
    check(node.inventory, node.claims)
    asked = prepared(arguments.claim, arguments.pod, node, settings.config, settings.node_name)
    outcome = simulate(*asked, arguments.times)
    text = outcome_table(outcome) if arguments.output == "table" else structured(outcome, arguments.output)
    if outcome["fit"] + outcome["unknown"] < outcome["of"]:
        return text, _DOES_NOT_FIT
    return text, _UNKNOWN if outcome["unknown"] else 0


def _explain(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.explain import explain  # noqa: PLC0415 - the API server's library costs the others 0.5 s
    from numa_tools.explain.subjects import UnknownSubjectError  # noqa: PLC0415 - only for people
    from numa_tools.explain.text import explanation_text  # noqa: PLC0415 - only for people

    try:
        found, problems = explain(load_settings(arguments), arguments.subject, alone=arguments.source is not None)
    except UnknownSubjectError as error:
        print(printable(f"dra-frontend: {error}"), file=sys.stderr)
        return "", _BAD_INPUT
    if arguments.output == "table":
        return explanation_text(found, problems), _FAILED if problems else 0
    return structured({**found, "problems": problems}, arguments.output), _FAILED if problems else 0


def _gather(arguments: argparse.Namespace) -> str:
    from numa_tools.commands.gather import gather  # noqa: PLC0415 - only for people

    summary = gather(load_settings(arguments), arguments.output, masked=arguments.mask)
    print(summary, file=sys.stderr)
    return ""


def _doctor(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.doctor.gather import gather  # noqa: PLC0415 - only for people
    from numa_tools.doctor.table import CHECKS, examine, report  # noqa: PLC0415
    from numa_tools.doctor.text import findings_text, rules_text  # noqa: PLC0415

    if arguments.list:
        return rules_text(CHECKS), 0
    if arguments.kubelet_config == arguments.runtime_config == "-":
        raise ConfigError("command line", ["standard input can be only one of --kubelet-config and --runtime-config"])
    settings = load_settings(arguments)
    verdicts = examine(asyncio.run(gather(settings, arguments.kubelet_config, arguments.runtime_config)))
    found = report(verdicts, settings.node_name)
    shown = findings_text(verdicts, settings.node_name) if arguments.output == "table" else structured(found, "json")
    return shown, (found["problems"] > 0) * _FAILED


def _status(arguments: argparse.Namespace) -> tuple[str, int]:
    from numa_tools.commands.status import read_status, status_screen  # noqa: PLC0415 - only for people

    settings = load_settings(arguments)
    try:
        while True:
            status = read_status(settings)
            shown = status_screen(status) if arguments.output == "table" else structured(status, "json")
            if not arguments.watch:
                break
            # From the top left corner, with nothing of the screen before it.
            print(f"{_CLEAR}{shown}" if sys.stdout.isatty() else shown, flush=True)
            time.sleep(_WATCH_SECONDS)
    except KeyboardInterrupt:
        return "", 0
    return shown, bool(status["problems"]) * _FAILED


def _provision(arguments: argparse.Namespace) -> str | tuple[str, int]:
    tree = HostTree(arguments.host_root)
    requested = [one for file in arguments.files for one in read_requested(read_yaml(file), file)]
    targets, pools = plan(discover(tree), requested), KernelPools(tree)
    rows = preview(targets, pools) if arguments.dry_run else provision(targets, pools, arguments.timeout)
    failed = any(row["short"] or "problem" in row for row in rows)
    shown = rows_table(rows) if arguments.output == "table" else structured(provision_report(rows), "json")
    return shown, failed * _FAILED


def _version(_: argparse.Namespace) -> str:
    return f"dra-frontend {__version__}"


_Command = Callable[[argparse.Namespace], str | tuple[str, int]]
# What runs, what it is for, and the forms of its output, default first.
_COMMANDS: Final[dict[str, tuple[_Command, str, tuple[str, ...]]]] = {
    "inspect": (_inspect, "show the machine as discovery sees it, and what is kept of it", ("table", "json", "yaml")),
    "slices": (_slices, "print the ResourceSlices that would be published", ("yaml", "json")),
    "classes": (_classes, "print the DeviceClasses that this machine's devices need", ("yaml", "json")),
    "simulate": (_simulate, "show what claims and pods would get of this node", ("table", "json", "yaml")),
    "explain": (_explain, "say what something has, why, and what enforces it", ("table", "json", "yaml")),
    "gather": (_gather, "pack what a bug report needs into one archive", ()),
    "status": (_status, "show who has what on this node: devices, claims, CPUs, problems", ("table", "json")),
    "doctor": (_doctor, "say what is wrong with this node, and what to do", ("table", "json")),
    "provision": (_provision, "allocate hugepages as HugePageProvision files say", ("table", "json")),
    "version": (_version, "print the version, as --version does", ("text",)),
}


@contextmanager
def _source(arguments: argparse.Namespace) -> Iterator[None]:
    """Lets an archive be the host, with its configuration where none is given."""
    if getattr(arguments, "source", None) is None:
        yield
        return
    from numa_tools.commands.gather import CONFIG, node_of, opened  # noqa: PLC0415 - only for people

    with opened(arguments.source) as root:
        arguments.host_root = str(root)
        arguments.config = arguments.config or str(root / CONFIG)
        arguments.node = arguments.node or node_of(root)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0 is good, 1 for problems found and output or pages that are missing, 2 for unusable input. simulate also returns 3
    if something does not fit, and 4 if nothing is known not to fit but the outcome of something is unknown.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command is None:
            from dra_frontend.app import main as run_service  # noqa: PLC0415 - grpc and kubernetes cost the commands 1 s

            return run_service(load_settings(arguments))
        with _source(arguments):
            answer = _COMMANDS[arguments.command][0](arguments)
        text, code = (answer, 0) if isinstance(answer, str) else answer
        if text:
            print(text, flush=True)
    except (ConfigError, InventoryError, HostTreeError) as error:
        below = (
            f" (below {arguments.host_root})" if isinstance(error, HostTreeError) and arguments.host_root != "/" else ""
        )
        print(printable(f"dra-frontend: {error}{below}"), file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # a reader that has seen enough, such as head
            print(f"dra-frontend: {error.strerror or error}", file=sys.stderr)
        # What is still in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return code
