# SPDX-License-Identifier: Apache-2.0
"""The command ``nri-backend setup-runtime``: says what containerd's configuration lacks, and prints the drop-in to add.

It writes one new file where it is told to, changes none, and restarts nothing.
"""

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from numa_contract.names import CDI_DIRECTORY

from nri_backend.setup import containerd

COMMAND: Final = "nri-backend setup-runtime"
_LACKING, _UNUSABLE = 1, 2
_MOST_BYTES: Final = 4 << 20
_DUMP_SECONDS: Final = 30


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description='Reads what "containerd config dump" prints (piped in; else it runs containerd), says what is '
        "missing for CDI, NRI and the time limits of plugins, and prints the drop-in to add.",
        epilog="Exit status: 0 nothing is missing or FILE was written, 1 something is missing, 2 unusable input.",
        allow_abbrev=False,
    )
    parser.add_argument("--write", metavar="FILE", help="write the drop-in to this new file, not to standard output")
    parser.add_argument(
        "--require-plugin",
        action="store_true",
        help="no container may start without the driver (containerd 2.2+)",
    )
    parser.add_argument(
        "--cdi-dir", metavar="DIR", default=CDI_DIRECTORY, help=f"cdiDir of the driver ({CDI_DIRECTORY})"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        dump = containerd.read_dump(_dump_text())
        missing = containerd.missing_settings(dump, given.cdi_dir, require_plugin=given.require_plugin)
        beyond = containerd.faults(dump, require_plugin=given.require_plugin)
        lines = [*map(str, missing), *beyond, *containerd.notes(dump)]
        if missing and given.write:
            with open(given.write, "x", encoding="utf-8") as file:  # noqa: PTH123 - names the file in its errors
                file.write(containerd.write_drop_in(dump, missing))
            lines.append(f"wrote {given.write}: name it in imports of config.toml, restart containerd, check again")
        elif missing:
            sys.stdout.write(containerd.write_drop_in(dump, missing))
    except (containerd.RuntimeConfigError, subprocess.SubprocessError) as error:
        return _say(str(error))
    except OSError as error:
        return _say(f"{error.filename}: {error.strerror}")
    for line in lines or ["nothing is missing"]:
        _say(line)
    return _LACKING if beyond or (missing and not given.write) else 0


def _dump_text() -> str:
    data = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read(_MOST_BYTES)
    if not data:
        program = shutil.which("containerd")
        if program is None:
            raise containerd.RuntimeConfigError(f'nothing to read: "containerd config dump | {COMMAND}"')
        command = [program, "config", "dump"]
        data = subprocess.run(command, capture_output=True, timeout=_DUMP_SECONDS, check=True).stdout  # noqa: S603
    return data.decode(errors="replace")


def _say(line: str) -> int:
    print(f"{COMMAND}: {line}", file=sys.stderr)
    return _UNUSABLE
