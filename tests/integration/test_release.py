# SPDX-License-Identifier: Apache-2.0
"""The parts of a release: an image's SBOM, and the same version everywhere."""

import base64
import hashlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from numa_contract import __version__

from hack.chart_release import prepare
from hack.chart_release import sbom as chart_sbom
from hack.version import python_faults
from tests.fakes.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
NAME = "dra-driver-numa"
STATUS = (
    "Package: libstdc++6\nVersion: 1:14.2.0+dfsg-19\nArchitecture: amd64\nDescription: one\n two\n\n"
    "Package: zlib1g\nVersion: 1\nArchitecture: amd64\n"
)


def sbom(root: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "hack/image/sbom.py"), str(root), "nri-backend", "1.2.3"]
    document: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return document


def test_the_sbom_lists_the_content_of_the_image(tmp_path: Path) -> None:
    """The SBOM lists Debian packages from dpkg's database and Python distributions from their metadata, each with a
    package URL.
    """
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
    """hack/version.py prints the version that both services report; any other version in a file fails "make check"."""
    command = [sys.executable, str(ROOT / "hack/version.py")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == __version__
    assert subprocess.run([*command, "--check"], check=False).returncode == 0


def imports_without(modules: list[str], *wanted: str) -> bool:
    """Returns True if the ``wanted`` modules can be imported while ``modules`` do not exist."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); import {', '.join(wanted)}"
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_the_frontend_works_without_packages_that_its_image_omits() -> None:
    """Packages that a library requires but nothing imports are removed from the image and must not become necessary."""
    (unused,) = re.findall(r'^ *unused="(.*)"$', (ROOT / "hack/image/install.sh").read_text(), re.MULTILINE)
    names = [name.removeprefix("python-") for name in unused.split()]
    assert imports_without(names, "dra_frontend.app", "numa_tools.commands.handlers")
    assert not imports_without(["aiohttp"], "dra_frontend.app")


def test_the_backend_works_without_openssl() -> None:
    """The backend's image does not contain OpenSSL, so none of its imports may need it."""
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


def test_third_party_modules_are_compiled_without_docstrings(tmp_path: Path) -> None:
    """Python uses the bytecode even if the source has changed. The bytecode contains the source's path in the image,
    and assertions are kept.
    """
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


def test_the_images_set_variables_that_save_memory() -> None:
    """With the Dockerfile's variables, all threads use one heap, and zoneinfo does not read the build configuration."""
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
    """Returns the packages in a lock file with their versions."""
    return set(re.findall(r"^[a-z0-9-]+==\S+", (ROOT / f"locks/{service}.txt").read_text(), re.MULTILINE))


def test_the_frontend_has_all_packages_of_the_backend() -> None:
    """Both images contain the backend's packages in a shared layer, so a node stores them once."""
    assert len(locked("nri-backend")) > 5
    assert locked("nri-backend") <= locked("dra-frontend")


def released(directory: Path, **environment: str) -> dict[str, bytes]:
    """Returns the files that release.sh creates from a checkout, without images."""
    tree, dist = directory / "tree", directory / "dist"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tree)], check=True)
    tools = {"PYTHON": sys.executable, "HELM": str(Path(sys.executable).with_name("helm"))}
    command = [str(tree / "hack/release.sh"), "--without-images"]
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(directory), "DIST": str(dist), **tools, **environment}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=60 * PATIENCE)
    return {path.name: path.read_bytes() for path in dist.iterdir()}


