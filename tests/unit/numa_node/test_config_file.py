# SPDX-License-Identifier: Apache-2.0
"""The configuration file."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.config import ConfigError
from numa_node.config_file import load_config, parse_yaml


@given(st.binary(max_size=60))
def test_any_bytes_result_in_a_value_or_a_config_error(data: bytes) -> None:
    """The error message is a single line that begins with the file's name."""
    said = ""
    try:
        parse_yaml(data, "some.yaml")
    except ConfigError as error:
        said = str(error)
    assert not said or said.startswith("some.yaml: ")
    assert "\n" not in said


def test_flags_override_the_file_and_errors_name_their_source(tmp_path: Path) -> None:
    """An invalid flag is reported as an error on the command line, and an invalid key as an error in the file, even if
    a flag overrides the key.
    """
    path = tmp_path / "config.yaml"
    path.write_text("groupBy: socket\nlogLevel: debug\n")
    config = load_config(str(path), {"groupBy": "machine"})
    assert (config.group_by, config.log_level) == ("machine", "debug")
    with pytest.raises(ConfigError, match="command line: groupBy"):
        load_config(str(path), {"groupBy": "galaxy"})
    path.write_text("groupBy: galaxy\n")
    with pytest.raises(ConfigError, match=r"config\.yaml: groupBy"):
        load_config(str(path), {"groupBy": "machine"})


def test_a_merge_key_is_not_a_duplicate_key(tmp_path: Path) -> None:
    """Keys that YAML's `<<` merges in may be overridden."""
    path = tmp_path / "config.yaml"
    path.write_text("reservedMemory: [&a {numaNode: 0, limits: {memory: 64Mi}}, {<<: *a, numaNode: 1}]\n")
    assert [one.numa_node for one in load_config(str(path)).reserved_memory] == [0, 1]


DEEP_ALIASES = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 80))
WIDE_ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))

TEXT_ALIASES = f"a: &a {'x' * 1000}\nb:\n  ? [{', '.join(['*a'] * 1000)}]\n  : 1\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[" * 65 + "]" * 65, "nested more than 64 levels deep"),
        ("[" * 9000, "nested more than 64 levels deep"),
        ("{a: " * 3000 + "1" + "}" * 3000, "nested more than 64 levels deep"),
        ("- " * 3000, "nested more than 64 levels deep"),
        (DEEP_ALIASES, "line 65: is nested more than 64 levels deep"),
        (WIDE_ALIASES, "has more than 200000 values"),
        ("a: &a [*a]", "line 1: an alias refers to a value that contains it"),
        ("a: " + "9" * 5000, "line 1: a number has more than 40 characters"),
        ("a: 0x" + "9" * 5000, "a number has more than 40 characters"),
        ("a: !!float " + "1:" * 2000 + "1.5", "a number has more than 40 characters"),
        ("a: !!int ''", "is not valid YAML"),
        ("a: !!bool maybe", "is not valid YAML"),
        ("a: !!timestamp x", "is not valid YAML"),
        (TEXT_ALIASES, "line 3: found unhashable key: a list or a map"),
        ("? {a: 1}\n: 1", "line 1: found unhashable key: a list or a map"),
        (f"{'k' * 500}: 1\n{'k' * 500}: 2", r"line 2: the key 'k{80}'\.\.\. \(500 characters\) is given twice"),
    ],
    ids=range(16),
)
def test_a_document_is_bounded_before_it_is_expanded(text: str, why: str) -> None:
    """The depth, the number of values and the length of numbers have explicit limits, which apply after aliases are
    expanded.
    """
    with pytest.raises(ConfigError, match=why):
        parse_yaml(text.encode(), "some.yaml")


@pytest.mark.parametrize(
    "text", ["!!binary aGk=", "!!timestamp 2001-01-01", "!!set {a, b}", "!!omap [a: 1]", "!!pairs [a: 1]"]
)
def test_a_value_that_json_cannot_represent_is_refused(text: str) -> None:
    """Otherwise, ``simulate`` would fail when it determines the length of a claim's parameters in JSON."""
    with pytest.raises(ConfigError, match=f"line 1: the tag {text.split(maxsplit=1)[0]} is not allowed"):
        parse_yaml(f"a: {text}".encode(), "file")


def test_documents_up_to_the_limit_are_read() -> None:
    """Documents with aliases are accepted up to the same depth."""
    assert parse_yaml(b"[" * 64 + b"]" * 64, "some.yaml")
    assert parse_yaml(b"a: &a {b: [1, 0x10, 1.5]}\nc: *a", "some.yaml")["c"] == {"b": [1, 16, 1.5]}
