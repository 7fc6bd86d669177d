# SPDX-License-Identifier: Apache-2.0
"""Values of CEL: what operators and functions make of them. Types never mix, but for whole and broken numbers."""

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final

from numa_contract.errors import MalformedError, shown

from dra_frontend.devices.quantity import parse_quantity
from dra_frontend.scheduling.cel_tokens import CelUnsupportedError

MOST_VALUES: Final = 100_000
"""That one evaluation may handle; a selector of the greatest length that binds no list has a few thousand."""
_PIECE: Final = 16
"""Characters of a text that count as one more value."""
_HIGHEST: Final = 2**63


class CelError(Exception):
    """The evaluation failed, which ends the attempt to schedule; says why as the scheduler's event does."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """A resource.Quantity: compared by methods."""

    value: Fraction


class Domains(dict[str, Mapping[str, Any]]):
    """Attributes or capacities by domain; one that a device does not have is empty, as the scheduler presents it."""

    def __contains__(self, name: object) -> bool:
        """Every domain is there."""
        return isinstance(name, str)

    def __missing__(self, _: str) -> Mapping[str, Any]:
        return {}


class Budget:
    """What may still be handled: ``cel.bind`` lets a short expression double a list at each step."""

    __slots__ = ("_left", "_most", "_whole", "_whose")

    def __init__(self, most: int = MOST_VALUES, whose: str = "it handles", whole: "Budget | None" = None) -> None:
        self._left, self._most, self._whose, self._whole = most, most, whose, whole

    def spend(self, operands: Iterable[Any]) -> None:
        """Counts a step with all that is inside of its operands; raises CelUnsupportedError when that is too much.

        What a list has in it twice counts twice, as it is compared twice.
        """
        waiting = [*operands]
        self.take(1 + len(waiting))
        while waiting:
            one = waiting.pop()
            if isinstance(one, str) and len(one) >= _PIECE:
                self.take(len(one) // _PIECE)
            elif isinstance(one, list):
                self.take(len(one))
                waiting.extend(one)

    def take(self, values: int) -> None:
        """Counts so many values, also of the whole that this is a part of."""
        self._left -= values
        if self._left < 0:
            raise CelUnsupportedError(
                f"costs too much: {self._whose} more than {self._most} values; make its lists shorter"
            )
        if self._whole:
            self._whole.take(values)


def boolean(value: Any, what: str) -> bool:
    """Returns the value; raises CelError unless it is true or false."""
    if not isinstance(value, bool):
        raise CelError(f"no such overload: {what} of what is neither true nor false")
    return value


def field(value: Any, name: str) -> Any:
    """Returns a field of a map; raises CelError where there is none."""
    if not isinstance(value, Mapping):
        raise CelError(f"no such overload: field {name} of what is not a map")
    if name not in value:
        raise CelError(f"no such key: {name}")
    return value[name]


def member(value: Any, key: Any) -> Any:
    """Returns ``value[key]``: by key of a map, by place of a list."""
    if isinstance(value, list):
        if not isinstance(key, int) or isinstance(key, bool) or not 0 <= key < len(value):
            raise CelError(f"index out of range: {shown(key)}")
        return value[key]
    if not isinstance(key, str):
        raise CelError(f"no such key: {shown(key)}")
    return field(value, key)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other) and (type(one) is type(other) or (_number(one) and _number(other)))


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    def ordered(one: Any, other: Any) -> bool:
        if not (_number(one) and _number(other)) and not (isinstance(one, str) and isinstance(other, str)):
            raise TypeError
        return compare(one, other)

    return ordered


def _contained(item: Any, place: Any) -> bool:
    if isinstance(place, Mapping):
        return item in place
    if not isinstance(place, list):
        raise TypeError
    return any(_equal(item, each) for each in place)


def _calculated(calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def calculated(one: Any, other: Any) -> Any:
        if not (_number(one) and _number(other)) or type(one) is not type(other):
            raise TypeError
        try:
            result = calculate(one, other)
        except ZeroDivisionError as error:
            raise CelError("division by zero") from error
        if isinstance(result, int) and not -_HIGHEST <= result < _HIGHEST:
            raise CelError("integer overflow")
        return result

    return calculated


def _quotient(one: Any, other: Any) -> Any:
    """Returns one divided by the other; of integers the part before the point."""
    if isinstance(one, float):
        return one / other
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)


def _added(one: Any, other: Any) -> Any:
    if (isinstance(one, str) and isinstance(other, str)) or (isinstance(one, list) and isinstance(other, list)):
        return operator.add(one, other)
    return _calculated(operator.add)(one, other)


def _remainder(one: Any, other: Any) -> Any:
    if isinstance(one, float):
        raise TypeError
    return one - _quotient(one, other) * other


def _not(value: Any) -> bool:
    return not boolean(value, "!")


def _negative(value: Any) -> Any:
    return _calculated(operator.sub)(type(value)(0), value)


def _of_texts(function: Callable[[str, str], bool]) -> Callable[[Any, Any], bool]:
    def checked(text: Any, part: Any) -> bool:
        if not isinstance(text, str) or not isinstance(part, str):
            raise TypeError
        return function(text, part)

    return checked


def _size(value: Any) -> int:
    if not isinstance(value, str | list | dict):
        raise TypeError
    return len(value)


def _quantity(text: Any) -> Quantity:
    if not isinstance(text, str):
        raise TypeError
    try:
        return Quantity(parse_quantity(text))
    except MalformedError as error:
        raise CelError(str(error)) from error


def _quantities(function: Callable[[Fraction, Fraction], Any]) -> Callable[[Quantity, Quantity], Any]:
    return lambda one, other: function(one.value, other.value)


OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "==": _equal,
    "!=": lambda one, other: not _equal(one, other),
    "<": _ordered(operator.lt),
    "<=": _ordered(operator.le),
    ">": _ordered(operator.gt),
    ">=": _ordered(operator.ge),
    "in": _contained,
    "+": _added,
    "-": _calculated(operator.sub),
    "*": _calculated(operator.mul),
    "/": _calculated(_quotient),
    "%": _calculated(_remainder),
    "unary !": _not,
    "unary -": _negative,
}
FUNCTIONS: Final[Mapping[str, Callable[..., Any]]] = {"size": _size, "quantity": _quantity}
METHODS: Final[Mapping[str, Callable[..., Any]]] = {
    "startsWith": _of_texts(str.startswith),
    "endsWith": _of_texts(str.endswith),
    "contains": _of_texts(str.__contains__),
    "size": _size,
    "isGreaterThan": _quantities(operator.gt),
    "isLessThan": _quantities(operator.lt),
    "compareTo": _quantities(lambda one, other: (one > other) - (one < other)),
}
