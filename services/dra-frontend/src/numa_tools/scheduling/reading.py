# SPDX-License-Identifier: Apache-2.0
"""Fields of API objects that a person wrote: each has its kind, or the fault is named by its place."""

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Final, TypeVar

from numa_contract.errors import MalformedError, shown
from numa_contract.quantity import parse_quantity

MOST_ITEMS: Final = 1024
"""Maximum number of entries of a list. Lists of the API are shorter."""
_KINDS: Final[Mapping[type, str]] = {
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "a map",
    int: "a number",
}
T = TypeVar("T")


class ManifestError(Exception):
    """A manifest that the API server would not take, or that is not simulated; names the object and the field."""


def value(document: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """Returns a field; absent or null it is the default. Raises ManifestError."""
    found = document.get(key)
    if found is None:
        if default is None:
            raise ManifestError(f"{key}: is missing")
        return default
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ManifestError(f"{key}: must be {_KINDS[kind]}, not {shown(found)}")
    return found


def mapping(document: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    """Returns a map inside of maps, an empty one where there is none; raises ManifestError."""
    for key in keys:
        document = value(document, key, dict, {})
    return document


def items(
    document: Mapping[str, Any], key: str, read: Callable[[Mapping[str, Any]], T], most: int = MOST_ITEMS
) -> tuple[T, ...]:
    """Returns what is read of each map of a list of at most so many; raises ManifestError with the place."""
    found = value(document, key, list, [])
    if len(found) > most:
        raise ManifestError(f"{key}: has {len(found)} entries; the API takes {most} at most")
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
    """Returns a list of texts; raises ManifestError."""
    found = value(document, key, list, [])
    if len(found) > MOST_ITEMS or not all(isinstance(one, str) for one in found):
        raise ManifestError(f"{key}: must be a list of texts")
    return tuple(found)


def quantity(found: Any) -> Fraction:
    """Returns an amount; raises ManifestError."""
    if isinstance(found, bool) or not isinstance(found, str | int | float):
        raise ManifestError(f"must be a quantity, not {shown(found)}")
    try:
        return parse_quantity(found)
    except MalformedError as error:
        raise ManifestError(str(error)) from error


def quantities(document: Mapping[str, Any], key: str) -> dict[str, Fraction]:
    """Returns a map of amounts; raises ManifestError."""
    found = {}
    for name, amount in value(document, key, dict, {}).items():
        try:
            found[str(name)] = quantity(amount)
        except ManifestError as error:
            raise ManifestError(f"{key}.{name}: {error}") from error
    return found
