# SPDX-License-Identifier: Apache-2.0
"""Reads a document field by field and reports the fields that were not read."""

import copy
from collections.abc import Mapping
from typing import Any, Self


class UnknownFieldError(Exception):
    """A document has fields that its reader does not know; the message lists their paths."""


class Fields:
    """A mapping whose fields are each read once; finish() rejects the fields that have not been read."""

    def __init__(self, content: dict[str, Any], path: str = "") -> None:
        """Wraps a mapping, from which each field is removed when it is read. Use of() for a document that must stay
        unchanged.
        """
        self._content = content
        self._path = path

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Returns the fields of a copy of a document."""
        return cls(copy.deepcopy(dict(document)))

    def take(self, key: str, default: Any = None) -> Any:
        """Removes a field and returns its whole value, or the default if the field is absent."""
        return self._content.pop(key, default)

    def inside(self, key: str) -> "Fields":
        """Returns the fields of a mapping inside this one, or no fields if that mapping is absent."""
        return Fields(self._content.setdefault(key, {}), f"{self._path}.{key}")

    def each(self, key: str) -> list["Fields"]:
        """Returns the fields of each mapping in a list, or an empty list if the list is absent."""
        items = self._content.get(key) or []
        return [Fields(item, f"{self._path}.{key}[{item.get('name', number)}]") for number, item in enumerate(items)]

    def has(self, key: str) -> bool:
        """Returns True if a field exists and has not been read yet."""
        return key in self._content

    def finish(self) -> None:
        """Raises UnknownFieldError if a field has not been read."""
        if left := _leaves(self._content, self._path):
            raise UnknownFieldError(", ".join(left))


def _leaves(value: Any, path: str) -> list[str]:
    """Returns the paths of all values that have not been read. Empty mappings, and lists of empty mappings, count as
    read.
    """
    if isinstance(value, Mapping):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}")]
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return [
            leaf for number, item in enumerate(value) for leaf in _leaves(item, f"{path}[{item.get('name', number)}]")
        ]
    return [path.removeprefix(".")]
