# SPDX-License-Identifier: Apache-2.0
"""Prints one hashed requirement list for the guest's Python, made from several locks.

``locks.py [--all] PYTHON_VERSION LOCK...``. A marker is evaluated for the guest (CPython of the given version, Linux,
x86_64), not for the Python that runs this. From the test lock, only packages that the node tests import are included;
with ``--all``, all of its packages are. Later locks must agree with earlier ones.
"""

import sys
from pathlib import Path

from packaging.requirements import Requirement

TEST_PACKAGES = {"pytest", "pytest-timeout", "iniconfig", "packaging", "pluggy", "pygments"}


def entries(lock: Path) -> list[str]:
    """Returns every requirement of a lock with its hashes, each on one line."""
    joined = lock.read_text().replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def wanted(lock: Path, requirement: Requirement, environment: dict[str, str], *, everything: bool) -> bool:
    if not everything and lock.name == "test.txt" and requirement.name not in TEST_PACKAGES:
        return False
    return requirement.marker is None or requirement.marker.evaluate(dict(environment))


def main() -> None:
    arguments = sys.argv[1:]
    everything = arguments[0] == "--all"
    version, *locks = arguments[everything:]
    environment = {
        "python_version": version,
        "python_full_version": f"{version}.0",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": "x86_64",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "os_name": "posix",
    }
    chosen: dict[str, str] = {}
    for lock in map(Path, locks):
        for entry in entries(lock):
            text, *hashes = entry.split(" --hash=")
            requirement = Requirement(text.strip())
            if not wanted(lock, requirement, environment, everything=everything):
                continue
            line = " ".join([f"{requirement.name}{requirement.specifier}", *(f"--hash={h.strip()}" for h in hashes)])
            if chosen.setdefault(requirement.name, line).split()[0] != line.split()[0]:
                sys.exit(
                    f"{lock}: {line.split()[0]} differs from {chosen[requirement.name].split()[0]} in another lock"
                )
    print("\n".join(chosen[name] for name in sorted(chosen)))


if __name__ == "__main__":
    main()
