# SPDX-License-Identifier: Apache-2.0
"""The functions and macros that selectors may call evaluate as in Kubernetes' libraries and in cel-go."""

import time
from typing import Any

import pytest
from numa_contract.quantity import parse_quantity
from numa_tools.cel.evaluate import selected
from numa_tools.cel.semver import Semver
from numa_tools.cel.tokens import CelUnsupportedError
from numa_tools.cel.values import CelError, Domains, Quantity

ATTRIBUTES: dict[str, dict[str, Any]] = {
    "dra.cpu": {"numCPUs": 16, "smtEnabled": True, "coreType": "p-core", "roots": ["pci0", "pci1"]},
    "resource.kubernetes.io": {"numaNode": 0, "nodes": [0, 1]},
    "gpu.example.com": {
        "productName": "Accelerator H9-XL",
        "driverVersion": Semver("550.127.5"),
        "firmware": [Semver("1.0.0"), Semver("2.0.0-rc.1")],
        "flags": [True, False],
        "links": ["a", "b", "c"],
    },
}
CAPACITY = {"dra.memory": {"size": Quantity(parse_quantity("4Gi"))}}
DEVICE = {"driver": "dra.cpu", "attributes": Domains(ATTRIBUTES), "capacity": Domains(CAPACITY)}
OURS = 'device.attributes["dra.cpu"]'
GPU = 'device.attributes["gpu.example.com"]'
COMMON = 'device.attributes["resource.kubernetes.io"]'
SIZE = 'device.capacity["dra.memory"].size'

