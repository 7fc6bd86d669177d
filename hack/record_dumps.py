# SPDX-License-Identifier: Apache-2.0
"""Records how real containerd releases interpret random configuration files, as test data.

``python -m hack.record_dumps 1.7.24=PROGRAM 2.1.9=PROGRAM`` runs ``containerd config dump`` with each program, without
starting a daemon, and writes tests/data/containerd/dumps.json. A PROGRAM may consist of several words, for example to
run it with the dynamic loader of the system that it was built for.
"""

import json
import random
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tests.rigs.containerd_files import RECORDED, Files, random_files, settings_in

_SEED: Final = 24
_CASES: Final = 120
_ORIGIN: Final = (
    "containerd config dump of the Debian packages containerd 1.7.24~ds1-6+deb13u1 and 2.1.9; "
    "files by tests/rigs/containerd_files.py; written by hack/record_dumps.py"
)


def _dump(program: str, files: Files) -> dict[str, Any] | None:
    """Returns the settings in a dump, or None if containerd rejects the files."""
    with TemporaryDirectory() as directory:
        for name, text in files.items():
            path = Path(directory, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        command = [*shlex.split(program), "--config", f"{directory}/config.toml", "config", "dump"]
        run = subprocess.run(command, capture_output=True, check=False, timeout=30)  # noqa: S603 - caller's programs
        return settings_in(tomllib.loads(run.stdout.decode())) if run.returncode == 0 else None


def main() -> None:
    """Runs every program with the same random files and writes dumps.json."""
    programs = dict(one.split("=", 1) for one in sys.argv[1:])
    source = random.Random(_SEED)  # noqa: S311 - reproducible
    cases = []
    for _ in range(_CASES):
        files = random_files(source)
        cases.append({"files": files, **{release: _dump(program, files) for release, program in programs.items()}})
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(one) for one in cases)
    RECORDED.write_text(f'{{"origin": {json.dumps(_ORIGIN)}, "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
