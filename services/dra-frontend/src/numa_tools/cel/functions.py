# SPDX-License-Identifier: Apache-2.0
"""CEL functions available to selectors: the standard ones, cel-go's strings and sets libraries, and Kubernetes' own.

A function raises TypeError for an overload that CEL does not have, and CelUnsupportedError for one that is not
implemented here. Every value that an evaluation can produce has one of the types of :mod:`numa_tools.cel.values`.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from dra_frontend.devices.model import MAX_ATTRIBUTE_VALUES
from numa_contract.errors import MalformedError, shown
from numa_contract.quantity import parse_quantity

from numa_tools.cel import regex
from numa_tools.cel.semver import Semver, normalized
from numa_tools.cel.tokens import INT_END, UINT_END, CelUnsupportedError, Uint
from numa_tools.cel.values import (
    NONE,
    OPERATORS,
    CelError,
    Maybe,
    Quantity,
    equal,
    is_number,
)

_BLANKS: Final = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
_LOWER: Final = {code: code + 32 for code in range(65, 91)}
_UPPER: Final = {code + 32: code for code in range(65, 91)}
_TRUE, _FALSE = ("1", "t", "T", "true", "TRUE", "True"), ("0", "f", "F", "false", "FALSE", "False")
Function = Callable[..., Any]


def _typed(*kinds: type) -> Callable[[Function], Function]:
    """Decorates a function so that it raises TypeError unless its arguments have these types."""

    def decorate(function: Function) -> Function:
        def checked(*values: Any) -> Any:
            if len(values) != len(kinds) or not all(map(_has_type, values, kinds)):
                raise TypeError
            return function(*values)

        return checked

    return decorate


def _has_type(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool | Uint)
    return kind is object or isinstance(value, kind)


def _by_type(*variants: Function) -> Function:
    """Returns a function that calls the first variant whose types match the arguments."""

    def call(*values: Any) -> Any:
        for variant in variants:
            try:
                return variant(*values)
            except TypeError:
                continue
        raise TypeError

    return call


def _size(value: Any) -> int:
    if not isinstance(value, str | list | Mapping):
        raise TypeError
    return len(value)


def _includes(value: Any, item: Any) -> bool:
    if not isinstance(value, list):
        return equal(value, item)
    if len(value) > MAX_ATTRIBUTE_VALUES:
        raise CelUnsupportedError(
            f"the result of includes() for more than {MAX_ATTRIBUTE_VALUES} values differs between releases"
        )
    return any(equal(each, item) for each in value)


# String functions: cel-go's ext.Strings, version 2, whose indices count characters rather than bytes.
def _character(text: str, index: int) -> str:
    if not 0 <= index <= len(text):
        raise CelError(f"index out of range: {index}")
    return text[index : index + 1]


def _substring(text: str, start: int, end: int) -> str:
    if not 0 <= start <= end <= len(text):
        raise CelError(f"index out of range: {start} to {end}")
    return text[start:end]


def _split(text: str, separator: str, most: int) -> list[str]:
    if most == 0:
        return []
    if separator:
        return text.split(separator, most - 1 if most > 0 else -1)
    limit = len(text) if most < 0 else most
    return [*text[: limit - 1], *([text[limit - 1 :]] if len(text) >= limit > 0 else [])]


def _joined(items: list[Any], separator: str) -> str:
    if not all(isinstance(item, str) for item in items):
        raise TypeError
    return separator.join(items)


# List functions: Kubernetes' lists library.
def _index(items: list[Any], item: Any) -> int:
    return next((index for index, each in enumerate(items) if equal(each, item)), -1)


def _last_index(items: list[Any], item: Any) -> int:
    return next((index for index in reversed(range(len(items))) if equal(items[index], item)), -1)


def _extremum(items: list[Any], greatest: bool = False) -> Any:
    if not items:
        raise CelError("min or max of an empty list")
    found = items[0]
    for item in items:
        if OPERATORS[">" if greatest else "<"](item, found):
            found = item
    return found


def _sum(items: list[Any]) -> Any:
    total: Any = 0
    for index, item in enumerate(items):
        if not is_number(item):
            raise TypeError
        total = OPERATORS["+"](total, item) if index else item
    return total


# Quantities and semantic versions.
def _quantity(text: str) -> Quantity:
    try:
        value = parse_quantity(text if text == text.strip() else "")
    except MalformedError as error:
        raise CelError(str(error)) from error
    return Quantity(value, whole="." not in text and text[-1:] not in "num" and "e-" not in text.lower())


def _is_valid(make: Function) -> Function:
    def valid(*values: Any) -> bool:
        try:
            make(*values)
        except CelError:
            return False
        return True

    return valid


def _fits_int(quantity: Quantity) -> bool:
    if quantity.value.denominator == 1 and not quantity.whole:
        raise CelUnsupportedError("it is unknown whether a quantity with a decimal point converts to an integer")
    return quantity.value.denominator == 1 and -INT_END <= quantity.value < INT_END


def _as_integer(quantity: Quantity) -> int:
    if not _fits_int(quantity):
        raise CelError("cannot convert value to integer")
    return int(quantity.value)


def _summed(sign: int) -> Function:
    def add(one: Quantity, other: Any) -> Quantity:
        amount, whole = (other.value, other.whole) if isinstance(other, Quantity) else (other, True)
        return Quantity(one.value + sign * amount, one.whole and whole)

    return _by_type(_typed(Quantity, Quantity)(add), _typed(Quantity, int)(add))


def _compared(function: Callable[[Any, Any], Any]) -> Function:
    quantities = _typed(Quantity, Quantity)(lambda one, other: function(one.value, other.value))
    return _by_type(quantities, _typed(Semver, Semver)(function))


_semver = _by_type(
    _typed(str)(Semver), _typed(str, bool)(lambda text, normal: Semver(normalized(text) if normal else text))
)


# Type conversions.
def _string(value: Any) -> str:
    if isinstance(value, float):
        raise CelUnsupportedError("string() of a float is not supported")
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int):
        raise TypeError
    return str(value)


def _integer(value: Any, low: int = -INT_END, high: int = INT_END) -> int:
    if isinstance(value, str):
        if not re.fullmatch(r"[+-]?\d{1,30}", value, re.ASCII):
            raise CelError(f"{shown(value)} is not a number")
        value = int(value)
    elif not is_number(value):
        raise TypeError
    if not low <= value < high:
        raise CelError("integer overflow")
    return int(value)


def _double(value: Any) -> float:
    if isinstance(value, str):
        if not re.fullmatch(r"[+-]?\d{1,30}(\.\d{1,30})?", value, re.ASCII):
            raise CelUnsupportedError(f"double() of {shown(value)} is not supported")
    elif not is_number(value):
        raise TypeError
    return float(value)


def _truth(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str):
        raise TypeError
    if value not in _TRUE + _FALSE:
        raise CelError(f"{shown(value)} is neither true nor false")
    return value in _TRUE


def _value(optional: Maybe) -> Any:
    if not optional.present:
        raise CelError("optional.none() dereference")
    return optional.value


def _nonzero(value: Any) -> Maybe:
    if isinstance(value, Quantity | Maybe) or not isinstance(value, str | int | float | list | Mapping | None):
        raise CelUnsupportedError("optional.ofNonZeroValue() of this type is not supported")
    return Maybe(value) if value else NONE


def _matches(text: str, pattern: str) -> bool:
    program = regex.compiled(pattern)
    if isinstance(program, str):
        raise CelUnsupportedError(program)
    return program.found_in(text)


def _contains_all(items: list[Any], others: list[Any]) -> bool:
    return all(any(equal(item, other) for item in items) for other in others)


FUNCTIONS: Final[Mapping[str, Function]] = {
    "size": _size,
    "dyn": _typed(object)(lambda value: value),
    "string": _string,
    "int": _typed(object)(_integer),
    "uint": _typed(object)(lambda value: Uint(_integer(value, 0, UINT_END))),
    "double": _double,
    "bool": _truth,
    "matches": _typed(str, str)(_matches),
    "quantity": _typed(str)(_quantity),
    "isQuantity": _is_valid(_typed(str)(_quantity)),
    "sign": _typed(Quantity)(lambda one: (one.value > 0) - (one.value < 0)),
    "semver": _semver,
    "isSemver": _is_valid(_semver),
    "optional.of": _typed(object)(Maybe),
    "optional.none": _typed()(lambda: NONE),
    "optional.ofNonZeroValue": _typed(object)(_nonzero),
    "sets.contains": _typed(list, list)(_contains_all),
    "sets.equivalent": _typed(list, list)(lambda one, other: _contains_all(one, other) and _contains_all(other, one)),
    "sets.intersects": _typed(list, list)(lambda one, other: any(equal(a, b) for a in one for b in other)),
}
METHODS: Final[Mapping[str, Function]] = {
    "size": _size,
    "startsWith": _typed(str, str)(str.startswith),
    "endsWith": _typed(str, str)(str.endswith),
    "contains": _typed(str, str)(str.__contains__),
    "matches": _typed(str, str)(_matches),
    "lowerAscii": _typed(str)(lambda text: text.translate(_LOWER)),
    "upperAscii": _typed(str)(lambda text: text.translate(_UPPER)),
    "trim": _typed(str)(lambda text: text.strip(_BLANKS)),
    "charAt": _typed(str, int)(_character),
    "substring": _by_type(
        _typed(str, int)(lambda text, start: _substring(text, start, len(text))), _typed(str, int, int)(_substring)
    ),
    "replace": _by_type(_typed(str, str, str)(str.replace), _typed(str, str, str, int)(str.replace)),
    "split": _by_type(_typed(str, str)(lambda text, by: _split(text, by, -1)), _typed(str, str, int)(_split)),
    "join": _by_type(_typed(list)(lambda items: _joined(items, "")), _typed(list, str)(_joined)),
    "indexOf": _by_type(_typed(str, str)(str.find), _typed(list, object)(_index)),
    "lastIndexOf": _by_type(_typed(str, str)(str.rfind), _typed(list, object)(_last_index)),
    "includes": _typed(object, object)(_includes),
    "isSorted": _typed(list)(lambda items: not any(map(OPERATORS[">"], items, items[1:]))),
    "sum": _typed(list)(_sum),
    "min": _typed(list)(_extremum),
    "max": _typed(list)(lambda items: _extremum(items, greatest=True)),
    "isGreaterThan": _compared(operator.gt),
    "isLessThan": _compared(operator.lt),
    "compareTo": _compared(lambda one, other: (one > other) - (one < other)),
    "asInteger": _typed(Quantity)(_as_integer),
    "isInteger": _typed(Quantity)(_fits_int),
    "asApproximateFloat": _typed(Quantity)(lambda one: float(one.value)),
    "add": _summed(1),
    "sub": _summed(-1),
    "major": _typed(Semver)(lambda version: version.key[0][0]),
    "minor": _typed(Semver)(lambda version: version.key[0][1]),
    "patch": _typed(Semver)(lambda version: version.key[0][2]),
    "hasValue": _typed(Maybe)(lambda optional: optional.present),
    "value": _typed(Maybe)(_value),
}
WITHOUT_OFFSET: Final = ("indexOf", "lastIndexOf")
"""Methods that are supported only if their optional offset argument is omitted."""
