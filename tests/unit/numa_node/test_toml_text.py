# SPDX-License-Identifier: Apache-2.0
"""Parsing TOML with the same depth limit as for other documents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.documents import MAX_NESTING
from numa_node.toml_text import parse_toml

from tests.rigs.cpu_time import cpu_seconds

LIMIT = MAX_NESTING


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('a = """x""""\nb = [[1]]', {"a": 'x"', "b": [[1]]}),
        ("a = '''[\n'[''[ '''  # ]]]", {"a": "[\n'[''[ "}),
        ('a = "\\"[[["\nb = "#"  # [[[', {"a": '"[[[', "b": "#"}),
        ("[[a]]\n" * 100, {"a": [{}] * 100}),
        ("a = " + "[" * (LIMIT - 1) + "]" * (LIMIT - 1), None),
        (".".join(["a"] * LIMIT) + " = 1", None),
        ("[" + " . ".join(['"a.b"'] * (LIMIT - 1)) + "]", None),
        ("a = [" + "1.5, " * 100 + "] # " + "." * 100, {"a": [1.5] * 100}),
    ],
)
def test_brackets_in_strings_and_comments_are_not_levels(text: str, value: object) -> None:
    assert value is None or parse_toml(text) == value
    assert parse_toml(text)


@pytest.mark.parametrize(
    "text",
    [
        "a = " + "[" * LIMIT + "]" * LIMIT,
        "a = " + "[" * 9000,
        "a = " + "{a = " * 9000,
        'a = ["""x"""", ' + "[" * 9000,
        "a = ['#', " + "[" * 9000,
        ".".join(["a"] * 9000) + " = 1",
        "[" + ".".join(["a"] * 9000) + "]",
        ".".join(["a"] * (LIMIT + 1)) + " = 1",
        "[[" + " . ".join(['"a"'] * (LIMIT + 1)) + "]]",
        "a = {" + ".".join(["'a'"] * LIMIT) + " = 1}",
    ],
    ids=range(10),
)
def test_deep_nesting_is_rejected(text: str) -> None:
    """Neither the parser nor the document's readers recurse that deeply, not even with dotted keys."""
    with pytest.raises(ValueError, match="nested more than 64 levels deep"):
        parse_toml(text)


@given(st.text("[]{}\"'#\\\n a=.1"))
def test_any_input_is_parsed_or_raises_value_error(text: str) -> None:
    """The parser raises no other exception."""
    try:
        parse_toml(text)
    except ValueError:
        return


@pytest.mark.parametrize(
    "text", ['"' * 1_000_000, "'" * 999_999, '\\"' * 500_000, '"""' + '""\\' * 300_000], ids=range(4)
)
def test_unterminated_strings_take_linear_time(text: str) -> None:
    """The cost grows linearly with the length."""

    def read() -> None:
        with pytest.raises(ValueError, match=r"TOML|Invalid|Expected|Unterminated|Illegal"):
            parse_toml(text)

    assert cpu_seconds(read) < 2


@pytest.mark.parametrize("form", ["{} = 1", "[{}]", "[[{}]]", "x = {{ {} = 1 }}"])
def test_a_key_with_many_parts_is_rejected_before_it_is_parsed(form: str) -> None:
    """tomllib takes 14 s to parse a key with 32,000 parts."""
    text = form.format(".".join(["a"] * 32_000))

    def read() -> None:
        with pytest.raises(ValueError, match="nested more than 64 levels deep"):
            parse_toml(text)

    assert cpu_seconds(read) < 1
