# SPDX-License-Identifier: Apache-2.0
"""The command ``nri-backend setup-runtime``: prints or writes a containerd configuration with CDI and NRI switched on.

It restarts nothing: containerd reads its configuration when the operator restarts it.
"""

import argparse
import os
import stat
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from numa_contract.names import CDI_DIRECTORY

from nri_backend.setup.containerd import RuntimeConfigError, RuntimeFile, notes, read_runtime_file, switch_on

COMMAND: Final = "nri-backend setup-runtime"
_CANNOT: Final = 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description="Prints a containerd configuration with CDI, NRI and, for containerd 1.7, the hugetlb controller "
        "switched on; says on stderr what it changed. Restarts nothing.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--containerd-config", metavar="FILE", required=True, help="usually /etc/containerd/config.toml"
    )
    parser.add_argument(
        "--write", action="store_true", help="write it to FILE; the old one stays beside it as a backup"
    )
    parser.add_argument(
        "--cdi-dir", metavar="DIR", default=CDI_DIRECTORY, help=f"the driver's cdiDir (default {CDI_DIRECTORY})"
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit code: 0, 1 when containerd cannot be set up so, 2 for a wrong command line."""
    given = _parser().parse_args(arguments)
    path = Path(given.containerd_config)
    try:
        chain = read_chain(path)
        text, changes = switch_on(chain, given.cdi_dir)
        backup = replace_file(path, text) if given.write and changes else None
    except RuntimeConfigError as error:
        return _say(str(error))
    except OSError as error:
        return _say(f"{error.filename or path}: {error.strerror}")
    if not given.write:
        sys.stdout.write(text)
    told = [f"{path}: {change}" for change in changes] or [f"{path}: nothing to change"]
    told += notes(chain)
    if backup is not None:
        told += [f"the old file is {backup}", "restart containerd when it suits you: it goes on as before until then"]
    for line in told:
        _say(line)
    return 0


def _say(line: str) -> int:
    print(f"{COMMAND}: {line}", file=sys.stderr)
    return _CANNOT


def read_chain(path: Path) -> list[RuntimeFile]:
    """Reads a configuration and everything that it imports, in containerd's order. OSError, RuntimeConfigError."""
    chain: list[RuntimeFile] = []
    seen: set[Path] = set()
    pending = [path]
    while pending:
        one = pending.pop(0)
        if one in seen:
            continue
        seen.add(one)
        chain.append(read_runtime_file(str(one), _read(one), chain[0] if chain else None))
        for pattern in chain[-1].imports:
            place = Path(os.path.normpath(one.parent.absolute() / pattern))
            pending += sorted(Path("/").glob(str(place)[1:])) if "*" in pattern else [place]
    return chain


def _read(path: Path) -> str:
    try:
        # Bytes, since reading as text would turn line ends into others.
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise RuntimeConfigError(f"{path}: is no TOML: {error.reason}") from error
    except FileNotFoundError as error:
        raise RuntimeConfigError(
            f"{path} does not exist: if containerd runs without one, 'containerd config default' prints what it uses"
        ) from error


def replace_file(path: Path, text: str) -> Path:
    """Puts a text in a file's place, at once or not at all, with its mode and owner; returns the backup's path."""
    path = path.resolve(strict=True)
    backup = path.with_name(f"{path.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.bak")
    with backup.open("xb") as file:
        file.write(path.read_bytes())
        _settle(file.fileno(), path)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp", delete=False) as new:
        try:
            new.write(text.encode())
            new.flush()
            _settle(new.fileno(), path)
            Path(new.name).replace(path)
        except BaseException:
            Path(new.name).unlink(missing_ok=True)
            raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return backup


def _settle(descriptor: int, like: Path) -> None:
    status = like.stat()
    os.fchown(descriptor, status.st_uid, status.st_gid)
    os.fchmod(descriptor, stat.S_IMODE(status.st_mode))
    os.fsync(descriptor)
