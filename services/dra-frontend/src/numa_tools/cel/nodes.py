# SPDX-License-Identifier: Apache-2.0
"""Nodes of a compiled CEL expression: calls, fields, variables, macros and ``cel.bind``. Each is a function of a
scope.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import (
    NONE,
    Budget,
    CelCostError,
    CelError,
    Maybe,
    boolean,
    get_field,
    optional_field,
)

_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Scope:
    """Variables visible to a part of the expression, and the budget of the whole evaluation."""

    names: Mapping[str, Any]
    budget: Budget

    def with_names(self, names: Mapping[str, Any]) -> "Scope":
        """Returns a scope with additional variables."""
        return Scope({**self.names, **names}, self.budget)


Node = Callable[[Scope], Any]


class Lazy:
    """Value bound by ``cel.bind``. It is evaluated when first used, so an error in an unused value does not matter."""

    __slots__ = ("_failed", "_node", "_scope", "_value")

    def __init__(self, node: Node, scope: Scope) -> None:
        self._node, self._scope = node, scope
        self._value: Any = _MISSING
        self._failed: CelError | CelUnsupportedError | None = None

    def get(self) -> Any:
        """Returns the value, evaluating it on first use. Raises CelError and CelUnsupportedError."""
        if self._failed is None and self._value is _MISSING:
            try:
                self._value = self._node(self._scope)
            except (CelError, CelUnsupportedError) as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed
        return self._value


class Select:
    """Node for ``operand.name``. The ``has`` macro tests for the field without reading it."""

    def __init__(self, operand: Node, name: str) -> None:
        self.operand, self.name = operand, name

    def __call__(self, scope: Scope) -> Any:
        return get_field(self.operand(scope), self.name)

    def present(self, scope: Scope) -> bool:
        """Returns True if the operand has a field with this name."""
        return optional_field(self.operand(scope), self.name).present


class Outcomes:
    """Results of the operands of ``&&``, ``||``, ``all`` and ``exists``. A single operand may decide the result."""

    def __init__(self, decisive: bool, operation: str) -> None:
        self._decisive, self._operation = decisive, operation
        self._unknown: CelUnsupportedError | None = None
        self._error: CelError | None = None

    def decides(self, node: Node, scope: Scope) -> bool:
        """Evaluates an operand and returns True if it decides the result. If the evaluation fails, the failure is
        recorded. Raises CelCostError.
        """
        try:
            return boolean(node(scope), self._operation) == self._decisive
        except CelCostError:
            raise
        except CelUnsupportedError as unknown:
            self._unknown = self._unknown or unknown
        except CelError as error:
            self._error = self._error or error
        return False

    def undecided_result(self) -> bool:
        """Returns the result of an expression that was not decided by a single operand. Raises CelUnsupportedError or
        CelError if an operand failed.
        """
        failed = self._unknown or self._error
        if failed is not None:
            raise failed
        return not self._decisive


def lookup(name: str, scope: Scope) -> Any:
    found = scope.names.get(name, _MISSING)
    if found is _MISSING:
        raise CelError(f"no such key: {name}")
    return found.get() if isinstance(found, Lazy) else found


def applied(function: Callable[..., Any], operands: tuple[Node, ...], cost: Callable[..., int] | None = None) -> Node:
    def apply(scope: Scope) -> Any:
        values = [operand(scope) for operand in operands]
        scope.budget.spend(values)
        try:
            if cost is not None:
                scope.budget.charge(cost(*values))
            return function(*values)
        except (TypeError, AttributeError, OverflowError) as error:
            raise CelError("no such overload: the operator does not accept the type of an operand") from error

    return apply


def alternative(name: str, target: Node, other: Node, scope: Scope) -> Any:
    """Evaluates ``or`` and ``orValue``. The alternative is evaluated only if the optional value is empty."""
    found = target(scope)
    if not isinstance(found, Maybe):
        raise CelUnsupportedError(f"{name}() is supported only on optional values")
    if not found.present:
        return other(scope)
    return found if name == "or" else found.value


def _elements(target: Node, names: tuple[str, ...], weight: int, scope: Scope) -> Iterator[Scope]:
    """Yields a scope for each list element or map key, and charges each loop iteration to the budget."""
    found = target(scope)
    if not isinstance(found, list | Mapping):
        raise CelError("no such overload: a macro over a value that is neither a list nor a map")
    for index, element in enumerate(list(found)):
        scope.budget.charge(weight)
        if len(names) == 1:
            yield scope.with_names({names[0]: element})
        else:
            pair = (element, found[element]) if isinstance(found, Mapping) else (index, element)
            yield scope.with_names(dict(zip(names, pair, strict=True)))


def _quantified(
    decisive: bool, target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope
) -> bool:
    """Evaluates ``exists``, which is decided by one true element, or ``all``, which is decided by one false element."""
    outcomes = Outcomes(decisive, "a macro")
    scopes = _elements(target, names, weight, scope)
    return decisive if any(outcomes.decides(bodies[0], each) for each in scopes) else outcomes.undecided_result()


def _exists_one(target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope) -> bool:
    scopes = _elements(target, names, weight, scope)
    return sum(boolean(bodies[0](each), "exists_one") for each in scopes) == 1


def _filtered(target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope) -> list[Any]:
    scopes = _elements(target, names, weight, scope)
    return [each.names[names[0]] for each in scopes if boolean(bodies[0](each), "filter")]


def _mapped(target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope) -> list[Any]:
    *conditions, body = bodies
    scopes = _elements(target, names, weight, scope)
    return [body(each) for each in scopes if all(boolean(one(each), "map") for one in conditions)]


def _opt_map(flat: bool, target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope) -> Maybe:
    """Evaluates ``optMap`` and ``optFlatMap``."""
    found = target(scope)
    if not isinstance(found, Maybe):
        raise CelError("no such overload: optMap needs an optional value")
    if not found.present:
        return NONE
    scope.budget.charge(weight)
    result = bodies[0](scope.with_names({names[0]: found.value}))
    if flat and not isinstance(result, Maybe):
        raise CelError("no such overload: the result of optFlatMap must be optional")
    return result if flat else Maybe(result)


MACROS: Final[Mapping[str, tuple[int, ...]]] = {
    "all": (1,),
    "exists": (1,),
    "exists_one": (1,),
    "existsOne": (1,),
    "filter": (1,),
    "map": (1, 2),
    "optMap": (1,),
    "optFlatMap": (1,),
}
"""Macros that declare a variable, each with the permitted numbers of expressions after the variable."""
WITH_TWO_VARIABLES: Final = ("all", "exists", "exists_one", "existsOne")
LOOPS: Final[Mapping[str, Callable[..., Any]]] = {
    "all": partial(_quantified, False),
    "exists": partial(_quantified, True),
    "exists_one": _exists_one,
    "existsOne": _exists_one,
    "filter": _filtered,
    "map": _mapped,
    "optMap": partial(_opt_map, False),
    "optFlatMap": partial(_opt_map, True),
}
