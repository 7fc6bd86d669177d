# SPDX-License-Identifier: Apache-2.0
"""The command-line interface of ``dra-frontend``: runs a command, or the service if no command is given.

The service process imports only this module from the package. Commands do not import the service.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from dra_frontend.devices.inventory import InventoryError
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.settings import add_run_arguments, load_settings
from numa_contract import __version__
from numa_contract.config import ConfigError
from numa_contract.errors import printable
from numa_node.lazy_modules import add_lazy_modules

_FAILED, _BAD_INPUT = 1, 2
_PROGRAM: Final = "dra-frontend"
_ARCHIVE_COMMANDS: Final = ("inspect", "classes", "simulate", "explain")
_MAX_TIMES: Final = 1024
_TABLE: Final = ("table", "wide", "json", "yaml")
_OBJECTS: Final = ("yaml", "json")
_VERSION_HELP: Final = "print the version and exit"
_STATUSES: Final = (
    "Exit status: 0 for success; 1 if the output cannot be written; 2 for a usage error or unusable input."
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command's help text and output formats."""

    text: str
    outputs: tuple[str, ...] = ()
    """Values of ``-o``, with the default first."""
    examples: Mapping[str, str] = field(default_factory=dict)
    """Example arguments by description, for the help text."""
    statuses: str = _STATUSES


COMMANDS: Final[dict[str, Command]] = {
    "inspect": Command(
        "show the node's CPUs and memory, and how much is reserved",
        _TABLE,
        {
            "This node": "",
            "A machine from its captured files": "--host-root DIR",
            "The node from a bug report": "--from node.tar.gz",
        },
    ),
    "slices": Command(
        "print the ResourceSlices that the driver would publish", _OBJECTS, {"Slices of a node": "--node node-1"}
    ),
    "classes": Command(
        "print the DeviceClasses for this node's devices",
        _OBJECTS,
        {"Create them in the cluster": "| kubectl apply -f -"},
    ),
    "simulate": Command(
        "show the resources that claims and pods would get on this node",
        _TABLE,
        {
            "Three copies of a pod": "--pod pod.yaml -n 3",
            "On an empty node, from standard input": "--pod - --empty",
            "On another node, from an archive created by gather": "--claim claim.yaml --from node.tar.gz",
        },
        "Exit status: 0 if everything fits; 2 for a usage error or unusable input; 3 if something does not fit; "
        "4 if it is unknown whether something fits, and everything else fits.",
    ),
    "explain": Command(
        "explain the resources of a claim, pod, CPU or device, and how they are enforced",
        _TABLE,
        {"A claim or a pod": "shop/db", "A CPU": "cpu/3", "A device": "cpudevnuma000"},
        "Exit status: 0 if there are no problems; 1 if there are problems, or if a pending claim does not fit; 2 for a "
        "usage error or an unknown subject.",
    ),
    "gather": Command(
        "pack the files for a bug report into one archive",
        examples={
            "With pod and node names masked": "-o node.tar.gz --mask",
            "To standard output": "-o - > node.tar.gz",
        },
        statuses="Exit status: 0 for success; 1 if the archive cannot be written; 2 for a usage error or unusable "
        "input.",
    ),
    "status": Command(
        "show this node's devices, claims, CPUs and problems",
        _TABLE,
        {"Once": "", "Every 2 s": "--watch", "Codes of all problems": "-o json | jq -r '.problems[].code'"},
        "Exit status: 0 if there are no problems; 1 if there are problems; 2 for a usage error or unusable input.",
    ),
    "doctor": Command(
        "check this node and suggest fixes",
        _TABLE,
        {
            "All checks": "",
            "What each check looks for": "--list",
            "With the kubelet's configuration from a file": "--kubelet-config config.yaml",
        },
        "Exit status: 0 if there are no problems; 1 if there are problems; 2 for a usage error or unusable input.",
    ),
    "provision": Command(
        "allocate the hugepages that HugePageProvision files specify",
        _TABLE,
        {
            "Check the files without changing anything": "--dry-run pages.yaml",
            "Allocate them within 10 s": "--timeout 10 pages.yaml",
        },
        "Exit status: 0 for success; 1 if pages are missing; 2 for a usage error or unusable input.",
    ),
    "serve-hugepages": Command(
        "resize hugepage pools for the service (hugepagesOnDemand)",
        examples={"As the chart starts it": "--config /etc/dra-driver-numa/config.yaml --host-root /"},
    ),
    "version": Command("print the version, like --version", examples={"The version": ""}),
}


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, printable(f"{_PROGRAM}: {message}; see {self.prog} --help") + "\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser for the service's arguments and all commands."""
    formatter_class = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog=_PROGRAM,
        description="DRA drivers for CPUs, memory and hugepages. Without a command, dra-frontend runs the service.",
        epilog=_epilog({f"{name} {_first_example(name)}": _sentence(name) for name in _PROGRAM_EXAMPLES}, _STATUSES),
        formatter_class=formatter_class,
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}", help=_VERSION_HELP)
    add_run_arguments(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    parsers: dict[str, argparse.ArgumentParser] = {}
    for name, command in COMMANDS.items():
        epilog = _epilog({f"{name} {words}": text for text, words in command.examples.items()}, command.statuses)
        text = f"{_sentence(name)}."
        parsers[name] = commands.add_parser(
            name, help=command.text, description=text, epilog=epilog, formatter_class=formatter_class
        )
        _add_common_arguments(parsers[name], command.outputs)
    _add_node_arguments(parsers)
    _add_simulate_arguments(parsers["simulate"])
    _add_subjects(parsers)
    return parser


_PROGRAM_EXAMPLES: Final = ("status", "doctor", "simulate", "explain")
"""Commands for which the program's own help text contains an example."""


def _first_example(name: str) -> str:
    return next(iter(COMMANDS[name].examples.values()))


def _sentence(name: str) -> str:
    text = COMMANDS[name].text
    return text[0].upper() + text[1:]


def _epilog(examples: Mapping[str, str], statuses: str) -> str:
    """Returns the end of a help text: the examples with their descriptions, and the exit statuses."""
    lines = [f"  # {text}\n  {_PROGRAM} {words.rstrip()}" for words, text in examples.items()]
    return "\n".join(["examples:", *lines, "", statuses])


def _add_common_arguments(command: argparse.ArgumentParser, outputs: Sequence[str]) -> None:
    if outputs:
        shown = [one for one in outputs if one != "table"]
        text = f"output format: {', '.join(shown)} (default: {'a table' if 'table' in outputs else outputs[0]})"
        command.add_argument("-o", "--output", choices=outputs, default=outputs[0], metavar="FORM", help=text)
    # SUPPRESS: an absent flag must not override the same flag given before the command.
    text = "configuration file (YAML; default: the file that the chart mounts)"
    command.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=text)
    text = "read the host's /sys and /proc under DIR (default: /)"
    command.add_argument("--host-root", metavar="DIR", default=argparse.SUPPRESS, help=text)


