# SPDX-License-Identifier: Apache-2.0
"""Creates a one-layer OCI image archive with only the standard library: image.py NAME OUT.tar [--entrypoint CMD]
SRC:DST...

SRC is a file or a folder, DST its path in the image. Import with `ctr -n k8s.io images import OUT.tar`. The layer is
not compressed: importing inside an emulated machine is then twice as fast.
"""

import argparse
import hashlib
import io
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

OCI = "application/vnd.oci.image."


def owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = 0
    return entry


def layer(pairs: list[tuple[Path, str]]) -> bytes:
    """Returns a tar archive with every source at its destination. Identical input results in identical bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source, destination in pairs:
            inside = destination.strip("/")
            if source.is_dir():
                for child in sorted(source.iterdir()):
                    tar.add(child, arcname=str(Path(inside, child.name)), filter=owned_by_root)
            else:
                tar.add(source.resolve(), arcname=inside, filter=owned_by_root)
    return buffer.getvalue()


class Archive:
    """An OCI image layout whose content-addressed blobs are collected in memory before it is written."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}

    def put(self, data: bytes, media_type: str) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        self.blobs[digest] = data
        return {"mediaType": OCI + media_type, "digest": f"sha256:{digest}", "size": len(data)}

    def put_json(self, document: dict[str, Any], media_type: str) -> dict[str, Any]:
        return self.put(json.dumps(document).encode(), media_type)

    def write(self, out: Path, manifest: dict[str, Any]) -> None:
        files = {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode(),
            **{f"blobs/sha256/{digest}": data for digest, data in self.blobs.items()},
        }
        with tarfile.open(out, "w") as tar:
            for path, data in files.items():
                entry = tarfile.TarInfo(path)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def write_image(name: str, out: Path, pairs: list[tuple[Path, str]], entrypoint: list[str]) -> None:
    archive = Archive()
    content = archive.put(layer(pairs), "layer.v1.tar")
    settings: dict[str, Any] = {"Env": ["PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"]}
    if entrypoint:
        settings["Entrypoint"] = entrypoint
    config = archive.put_json(
        {
            "architecture": "amd64",
            "os": "linux",
            "rootfs": {"type": "layers", "diff_ids": [content["digest"]]},
            "config": settings,
        },
        "config.v1+json",
    )
    manifest = archive.put_json(
        {"schemaVersion": 2, "mediaType": OCI + "manifest.v1+json", "config": config, "layers": [content]},
        "manifest.v1+json",
    )
    manifest["annotations"] = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
    archive.write(out, manifest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--entrypoint", default="")
    parser.add_argument("pairs", nargs="+", metavar="SRC:DST")
    given = parser.parse_args()
    pairs = [(Path(source), destination) for source, destination in (pair.rsplit(":", 1) for pair in given.pairs)]
    write_image(given.name, given.out, pairs, shlex.split(given.entrypoint))


if __name__ == "__main__":
    main()
