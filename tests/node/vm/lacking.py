# SPDX-License-Identifier: Apache-2.0
"""Writes the layers of an image that are missing from containerd: lacking.py ARCHIVE CONTENT OUT

ARCHIVE is a docker archive with uncompressed layers, CONTENT the output of `ctr images ls` and `ctr content ls -q`, OUT
an OCI archive without the layers that CONTENT lists. If CONTENT lists the image itself, OUT is an empty file.
"""

import json
import sys
import tarfile
from pathlib import Path
from typing import Any

from tests.node.vm.image import OCI, Archive


def read(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        sys.exit(f"{name} in the archive is not a file")
    return file.read()


def main() -> None:
    source, content, out = map(Path, sys.argv[1:])
    known = content.read_text()
    made = Archive()
    with tarfile.open(source) as archive:
        (image,) = json.loads(read(archive, "manifest.json"))
        (name,) = image["RepoTags"]
        config = made.put(read(archive, image["Config"]), "config.v1+json")
        layers: list[dict[str, Any]] = []
        for file in image["Layers"]:
            digest = f"sha256:{Path(file).stem}"
            if digest in known:
                size = archive.getmember(file).size
                layers.append({"mediaType": f"{OCI}layer.v1.tar", "digest": digest, "size": size})
            else:
                layers.append(made.put(read(archive, file), "layer.v1.tar"))
    document = {"schemaVersion": 2, "mediaType": f"{OCI}manifest.v1+json", "config": config, "layers": layers}
    manifest = made.put_json(document, "manifest.v1+json")
    there = any(line.startswith(f"{name} ") and manifest["digest"] in line for line in known.splitlines())
    if there:
        out.write_bytes(b"")
        return
    manifest["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    made.write(out, manifest)


if __name__ == "__main__":
    main()
