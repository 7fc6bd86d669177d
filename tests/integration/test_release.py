# SPDX-License-Identifier: Apache-2.0
"""What a release is made with: the SBOM of an image, and one version everywhere."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numa_contract import __version__

from hack.version import python_faults
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
STATUS = (
    "Package: libstdc++6\nVersion: 1:14.2.0+dfsg-19\nArchitecture: amd64\nDescription: one\n two\n\n"
    "Package: zlib1g\nVersion: 1\nArchitecture: amd64\n"
)


def sbom(root: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "hack/image/sbom.py"), str(root), "nri-backend", "1.2.3"]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return document


def test_the_sbom_lists_what_is_in_the_image(tmp_path: Path) -> None:
    """Debian packages by dpkg's database and Python distributions by their metadata, each with a package URL."""
    for name, text in {
        "usr/lib/os-release": 'ID=debian\nVERSION_ID="13"\n',
        "var/lib/dpkg/status": STATUS,
        "opt/app/lib/python3.13/site-packages/a.dist-info/METADATA": (
            "Metadata-Version: 2.4\nName: Typing_Extensions\nVersion: 4.1\nLicense-Expression: PSF-2.0\n\nText\n"
        ),
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    document = sbom(tmp_path)
    assert [one["purl"] for one in document["components"]] == [
        "pkg:deb/debian/libstdc%2B%2B6@1%3A14.2.0%2Bdfsg-19?arch=amd64&distro=debian-13",
        "pkg:deb/debian/zlib1g@1?arch=amd64&distro=debian-13",
        "pkg:pypi/typing-extensions@4.1",
    ]
    assert document["components"][2]["licenses"] == [{"expression": "PSF-2.0"}]
    assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.6")
    assert document["metadata"]["component"]["version"] == "1.2.3"
    assert sbom(tmp_path) == document


def test_the_version_is_the_same_everywhere() -> None:
    """hack/version.py prints what both services report; a file that says another fails "make check"."""
    command = [sys.executable, str(ROOT / "hack/version.py")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == __version__
    assert subprocess.run([*command, "--check"], check=False).returncode == 0


def imports_without(modules: list[str], *wanted: str) -> bool:
    """Whether these modules can be imported where the others do not exist."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); import {', '.join(wanted)}"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


@pytest.mark.fault("security S19")
def test_the_frontend_does_without_what_its_image_leaves_out() -> None:
    """Packages that a library requires and nobody imports are taken out of the image, and stay out."""
    (unused,) = re.findall(r'^ *unused="(.*)"$', (ROOT / "hack/image/install.sh").read_text(), re.MULTILINE)
    names = [name.removeprefix("python-") for name in unused.split()]
    assert imports_without(names, "dra_frontend.app", "numa_tools.commands.handlers")
    assert not imports_without(["aiohttp"], "dra_frontend.app")


@pytest.mark.fault("security S19")
def test_the_backend_does_without_openssl() -> None:
    """Its image has none, so nothing that it imports may ask for it."""
    assert imports_without(["_ssl", "_hashlib"], "nri_backend.app", "nri_backend.setup.command")


MODULE = """'docstring'
from __future__ import annotations

class Empty:
    'docstring'

class Full:
    'docstring'
    value = 1

    async def method(self):
        'docstring'

def fail():
    'docstring'
    assert not Full.value, 'assertions stay'
"""


def test_modules_of_others_are_compiled_without_docstrings(tmp_path: Path) -> None:
    """The code is used although its source has changed, its file is the one in the image, and assertions stay."""
    directory = tmp_path / "usr/lib"
    directory.mkdir(parents=True)
    (directory / "module_of_an_image.py").write_text(MODULE)
    (directory / "of_another_version.py").write_text("print 'text'")
    command = [sys.executable, str(ROOT / "hack/image/compile.py"), str(tmp_path), str(directory)]
    subprocess.run(command, check=True)
    (directory / "module_of_an_image.py").write_text("")
    code = """
import module_of_an_image as module
documented = module, module.Empty, module.Full, module.Full.method, module.fail
print([one.__doc__ for one in documented])
try:
    module.fail()
except AssertionError as error:
    print(error)
"""
    environment = {"PYTHONPATH": str(directory)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert done.stdout == f"{[None] * 5}\nassertions stay\n"
    (file,) = directory.glob("__pycache__/*.pyc")
    assert b"/usr/lib/module_of_an_image.py" in file.read_bytes()
    assert bytes(tmp_path) not in file.read_bytes()


def test_the_images_set_the_environment_by_which_processes_take_less_memory() -> None:
    """With the variables of the Dockerfile all threads use one heap, and zoneinfo reads no build configuration."""
    lines = re.findall(r"^ENV (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    variables = dict(one.split("=", 1) for line in lines for one in shlex.split(line))
    code = """
import ctypes, sys, threading, zoneinfo
threads = [threading.Thread(target=lambda: bytearray(10_000)) for _ in range(4)]
[one.start() for one in threads], [one.join() for one in threads]
print([name for name in sys.modules if name.startswith("_sysconfigdata")], flush=True)
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
"""

    def printed(environment: dict[str, str]) -> str:
        command = [sys.executable, "-S", "-c", code]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    assert printed({}).count("<heap nr=") > 1
    found = printed(variables)
    assert found.startswith("[]\n")
    assert found.count("<heap nr=") == 1


def locked(service: str) -> set[str]:
    """What a lock names, with its version."""
    return set(re.findall(r"^[a-z0-9-]+==\S+", (ROOT / f"locks/{service}.txt").read_text(), re.MULTILINE))


def test_all_of_the_backends_packages_are_the_frontends_too() -> None:
    """Both images have them in one layer, so a node stores them once."""
    assert len(locked("nri-backend")) > 5
    assert locked("nri-backend") <= locked("dra-frontend")


def released(directory: Path, **environment: str) -> dict[str, bytes]:
    """What release.sh makes of a checkout, images left out."""
    tree, dist = directory / "tree", directory / "dist"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    tools = {"PYTHON": sys.executable, "HELM": str(Path(sys.executable).with_name("helm"))}
    command = [str(tree / "hack/release.sh"), "--without-images"]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(directory), "DIST": str(dist), **tools, **environment}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60 * PATIENCE)
    return {path.name: path.read_bytes() for path in dist.iterdir()}


def test_a_release_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    """Chart and manifests have no time, language, file mode or place in them; the checksums are theirs."""
    here, there = tmp_path / "here", tmp_path / "there/elsewhere"
    here.mkdir()
    there.mkdir(parents=True)
    made = released(here)
    assert made == released(there, TZ="Pacific/Chatham", LC_ALL="tr_TR.UTF-8")
    names = {f"dra-driver-numa-{__version__}.tgz", f"dra-driver-numa-{__version__}.yaml"}
    assert names | {"SHA256SUMS"} <= set(made)
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=here / "dist", check=True, capture_output=True)


def test_a_release_is_made_from_what_is_committed(tmp_path: Path) -> None:
    """Files of the day are nobody's release."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "tree")], check=True)
    (tmp_path / "tree/left-over").touch()
    done = subprocess.run([str(tmp_path / "tree/hack/release.sh")], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "clean checkout" in done.stderr


def stand_in(directory: Path, version: str) -> str:
    """Makes an interpreter that reports another version."""
    path = directory / f"python-{version}"
    info = f"({version.replace('.', ', ')})"
    path.write_text(
        f"#!{sys.executable}\n"
        f"import platform, sys\n"
        f"sys.version_info, platform.python_version = {info}, lambda: {version!r}\n"
        f"exec(sys.argv[2])\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("version", "found"), [("3.9.18", "is Python 3.9.18"), ("3.11.1", "is Python 3.11.1"), ("", "is not there")]
)
def test_the_first_command_names_the_python_that_it_needs(version: str, found: str, tmp_path: Path) -> None:
    """With an older interpreter, or none, the message has the lowest version and how to choose another one."""
    python = stand_in(tmp_path, version) if version else "/nowhere/python3"
    made = [str(ROOT / "hack/venv.sh"), str(tmp_path / "venv"), "locks/dev.txt", ""]
    ran = subprocess.run(made, env={**os.environ, "PYTHON": python}, check=False, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"venv: needs Python 3.11.2 or later, and {python} {found}",
        "venv: set PYTHON to one, for example: make test PYTHON=/usr/bin/python3.11",
    ]
    assert not (tmp_path / "venv").exists()


def test_the_lowest_python_is_the_same_everywhere() -> None:
    """README, packages, locks and linters name one version."""
    assert python_faults() == []
