# SPDX-License-Identifier: Apache-2.0
"""What instances that share the CDI directory tell each other: that something changed, and what was released.

A file that is gone was either released by another instance or lost; only the one who removed it knows. Losing the
journal loses no claim: files that another instance released may then be written again, and released again.
"""

import json
import secrets
from pathlib import Path
from typing import Any

from numa_contract.names import ClaimKey

_RELEASES_KEPT = 512


class Journal:
    """The journal's file, read again at each question. Wants the claims lock to be held."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def _load(self) -> dict[str, Any]:
        try:
            document = json.loads(self._path.read_bytes())
            releases = [(str(driver), str(uid)) for driver, uid in document["releases"]]
            return {"generation": int(document["generation"]), "releases": releases}
        except (OSError, ValueError, TypeError, KeyError):
            return {"generation": 0, "releases": []}

    def _store(self, releases: list[ClaimKey], generation: int) -> int:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        fresh.write_text(json.dumps({"generation": generation, "releases": releases[-_RELEASES_KEPT:]}))
        fresh.rename(self._path)
        return generation

    @property
    def generation(self) -> int:
        """A number that each change raises."""
        return int(self._load()["generation"])

    @property
    def releases(self) -> frozenset[ClaimKey]:
        """The latest releases."""
        return frozenset(self._load()["releases"])

    def written(self, key: ClaimKey) -> int:
        """A claim's file was written: it is no longer released. Returns the new generation."""
        state = self._load()
        return self._store([other for other in state["releases"] if other != key], state["generation"] + 1)

    def released(self, key: ClaimKey) -> int:
        """A claim's file was removed on purpose. Returns the new generation."""
        state = self._load()
        return self._store([other for other in state["releases"] if other != key] + [key], state["generation"] + 1)
