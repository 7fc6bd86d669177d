# SPDX-License-Identifier: Apache-2.0
"""The evaluator of selectors: valid expressions made of all functions and types, and invalid strings."""

from fractions import Fraction

from hypothesis import strategies as st
from numa_tools.cel.evaluate import MAX_LENGTH, selected
from numa_tools.cel.functions import FUNCTIONS, METHODS
from numa_tools.cel.semver import Semver
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import CelError, Domains, Quantity

from tests.fuzz.contract_targets import text
from tests.fuzz.target import Target

_LEAVES = [
    *("device.driver", "device.attributes", 'device.attributes["dra.cpu"].numCPUs', 'device.attributes["dra.cpu"].?x'),
    *('device.attributes["dra.cpu"].v', 'device.capacity["dra.cpu"].cpu', 'quantity("1.5Gi")', 'semver("1.2.3")'),
    *("1", "-1", "2u", "1.5", "true", "null", "'aab'", "'(a|b)*$'", "[1, 2]", "[]", "{'a': 1}", "{}", "a", "odd()"),
    *("optional.none()", "optional.of(1)", "device.nothing"),
]
_SIGNS = ("==", "!=", "<", ">=", "&&", "||", "+", "-", "*", "/", "%", "in")
_MACROS = ("all", "exists", "existsOne", "map", "filter", "optMap", "optFlatMap")
_FORMS = [
    *(f"({{}} {sign} {{}})" for sign in _SIGNS),
    *(f"{{}}.{name}({{}})" for name in METHODS),
    *(f"{{}}.{name}()" for name in METHODS),
    *(f"{name}({{}})" for name in FUNCTIONS),
    *(f"{name}({{}}, {{}})" for name in FUNCTIONS),
    *(f"{{}}.{name}(a, {{}})" for name in _MACROS),
    *("{}.exists(a, b, {})", "{}.map(a, {}, {})", "cel.bind(a, {}, {})", "({} ? {} : {})", "[{}, {}]", "{}[{}]"),
    *("{}[?{}]", "!{}", "-{}", "has({}.x)", "{{'a': {}, 'b': {}}}", "{}.or({})", "{}.orValue({})", "{}.odd({})"),
    *("{}.replace({}, {})", "{}.substring({}, {})", "{}.split({}, {})"),
]
"""Templates of expressions, with placeholders for smaller expressions."""


def _filled(form: str, inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    gaps = form.count("{}")
    return st.tuples(*[inner] * gaps).map(lambda parts: form.format(*parts))


_READABLE = st.recursive(
    st.sampled_from(_LEAVES),
    lambda inner: st.sampled_from(_FORMS).flatmap(lambda form: _filled(form, inner)),
    max_leaves=24,
)
_DEVICE = {
    "driver": "dra.cpu",
    "attributes": Domains({"dra.cpu": {"numCPUs": 16, "nodes": [0, 1], "v": Semver("1.2.3")}}),
    "capacity": Domains({"dra.cpu": {"cpu": Quantity(Fraction(16))}}),
}
_WHOLE = ("cannot be parsed", "is nested too deep", "has more than", "costs too much", "the message", "the escape")
"""Prefixes of the reasons that concern an expression as a whole, rather than a part of it."""
_DEEP = "unknown: is nested too deeply"


def _selector(data: bytes) -> None:
    """Evaluates a selector and checks that the result is true, false, an error or unknown. Also checks that ``||`` and
    ``&&`` follow CEL's rules if the selector is one of their operands.
    """
    expression = text(data)
    found = _outcome(expression)
    assert _outcome(expression) == found
    if len(expression) > MAX_LENGTH - 20 or (found.startswith("unknown: ") and found[9:].startswith(_WHOLE)):
        return
    assert _outcome(f"true || ({expression}\n)") in ("true", _DEEP)
    assert _outcome(f"({expression}\n) && false") in ("false", _DEEP)
    kept = _outcome(f"({expression}\n) || false")
    assert kept.partition(": ")[0] == found.partition(": ")[0] or kept == _DEEP
    assert _outcome(f"odd() || ({expression}\n)").startswith("true" if found == "true" else "unknown: ")


def _outcome(expression: str) -> str:
    try:
        return str(selected(expression, _DEVICE)).lower()
    except CelError as error:
        reason = f"failed: {error}"
    except CelUnsupportedError as error:
        reason = f"unknown: {error}"
    assert len(reason) < 1000
    return reason


def _bound(step: str, steps: int, first: str, body: str) -> str:
    """Returns an expression in which each step computes a value from the previous one."""
    for number in range(steps, 0, -1):
        body = f"cel.bind(b{number}, {step.replace('b', f'b{number - 1}')}, {body})"
    return f"cel.bind(b0, {first}, {body})"


_BOMBS = [
    f"{[1] * 3000}.all(x, {[1] * 300}.exists(y, y == x + 1))",
    f"{[1] * 3000}.map(x, {[1] * 300}.map(y, y))",
    "[1].all(x, " * 59 + "true" + ")" * 59,
    "[1].all(x, " * 33 + "true" + ")" * 33,
    "cel.bind(x, 1, " * 59 + "true" + ")" * 59,
    "device.driver.matches('" + "(a?){900}" * 900 + "')",
    "device.driver.matches('" + "(" * 5000 + "')",
    "device.driver.matches('" + "(a|b|c)*" * 200 + "$')",
    _bound("b.replace('a', b)", 12, "'aaaa'", "b12 == 'a'"),
    _bound("[b, b].map(x, [x, x])", 12, "[1, 1]", "b12 == b12"),
    _bound("b.join(',').split(',')", 20, f"{['a'] * 400}", "b20 == b20"),
    f"{'a' * 4000!r}.split('').map(x, x + x).join('a').matches('(a*)*b')",
    f"{'a' * 4000!r}.matches('^(a|aa)+$')",
    f"{'a' * 300!r}.matches('[{'bd' * 1500}a]{{300}}c')",
    f"cel.bind(t, {'a' * 4000!r}.replace('a', '{'a' * 60}'), t.lastIndexOf('ab' + t.substring(0, 100000)) == 0)",
    f"cel.bind(a, {[1] * 300}, sets.contains({[1] * 90}.map(x, a), {[1] * 90}.map(x, a)))",
    'x."' * 3000,
    "'\"\"' + " * 1500,
    "'''" * 3000,
    "{'a': " * 1500,
    "a ? " * 2500,
    "x.all(y, " * 1000,
]
TARGETS = [
    Target(
        "selector",
        _selector,
        st.one_of(_READABLE, st.lists(st.sampled_from([*_LEAVES, *_FORMS]), max_size=8).map(" ".join)).map(str.encode),
        milliseconds=2000,
        max_bytes=16 << 10,
        bombs=[one.encode() for one in _BOMBS],
    ),
]
