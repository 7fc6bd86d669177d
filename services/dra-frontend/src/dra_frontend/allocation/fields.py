# SPDX-License-Identifier: Apache-2.0
"""Typed access to fields of a Kubernetes document. As in its JSON, null and absent are the same.

Everything here raises Refused for a field that does not have the form that the API promises.
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dra_frontend.allocation.errors import Refused
from dra_frontend.devices.quantity import parse_quantity

# Claims ask for the same few amounts.
_exact = lru_cache(256)(parse_quantity)


def _wrong(key: str, value: object, wanted: str) -> Refused:
    return Refused(f"field {key!r} must be {wanted}, not {'missing' if value is None else type(value).__name__}")


def object_in(document: object, *keys: str) -> Mapping[str, Any]:
    """Returns the object at the end of a path of keys; an empty one where something is absent on the way."""
    here, name = document, "document"
    for key in keys:
        if not isinstance(here, Mapping):
            raise _wrong(name, here, "an object")
        here, name = here.get(key), key
        if here is None:
            return {}
    if not isinstance(here, Mapping):
        raise _wrong(name, here, "an object")
    return here


def items_in(document: Mapping[str, Any], key: str, most: int) -> list[Mapping[str, Any]]:
    """Returns a list of at most ``most`` objects."""
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong(key, value, "a list")
    if len(value) > most:
        raise Refused(f"field {key!r} has {len(value)} entries, more than {most}")
    for item in value:
        if not isinstance(item, Mapping):
            raise _wrong(f"{key}[]", item, "an object")
    return value


def text_in(document: Mapping[str, Any], key: str) -> str:
    """Returns a text that must be there and not be empty."""
    value = document.get(key)
    if not isinstance(value, str):
        raise _wrong(key, value, "a string")
    if not value:
        raise Refused(f"field {key!r} must not be empty")
    return value


def optional_text_in(document: Mapping[str, Any], key: str) -> str | None:
    """Returns a text, None where it is absent or empty."""
    return None if document.get(key) in (None, "") else text_in(document, key)


def texts_in(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Returns a list of texts."""
    value = document.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _wrong(key, value, "a list of strings")
    return tuple(value)


def flag_in(document: Mapping[str, Any], key: str) -> bool:
    """Returns a boolean; absent is false."""
    value = document.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(key, value, "a boolean")
    return bool(value)


def quantities_in(document: Mapping[str, Any], key: str) -> dict[str, Fraction]:
    """Returns a map of exact quantities, each written as a string or as a bare number."""
    found: dict[str, Fraction] = {}
    for name, value in object_in(document, key).items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise _wrong(f"{key}[{name}]", value, "a quantity")
        try:
            found[name] = _exact(value)
        except ValueError as error:
            raise Refused(f"field '{key}[{name}]' is not a quantity: {error}") from error
    return found
