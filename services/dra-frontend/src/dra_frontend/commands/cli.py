# SPDX-License-Identifier: Apache-2.0
"""The command ``dra-frontend``: runs the service, or shows what it would see, publish and allocate on a machine."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Final

from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_node.config_file import read_yaml

from dra_frontend.commands.classes import device_classes
from dra_frontend.commands.hugepage_pools import KernelPools
from dra_frontend.commands.inspect import report
from dra_frontend.commands.provision import Effort, preview, provision, table
from dra_frontend.commands.provision import report as provision_report
from dra_frontend.commands.provision_plan import plan, read_wishes
from dra_frontend.commands.render import machine_table, structured
from dra_frontend.commands.simulate import NODE, read_operations, simulate
from dra_frontend.devices.allocatable import MappingForm
from dra_frontend.devices.inventory import InventoryError, build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.node.host_tree import HostTree
from dra_frontend.settings import add_run_arguments, load_settings, open_host

_BAD_INPUT = 2
_FAILED = 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-frontend",
        description="DRA drivers for CPUs, memory and hugepages. Without a command: runs the service.",
    )
    parser.add_argument("--version", action="version", version=f"dra-frontend {__version__}")
    add_run_arguments(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="show the machine as discovery sees it")
    inspect.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    slices = commands.add_parser("slices", help="print the ResourceSlices that would be published")
    slices.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml")
    # SUPPRESS: an absent flag must not hide the one given before the command.
    slices.add_argument("--node", metavar="NAME", default=argparse.SUPPRESS, help="name of the Node object")
    classes = commands.add_parser("classes", help="print the DeviceClasses that this machine's devices need")
    classes.add_argument("-o", "--output", choices=("yaml", "json"), default="yaml")
    what_if = commands.add_parser("simulate", help="tell which CPUs claims would get, one after another")
    what_if.add_argument("-o", "--output", choices=("json", "yaml"), default="json")
    what_if.add_argument("--claims", metavar="FILE", required=True, help="operations to run (YAML)")
    pages = commands.add_parser("provision", help="allocate hugepages as HugePageProvision files say")
    pages.add_argument("files", metavar="FILE", nargs="+", help="HugePageProvision (YAML)")
    pages.add_argument("-o", "--output", choices=("table", "json"), default="table")
    pages.add_argument("--dry-run", action="store_true", help="check the files and show what there is; change nothing")
    pages.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help="give up after (default: 60)")
    for command in (inspect, slices, classes, what_if, pages):
        command.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="configuration file (YAML)")
        command.add_argument("--host-root", metavar="DIR", default=argparse.SUPPRESS, help="another root than /")
    return parser


def _inspect(arguments: argparse.Namespace) -> int:
    machine = discover(open_host(load_settings(arguments)))
    print(machine_table(machine) if arguments.output == "table" else structured(report(machine), arguments.output))
    return 0


def _slices(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments)
    inventory = build_inventory(discover(open_host(settings)), settings.config, settings.node_name)
    # No server is asked: the newest form is shown.
    mapping = MappingForm.V1_37 if settings.config.publish_node_allocatable_resource_mapping else None
    items = [one for pool in inventory.pools for one in slice_documents(pool, settings.node_name, mapping=mapping)]
    print(structured({"apiVersion": "v1", "kind": "List", "items": items}, arguments.output))
    return 0


def _classes(arguments: argparse.Namespace) -> int:
    items = device_classes(discover(open_host(load_settings(arguments))))
    print(structured({"apiVersion": "v1", "kind": "List", "items": items}, arguments.output))
    return 0


def _simulate(arguments: argparse.Namespace) -> int:
    settings = load_settings(arguments)
    operations = read_operations(read_yaml(arguments.claims), arguments.claims)
    # Any name does: nothing is published, and a made-up machine may have been captured under one that is none.
    inventory = build_inventory(discover(open_host(settings)), settings.config, NODE)
    print(structured(simulate(inventory, operations, settings.config), arguments.output))
    return 0


def _provision(arguments: argparse.Namespace) -> int:
    tree = HostTree(arguments.host_root)
    wishes = [wish for file in arguments.files for wish in read_wishes(read_yaml(file), file)]
    targets, pools = plan(discover(tree), wishes), KernelPools(tree)
    outcomes = preview(targets, pools) if arguments.dry_run else provision(targets, pools, Effort(arguments.timeout))
    told = table(outcomes) if arguments.output == "table" else structured(provision_report(outcomes), "json")
    print(told)
    return _FAILED if any(outcome.failed for outcome in outcomes) else 0


def _run(arguments: argparse.Namespace) -> int:
    from dra_frontend.app import main as run_service  # noqa: PLC0415 - grpc and kubernetes cost the other commands 1 s

    return run_service(load_settings(arguments))


_COMMANDS: Final[dict[str | None, Callable[[argparse.Namespace], int]]] = {
    "inspect": _inspect,
    "slices": _slices,
    "classes": _classes,
    "simulate": _simulate,
    "provision": _provision,
    None: _run,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code: 0, 2 for unusable input, 1 for output or pages that are missing."""
    arguments = _parser().parse_args(argv)
    command = _COMMANDS[arguments.command]
    try:
        code = command(arguments)
        sys.stdout.flush()
    except HostTreeError as error:
        root = arguments.host_root
        print(f"dra-frontend: {error}" + (f" (below {root})" if root != "/" else ""), file=sys.stderr)
        return _BAD_INPUT
    except (ConfigError, InventoryError) as error:
        print(f"dra-frontend: {error}", file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        print(f"dra-frontend: {error.strerror or error}", file=sys.stderr)
        # What is still in the buffer would fail again, with a traceback, when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return code
