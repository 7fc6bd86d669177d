# SPDX-License-Identifier: Apache-2.0
"""Reads fields from hand-written API objects. Each field's type is checked, and errors contain the field's path."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, TypeVar

from numa_contract.errors import MalformedError, shown
from numa_contract.quantity import parse_quantity

MAX_ITEMS: Final = 1024
"""Maximum number of entries in a list. The limits in the API itself are lower."""
_KINDS: Final[Mapping[type, str]] = {
    str: "a string",
    bool: "true or false",
    list: "a list",
    dict: "a map",
    int: "a number",
}
T = TypeVar("T")


class ManifestError(Exception):
    """Raised for a manifest that the API server would reject or that is not simulated. The message names the object and
    the field.
    """


def value(document: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Returns a field's value, or the default if the field is absent or null.

    Raises ManifestError if the value has the wrong type, or if there is neither a value nor a default.
    """
    found = document.get(key)
    if found is None:
        if default is None:
            raise ManifestError(f"{key}: is missing")
        return default
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ManifestError(f"{key}: must be {_KINDS[kind]}, not {shown(found)}")
    return found


def mapping(document: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Returns the map at a path of keys, or an empty map if there is none. Raises ManifestError."""
    for key in keys:
        document = value(document, key, dict, {})
    return document


def items(
    document: Mapping[str, Any], key: str, read: Callable[[Mapping[str, Any]], T], most: int = MAX_ITEMS
) -> tuple[T, ...]:
    """Applies ``read`` to each map in a list of at most ``most`` entries. Raises a ManifestError that contains the
    path.
    """
    found = value(document, key, list, [])
    if len(found) > most:
        raise ManifestError(f"{key}: has {len(found)} entries; the API accepts at most {most}")
    result = []
    for place, item in enumerate(found):
        try:
            if not isinstance(item, dict):
                raise ManifestError(f"must be a map, not {shown(item)}")
            result.append(read(item))
        except ManifestError as error:
            raise ManifestError(f"{key}[{place}]: {error}") from error
    return tuple(result)


def texts(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns the strings in a list field, or an empty tuple if the field is absent. Raises ManifestError."""
    found = value(document, key, list, [])
    if len(found) > MAX_ITEMS or not all(isinstance(one, str) for one in found):
        raise ManifestError(f"{key}: must be a list of strings")
    return tuple(found)


def quantity(found: Any) -> Fraction:
    """Parses a quantity. Raises ManifestError."""
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise ManifestError(f"must be a quantity, not {shown(found)}")
    try:
        return parse_quantity(found)
    except MalformedError as error:
        raise ManifestError(str(error)) from error


def quantities(document: Mapping[str, Any], key: str) -> dict[str, Fraction]:
    """Parses a map of quantities. Raises ManifestError."""
    found = {}
    for name, amount in value(document, key, dict, {}).items():
        try:
            found[str(name)] = quantity(amount)
        except ManifestError as error:
            raise ManifestError(f"{key}.{name}: {error}") from error
    return found