def _add_node_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    parsers["slices"].add_argument("--node", metavar="NAME", default=argparse.SUPPRESS, help="name of the Node object")
    slices_of = "name of the node whose ResourceSlices are used, if the files contain slices for several nodes"
    parsers["simulate"].add_argument("--node", metavar="NAME", default=argparse.SUPPRESS, help=slices_of)
    for name in _ARCHIVE_COMMANDS:
        text = "read an archive created by gather, or the directory it was unpacked into, instead of this node"
        parsers[name].add_argument("--from", dest="source", metavar="FILE-or-DIR", help=text)


def _add_subjects(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    subject = (
        "claim or pod ([NAMESPACE/]NAME or UID; default namespace: default), CPU or device; the prefix claim/, pod/, "
        "cpu/ or device/ selects the kind if a name is ambiguous"
    )
    parsers["explain"].add_argument("subject", metavar="CLAIM|POD|CPU|DEVICE", help=subject)
    text = "archive to write (.tar.gz); - for standard output"
    parsers["gather"].add_argument("-o", "--output", metavar="FILE", required=True, help=text)
    masks = "replace the names of pods, containers, namespaces, claims and the node with numbers"
    parsers["gather"].add_argument("--mask", action="store_true", help=masks)
    parsers["status"].add_argument("-w", "--watch", action="store_true", help="print the status again every 2 s")
    text = "list the id and rule of each check without running the checks"
    parsers["doctor"].add_argument("--list", action="store_true", help=text)
    text = "file with the kubelet's configuration or its /configz response; - for standard input"
    parsers["doctor"].add_argument("--kubelet-config", metavar="FILE", default="", help=text)
    text = 'file with the output of "containerd config dump" or "crio status config"; - for standard input'
    parsers["doctor"].add_argument("--runtime-config", metavar="FILE", default="", help=text)
    pages = parsers["provision"]
    pages.add_argument("files", metavar="FILE", nargs="+", help="HugePageProvision (YAML)")
    text = "check the files and show the current numbers of pages without changing them"
    pages.add_argument("--dry-run", action="store_true", help=text)
    text = "maximum time in seconds to keep trying to allocate missing pages (default: 60)"
    pages.add_argument("--timeout", metavar="SECONDS", type=float, default=60.0, help=text)
    text = "write to sys/devices/system/node under DIR, where it is mounted read-write (default: same as --host-root)"
    pages.add_argument("--pool-root", metavar="DIR", default="", help=text)


def _add_simulate_arguments(command: argparse.ArgumentParser) -> None:
    for kind, what in (("claim", "claims and claim templates"), ("pod", "pods and workloads")):
        text = f"simulate the {what} in this manifest (YAML; - for standard input); may be repeated"
        command.add_argument(f"--{kind}", metavar="FILE", action="append", default=[], help=text)
    text = "number of copies to simulate (default: 1)"
    command.add_argument("-n", dest="times", metavar="N", type=_count, default=1, help=text)
    command.add_argument("--empty", action="store_true", help="ignore claims that are already prepared")


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= _MAX_TIMES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {_MAX_TIMES}")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status.

    The status is 0 on success, 1 if there are problems, the output cannot be written or hugepages are missing, and 2
    for unusable input. simulate also returns 3 if something does not fit, and 4 if everything may fit but an outcome is
    unknown.
    """
    arguments = build_parser().parse_args(argv)
    try:
        if arguments.command is None:
            add_lazy_modules("google.protobuf.internal.python_message")  # so that protobuf uses its C code
            from dra_frontend.app import main as run_service  # noqa: PLC0415 - costs a command 1 s

            return run_service(load_settings(arguments))
        if arguments.command == "serve-hugepages":
            from dra_frontend.node.pool_helper import main as serve_hugepages  # noqa: PLC0415 - needed only here

            settings = load_settings(arguments)
            return serve_hugepages(settings.config, settings.host_root)
        from numa_tools.commands.handlers import run  # noqa: PLC0415 - the service must not import it

        text, code = run(arguments)
        if text:
            print(text, flush=True)
    except (ConfigError, InventoryError, HostTreeError) as error:
        below = (
            f" (under {arguments.host_root})" if isinstance(error, HostTreeError) and arguments.host_root != "/" else ""
        )
        print(printable(f"dra-frontend: {error}{below}"), file=sys.stderr)
        return _BAD_INPUT
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe, as head does
            print(f"dra-frontend: {error.strerror or error}", file=sys.stderr)
        # On exit, the interpreter would flush the buffer again, and that would fail with a traceback.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return code
