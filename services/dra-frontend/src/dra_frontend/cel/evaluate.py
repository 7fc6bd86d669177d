# SPDX-License-Identifier: Apache-2.0
"""Evaluates the selectors of devices: CEL as Kubernetes configures it, as far as it is written here (ADR 28).

An expression has one of four outcomes: true, false, an error (CelError), or unknown (CelUnsupportedError) if it depends
on a part that is not understood. As in CEL, ``&&`` and ``||`` ignore an error or an unknown part if the other side
decides; otherwise unknown wins over an error, since the unknown part may decide in the cluster.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from dra_frontend.cel.functions import COSTS, FUNCTIONS, METHODS, WITHOUT_OFFSET
from dra_frontend.cel.tokens import LITERALS, CelUnsupportedError, tokens
from dra_frontend.cel.values import (
    NONE,
    OPERATORS,
    Budget,
    CelCostError,
    CelError,
    MapLiteral,
    Maybe,
    boolean,
    get_field,
    member,
    optional_field,
    optional_member,
)

LONGEST: Final = 10 << 10
"""Maximum number of characters of an expression (resource.k8s.io, CELSelectorExpressionMaxLength)."""
_MAX_LEVELS: Final = 60
"""Maximum depth of parentheses, arguments, branches and signs: the parser makes about nine nested calls for each."""
_MAX_HEIGHT: Final = 100
"""Maximum number of operators and fields applied to each other's result, as in ``1 + 1 + 1``: two nested calls each."""
_TOO_DEEP: Final = "is nested too deep"


@dataclass(frozen=True, slots=True)
class Scope:
    """The names that a part of an evaluation knows, and the budget of the whole evaluation."""

    names: Mapping[str, Any]
    budget: Budget

    def having(self, names: Mapping[str, Any]) -> "Scope":
        """Returns a scope with more names."""
        return Scope({**self.names, **names}, self.budget)


Node = Callable[[Scope], Any]
_LEVELS: Final = (("==", "!=", "<", "<=", ">", ">=", "in"), ("+", "-"), ("*", "/", "%"))
_WORDS: Final = {"true": True, "false": False, "null": None}
_SPACES: Final = ("cel", "optional", "sets", "math", "strings", "lists", "regex", "base64", "ip", "cidr", "google")
"""Names before a dot that begin the name of a function."""
_TYPES: Final = ("bool", "int", "uint", "double", "string", "bytes", "list", "map", "null_type", "type", "google")
_MISSING: Final = object()


@dataclass(frozen=True, slots=True)
class Program:
    """An expression as a function of its scope."""

    node: Node
    weight: int
    """Number of tokens: the steps of an evaluation without loops are at most that many."""


class _Lazy:
    """A value that ``cel.bind`` names. It is evaluated at its first use; an error counts only where it is used."""

    __slots__ = ("_failed", "_node", "_scope", "_value")

    def __init__(self, node: Node, scope: Scope) -> None:
        self._node, self._scope = node, scope
        self._value: Any = _MISSING
        self._failed: CelError | CelUnsupportedError | None = None

    def get(self) -> Any:
        """Returns the value. Raises CelError and CelUnsupportedError."""
        if self._failed is None and self._value is _MISSING:
            try:
                self._value = self._node(self._scope)
            except (CelError, CelUnsupportedError) as error:
                self._failed = error
        if self._failed is not None:
            raise self._failed
        return self._value


class _Select:
    """``operand.name``, whose presence ``has`` tests without reading it."""

    def __init__(self, operand: Node, name: str) -> None:
        self.operand, self.name = operand, name

    def __call__(self, scope: Scope) -> Any:
        return get_field(self.operand(scope), self.name)

    def present(self, scope: Scope) -> bool:
        """Returns True if the operand has the field."""
        return optional_field(self.operand(scope), self.name).present


@lru_cache(256)
def _compiled(expression: str) -> Program | str:
    """Returns the program, or the reason that the expression cannot be read. Both are cached for the next device."""
    if len(expression) > LONGEST:
        return f"has more than {LONGEST} characters"
    try:
        return _Parser(expression).whole()
    except CelUnsupportedError as error:
        return str(error)


def selected(expression: str, device: Mapping[str, Any], whole: Budget | None = None) -> bool:
    """Returns True if a selector matches a device. Raises CelError and CelUnsupportedError.

    The evaluation also counts in ``whole``, the budget that it shares with others.
    """
    program = _compiled(expression)
    if isinstance(program, str):
        raise CelUnsupportedError(program)
    budget = Budget(whole=whole)
    budget.take(program.weight)
    return boolean(program.node(Scope({"device": device}, budget)), "the selector")


