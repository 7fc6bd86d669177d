# SPDX-License-Identifier: Apache-2.0
"""The command line ``dra-frontend``: runs the service if it has no command, else the command.

The service's process imports this module and no other of the package. A command does not import the service.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from dra_frontend.devices.inventory import InventoryError
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.settings import add_run_arguments, load_settings
from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_contract.errors import printable
from numa_node.lazy_modules import add_lazy_modules

_FAILED, _BAD_INPUT = 1, 2
_OF_ARCHIVES: Final = ("inspect", "classes", "simulate", "explain")
_MOST_TIMES: Final = 1024
COMMANDS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "inspect": ("show the machine as discovery sees it, and what is kept of it", ("table", "json", "yaml")),
    "slices": ("print the ResourceSlices that would be published", ("yaml", "json")),
    "classes": ("print the DeviceClasses that this machine's devices need", ("yaml", "json")),
    "simulate": ("show what claims and pods would get of this node", ("table", "json", "yaml")),
    "explain": ("say what something has, why, and what enforces it", ("table", "json", "yaml")),
    "gather": ("pack what a bug report needs into one archive", ()),
    "status": ("show who has what on this node: devices, claims, CPUs, problems", ("table", "json")),
    "doctor": ("say what is wrong with this node, and what to do", ("table", "json")),
    "provision": ("allocate hugepages as HugePageProvision files say", ("table", "json")),
    "serve-hugepages": ("resize pools of hugepages for the service (hugepagesOnDemand)", ()),
    "version": ("print the version, as --version does", ("text",)),
}
"""Help text and output formats of each command; the first format is the default."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dra-frontend",
        description="DRA drivers for CPUs, memory and hugepages. Without a command: runs the service.",
    )
    parser.add_argument("--version", action="version", version=f"dra-frontend {__version__}")
    add_run_arguments(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    made = {name: commands.add_parser(name, help=text) for name, (text, _) in COMMANDS.items()}
    for name, command in made.items():
        if forms := COMMANDS[name][1]:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    0 is good, 1 for problems found and output or pages that are missing, 2 for unusable input. simulate also returns 3
    if something does not fit, and 4 if nothing is known not to fit but the outcome of something is unknown.
    """
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command is None:
            add_lazy_modules("google.protobuf.internal.python_message")  # replaced by C code
            from dra_frontend.app import main as run_service  # noqa: PLC0415 - costs a command 1 s

            return run_service(load_settings(arguments))
        if arguments.command == "serve-hugepages":
            from dra_frontend.node.pool_helper import main as serve_hugepages  # noqa: PLC0415 - no other command needs it

            settings = load_settings(arguments)
            return serve_hugepages(settings.config, settings.host_root)
        from numa_tools.commands.handlers import run  # noqa: PLC0415 - the service must not import it

        text, code = run(arguments)
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
