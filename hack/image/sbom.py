# SPDX-License-Identifier: Apache-2.0
"""Prints the SBOM of an image (CycloneDX 1.6, JSON): sbom.py ROOT NAME VERSION.

ROOT is the image's file system. The SBOM lists its contents: Debian packages from dpkg's database, and Python
distributions from their metadata. Identical content produces identical output.
"""

import json
import sys
import uuid
from collections.abc import Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

# Namespace of the generated UUIDs (RFC 9562, version 5). Any fixed UUID would do.
NAMESPACE = uuid.UUID("2ad7fb59-2b2c-5e92-9d0a-1c2e1f0d7c55")


def debian(root: Path) -> Iterator[dict[str, Any]]:
    release = dict(line.split("=", 1) for line in (root / "usr/lib/os-release").read_text().splitlines() if "=" in line)
    distribution = f"{release['ID']}-{release['VERSION_ID']}".replace('"', "")
    for paragraph in (root / "var/lib/dpkg/status").read_text().strip().split("\n\n"):
        package = HeaderParser().parsestr(paragraph)
        name, version = package["Package"], package["Version"]
        place = f"arch={package['Architecture']}&distro={distribution}"
        yield component(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version)}?{place}")


def python(root: Path) -> Iterator[dict[str, Any]]:
    for metadata in root.glob("opt/app/lib/python3*/site-packages/*.dist-info/METADATA"):
        package = HeaderParser().parsestr(metadata.read_text())
        name, version = package["Name"], package["Version"]
        found = component(name, version, f"pkg:pypi/{name.lower().replace('_', '-')}@{quote(version)}")
        if licence := package["License-Expression"]:
            found["licenses"] = [{"expression": licence}]
        yield found


def component(name: str, version: str, purl: str) -> dict[str, Any]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(root: Path, name: str, version: str) -> dict[str, Any]:
    image = {"type": "container", "bom-ref": "image", "name": name, "version": version}
    components = sorted([*debian(root), *python(root)], key=lambda one: str(one["bom-ref"]))
    content = json.dumps([image, components])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(NAMESPACE, content)}",
        "version": 1,
        "metadata": {"component": image},
        "components": components,
        "dependencies": [{"ref": "image", "dependsOn": [one["bom-ref"] for one in components]}],
    }


if __name__ == "__main__":
    print(json.dumps(document(Path(sys.argv[1]), sys.argv[2], sys.argv[3]), indent=1))
