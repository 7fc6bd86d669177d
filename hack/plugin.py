# SPDX-License-Identifier: Apache-2.0
"""Builds ``kubectl numa`` as a single Python file, an archive of it, and a manifest for krew. The build is
reproducible.

``python -m hack.plugin DIRECTORY [REPOSITORY]``. REPOSITORY is the address that releases are downloaded from; without
it, no manifest is written.
"""

import gzip
import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

from hack.version import SOURCE, version_in

ROOT: Final = Path(__file__).parents[1]
_PACKAGE: Final = ROOT / "services/kubectl-numa/src/kubectl_numa"
_NAME: Final = "kubectl-numa"
_MAIN: Final = "from kubectl_numa.__main__ import main\n\nmain()\n"
_EARLIEST_DATE: Final = (1980, 1, 1, 0, 0, 0)
"""Earliest time that a ZIP archive can store."""
_MANIFEST: Final = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: numa
spec:
  version: v{version}
  homepage: {repository}
  shortDescription: Show CPUs, memory and hugepages by NUMA node
  description: |
    Shows what dra-driver-numa offers and has allocated in a cluster: exclusive CPUs,
    memory and hugepages of each NUMA node, and whether claims are enforced.
  caveats: |
    Needs Python 3.11.2 or later, as python3.
  platforms:
    - selector:
        matchExpressions:
          - {{key: os, operator: In, values: [linux, darwin]}}
      uri: {repository}/releases/download/v{version}/{name}.tar.gz
      sha256: {digest}
      bin: {name}
      files:
        - {{from: {name}, to: .}}
        - {{from: LICENSE, to: .}}
"""


def zipapp() -> bytes:
    """Returns the program: a shebang line that names its interpreter, followed by a ZIP archive."""
    data = io.BytesIO(b"#!/usr/bin/env python3\n")
    data.seek(0, io.SEEK_END)
    texts = {f"{_PACKAGE.name}/{file.name}": file.read_text() for file in sorted(_PACKAGE.glob("*.py"))}
    with zipfile.ZipFile(data, "a", zipfile.ZIP_DEFLATED) as archive:
        for name, text in {"__main__.py": _MAIN, **texts}.items():
            entry = zipfile.ZipInfo(name, _EARLIEST_DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(entry, text)
    return data.getvalue()


def archive(program: bytes) -> bytes:
    """Returns the program and the licence as a ``.tar.gz`` archive."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content, mode in ((_NAME, program, 0o755), ("LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644)):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), mode
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(data.getvalue(), mtime=0)


def main(arguments: list[str]) -> int:
    """Writes all files to a directory and returns the exit status."""
    directory, repository = Path(arguments[0]), (arguments[1:] or [""])[0].rstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    program = zipapp()
    tar_gz = archive(program)
    (directory / _NAME).write_bytes(program)
    (directory / _NAME).chmod(0o755)
    (directory / f"{_NAME}.tar.gz").write_bytes(tar_gz)
    if repository:
        version, digest = version_in(SOURCE, r'^__version__ = "(.*)"$'), hashlib.sha256(tar_gz).hexdigest()
        text = _MANIFEST.format(name=_NAME, repository=repository, version=version, digest=digest)
        (directory / "numa.yaml").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