class _Outcomes:
    """Results of the terms of ``&&``, ``||``, ``all`` and ``exists``: one may decide whatever the others are."""

    def __init__(self, decisive: bool, what: str) -> None:
        self._decisive, self._what = decisive, what
        self._unknown: CelUnsupportedError | None = None
        self._error: CelError | None = None

    def decides(self, node: Node, scope: Scope) -> bool:
        """Returns True if a term decides; remembers it if it fails. Raises CelCostError."""
        try:
            return boolean(node(scope), self._what) == self._decisive
        except CelCostError:
            raise
        except CelUnsupportedError as unknown:
            self._unknown = self._unknown or unknown
        except CelError as error:
            self._error = self._error or error
        return False

    def rest(self) -> bool:
        """Returns the result if no term decided. Raises CelUnsupportedError or CelError if a term failed."""
        failed = self._unknown or self._error
        if failed is not None:
            raise failed
        return not self._decisive


class _Parser:
    """Recursive descent over the tokens of one expression.

    Both the parser and the function that it returns recurse. Their depth is bounded here, so that no expression reaches
    the recursion limit of the interpreter.
    """

    def __init__(self, expression: str) -> None:
        self._tokens = tokens(expression)
        self._place = 0
        self._level = 0
        self._heights: dict[Node, int] = {}
        self._bound: list[str] = []

    def _enter(self) -> None:
        self._level += 1
        if self._level > _MAX_LEVELS:
            raise CelUnsupportedError(_TOO_DEEP)

    def _leave(self) -> None:
        self._level -= 1

    def _height(self, *parts: Node) -> int:
        return max((self._heights.get(part, 1) for part in parts), default=0)

    def _above(self, node: Node, *parts: Node, added: int = 1) -> Node:
        """Returns a node whose evaluation evaluates ``parts``. Raises CelUnsupportedError if it goes too deep."""
        height = added + self._height(*parts)
        if height > _MAX_HEIGHT:
            raise CelUnsupportedError(_TOO_DEEP)
        self._heights[node] = height
        return node

    def _applied(self, function: Callable[..., Any], *operands: Node, cost: Callable[..., int] | None = None) -> Node:
        return self._above(_applied(function, operands, cost), *operands)

    def whole(self) -> Program:
        """Returns the program of all tokens. Raises CelUnsupportedError."""
        node = self._ternary()
        if self._place < len(self._tokens):
            raise self._unexpected()
        return Program(node, len(self._tokens))

    def _token(self, ahead: int = 0) -> tuple[str, str]:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else ("", "")

    def _peek(self, ahead: int = 0) -> str:
        """Returns the next operator or identifier. Returns "" for literals: a quoted "-" is not an operator."""
        kind, text = self._token(ahead)
        return text if kind in ("sign", "name") else ""

    def _unexpected(self) -> CelUnsupportedError:
        found = repr(self._token()[1][:40]) if self._place < len(self._tokens) else "its end"
        return CelUnsupportedError(f"cannot be read at {found}")

    def _take(self, *wanted: str) -> str:
        text = self._peek()
        if text and text in wanted:
            self._place += 1
            return text
        return ""

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._unexpected()

    def _name(self) -> str:
        kind, text = self._token()
        if kind != "name":
            raise self._unexpected()
        self._place += 1
        return text

    @contextmanager
    def _binding(self, *names: str) -> Iterator[None]:
        """Declares variables for the part that is read inside."""
        self._bound += names
        yield
        del self._bound[len(self._bound) - len(names) :]

    def _ternary(self) -> Node:
        self._enter()
        node = self._joined("||", "&&")
        if self._take("?"):
            node = self._choice(node)
        self._leave()
        return node

    def _choice(self, condition: Node) -> Node:
        yes = self._joined("||", "&&")
        self._expect(":")
        no = self._ternary()
        node: Node = lambda scope: yes(scope) if boolean(condition(scope), "?:") else no(scope)  # noqa: E731
        return self._above(node, condition, yes, no)

    def _joined(self, sign: str, *inner: str) -> Node:
        part: Callable[[], Node] = partial(self._joined, *inner) if inner else partial(self._binary, 0)
        parts = [part()]
        while self._take(sign):
            parts.append(part())
        decisive = sign == "||"

        def join(scope: Scope) -> bool:
            outcomes = _Outcomes(decisive, sign)
            return decisive if any(outcomes.decides(each, scope) for each in parts) else outcomes.rest()

        return self._above(join, *parts) if len(parts) > 1 else parts[0]

    def _binary(self, level: int) -> Node:
        node = self._unary() if level == len(_LEVELS) else self._binary(level + 1)
        while level < len(_LEVELS) and (sign := self._take(*_LEVELS[level])):
            node = self._applied(OPERATORS[sign], node, self._binary(level + 1))
        return node

    def _unary(self) -> Node:
        if sign := self._take("!", "-"):
            self._enter()
            operand = self._unary()
            self._leave()
            return self._applied(OPERATORS[f"unary {sign}"], operand)
        node = self._primary()
        while sign := self._take(".", "["):
            optional = bool(self._take("?"))
            node = self._indexed(node, optional) if sign == "[" else self._selected(node, optional)
        return node

    def _indexed(self, node: Node, optional: bool) -> Node:
        key = self._ternary()
        self._expect("]")
        return self._applied(optional_member if optional else member, node, key)

    def _selected(self, node: Node, optional: bool) -> Node:
        name = self._name()
        if optional:
            return self._applied(lambda value: optional_field(value, name), node)
        return self._method(node, name) if self._take("(") else self._above(_Select(node, name), node)

    def _arguments(self, end: str) -> list[Node]:
        found: list[Node] = []
        while not self._take(end):
            if found:
                self._expect(",")
                if self._take(end):
                    break
            found.append(self._ternary())
        return found

    def _method(self, target: Node, name: str) -> Node:
        if name in _MACROS and self._token()[0] == "name" and self._peek(1) == ",":
            return self._macro(target, name)
        arguments = self._arguments(")")
        if name in ("or", "orValue") and len(arguments) == 1:
            return self._above(partial(_alternative, name, target, arguments[0]), target, arguments[0])
        if name not in METHODS or (name in WITHOUT_OFFSET and len(arguments) > 1):
            return self._unknown(f"the {'macro' if name in _MACROS else 'function'} {name}()")
        return self._applied(METHODS[name], target, *arguments, cost=COSTS.get(name))

    def _unknown(self, what: str) -> Node:
        """Returns a node without a value; the expression can have one if the other parts decide."""

        def fail(_: Scope) -> Any:
            raise CelUnsupportedError(f"{what} is not understood")

        return self._above(fail)

    def _macro(self, target: Node, name: str) -> Node:
        """Returns a loop over a list or map: ``target.name(variable, ...)``, read up to its end."""
        names = [self._name()]
        self._expect(",")
        if name in _WITH_TWO and self._token()[0] == "name" and self._peek(1) == ",":
            names.append(self._name())
            self._expect(",")
        start = self._place
        with self._binding(*names):
            bodies = self._arguments(")")
        weight = 1 + self._place - start
        if len(bodies) not in _MACROS[name]:
            return self._unknown(f"the macro {name}() of {len(names) + len(bodies)} arguments")
        evaluate = partial(_LOOPS[name], target, tuple(names), bodies, weight)
        return self._above(evaluate, target, *bodies, added=2)

    def _primary(self) -> Node:
        if self._take("("):
            node = self._ternary()
            self._expect(")")
            return node
        if self._take("["):
            items = self._arguments("]")
            return self._above(lambda scope: [item(scope) for item in items], *items)
        if self._take("{"):
            return self._map()
        if self._peek() == "." and self._token(1)[0] == "name":
            self._place += 1
        kind, text = self._token()
        if kind in ("", "sign"):
            raise self._unexpected()
        self._place += 1
        if kind == "name":
            return self._named(text)
        if kind == "bytes":
            return self._unknown("a literal of bytes")
        value = LITERALS[kind](text)
        return lambda _: value

    def _map(self) -> Node:
        entries: list[tuple[Node, Node]] = []
        while not self._take("}"):
            if entries:
                self._expect(",")
                if self._take("}"):
                    break
            key = self._ternary()
            self._expect(":")
            entries.append((key, self._ternary()))

        def construct(scope: Scope) -> MapLiteral:
            made = MapLiteral()
            for key, value in ((key(scope), value(scope)) for key, value in entries):
                if not isinstance(key, str):
                    raise CelUnsupportedError("a map with keys other than texts is not understood")
                if key in made:
                    raise CelError("a key is repeated in a map")
                made[key] = value
            return made

        return self._above(construct, *(part for entry in entries for part in entry))

    def _named(self, name: str) -> Node:
        if name in _WORDS:
            return lambda _: _WORDS[name]
        if name in _SPACES and name not in self._bound and self._peek() == "." and self._token(1)[0] == "name":
            return self._function_of(name)
        if self._take("{"):
            raise CelUnsupportedError(f"the message {name} is not understood")
        if self._take("("):
            return self._call(name)
        if name in _TYPES and name not in self._bound:
            return self._unknown(f"the type {name}")
        return partial(_lookup, name)

    def _function_of(self, space: str) -> Node:
        """Returns a call of a function whose name has two parts."""
        self._expect(".")
        name = f"{space}.{self._name()}"
        if not self._take("("):
            return self._unknown(name)
        return self._bind() if name == "cel.bind" else self._call(name)

    def _call(self, name: str) -> Node:
        arguments = self._arguments(")")
        if name == "has" and len(arguments) == 1 and isinstance(arguments[0], _Select):
            return self._above(arguments[0].present, arguments[0])
        if name not in FUNCTIONS:
            return self._unknown(f"the function {name}()")
        return self._applied(FUNCTIONS[name], *arguments, cost=COSTS.get(name))

    def _bind(self) -> Node:
        name = self._name()
        self._expect(",")
        value = self._ternary()
        self._expect(",")
        with self._binding(name):
            body = self._ternary()
        self._expect(")")
        node: Node = lambda scope: body(scope.having({name: _Lazy(value, scope)}))  # noqa: E731
        # The value is evaluated inside the body, where its depth adds to that of the place that uses it.
        return self._above(node, body, added=1 + self._height(value))


