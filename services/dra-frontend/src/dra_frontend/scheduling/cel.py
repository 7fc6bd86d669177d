# SPDX-License-Identifier: Apache-2.0
"""The part of CEL that selectors of devices are written in; what is left out is refused by name (ADR 19).

In it: literals, lists, ``device``, fields and keys, ``has``, ``in``, ``cel.bind``, all operators, a few functions of
texts and quantities. As in CEL, ``&&`` and ``||`` forgive an error on one side where the other side decides.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Final

from dra_frontend.scheduling.cel_tokens import LITERALS, CelUnsupportedError, tokens
from dra_frontend.scheduling.cel_values import FUNCTIONS, METHODS, OPERATORS, Budget, CelError, boolean, field, member

LONGEST: Final = 10 << 10
"""Characters of an expression (resource.k8s.io, CELSelectorExpressionMaxLength)."""
_MAX_LEVELS: Final = 60
"""Maximum depth of parentheses, arguments, branches and signs: the parser makes about nine nested calls for each."""
_MAX_HEIGHT: Final = 100
"""Maximum number of operators and fields applied to each other's result, as in ``1 + 1 + 1``: two nested calls each."""
_TOO_DEEP: Final = "is nested too deep"


@dataclass(frozen=True, slots=True)
class Scope:
    """The names that a part of an evaluation knows, and what the whole may still handle."""

    names: Mapping[str, Any]
    budget: Budget


Node = Callable[[Scope], Any]
_LEVELS: Final = (("==", "!=", "<", "<=", ">", ">=", "in"), ("+", "-"), ("*", "/", "%"))
_MACROS: Final = ("all", "exists", "exists_one", "map", "filter")
_WORDS: Final = {"true": True, "false": False, "null": None}


class _Select:
    """``operand.name``, which ``has`` asks about without reading it."""

    def __init__(self, operand: Node, name: str) -> None:
        self.operand, self.name = operand, name

    def __call__(self, scope: Scope) -> Any:
        return field(self.operand(scope), self.name)

    def present(self, scope: Scope) -> bool:
        there = self.operand(scope)
        if not isinstance(there, Mapping):
            raise CelError(f"has(): {self.name} of what is not a map")
        return self.name in there


@lru_cache(256)
def compiled(expression: str) -> Node:
    """Returns an expression as a function of its scope, which raises CelError; both raise CelUnsupportedError."""
    if len(expression) > LONGEST:
        raise CelUnsupportedError(f"has more than {LONGEST} characters")
    return _Parser(expression).whole()


def selected(expression: str, device: Mapping[str, Any], whole: Budget | None = None) -> bool:
    """Tells whether a selector is true of a device; raises CelError and CelUnsupportedError.

    It also spends of the budget that it has with others.
    """
    return boolean(compiled(expression)(Scope({"device": device}, Budget(whole=whole))), "the selector")


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

    def _enter(self) -> None:
        self._level += 1
        if self._level > _MAX_LEVELS:
            raise CelUnsupportedError(_TOO_DEEP)

    def _leave(self) -> None:
        self._level -= 1

    def _above(self, node: Node, *parts: Node) -> Node:
        """Returns a node whose evaluation evaluates ``parts``. Raises CelUnsupportedError if it goes too deep."""
        height = 1 + max((self._heights.get(part, 1) for part in parts), default=0)
        if height > _MAX_HEIGHT:
            raise CelUnsupportedError(_TOO_DEEP)
        self._heights[node] = height
        return node

    def _applied(self, function: Callable[..., Any], *operands: Node) -> Node:
        return self._above(_applied(function, *operands), *operands)

    def whole(self) -> Node:
        """Returns all of it."""
        node = self._ternary()
        if self._place < len(self._tokens):
            raise self._unexpected()
        return node

    def _peek(self) -> str:
        """Returns the next sign or name; nothing of a literal, since "-" in quotes is no minus."""
        kind, text = self._tokens[self._place] if self._place < len(self._tokens) else ("", "")
        return text if kind in ("sign", "name") else ""

    def _unexpected(self) -> CelUnsupportedError:
        found = repr(self._tokens[self._place][1][:40]) if self._place < len(self._tokens) else "its end"
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
        kind, text = self._tokens[self._place] if self._place < len(self._tokens) else ("", "")
        if kind != "name":
            raise self._unexpected()
        self._place += 1
        return text

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
            failed: CelError | None = None
            for each in parts:
                try:
                    if boolean(each(scope), sign) == decisive:
                        return decisive
                except CelError as error:
                    failed = failed or error
            if failed is not None:
                raise failed
            return not decisive

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
            if sign == "[":
                node = self._applied(member, node, self._ternary())
                self._expect("]")
                continue
            name = self._name()
            node = self._method(node, name) if self._take("(") else self._above(_Select(node, name), node)
        return node

    def _arguments(self, end: str) -> list[Node]:
        found: list[Node] = []
        while not self._take(end):
            if found:
                self._expect(",")
            found.append(self._ternary())
        return found

    def _method(self, target: Node, name: str) -> Node:
        if name not in METHODS:
            what = "macro" if name in _MACROS else "function"
            raise CelUnsupportedError(f"the {what} {name}() is not simulated; known are {', '.join(sorted(METHODS))}")
        return self._applied(METHODS[name], target, *self._arguments(")"))

    def _primary(self) -> Node:
        if self._take("("):
            node = self._ternary()
            self._expect(")")
            return node
        if self._take("["):
            items = self._arguments("]")
            return self._above(lambda scope: [item(scope) for item in items], *items)
        kind, text = self._tokens[self._place] if self._place < len(self._tokens) else ("", "")
        if kind in ("", "sign"):
            raise self._unexpected()
        self._place += 1
        if kind == "name":
            return self._named(text)
        value = LITERALS[kind](text)
        return lambda _: value

    def _named(self, name: str) -> Node:
        if name in _WORDS:
            return lambda _: _WORDS[name]
        if name == "cel" and self._take("."):
            return self._bind()
        if not self._take("("):
            return lambda scope: field(scope.names, name)
        arguments = self._arguments(")")
        if name == "has" and len(arguments) == 1 and isinstance(arguments[0], _Select):
            return self._above(arguments[0].present, arguments[0])
        if name not in FUNCTIONS:
            raise CelUnsupportedError(f"the function {name}() is not simulated")
        return self._applied(FUNCTIONS[name], *arguments)

    def _bind(self) -> Node:
        for expected in ("bind", "("):
            self._expect(expected)
        name = self._name()
        self._expect(",")
        value = self._ternary()
        self._expect(",")
        body = self._ternary()
        self._expect(")")
        node: Node = lambda scope: body(Scope({**scope.names, name: value(scope)}, scope.budget))  # noqa: E731
        return self._above(node, value, body)


def _applied(function: Callable[..., Any], *operands: Node) -> Node:
    def apply(scope: Scope) -> Any:
        values = [operand(scope) for operand in operands]
        scope.budget.spend(values)
        try:
            return function(*values)
        except (TypeError, AttributeError, OverflowError) as error:
            raise CelError("no such overload: an operand is of another type than the operator takes") from error

    return apply
