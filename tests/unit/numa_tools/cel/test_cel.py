# SPDX-License-Identifier: Apache-2.0
"""The value of a selector is either unknown or the same as in the scheduler's CEL, and the cost of its evaluation is
bounded.
"""

import resource
import sys
import time
from typing import Any

import pytest
from dra_frontend.machine.discovery import discover
from numa_contract.quantity import parse_quantity
from numa_tools.cel.evaluate import MAX_LENGTH, selected
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import CelError, Domains, Quantity
from numa_tools.commands.classes import device_classes

from tests.rigs.trees import small_machine

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "dra.cpu": {"numCPUs": 16, "smtEnabled": True, "coreType": "p-core", "roots": ["pci0", "pci1"], "ratio": -1},
    "resource.kubernetes.io": {"numaNode": 0},
}
DEVICE = {
    "driver": "dra.cpu",
    "attributes": Domains(ATTRIBUTES),
    "capacity": Domains({"dra.cpu": {"cpu": Quantity(parse_quantity("16"))}}),
}
OURS = 'device.attributes["dra.cpu"]'


@pytest.mark.parametrize(
    ("expression", "true"),
    [
        ('device.driver == "dra.cpu"', True),
        ("device.driver != 'dra.cpu'", False),
        (f"{OURS}.numCPUs >= 8 && {OURS}.numCPUs < 17", True),
        (f"{OURS}.coreType in ['e-core', \"p-core\"]", True),
        (f'"coreType" in {OURS} && "l3" in {OURS}', False),
        (f"has({OURS}.coreType) && !has({OURS}.l3)", True),
        # Looking up a domain that the device does not have returns an empty map, but the domain is not "in" the
        # attributes.
        ('"other.example.com" in device.attributes', False),
        ('"dra.cpu" in device.attributes', True),
        ('size(device.attributes["other.example.com"]) == 0', True),
        ('has(device.attributes["other.example.com"].x)', False),
        # An operand that decides the result hides an error in the other operand, on either side.
        (f"{OURS}.missing == 1 || {OURS}.smtEnabled", True),
        (f"{OURS}.missing == 1 && !{OURS}.smtEnabled", False),
        (f"({OURS}.numCPUs + 2 * 3 - 4 / 2) % 7 == 6", True),
        ("-7 / 2 == -3 && -7 % 2 == -1", True),
        (f"-{OURS}.ratio == 1 && - -1 == 1", True),
        (f'{OURS}.coreType.startsWith("p") && {OURS}.coreType.endsWith("core")', True),
        (f'{OURS}.coreType.contains("-") && size({OURS}.roots) == 2', True),
        (f'"pci1" in {OURS}.roots && {OURS}.roots[0] == "pci0"', True),
        (f"cel.bind(a, {OURS}, a.numCPUs == 16 && a.smtEnabled)", True),
        ('device.capacity["dra.cpu"].cpu.compareTo(quantity("8")) > 0', True),
        ('device.capacity["dra.cpu"].cpu.isLessThan(quantity("16k"))', True),
        (f'{OURS}.smtEnabled ? {OURS}.numCPUs == 16 : {OURS}.missing == "x"', True),
        # Types are never converted: a quoted number is not equal to a number.
        (f'{OURS}.numCPUs == "16"', False),
        (f"{OURS}.smtEnabled == 1", False),
        ("1 == 1.0 && 2 > 1.5", True),
        ('"a" + "b" == "ab" && "\\"" == \'"\' // a comment\n', True),
        ("0x10 == 16 && null == null && !(1 in [2, 3])", True),
    ],
)
def test_operators_and_literals_are_evaluated_as_in_cel(expression: str, true: bool) -> None:
    assert selected(expression, DEVICE) is true


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (f"{OURS}.missing == 1", "no such key: missing"),
        (f"{OURS}.numCPUs", "neither true nor false"),
        (f"{OURS}.numCPUs && true", "neither true nor false"),
        (f'{OURS}.numCPUs < "9"', "no such overload"),
        (f"{OURS}.numCPUs / 0 == 1", "division by zero"),
        ("9223372036854775807 + 1 > 0", "integer overflow"),
        (f"{OURS}.roots[2] == 'x'", "index out of range"),
        ("devices.driver == 'x'", "no such key: devices"),
        ("!device.driver", "neither true nor false"),
        ("-'a' == 1", "no such overload"),
        ("'a'.isLessThan('b')", "no such overload"),
        ("quantity('much').isLessThan(quantity('1'))", "quantity 'much'"),
    ],
)
def test_runtime_errors_are_distinguishable_from_false(expression: str, text: str) -> None:
    """An error ends the scheduler's attempt, whereas "false" only excludes the device."""
    with pytest.raises(CelError, match=text):
        selected(expression, DEVICE)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("device.driver ==", "at its end"),
        ("a b", "cannot be parsed at 'b'"),
        ("", "at its end"),
        ("(" * 5000 + ")" * 5000, "nested too deep"),
        ("-" * 5000 + "1 == 1", "nested too deep"),
        ("device" + ".a" * 5000, "nested too deep|more than"),
        ("[" * 2000 + "]" * 2000 + " == []", "nested too deep"),
        ("1" * (MAX_LENGTH + 1), "more than"),
    ],
)
def test_the_value_of_an_unsupported_expression_is_unknown(expression: str, text: str) -> None:
    """An unsupported expression is neither true nor false, and no nesting depth crashes the process."""
    with pytest.raises(CelUnsupportedError, match=text):
        selected(expression, DEVICE)