def _lookup(name: str, scope: Scope) -> Any:
    found = scope.names.get(name, _MISSING)
    if found is _MISSING:
        raise CelError(f"no such key: {name}")
    return found.get() if isinstance(found, _Lazy) else found


def _applied(function: Callable[..., Any], operands: tuple[Node, ...], cost: Callable[..., int] | None = None) -> Node:
    def apply(scope: Scope) -> Any:
        values = [operand(scope) for operand in operands]
        scope.budget.spend(values)
        try:
            if cost is not None:
                scope.budget.take(cost(*values))
            return function(*values)
        except (TypeError, AttributeError, OverflowError) as error:
            raise CelError("no such overload: an operand is of another type than the operator takes") from error

    return apply


def _alternative(name: str, target: Node, other: Node, scope: Scope) -> Any:
    """Evaluates ``or`` and ``orValue``; the other value is only evaluated if it is needed."""
    found = target(scope)
    if not isinstance(found, Maybe):
        raise CelUnsupportedError(f"{name}() of a value that is not optional is not understood")
    if not found.present:
        return other(scope)
    return found if name == "or" else found.value


def _elements(target: Node, names: tuple[str, ...], weight: int, scope: Scope) -> Iterator[Scope]:
    """Yields a scope for each element of a list or key of a map, and counts the evaluation of the loop's body."""
    found = target(scope)
    if not isinstance(found, list | Mapping):
        raise CelError("no such overload: a macro of what is neither a list nor a map")
    for place, element in enumerate(list(found)):
        scope.budget.take(weight)
        if len(names) == 1:
            yield scope.having({names[0]: element})
        else:
            pair = (element, found[element]) if isinstance(found, Mapping) else (place, element)
            yield scope.having(dict(zip(names, pair, strict=True)))