def test_a_release_is_reproducible(tmp_path: Path) -> None:
    """The chart and the manifests do not depend on the time, locale, file modes or path of the build; the checksums
    match the files.
    """
    here, there = tmp_path / "here", tmp_path / "there/elsewhere"
    here.mkdir()
    there.mkdir(parents=True)
    made = released(here)
    assert made == released(there, TZ="Pacific/Chatham", LC_ALL="tr_TR.UTF-8")
    names = {f"{NAME}-{__version__}.{suffix}" for suffix in ("tgz", "yaml", "cdx.json", "provenance.json")}
    assert names | {"SHA256SUMS"} <= set(made)
    subprocess.run(["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=here / "dist", check=True, capture_output=True)
    summed = {line.split()[1] for line in made["SHA256SUMS"].decode().splitlines()}
    assert summed == set(made) - {"SHA256SUMS"}
    statement = json.loads(made[f"{NAME}-{__version__}.provenance.json"])
    assert digests(statement) == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in made.items()
        if name not in ("SHA256SUMS", f"{NAME}-{__version__}.provenance.json")
    }
    revision = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    (source, *_) = statement["predicate"]["buildDefinition"]["resolvedDependencies"]
    assert source == {"name": "source", "digest": {"gitCommit": revision.stdout.strip()}}
    assert statement["predicate"]["runDetails"]["builder"]["id"] == "urn:dra-driver-numa:make-release"
    assert chart_file(made, "Chart.yaml").keys().isdisjoint({"home", "sources"})


def digests(statement: dict[str, Any]) -> dict[str, str]:
    """Returns the subjects of an in-toto statement."""
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
    return {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}


def chart_text(made: dict[str, bytes], name: str) -> str:
    """Returns a file from the packaged chart."""
    with tarfile.open(fileobj=io.BytesIO(made[f"{NAME}-{__version__}.tgz"])) as tar:
        file = tar.extractfile(f"{NAME}/{name}")
        assert file
        return file.read().decode()


def chart_file(made: dict[str, bytes], name: str) -> dict[str, Any]:
    """Returns a YAML file from the packaged chart."""
    content: dict[str, Any] = yaml.safe_load(chart_text(made, name))
    return content


def test_a_release_contains_the_addresses_of_its_repository_and_registry(tmp_path: Path) -> None:
    """REPOSITORY and REGISTRY appear in the chart's metadata, its images, its alerts, the SBOM and the provenance."""
    repository, registry = "https://git.example/team/numa", "registry.example/team"
    workflow = f"{repository}/.github/workflows/release.yaml@refs/tags/v{__version__}"
    made = released(tmp_path, REPOSITORY=f"{repository}/", REGISTRY=registry, BUILDER=workflow)
    chart, values = chart_file(made, "Chart.yaml"), chart_file(made, "values.yaml")
    assert (chart["home"], chart["sources"]) == (repository, [repository])
    assert chart["icon"] == icon()
    images = [f"{registry}/{NAME}/{name}" for name in ("dra-frontend", "nri-backend")]
    assert [values[half]["image"]["repository"] for half in ("frontend", "backend")] == images
    scanned = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    assert [one["image"] for one in scanned] == [f"{image}:{__version__}" for image in images]
    assert chart["annotations"]["artifacthub.io/prerelease"] == "false"
    for link in [*yaml.safe_load(chart["annotations"]["artifacthub.io/links"]), *chart["maintainers"]]:
        tree, page = f"{repository}/blob/v{__version__}/", link["url"]
        assert page == f"{repository}/issues" or (ROOT / page.removeprefix(tree)).is_file()
    readme = chart_text(made, "README.md")
    assert f"helm install {NAME} oci://{registry}/charts/{NAME} --version {__version__} " in readme
    assert "registry.example/dra-frontend" not in readme
    pages = re.findall(r"\]\(([^)#]+)", readme)
    assert pages
    assert all((ROOT / page.removeprefix(f"{repository}/blob/v{__version__}/")).is_file() for page in pages), pages
    manifests = made[f"{NAME}-{__version__}.yaml"].decode()
    assert re.findall(r" image: \"(\S+)\"", manifests) == [f"{image}:{__version__}" for image in images]
    statement = json.loads(made[f"{NAME}-{__version__}.provenance.json"])["predicate"]
    assert statement["runDetails"]["builder"]["id"] == workflow
    assert statement["buildDefinition"]["resolvedDependencies"][0]["uri"] == f"git+{repository}"
    components = json.loads(made[f"{NAME}-{__version__}.cdx.json"])["components"]
    purls = [one["purl"] for one in components if one["type"] == "container"]
    assert purls == [f"pkg:oci/{image.rpartition('/')[2]}?repository_url={image}&tag={__version__}" for image in images]
    rules = alerts_of(tmp_path / "dist" / f"{NAME}-{__version__}.tgz")
    assert f"runbook_url: {repository}/blob/v{__version__}/docs/symptoms.md#" in rules


def alerts_of(archive: Path) -> str:
    """Returns the alerts of a packaged chart that is installed without an address for their links."""
    helm = Path(sys.executable).with_name("helm")
    command = [str(helm), "template", "x", str(archive), "--set", "metrics.prometheusRule.enabled=true"]
    command += ["--show-only", "templates/prometheusrule.yaml"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def icon() -> str:
    """Returns the repository's icon as a data URI, which needs no server."""
    content = base64.b64encode((ROOT / "docs/images/icon.svg").read_bytes()).decode()
    return f"data:image/svg+xml;base64,{content}"


def test_the_sbom_of_the_chart_lists_its_files_and_images(tmp_path: Path) -> None:
    """Each file of the archive is listed with its digest and each image with its tag, even without a registry."""
    root = Path(sys.executable).parent
    tree = prepare(tmp_path, "", "")
    subprocess.run([root / "helm", "package", tree, "--destination", tmp_path], check=True, capture_output=True)
    archive = tmp_path / f"{NAME}-{__version__}.tgz"
    document = chart_sbom(archive, "")
    files = {one["name"]: one["hashes"][0]["content"] for one in document["components"] if one["type"] == "file"}
    values = (tree / "values.yaml").read_bytes()
    assert files[f"{NAME}/values.yaml"] == hashlib.sha256(values).hexdigest()
    with tarfile.open(archive) as tar:
        assert sorted(files) == sorted(entry.name for entry in tar.getmembers() if entry.isfile())
    images = [one["purl"] for one in document["components"] if one["type"] == "container"]
    assert images == [f"pkg:oci/{name}?tag={__version__}" for name in ("dra-frontend", "nri-backend")]
    assert document["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert document["dependencies"][0]["dependsOn"] == [one["bom-ref"] for one in document["components"]]


def test_the_workflow_attests_the_files_of_the_release() -> None:
    """The images and the chart get their SBOMs and the provenance as attestations, with the file names that release.sh
    creates.
    """
    workflow = (ROOT / ".github/workflows/release.yaml").read_text()
    (job,) = yaml.safe_load(workflow)["jobs"].values()
    script = "\n".join(step.get("run", "") for step in job["steps"])
    predicates = set(re.findall(r"--type (\w+) --predicate \"?([^\s\"]+)", script))
    assert predicates == {
        ("cyclonedx", "dist/$image-$version-$arch.cdx.json"),
        ("cyclonedx", f"dist/{NAME}-$version.cdx.json"),
        ("slsaprovenance1", "provenance.json"),
    }
    assert f"{NAME}-$(python3 hack/version.py).provenance.json" in script
    (command,) = re.findall(r"make release (.*)", script.replace("\\\n", ""))
    assert re.findall(r"(\w+)=", command) == ["REPOSITORY", "REGISTRY", "BUILDER"]


def test_the_release_notes_are_the_changelog_with_absolute_links(tmp_path: Path) -> None:
    """A relative link would lead to a page below the release's page, which does not exist."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/release.yaml").read_text())["jobs"].values()
    script = job["steps"][-1]["run"].partition("cosign")[0].replace("notes.md", str(tmp_path / "notes.md"))
    address = {"GITHUB_SERVER_URL": "https://git.example", "GITHUB_REPOSITORY": "team/numa", "GITHUB_REF_NAME": "v1"}
    subprocess.run(["bash", "-e", "-c", script], cwd=ROOT, env=os.environ | address, check=True)
    notes = (tmp_path / "notes.md").read_text()
    assert "### Added" in notes
    assert __version__ not in notes
    links = re.findall(r"\]\(([^)#]+)", notes)
    files = [link.removeprefix("https://git.example/team/numa/blob/v1/") for link in links]
    assert all(link != file and (ROOT / file).is_file() for link, file in zip(links, files, strict=True)), links
    assert len(links) > 10


def test_a_release_is_built_from_committed_files(tmp_path: Path) -> None:
    """Uncommitted files must not become part of a release."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(tmp_path / "tree")], check=True)
    (tmp_path / "tree/left-over").touch()
    done = subprocess.run([str(tmp_path / "tree/hack/release.sh")], check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "clean checkout" in done.stderr


def stand_in(directory: Path, version: str) -> str:
    """Creates an interpreter that reports a different version."""
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
    ("version", "found"), [("3.9.18", "is Python 3.9.18"), ("3.11.1", "is Python 3.11.1"), ("", "is missing or broken")]
)
def test_the_first_command_names_the_python_that_it_needs(version: str, found: str, tmp_path: Path) -> None:
    """With an older interpreter, or none, the message states the lowest version and how to choose a different
    interpreter.
    """
    python = stand_in(tmp_path, version) if version else "/nowhere/python3"
    made = [str(ROOT / "hack/venv.sh"), str(tmp_path / "venv"), "locks/dev.txt", ""]
    ran = subprocess.run(made, env={**os.environ, "PYTHON": python}, check=False, capture_output=True, text=True)
    assert ran.returncode == 1
    assert ran.stderr.splitlines() == [
        f"venv: needs Python 3.11.2 or later, but {python} {found}",
        "venv: set PYTHON to such an interpreter, for example: make test PYTHON=/usr/bin/python3.11",
    ]
    assert not (tmp_path / "venv").exists()


def test_the_minimum_python_version_is_the_same_everywhere() -> None:
    """The README, the packages, the locks and the linters' settings contain the same version."""
    assert python_faults() == []
