# SPDX-License-Identifier: Apache-2.0
"""Parses a CEL expression into a function of its scope."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from numa_tools.cel.costs import COSTS
from numa_tools.cel.functions import FUNCTIONS, METHODS, WITHOUT_OFFSET
from numa_tools.cel.nodes import (
    LOOPS,
    MACROS,
    WITH_TWO_VARIABLES,
    Lazy,
    Node,
    Outcomes,
    Scope,
    Select,
    alternative,
    applied,
    lookup,
)
from numa_tools.cel.tokens import LITERALS, CelUnsupportedError, tokens
from numa_tools.cel.values import OPERATORS, CelError, MapLiteral, boolean, member, optional_field, optional_member

_MAX_LEVELS: Final = 60
"""Maximum nesting depth of parentheses, arguments, branches and signs. Each level costs about nine Python calls."""
_MAX_HEIGHT: Final = 100
"""Maximum number of operators and fields in a chain, as in ``1 + 1 + 1``. Each costs two nested Python calls."""
_TOO_DEEP: Final = "is nested too deeply"
_LEVELS: Final = (("==", "!=", "<", "<=", ">", ">=", "in"), ("+", "-"), ("*", "/", "%"))
_WORDS: Final = {"true": True, "false": False, "null": None}
_NAMESPACES: Final = ("cel", "optional", "sets", "math", "strings", "lists", "regex", "base64", "ip", "cidr", "google")
"""Namespaces of functions, such as ``sets`` in ``sets.contains``."""
_TYPES: Final = ("bool", "int", "uint", "double", "string", "bytes", "list", "map", "null_type", "type", "google")


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled expression: a function of its scope."""

    node: Node
    weight: int
    """Number of tokens, which bounds the number of evaluation steps in an expression without loops."""


class Parser:
    """Recursive-descent parser over the tokens of one expression.

    Both the parser and the function that it returns recurse. The depth of both is limited here, so no expression can
    reach the interpreter's recursion limit.
    """

    def __init__(self, expression: str) -> None:
        self._tokens = tokens(expression)
        self._position = 0
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
        """Returns a node that evaluates ``parts``. Raises CelUnsupportedError if the result is nested too deeply."""
        height = added + self._height(*parts)
        if height > _MAX_HEIGHT:
            raise CelUnsupportedError(_TOO_DEEP)
        self._heights[node] = height
        return node

    def _applied(self, function: Callable[..., Any], *operands: Node, cost: Callable[..., int] | None = None) -> Node:
        return self._above(applied(function, operands, cost), *operands)

    def whole(self) -> Program:
        """Parses all tokens and returns the program. Raises CelUnsupportedError."""
        node = self._ternary()
        if self._position < len(self._tokens):
            raise self._unexpected()
        return Program(node, len(self._tokens))

    def _token(self, ahead: int = 0) -> tuple[str, str]:
        position = self._position + ahead
        return self._tokens[position] if position < len(self._tokens) else ("", "")

    def _peek(self, ahead: int = 0) -> str:
        """Returns the next operator or identifier. Returns "" for literals, so that the string "-" is not mistaken for
        an operator.
        """
        kind, text = self._token(ahead)
        return text if kind in ("sign", "name") else ""

    def _unexpected(self) -> CelUnsupportedError:
        found = repr(self._token()[1][:40]) if self._position < len(self._tokens) else "its end"
        return CelUnsupportedError(f"cannot be parsed at {found}")

    def _take(self, *wanted: str) -> str:
        text = self._peek()
        if text and text in wanted:
            self._position += 1
            return text
        return ""

    def _expect(self, text: str) -> None:
        if not self._take(text):
            raise self._unexpected()

    def _name(self) -> str:
        kind, text = self._token()
        if kind != "name":
            raise self._unexpected()
        self._position += 1
        return text

    @contextmanager
    def _binding(self, *names: str) -> Iterator[None]:
        """Declares variables for the subexpression that is parsed while the context is open."""
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
            outcomes = Outcomes(decisive, sign)
            return decisive if any(outcomes.decides(each, scope) for each in parts) else outcomes.undecided_result()

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
        return self._method(node, name) if self._take("(") else self._above(Select(node, name), node)

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
        if name in MACROS and self._token()[0] == "name" and self._peek(1) == ",":
            return self._macro(target, name)
        arguments = self._arguments(")")
        if name in ("or", "orValue") and len(arguments) == 1:
            return self._above(partial(alternative, name, target, arguments[0]), target, arguments[0])
        if name not in METHODS or (name in WITHOUT_OFFSET and len(arguments) > 1):
            return self._unknown(f"the {'macro' if name in MACROS else 'function'} {name}()")
        return self._applied(METHODS[name], target, *arguments, cost=COSTS.get(name))

    def _unknown(self, what: str) -> Node:
        """Returns a node whose value is unknown. Other operands may still decide the result."""

        def fail(_: Scope) -> Any:
            raise CelUnsupportedError(f"{what} is not supported")

        return self._above(fail)

    def _macro(self, target: Node, name: str) -> Node:
        """Parses the rest of a loop macro, ``target.name(variable, ...)``, over a list or map."""
        names = [self._name()]
        self._expect(",")
        if name in WITH_TWO_VARIABLES and self._token()[0] == "name" and self._peek(1) == ",":
            names.append(self._name())
            self._expect(",")
        start = self._position
        with self._binding(*names):
            bodies = self._arguments(")")
        weight = 1 + self._position - start
        if len(bodies) not in MACROS[name]:
            return self._unknown(f"the macro {name}() with {len(names) + len(bodies)} arguments")
        evaluate = partial(LOOPS[name], target, tuple(names), bodies, weight)
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
            self._position += 1
        kind, text = self._token()
        if kind in ("", "sign"):
            raise self._unexpected()
        self._position += 1
        if kind == "name":
            return self._named(text)
        if kind == "bytes":
            return self._unknown("a bytes literal")
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
                    raise CelUnsupportedError("a map with keys other than strings is not supported")
                if key in made:
                    raise CelError("a key is repeated in a map")
                made[key] = value
            return made

        return self._above(construct, *(part for entry in entries for part in entry))

    def _named(self, name: str) -> Node:
        if name in _WORDS:
            return lambda _: _WORDS[name]
        if name in _NAMESPACES and name not in self._bound and self._peek() == "." and self._token(1)[0] == "name":
            return self._function_of(name)
        if self._take("{"):
            raise CelUnsupportedError(f"the message {name} is not supported")
        if self._take("("):
            return self._call(name)
        if name in _TYPES and name not in self._bound:
            return self._unknown(f"the type {name}")
        return partial(lookup, name)

    def _function_of(self, namespace: str) -> Node:
        """Parses a call to a namespaced function, such as ``sets.contains(...)``."""
        self._expect(".")
        name = f"{namespace}.{self._name()}"
        if not self._take("("):
            return self._unknown(name)
        return self._bind() if name == "cel.bind" else self._call(name)

    def _call(self, name: str) -> Node:
        arguments = self._arguments(")")
        if name == "has" and len(arguments) == 1 and isinstance(arguments[0], Select):
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
        node: Node = lambda scope: body(scope.with_names({name: Lazy(value, scope)}))  # noqa: E731
        # The value is evaluated at the point where the body uses it, so its depth is added to the depth at that point.
        return self._above(node, body, added=1 + self._height(value))