def _quantified(
    decisive: bool, target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope
) -> bool:
    """Evaluates ``exists``, which one true element decides, or ``all``, which one false element decides."""
    outcomes = _Outcomes(decisive, "a macro")
    scopes = _elements(target, names, weight, scope)
    return decisive if any(outcomes.decides(bodies[0], each) for each in scopes) else outcomes.rest()


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


def _optionally(
    flat: bool, target: Node, names: tuple[str, ...], bodies: list[Node], weight: int, scope: Scope
) -> Maybe:
    """Evaluates ``optMap`` and ``optFlatMap``."""
    found = target(scope)
    if not isinstance(found, Maybe):
        raise CelError("no such overload: optMap of what is not optional")
    if not found.present:
        return NONE
    scope.budget.take(weight)
    result = bodies[0](scope.having({names[0]: found.value}))
    if flat and not isinstance(result, Maybe):
        raise CelError("no such overload: optFlatMap to what is not optional")
    return result if flat else Maybe(result)


_MACROS: Final[Mapping[str, tuple[int, ...]]] = {
    "all": (1,),
    "exists": (1,),
    "exists_one": (1,),
    "existsOne": (1,),
    "filter": (1,),
    "map": (1, 2),
    "optMap": (1,),
    "optFlatMap": (1,),
}
"""Macros that name a variable, and how many expressions follow."""
_WITH_TWO: Final = ("all", "exists", "exists_one", "existsOne")
_LOOPS: Final[Mapping[str, Callable[..., Any]]] = {
    "all": partial(_quantified, False),
    "exists": partial(_quantified, True),
    "exists_one": _exists_one,
    "existsOne": _exists_one,
    "filter": _filtered,
    "map": _mapped,
    "optMap": partial(_optionally, False),
    "optFlatMap": partial(_optionally, True),
}