@pytest.mark.parametrize(
    ("within", "beyond"),
    [
        ("(" * 59 + "true" + ")" * 59, "(" * 60 + "true" + ")" * 60),
        ("!" * 58 + "true", "!" * 60 + "true"),
        ("true ? true : " * 59 + "true", "true ? true : " * 60 + "true"),
        ("[" * 59 + "]" * 59 + " != []", "[" * 61 + "]" * 61 + " != []"),
        ("1" + " + 1" * 90 + " == 91", "1" + " + 1" * 100 + " == 101"),
    ],
    ids=range(5),
)
def test_the_depth_limit_does_not_depend_on_the_interpreters(within: str, beyond: str) -> None:
    """Expressions beyond the limit are rejected as too deep, whatever the Python version and its recursion limit."""
    before = sys.getrecursionlimit()
    assert selected(within, DEVICE)
    sys.setrecursionlimit(100_000)
    try:
        with pytest.raises(CelUnsupportedError, match="nested too deep"):
            selected(beyond, DEVICE)
    finally:
        sys.setrecursionlimit(before)


@pytest.mark.parametrize("expression", ["a" * 5000 + " == 1", "device." + "b" * 5000, "b" * 5000 + "{}"])
def test_an_error_message_is_cut(expression: str) -> None:
    """A selector's author controls the length of the names in it."""
    with pytest.raises((CelError, CelUnsupportedError)) as caught:
        selected(expression, DEVICE)
    assert len(str(caught.value)) < 300


def test_many_terms_are_not_deep_nesting() -> None:
    """A long list of alternatives is a wide expression, not a deep one."""
    assert selected(" || ".join(["false"] * 1000 + ["true"]), DEVICE)


def bound(step: str, steps: int, first: str, body: str) -> str:
    """Returns an expression that computes each ``b(n+1)`` from ``b(n)`` in one step and tests the last value."""
    body = body.replace("last", f"b{steps}")
    for number in range(steps, 0, -1):
        body = f"cel.bind(b{number}, {step.replace('b', f'b{number - 1}')}, {body})"
    return f"cel.bind(b0, {first}, {body})"


@pytest.mark.parametrize(
    "expression",
    [
        bound("b + b", 30, "[1, 1]", "last == last"),
        bound("b + b", 30, '"text"', "last == last"),
        bound("[b, b]", 30, "[1, 1]", "last == last"),
        bound("[b, b]", 30, "[1, 1]", "last in [last]"),
        bound("[b, b]", 30, "[1, 1]", "[1][last] == 1"),
        bound("[b, b]", 30, "[1, 1]", "!last || true"),
        f"cel.bind(l, {list(range(1000))}, {' && '.join(['l == l'] * 60)})",
        f"cel.bind(l, {list(range(1000))}, l.all(x, l.all(y, l.exists(z, true))))",
        f"{list(range(1000))}.all(x, {' && '.join(['true'] * 500)})",
        bound("[b, b].map(x, x)", 15, "[1, 1]", "last == last"),
        bound("b.replace('a', b)", 15, "'aa'", "last == last"),
        bound("[b, b].join(b)", 15, "'aa'", "last == last"),
        f"cel.bind(l, {list(range(1000))}, sets.contains(l, l))",
        bound("{'a': b, 'b': b}", 20, "[1]", "last == last"),
        bound("[optional.of(b), optional.of(b)]", 20, "[1]", "last == last"),
        bound("b + b", 10, "'aaaaaaaaaaaaaaaaaaaa'", "last.matches('(a{300})?(b{300})?(a?){90}c')"),
        f"{list(range(900))}.exists(x, 'a'.matches('{'[b-c]' * 300}(' + string(x)))",
        f"cel.bind(t, '{'a' * 4000}'.replace('a', '{'a' * 60}'), t.lastIndexOf('ab' + t.substring(0, 100000)) == 0)",
        f"cel.bind(a, {[1] * 300}, sets.contains({[1] * 90}.map(x, a), {[1] * 90}.map(x, a)))",
    ],
)
def test_exponential_growth_is_rejected(expression: str) -> None:
    """Even a short selector can be extremely expensive to evaluate. Explaining a claim with such a selector must
    neither exhaust memory nor run indefinitely.
    """
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(CelUnsupportedError, match="costs too much"):
        selected(expression, DEVICE)
    assert time.thread_time() - began < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_long_selectors_on_long_lists_are_accepted() -> None:
    """The selector has the maximum number of terms, each of which tests the maximum number of values in a list
    attribute.
    """
    roots = [f"pci{number:04x}:{number:02x}-{'x' * 50}" for number in range(64)]
    device = {**DEVICE, "attributes": Domains({"d": {"roots": roots}})}
    terms = ['"pci0" in device.attributes["d"].roots'] * 240
    assert not selected(" || ".join(terms), device)
    assert selected(bound("b + b", 6, 'device.attributes["d"].roots', "size(last) == 4096"), device)


def test_the_drivers_own_classes_are_supported() -> None:
    """The simulation understands every class that the driver prints."""
    memory: dict[str, Any] = {**DEVICE, "driver": "dra.memory", "attributes": Domains({})}
    for document in device_classes(discover(small_machine())):
        for selector in document["spec"]["selectors"]:
            expression = selector["cel"]["expression"]
            assert selected(expression, DEVICE) == (document["metadata"]["name"] == "dra.cpu")
            if "hugeTLB" in expression:
                with pytest.raises(CelError, match="no such key: hugeTLB"):
                    selected(expression, memory)
