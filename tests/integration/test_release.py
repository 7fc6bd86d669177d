# SPDX-License-Identifier: Apache-2.0
"""What a release is made with: the SBOM of an image, and one version everywhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from numa_contract import __version__

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
    (unused,) = re.findall(r'^unused="(.*)"$', (ROOT / "hack/image/install.sh").read_text(), re.MULTILINE)
    names = [name.removeprefix("python-") for name in unused.split()]
    assert imports_without(names, "dra_frontend.app", "dra_frontend.commands.cli")
    assert not imports_without(["aiohttp"], "dra_frontend.app")


@pytest.mark.fault("security S19")
def test_the_backends_image_has_openssl_only_for_a_metrics_library() -> None:
    """The Dockerfile leaves it out unless the backend's lock names the one package that imports it."""
    named = re.search("^prometheus-client=", (ROOT / "locks/nri-backend.txt").read_text(), re.MULTILINE)
    assert imports_without(["_ssl", "_hashlib"], "nri_backend.app") == (named is None)