INCLUDES = [
    (f"{COMMON}.nodes.includes(1)", True),
    (f"{COMMON}.nodes.includes(2)", False),
    (f"{COMMON}.numaNode.includes(0)", True),
    (f"{GPU}.flags.includes(false)", True),
    (f'{GPU}.driverVersion.includes(semver("550.127.5"))', True),
    (f'{GPU}.firmware.includes(semver("3.0.0"))', False),
    ('"model-a".includes("model")', False),
]
TEXTS = [
    (f'{GPU}.productName.lowerAscii().matches("^accelerator h[0-9].*$")', True),
    (f'{GPU}.productName.upperAscii() == "ACCELERATOR H9-XL"', True),
    (f'matches({GPU}.productName, "H9")', True),
    (f'{GPU}.productName.split(" ")[1] == "H9-XL" && {GPU}.productName.split(" ", 1).size() == 1', True),
    ('"".split("") == [] && "abc".split("", 2) == ["a", "bc"] && "a".split(",", 0) == []', True),
    ('"abc".split("") == ["a", "b", "c"] && "a,b,c".split(",", 2) == ["a", "b,c"]', True),
    (f'{GPU}.links.join("+") == "a+b+c" && {GPU}.links.join() == "abc"', True),
    (f'{GPU}.productName.replace("H9", "H8").substring(12, 14) == "H8"', True),
    ('"aaa".replace("a", "b", 2) == "bba" && "abc".substring(3) == "" && "abc".charAt(3) == ""', True),
    ('" \\u00a0x\\t".trim() == "x" && "abab".lastIndexOf("b") == 3 && "abab".indexOf("c") == -1', True),
    ('"é".lowerAscii() == "é" && "É".lowerAscii() == "É" && size("é") == 1', True),
]
OPTIONALS = [
    (f'{OURS}.?tier.orValue("local") == "local"', True),
    (f'{OURS}.?coreType.orValue("local") == "local"', False),
    (f'{OURS}[?"coreType"].hasValue() && !{OURS}[?"tier"].hasValue()', True),
    (f'{OURS}.?tier.or({OURS}.?coreType).value() == "p-core"', True),
    (f"{OURS}.?numCPUs.optMap(n, n > 8).orValue(false)", True),
    (f"{OURS}.?missing.optMap(n, n > 8).orValue(false)", False),
    (f"{OURS}.?numCPUs.optFlatMap(n, optional.of(n)).hasValue()", True),
    ('device.?attributes["dra.cpu"].?numCPUs.orValue(0) == 16', True),
    # Selecting a field of an optional map returns an optional value, even without another question mark.
    ('device.?attributes["dra.cpu"].missing.orValue(5) == 5', True),
    ('device.attributes[?"other.example.com"].hasValue()', True),
    ("optional.none().orValue(1) == 1 && optional.ofNonZeroValue(0).orValue(2) == 2", True),
    ("[1, 2][?5].orValue(7) == 7 && [1, 2][?1].orValue(7) == 2", True),
    # The argument of orValue() is evaluated only if it is needed.
    (f"{OURS}.?numCPUs.orValue({OURS}.missing) == 16", True),
]
MACROS = [
    (f"[0, 1].exists(n, n == {COMMON}.numaNode)", True),
    (f'{OURS}.roots.exists(r, r.startsWith("pci1"))', True),
    (f'{OURS}.roots.all(r, r.startsWith("pci"))', True),
    ("[].all(x, false) && ![].exists(x, true)", True),
    (f'{OURS}.exists(name, name == "coreType")', True),
    ('device.attributes.exists(d, d == "other.example.com")', False),
    ("[1, 2, 3].exists_one(x, x > 2) && ![1, 2, 3].existsOne(x, x > 1)", True),
    ("[1, 2, 3].map(x, x * x) == [1, 4, 9] && [1, 2, 3].map(x, x > 1, x + 1) == [3, 4]", True),
    ("[1, 2, 3].filter(x, x != 2) == [1, 3]", True),
    ("[4, 5].exists(i, v, i == 1 && v == 5) && {'a': 1}.all(k, v, k == 'a' && v == 1)", True),
    # Like || and &&, exists and all ignore an error if another element decides.
    ("[0, 1].exists(x, 1 / x == 1) && ![0, 1].all(x, 1 / x == 2)", True),
    ("[1].exists(x, [2].exists(x, x == 2) && x == 1)", True),
    # The value of a variable that cel.bind defines is evaluated only if the variable is used.
    (f"cel.bind(x, {OURS}.missing, true)", True),
    (f"cel.bind(self, {OURS}.numCPUs, self > 1 && cel.bind(twice, self * 2, twice == 32))", True),
]
NUMBERS = [
    (f'string({OURS}.numCPUs) == "16" && string({OURS}.smtEnabled) == "true"', True),
    ('int("-7") == -7 && int(1.9) == 1 && uint(3) == 3u && double(1) == 1.0 && bool("T")', True),
    (f"{SIZE}.asInteger() > 1024 && {SIZE}.isInteger()", True),
    (f"{SIZE}.isGreaterThan(quantity('3.5Gi')) && {SIZE} == quantity('4096Mi')", True),
    (f"{SIZE}.sub(quantity('1Gi')).add(5).compareTo(quantity('3Gi')) == 1 && sign({SIZE}) == 1", True),
    ("quantity('1500m').isInteger() || isQuantity('10 apples') || !isQuantity('10Gi')", False),
    ("quantity('9999999999999999999999G').isInteger()", False),
    ("quantity('2k').asApproximateFloat() == 2000.0", True),
    ("[3, 1].min() == 1 && [3, 1].max() == 3 && [3, 1].sum() == 4 && [1, 3].isSorted()", True),
    ("[1, 2, 2].indexOf(2) == 1 && [1, 2, 2].lastIndexOf(2) == 2", True),
    (f'sets.contains({GPU}.links, ["a"]) && sets.intersects([1], [1, 2])', True),
    ("sets.equivalent([1, 1], [1]) && !sets.contains([1], [1, 2])", True),
]
VERSIONS = [
    (f'{GPU}.driverVersion.isGreaterThan(semver("550.54.14"))', True),
    (f"{GPU}.driverVersion.major() == 550 && {GPU}.driverVersion.compareTo(semver('550.127.5')) == 0", True),
    (f'{GPU}.driverVersion == "550.127.5"', False),
    (f'{GPU}.firmware.exists(v, v.isLessThan(semver("2.0.0")) && v.minor() + v.patch() == 0 && v.major() == 2)', True),
    ("semver('1.0.0-alpha.2').isLessThan(semver('1.0.0-alpha.10'))", True),
    ("semver('1.0.0-alpha').isGreaterThan(semver('1.0.0-1')) && semver('1.0.0+a') == semver('1.0.0+b')", True),
    ("isSemver('1.0') || isSemver('v1.0.0') || isSemver('01.0.0') || isSemver('1.0.0-01')", False),
    ("isSemver('v1.0', true) && semver('01.02', true) == semver('1.2.0')", True),
]
LITERALS = [
    ("{'a': [1], 'b': [2]}.b[0] == 2 && 'a' in {'a': 1} && {'a': 1} == {'a': 1.0}", True),
    ('1u + 2u == 3u && 0x1F == 31 && 1e3 == 1000.0 && .5 < 1.0 && r"\\d" == "\\\\d"', True),
    (r"'\x41\u0042\103\U00000044' == 'ABCD' && -9223372036854775808 < 0", True),
    ("""'''it's''' == "it's" && true > false && .device.driver == 'dra.cpu'""", True),
]
UNKNOWN_PARTS = [
    ("true || unknown()", True),
    ("unknown('x').y.z > 1 && false", False),
    ("[1, 2].exists(x, x == 2 || unknown(x))", True),
    ("[1, 2].all(x, x == 3 && unknown(x))", False),
    ("cel.bind(x, unknown(), false)", False),
    ("false ? unknown() : true", True),
]


