# SPDX-License-Identifier: Apache-2.0
"""Completes the chart for a release, and prints the SBOM of the packaged chart.

``python -m hack.chart_release prepare DIRECTORY`` copies the chart to DIRECTORY/dra-driver-numa and adds the values
that depend on where the project is published. ``python -m hack.chart_release sbom ARCHIVE`` prints the SBOM of a
packaged chart (CycloneDX 1.6, JSON). Two optional environment variables are used:

* REPOSITORY: the repository's address, such as https://github.com/OWNER/NAME. It becomes ``home``, ``sources`` and the
  links on Artifact Hub, and the chart's README links to its pages. Alerts link to its symptoms page.
* REGISTRY: the registry and path, such as ghcr.io/OWNER, that contain both images under ``dra-driver-numa/`` and the
  chart under ``charts/``. It becomes the default for the image repositories, Artifact Hub scans these images, and the
  chart's README shows how to install the chart from there.
"""

import hashlib
import json
import os
import re
import shutil
import sys
import tarfile
import uuid
from pathlib import Path
from typing import Any, Final

import yaml

from hack.image.sbom import NAMESPACE

CHART: Final = Path(__file__).parents[1] / "charts/dra-driver-numa"
IMAGES: Final = ("dra-frontend", "nri-backend")
_HEADER: Final = "# SPDX-License-Identifier: Apache-2.0\n"


def prepare(directory: Path, repository: str, registry: str) -> Path:
    """Copies the chart into a directory, completes the copy, and returns its path."""
    copy = directory / CHART.name
    shutil.copytree(CHART, copy)
    metadata = yaml.safe_load((copy / "Chart.yaml").read_text())
    metadata["annotations"]["artifacthub.io/prerelease"] = str("-" in metadata["version"]).lower()
    if repository:
        _add_addresses(metadata, repository)
        readme = copy / "README.md"
        readme.write_text(_with_addresses(readme.read_text(), f"{repository}/blob/v{metadata['version']}"))
    if registry:
        images = [{"name": name, "image": f"{_image(registry, name)}:{metadata['appVersion']}"} for name in IMAGES]
        metadata["annotations"]["artifacthub.io/images"] = yaml.safe_dump(images, sort_keys=False)
        for file in (copy / "values.yaml", copy / "README.md"):
            _name_images(file, registry)
        _install_from(copy / "README.md", registry, metadata["version"])
    (copy / "Chart.yaml").write_text(_HEADER + yaml.safe_dump(metadata, sort_keys=False, width=1000))
    return copy


def _add_addresses(metadata: dict[str, Any], repository: str) -> None:
    """Adds the metadata that Helm and Artifact Hub show about the project."""
    pages = f"{repository}/blob/v{metadata['version']}"
    metadata["home"], metadata["sources"] = repository, [repository]
    for maintainer in metadata["maintainers"]:
        maintainer["url"] = f"{pages}/MAINTAINERS.md"
    links = {
        "documentation": f"{pages}/docs/install.md",
        "changelog": f"{pages}/CHANGELOG.md",
        "security": f"{pages}/SECURITY.md",
        "support": f"{repository}/issues",
    }
    texts = [{"name": name, "url": address} for name, address in links.items()]
    metadata["annotations"]["artifacthub.io/links"] = yaml.safe_dump(texts, sort_keys=False)


def _with_addresses(readme: str, tree: str) -> str:
    """Returns the README with the addresses of files in the repository instead of relative links to them."""
    readme = readme.replace("](../../", f"]({tree}/")
    return re.sub(r"\]\((?=[\w.]+\))", f"]({tree}/charts/{CHART.name}/", readme)


def _image(registry: str, name: str) -> str:
    return f"{registry}/{CHART.name}/{name}"


def _name_images(file: Path, registry: str) -> None:
    text = file.read_text()
    for name in IMAGES:
        text = text.replace(f"localhost/{name}", _image(registry, name))
    file.write_text(text)


def _install_from(readme: Path, registry: str, version: str) -> None:
    """Changes the command in the README so that it installs the chart from a registry, with the chart's own images."""
    chart = f"oci://{registry}/charts/{CHART.name} --version {version}"
    text, found = re.subn(
        rf"^(helm install {CHART.name}) charts/{CHART.name} (--namespace .*?) \\\n .*$",
        lambda match: f"{match[1]} {chart} \\\n  {match[2]}",
        readme.read_text(),
        flags=re.MULTILINE,
    )
    if found != 1:
        raise ValueError(f"{readme} does not contain the command that installs the chart")
    readme.write_text(text)


def sbom(archive: Path, registry: str) -> dict[str, Any]:
    """Returns the SBOM of a packaged chart: its files with their digests, and the images that it installs."""
    data = archive.read_bytes()
    with tarfile.open(archive) as tar:
        files = {entry.name: _content(tar, entry) for entry in tar.getmembers() if entry.isfile()}
    metadata = yaml.safe_load(files[f"{CHART.name}/Chart.yaml"])
    components = [
        *(_file(name, content) for name, content in sorted(files.items())),
        *(_image_component(name, metadata["appVersion"], registry) for name in IMAGES),
    ]
    chart = {
        "type": "application",
        "bom-ref": "chart",
        "name": metadata["name"],
        "version": metadata["version"],
        "licenses": [{"expression": metadata["annotations"]["artifacthub.io/license"]}],
        "hashes": [_hash(data)],
    }
    content = json.dumps([chart, components])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}",
        "version": 1,
        "metadata": {"component": chart},
        "components": components,
        "dependencies": [{"ref": "chart", "dependsOn": [one["bom-ref"] for one in components]}],
    }


def _content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry)
    return file.read() if file else b""


def _hash(data: bytes) -> dict[str, str]:
    return {"alg": "SHA-256", "content": hashlib.sha256(data).hexdigest()}


def _file(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "bom-ref": f"file:{name}", "name": name, "hashes": [_hash(content)]}


def _image_component(name: str, version: str, registry: str) -> dict[str, Any]:
    """Returns the SBOM component for an image. The image is identified by its tag, because its digest is unknown until
    the image has been pushed to a registry.
    """
    place = f"repository_url={_image(registry, name)}&" if registry else ""
    purl = f"pkg:oci/{name}?{place}tag={version}"
    return {"type": "container", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main(arguments: list[str]) -> int:
    """Runs one of the two commands."""
    repository, registry = (os.environ.get(name, "").rstrip("/") for name in ("REPOSITORY", "REGISTRY"))
    command, path = arguments[0], Path(arguments[1])
    if command == "prepare":
        prepare(path, repository, registry)
    else:
        print(json.dumps(sbom(path, registry), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
