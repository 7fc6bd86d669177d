# SPDX-License-Identifier: Apache-2.0
"""Consistently replaces the names of pods, containers, namespaces, claims and the node with numbers."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from numa_contract.cdi import RECORD_ANNOTATION
from numa_contract.documents import parse_json
from numa_contract.errors import MalformedError
from numa_contract.names import DRIVERS

# Names of Kubernetes objects. A match inside a longer name is ignored, except that a pool's name is recognized inside
# the name of its slice.
_IN_SLICE = "|".join(rf"(?<=[0-9a-f]{{5}}-{re.escape(driver)}-)" for driver in DRIVERS)
_BEFORE, _AFTER = rf"(?:(?<![a-z0-9-])(?<![a-z0-9]\.)|{_IN_SLICE})", r"(?![a-z0-9-]|\.[a-z0-9])"
_NAME: Final = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?"
# The form in which names appear in this driver's error messages.
_IN_TEXT: Final = re.compile(rf"(claim|pod) ({_NAME})/({_NAME})", re.ASCII)
_SLICE: Final = re.compile(rf"(?:{_IN_SLICE}){_NAME}", re.ASCII)
_FIELDS: Final[Mapping[str, str]] = {
    "podName": "pod",
    "podNamespace": "namespace",
    "namespace": "namespace",
    "node": "node",
}
# Any user can name a pod "cpu" or "0-3". Values with a fixed meaning are therefore kept where they cannot be names: if
# they were masked, no command could read the archive.
_FIELDS_WITHOUT_NAMES: Final = frozenset(
    (
        *("apiVersion", "cdiVersion", "version", "kind", "driver", "device", "attribute", "size", "pageSize", "mode"),
        *("id", "cgroup", "request", "requests", "env"),
    )
)
"""Fields whose values are kept. None contains an object's name. Names of requests could not be masked consistently,
because they also occur as keys, which are kept.
"""
# A CPU list or a UUID.
_NUMBERS: Final = re.compile(
    r"\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII
)
# Keys such as "dra.cpu/cpu", whose values are quantities. Such a key cannot be a namespaced name, because namespaces
# contain no full stops.
_ATTRIBUTE: Final = re.compile(r"[^/]*\.[^/]*/.*", re.DOTALL)
_WORDS: Final = """
dra.cpu dra.memory packed spread preferred required ignore group distribute only never any performance efficiency lift
keep move exclusive isolated mixed all strict interleave none claim low min container pod partition pool numa unknown
created running paused stopped prepared healthy unhealthy true false null
"""
_MAX_BYTES: Final = 1 << 20
"""Maximum size of a JSON document that is embedded in a string. A longer string is masked as text."""
KEPT_WORDS: Final = frozenset(_WORDS.split())
"""Words in the driver's own vocabulary. They are masked only in fields that contain names."""