@pytest.mark.parametrize(
    ("expression", "true"),
    [*INCLUDES, *TEXTS, *OPTIONALS, *MACROS, *NUMBERS, *VERSIONS, *LITERALS, *UNKNOWN_PARTS],
)
def test_functions_and_macros_are_evaluated_as_in_a_cluster(expression: str, true: bool) -> None:
    """The values are the same as in a cluster that accepts these selectors."""
    assert selected(expression, DEVICE) is true


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (f"{OURS}.numCPUs.exists(x, x > 0)", "neither a list nor a map"),
        (f"{OURS}.missing.includes(1)", "no such key: missing"),
        (f"{OURS}.numCPUs.?x.hasValue()", "not a map"),
        ("optional.none().value() == 1", r"optional.none\(\) dereference"),
        ("optional.of(1) == 1 ? true : [].min() == 0", "empty list"),
        ('semver("1.2").major() == 1', "not a semantic version"),
        ('semver("1.0-rc", true).major() == 1', "not a semantic version"),
        ("quantity('0.5').asInteger() == 0", "cannot convert value to integer"),
        ('int("x") == 1', "not a number"),
        ('int("9999999999999999999999") == 1', "integer overflow"),
        ("uint(-1) == 1u", "integer overflow"),
        ("1u - 2u == 0u", "integer overflow"),
        ("1u + 1 == 2", "no such overload"),
        ('"abc".substring(2, 1) == ""', "index out of range"),
        ('"abc".charAt(4) == ""', "index out of range"),
        ("[1, 'a'].join() == ''", "no such overload"),
        ("'1'.lowerAscii(2) == ''", "no such overload"),
        ("{'a': 1, 'a': 2}.a == 1", "repeated"),
        ("[1].map(x, x)", "neither true nor false"),
        ("[0].exists(x, 1 / x == 1)", "division by zero"),
        ("[0, 1].exists_one(x, 1 / x == 1)", "division by zero"),
        ("[1, 2].filter(x, x)[0] == 1", "neither true nor false"),
    ],
)
def test_runtime_errors_are_neither_false_nor_unknown(expression: str, text: str) -> None:
    """A runtime error ends the scheduler's attempt."""
    with pytest.raises(CelError, match=text):
        selected(expression, DEVICE)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (f'{OURS}.coreType.find("p.*") == "p"', r"the function find\(\) is not supported"),
        ('"%d".format([1]) == "1"', r"the function format\(\)"),
        ('duration("1s") == duration("1000ms")', r"the function duration\(\)"),
        ("int == type(1)", "the type int"),
        ("math.greatest(1, 2) == 2", r"the function math.greatest\(\)"),
        ("ip('10.0.0.1').family() == 4", r"the function (family|ip)\(\)"),
        ("[1].transformList(i, v, v)[0] == 1", r"the function transformList\(\)"),
        ("[1].all(x, true, true, true)", r"the macro all\(\) with 4 arguments"),
        ("1.or(true)", "only on optional values"),
        ("string(1.5) == '1.5'", r"string\(\) of a float"),
        ("1.0 / 0.0 > 1.0", "division of a float by zero"),
        ("quantity('1.5Gi').isInteger()", "quantity with a decimal point"),
        ("{1: 2}[1] == 2", "keys other than strings"),
        ("Device{name: 'a'}.name == 'a'", "the message Device"),
        ("b'a' == b'a'", "a bytes literal"),
        ('"\\q" == "q"', "the escape"),
        ("99999999999999999999u == 1u", "does not fit in 64 bits"),
        ("'aba'.indexOf('a', 1) == 2", r"the function indexOf\(\)"),
        ("'a'.matches('(?=a)')", "the pattern cannot be parsed"),
        ("'a'.matches('a**')", "repeats a repetition"),
        ("'a'.matches('a{9999}')", "repetition count is not supported"),
        ("'a'.matches('(a{1000}){1000}')", "the pattern is too large"),
        ("'a'.matches('((){1000}){1000}')", "the pattern is too large"),
        (f"'a'.matches('[{'a' * 5000}]')", r"matches\(\): the pattern is too large"),
        (f"'a'.matches('{'(' * 50}{')' * 50}')", "the pattern is nested too deeply"),
        (r"'a'.matches('\\pL')", "the pattern cannot be parsed"),
        ("'a'.matches('(?i)é')", "only supported for ASCII"),
        ("unknown() && true", r"the function unknown\(\)"),
        # In the cluster, the part that the simulation does not support may decide the result, and the error in the
        # other part is then ignored.
        (f"{OURS}.missing == 1 || unknown()", r"the function unknown\(\)"),
        (f"unknown() && {OURS}.missing == 1", r"the function unknown\(\)"),
        ("[0, 1].exists(x, 1 / x == 2 || unknown())", r"the function unknown\(\)"),
        ("cel.bind(x, unknown(), x == 1)", r"the function unknown\(\)"),
        (f"{list(range(49))}.includes(1)", "differs between releases"),
    ],
)
def test_the_value_of_an_unsupported_expression_is_unknown(expression: str, text: str) -> None:
    """An expression with a part that the simulation does not support is neither true nor false nor an error. The
    message quotes that part.
    """
    with pytest.raises(CelUnsupportedError, match=text):
        selected(expression, DEVICE)


