# SPDX-License-Identifier: Apache-2.0
"""CEL values and operators, and the budget of an evaluation.

Except for numbers, values of different types are never equal.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from numa_contract.errors import shown

from numa_tools.cel.tokens import INT_END, UINT_END, CelTextError, CelUnsupportedError, Uint

MAX_VALUES: Final = 100_000
"""Maximum number of values that one evaluation may handle. A selector without loops needs a few thousand at most."""
_CHARACTERS_PER_VALUE: Final = 16
"""Number of characters in a string that cost as much as one value."""


class CelError(CelTextError):
    """Raised if the evaluation fails. In the cluster, the scheduler then stops scheduling the pod and reports this
    error in an Event.
    """


class CelCostError(CelUnsupportedError):
    """Raised if the evaluation exceeds its budget. Unlike any other CelUnsupportedError, it ends the evaluation
    immediately.
    """


@dataclass(frozen=True, slots=True)
class Quantity:
    """A Kubernetes resource.Quantity, compared by CEL's quantity methods."""

    value: Fraction
    whole: bool = field(default=True, compare=False)
    """False if the text has decimals or a sub-unit suffix. Kubernetes converts only some of these to integers."""


@dataclass(frozen=True, slots=True)
class Maybe:
    """A CEL optional value."""

    value: Any = None
    present: bool = True


NONE: Final = Maybe(present=False)


class Domains(dict[str, Mapping[str, Any]]):
    """Attributes or capacities by domain. Looking up a missing domain returns an empty map, as in the scheduler."""


class MapLiteral(dict[str, Any]):
    """A map constructed by the expression. Its values are charged to the budget when an operator handles the map."""


def weights(values: Iterable[Any]) -> Iterator[int]:
    """Yields weights whose sum is the cost of the values: first the number of values, then a weight for each list, map
    and long string among these values or nested inside them.
    """
    waiting = [*values]
    yield len(waiting)
    while waiting:
        one = waiting.pop()
        if isinstance(one, str) and len(one) >= _CHARACTERS_PER_VALUE:
            yield len(one) // _CHARACTERS_PER_VALUE
        elif isinstance(one, list):
            yield len(one)
            waiting.extend(one)
        elif isinstance(one, MapLiteral):
            yield len(one)
            waiting.extend(one.values())
        elif isinstance(one, Maybe):
            waiting.append(one.value)


class Budget:
    """Number of values that an evaluation may still handle.

    Without this limit, nested ``cel.bind`` calls could double a list at every step, and a short expression could
    exhaust memory.
    """

    __slots__ = ("_left", "_max_values", "_parent", "_subject")

    def __init__(
        self, max_values: int = MAX_VALUES, subject: str = "it handles", parent: "Budget | None" = None
    ) -> None:
        self._left, self._max_values, self._subject, self._parent = max_values, max_values, subject, parent

    def spend(self, operands: Iterable[Any]) -> None:
        """Charges the budget for all values in a step's operands. Raises CelCostError if the budget is exceeded.

        A value that occurs twice in a list is charged twice, because it is compared twice.
        """
        self.charge(1)
        for weight in weights(operands):
            self.charge(weight)

    @property
    def exhausted(self) -> bool:
        """Returns True if the budget is used up, in which case no other evaluation can succeed."""
        return self._left < 0

    def charge(self, values: int) -> None:
        """Charges a number of values to this budget and its parent. Raises CelCostError if either is exceeded."""
        self._left -= values
        if self._left < 0:
            raise CelCostError(
                f"costs too much: {self._subject} more than {self._max_values} values; shorten its lists"
            )
        if self._parent:
            self._parent.charge(values)


def boolean(value: Any, operation: str) -> bool:
    """Returns the value if it is a boolean. Raises CelError otherwise."""
    if not isinstance(value, bool):
        raise CelError(f"no such overload: {operation} of a value that is neither true nor false")
    return value


def get_field(value: Any, name: str) -> Any:
    """Returns a map's field. Raises CelError if the field is missing. A field of an optional value is optional."""
    if isinstance(value, Maybe):
        return optional_field(value, name)
    found = optional_field(value, name)
    if not found.present:
        raise CelError(f"no such key: {name}")
    return found.value