class Masks:
    """Mapping of names to their replacements."""

    def __init__(self) -> None:
        self._masks: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None

    def add(self, kind: str, name: str) -> None:
        """Adds an object's name. If several kinds of objects share the name, the kind that was added first takes
        precedence.
        """
        if name and name not in self._masks:
            number = self._counts[kind] = self._counts.get(kind, 0) + 1
            self._masks[name] = f"{kind}-{number}"
            self._pattern = None

    def add_from_document(self, document: Any) -> None:
        """Adds the names in a JSON value, both from fields that contain names and from messages that mention them."""
        waiting = [document]
        while waiting:
            one = waiting.pop()
            if isinstance(one, dict):
                self._add_from_fields(one)
                waiting.extend(one.values())
            elif isinstance(one, list):
                waiting.extend(one)
            elif isinstance(one, str):
                inner = _embedded_object(one)
                self.add_from_text(one) if inner is None else waiting.append(inner)

    def _add_from_fields(self, fields: Mapping[str, Any]) -> None:
        for field, kind in _FIELDS.items():
            if isinstance(fields.get(field), str):
                self.add(kind, fields[field])
        if isinstance(fields.get("pool"), str):
            self.add_pools([fields["pool"]])
        match fields:
            case {"uid": str(), "namespace": str(), "name": str(name)}:
                self.add("claim", name)
            case {"podUid": str(), "name": str(name)} | {"podUid": str(), "container": str(name)}:
                self.add("container", name)
            case {"uid": str(), "name": str(name), **rest} if not rest:
                self.add("pod", name)
        for claim in [fields.get("claim"), *(fields["claims"] if isinstance(fields.get("claims"), list) else ())]:
            if isinstance(claim, str) and "/" in claim:
                namespace, _, name = claim.partition("/")
                self.add("namespace", namespace)
                self.add("claim", name)

    def add_from_text(self, text: str) -> None:
        """Adds the names that occur in a message. Names are recognized by the words around them."""
        for kind, namespace, name in _IN_TEXT.findall(text):
            self.add("namespace", namespace)
            self.add(kind, name)
        self.add_pools(_SLICE.findall(text))

    def text(self, text: str) -> str:
        """Replaces the names in a string, except names that are also words in the driver's vocabulary."""
        if self._pattern is None:
            names = sorted(self._masks.keys() - KEPT_WORDS, key=len, reverse=True)
            self._pattern = re.compile(f"{_BEFORE}({'|'.join(map(re.escape, names)) or '(?!)'}){_AFTER}", re.ASCII)
        return self._pattern.sub(lambda match: self._masks[match[0]], text)

    def document(self, value: Any, field: str = "", *, embedded: bool = False) -> Any:
        """Replaces the names in a JSON value. Keys are kept, except namespaced names, which contain a slash. Values
        that cannot be names are also kept.

        A string may contain another JSON document, as a claim file's annotation does. Strings in such a document
        (``embedded``) are masked as text, because documents could otherwise be nested without limit.
        """
        if isinstance(value, dict):
            return {
                self.text(key) if _is_name(key) else key: self.document(one, key, embedded=embedded)
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self.document(one, field, embedded=embedded) for one in value]
        if not isinstance(value, str) or field in _FIELDS_WITHOUT_NAMES or _ATTRIBUTE.fullmatch(field):
            return value
        if not embedded and (inner := _embedded_object(value)) is not None:
            return json.dumps(self.document(inner, embedded=True), separators=(",", ":"))
        if field in _FIELDS or field in ("name", "container"):
            return self._masks.get(value, self.text(value))
        if _NUMBERS.fullmatch(value):
            return value
        return self.text(value)

    def add_pools(self, names: Iterable[str]) -> None:
        """Adds pool names that begin with the node's name. If the node ``a`` becomes ``node-1``, its pool ``a-memory``
        becomes ``node-1-memory``.

        The node's name must already have been added. ``add_from_document`` and ``add_from_text`` call this method for
        the pool names in documents and in the names of slices.
        """
        for name in set(names) - self._masks.keys():
            nodes = [
                one for one, mask in self._masks.items() if mask.startswith("node-") and name.startswith(f"{one}-")
            ]
            if nodes:
                node = max(nodes, key=len)
                self._masks[name] = self._masks[node] + name.removeprefix(node)
                self._pattern = None


def _is_name(key: str) -> bool:
    """Returns True if a key is a namespaced name, as opposed to the name of a field, an attribute or an annotation."""
    return "/" in key and key != RECORD_ANNOTATION and not _ATTRIBUTE.fullmatch(key)


def _embedded_object(text: str) -> Any:
    """Parses the JSON object in a string, such as the record in a claim file. Returns None for any other string."""
    if not text.startswith("{"):
        return None
    try:
        found = parse_json(text.encode(), _MAX_BYTES, "text", "")
    except (MalformedError, UnicodeEncodeError):
        return None
    return found if isinstance(found, dict) else None