@pytest.mark.parametrize(
    ("text", "pattern", "found"),
    [
        ("abc", "b", True),
        ("abc", "^b", False),
        ("abc", "c$", True),
        ("abc\n", "c$", False),
        ("a\nc", "a.c", False),
        ("abbbc", "^ab{3}c$", True),
        ("abbbc", "^ab{4,}c$", False),
        ("abbc", "^ab{1,3}?c$", True),
        ("a{,2}", "a{,2}", True),
        ("ac", "^(a|b)(?:c|d)?$", True),
        ("a", "^(a|b)(?:c|d)?$", True),
        ("ad", "^(?P<first>a)(c|d|e)+$", True),
        ("x-1", r"^[\w-]+$", True),
        ("x]1", r"^[]x\d]+$", True),
        ("é", r"\w", False),
        ("٣", r"\d", False),
        ("a b", r"a\sb", True),
        ("NVIDIA A100", "(?i)^nvidia [a-c]100$", True),
        ("b", "(?i)[^B]", False),
        ("\u212a", "(?i)^k$", True),
        ("foo bar", r"\bbar\b", True),
        ("foobar", r"\bbar", False),
        ("A1", "^[[:upper:]][[:digit:]]$", True),
        ("a.b", r"^a\.b$", True),
        ("", "", True),
        ("aaaa", "^(a*)*$", True),
        ("", "^()*$", True),
        ("A", r"\x41", True),
        ("abc", "[^a-c]", False),
        ("b", "^[ca-bb]$", True),
        ("d", "[ca-bb]", False),
        ("ab", "^(a|ab)(|c)$", True),
    ],
)
def test_matches_follows_re2(text: str, pattern: str, found: bool) -> None:
    """A pattern may match anywhere in the string. Character classes are ASCII, and ``$`` matches only at the end of the
    string.
    """
    device = {"driver": text, "attributes": {"pattern": pattern}}
    assert selected("device.driver.matches(device.attributes.pattern)", device) is found


def test_a_pattern_takes_linear_time() -> None:
    """Patterns that take exponential time in a backtracking matcher finish immediately."""
    device = {"driver": "a" * 64}
    began = time.thread_time()
    for pattern in ("(a+)+b$", "(a|a)*b$", "(a?){60}a{60}b", "(.*)(.*)(.*)(.*)b$"):
        assert not selected(f"device.driver.matches('{pattern}')", device)
    assert time.thread_time() - began < 2


def test_a_large_character_class_costs_no_more_than_a_small_one() -> None:
    """A character class is a single instruction, however many ranges it has."""
    ranges = "".join(chr(0x4E00 + 2 * number) for number in range(1500))
    device = {"driver": "a" * 300}
    began = time.thread_time()
    assert not selected(f"device.driver.matches('[{ranges}a]{{300}}c')", device)
    assert not selected(f"device.driver.matches('[{'bd' * 1500}a]{{300}}c')", device)
    assert time.thread_time() - began < 2