def optional_field(value: Any, name: Any) -> Maybe:
    """Returns a map's field, or NONE if the field is missing. Raises CelError if the value is not a map."""
    if isinstance(value, Maybe):
        return optional_field(value.value, name) if value.present else NONE
    if not isinstance(value, Mapping):
        raise CelError(f"no such overload: field {shown(name)} of a value that is not a map")
    if isinstance(value, Domains) and isinstance(name, str):
        return Maybe(value.get(name, {}))
    return Maybe(value[name]) if isinstance(name, str) and name in value else NONE


def member(value: Any, key: Any) -> Any:
    """Returns ``value[key]``, a map's entry by key or a list's entry by index. Raises CelError."""
    if isinstance(value, Maybe):
        return optional_member(value, key)
    found = optional_member(value, key)
    if not found.present:
        raise CelError(f"{'index out of range' if isinstance(value, list) else 'no such key'}: {shown(key)}")
    return found.value


def optional_member(value: Any, key: Any) -> Maybe:
    """Returns ``value[?key]``. Raises CelError if the value is neither a map nor a list."""
    if isinstance(value, Maybe):
        return optional_member(value.value, key) if value.present else NONE
    if not isinstance(value, list):
        return optional_field(value, key)
    if isinstance(key, bool) or not isinstance(key, int):
        raise CelError(f"index out of range: {shown(key)}")
    return Maybe(value[key]) if 0 <= key < len(value) else NONE


def is_number(value: Any) -> bool:
    """Returns True for CEL's three numeric types."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def equal(one: Any, other: Any) -> bool:
    """Returns True if two values are equal. Numbers of different types can be equal. Any other value is equal only to
    values of its own type.
    """
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, Maybe) and isinstance(other, Maybe):
        return one.present == other.present and equal(one.value, other.value)
    return bool(one == other) and (type(one) is type(other) or (is_number(one) and is_number(other)))


def ordered(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Returns a comparison operator that raises TypeError unless both operands are numbers, strings or booleans."""

    def compared(one: Any, other: Any) -> bool:
        alike = any(isinstance(one, kind) and isinstance(other, kind) for kind in (str, bool))
        if not alike and not (is_number(one) and is_number(other)):
            raise TypeError
        return compare(one, other)

    return compared


def _contained(item: Any, container: Any) -> bool:
    if isinstance(container, Mapping):
        return isinstance(item, str) and item in container
    if not isinstance(container, list):
        raise TypeError
    return any(equal(item, each) for each in container)


def calculated(calculate: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Returns an arithmetic operator for two numbers of the same type. It raises CelError if an integer result does not
    fit in 64 bits.
    """

    def apply(one: Any, other: Any) -> Any:
        if not (is_number(one) and is_number(other)) or type(one) is not type(other):
            raise TypeError
        try:
            result = calculate(one, other)
        except ZeroDivisionError as error:
            if isinstance(one, float):
                raise CelUnsupportedError("the division of a float by zero is not supported") from error
            raise CelError("division by zero") from error
        low, high = (0, UINT_END) if isinstance(one, Uint) else (-INT_END, INT_END)
        if isinstance(result, int) and not low <= result < high:
            raise CelError("integer overflow")
        return Uint(result) if isinstance(one, Uint) else result

    return apply


def _quotient(one: Any, other: Any) -> Any:
    """Divides two numbers of the same type. The quotient of integers is truncated toward zero."""
    if isinstance(one, float):
        return one / other
    return abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)


def _added(one: Any, other: Any) -> Any:
    if (isinstance(one, str) and isinstance(other, str)) or (isinstance(one, list) and isinstance(other, list)):
        return operator.add(one, other)
    return calculated(operator.add)(one, other)


def _remainder(one: Any, other: Any) -> Any:
    if isinstance(one, float):
        raise TypeError
    return one - _quotient(one, other) * other


def _not(value: Any) -> bool:
    return not boolean(value, "!")


def _negative(value: Any) -> Any:
    if isinstance(value, Uint) or not is_number(value):
        raise TypeError
    return calculated(operator.sub)(type(value)(0), value)


OPERATORS: Final[Mapping[str, Callable[..., Any]]] = {
    "==": equal,
    "!=": lambda one, other: not equal(one, other),
    "<": ordered(operator.lt),
    "<=": ordered(operator.le),
    ">": ordered(operator.gt),
    ">=": ordered(operator.ge),
    "in": _contained,
    "+": _added,
    "-": calculated(operator.sub),
    "*": calculated(operator.mul),
    "/": calculated(_quotient),
    "%": calculated(_remainder),
    "unary !": _not,
    "unary -": _negative,
}
