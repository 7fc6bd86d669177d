# SPDX-License-Identifier: Apache-2.0
"""The ``nri-backend setup-runtime`` command: reports the settings that containerd lacks and prints a drop-in that
contains them.

With ``--write`` it creates one new file. It changes no existing file and restarts nothing.

An operator runs it from the image with ``ctr run``, which differs in two ways from running a program on the node. ctr
does not forward end-of-file on its standard input, so the dump is mounted as a file, and reading standard input has a
timeout. Also, the process is the first in its PID namespace, so the kernel discards signals for which the process has
no handler (signal(7)). The command therefore installs handlers for SIGTERM and SIGINT.
"""

import argparse
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NoReturn

from numa_contract.names import CDI_DIRECTORY
from numa_node.runtimes.containerd import RuntimeConfigError, read_dump

from nri_backend.setup import containerd

COMMAND: Final = "nri-backend setup-runtime"
_EXIT_MISSING, _EXIT_UNUSABLE = 1, 2
_MAX_BYTES: Final = 4 << 20
_DUMP_SECONDS: Final = 30
_INPUT_SECONDS: Final = 10
"""How long to wait for end-of-file on standard input. containerd prints its dump within a second."""

_DESCRIPTION: Final = """\
Reads the output of "containerd config dump", reports the settings that are missing for CDI, NRI and plugin
timeouts, and prints the drop-in to add. Without DUMP and without any input, it runs containerd itself."""
_EPILOG: Final = f"""\
examples:
  # From a file
  {COMMAND} dump.toml
  # From a pipe, with the drop-in written to a file
  containerd config dump | {COMMAND} --write 90-dra-driver-numa.toml
  # To prevent containers from starting without the driver
  {COMMAND} --require-plugin dump.toml

Exit status: 0 if nothing is missing or FILE was written; 1 if something is missing; 2 for a usage error or
unusable input."""


class _Parser(argparse.ArgumentParser):
    """Argument parser that reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_EXIT_UNUSABLE, f"{COMMAND}: {message}; see {COMMAND} --help\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser for the command's arguments."""
    parser = _Parser(
        prog=COMMAND,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("dump", metavar="DUMP", nargs="?", help="file with the dump; default: standard input")
    parser.add_argument("--write", metavar="FILE", help="write the drop-in to this new file instead of standard output")
    parser.add_argument(
        "--require-plugin",
        action="store_true",
        help="prevent containers from starting without the driver (containerd 2.2+)",
    )
    parser.add_argument(
        "--cdi-dir", metavar="DIR", default=CDI_DIRECTORY, help=f"the driver's cdiDir ({CDI_DIRECTORY})"
    )
    return parser


class _Signalled(Exception):  # noqa: N818 - not an error
    """Raised by a signal handler to end the command."""

    def __init__(self, number: int) -> None:
        self.status = 128 + number
        """Exit status of a program that is terminated by this signal, as shells report it."""
        super().__init__()


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the exit code."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _raise)
        return _run(arguments)
    except _Signalled as end:
        return end.status


def _raise(number: int, _: object) -> NoReturn:
    raise _Signalled(number)


def _run(arguments: Sequence[str]) -> int:
    options = build_parser().parse_args(arguments)
    try:
        dump = read_dump(_dump_text(options.dump))
        missing = containerd.missing_settings(dump, options.cdi_dir, require_plugin=options.require_plugin)
        manual = containerd.manual_changes(dump, require_plugin=options.require_plugin)
        lines = [*map(str, missing), *manual, *containerd.warnings(dump)]
        if missing and options.write:
            # A drop-in for containerd 1.7 repeats whole sections, which may contain registry passwords.
            _write_new(options.write, containerd.write_drop_in(dump, missing))
            lines.append(
                f"wrote {options.write}: add it to imports in config.toml, restart containerd, and check again"
            )
        elif missing:
            sys.stdout.write(containerd.write_drop_in(dump, missing))
    except (RuntimeConfigError, subprocess.SubprocessError) as error:
        return _report(str(error))
    except OSError as error:
        return _report(f"{error.filename}: {error.strerror}")
    for line in lines or ["nothing is missing"]:
        _report(line)
    return _EXIT_MISSING if manual or (missing and not options.write) else 0


def _write_new(path: str, text: str) -> None:
    """Writes a new file, or removes it again if only part of the text can be written. Raises OSError.

    containerd would not start with a truncated drop-in, and the command never replaces a file.
    """
    file = open(path, "x", encoding="utf-8", opener=_open_private)  # noqa: SIM115 - closing it may fail as well
    try:
        with file:
            file.write(text)
    except BaseException as error:
        os.unlink(path)  # noqa: PTH108
        if isinstance(error, OSError):
            error.filename = path
        raise


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _dump_text(name: str | None) -> str:
    """Returns the dump from the file, else from standard input, else from containerd itself.

    Raises RuntimeConfigError, OSError or subprocess.SubprocessError.
    """
    if name is not None:
        with open(name, "rb") as file:  # noqa: PTH123 - its errors contain the name as the user typed it
            data = file.read(_MAX_BYTES + 1)
    else:
        data = b"" if sys.stdin is None or sys.stdin.isatty() else _read_until_end(sys.stdin.fileno())
    if name is None and not data:
        data = _dump_of_containerd()
    if len(data) > _MAX_BYTES:
        raise RuntimeConfigError(f"the dump is larger than {_MAX_BYTES >> 20} MiB")
    return data.decode(errors="replace")


def _read_until_end(descriptor: int) -> bytes:
    """Reads until end-of-file, or until the limit is exceeded. Raises RuntimeConfigError if neither happens in time."""
    data, deadline = b"", time.monotonic() + _INPUT_SECONDS
    while len(data) <= _MAX_BYTES:
        if not select.select([descriptor], [], [], max(deadline - time.monotonic(), 0))[0]:
            raise RuntimeConfigError(
                f"no end-of-file on standard input within {_INPUT_SECONDS} s (ctr run does not forward it): "
                f'write the dump to a file, "containerd config dump >FILE", and pass that file: "{COMMAND} FILE"'
            )
        part = os.read(descriptor, 1 << 16)
        if not part:
            break
        data += part
    return data


def _dump_of_containerd() -> bytes:
    program = shutil.which("containerd")
    if program is None:
        raise RuntimeConfigError(
            f'nothing to read: run "containerd config dump >FILE" on the node, then "{COMMAND} FILE"'
        )
    command = [program, "config", "dump"]
    return subprocess.run(command, capture_output=True, timeout=_DUMP_SECONDS, check=True).stdout  # noqa: S603


def _report(line: str) -> int:
    print(f"{COMMAND}: {line}", file=sys.stderr)
    return _EXIT_UNUSABLE
