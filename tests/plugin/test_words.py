# SPDX-License-Identifier: Apache-2.0
"""The commands, the page and the plugin use the same words and format amounts by the same rule."""

import json
import re
from pathlib import Path
from typing import Any, Final

import pytest
from dra_frontend.state_endpoint import page
from hypothesis import given
from hypothesis import strategies as st
from kubectl_numa import lists, quantity
from numa_contract.pagesize import kubernetes_page_size
from numa_contract.state import words
from numa_contract.state.node import PageCpu
from numa_tools import render

_BROWSER: Final = Path(page.__file__).with_name("browser")


def table_of(script: str, name: str) -> Any:
    """Returns the object or list that a script on the page assigns to a constant."""
    text = (_BROWSER / script).read_text().partition(f"const {name} = ")[2].partition(";\n")[0]
    quoted = re.sub(r"([{,]\s*)([\w]+):", r'\1"\2":', text)
    return json.loads(re.sub(r",(\s*[}\]])", r"\1", quoted))


def test_the_page_explains_each_use_of_a_cpu_in_the_words_of_the_contract() -> None:
    """The words are those in the description of the `use` field."""
    assert {use: meaning for use, (_, meaning) in table_of("values.js", "USES").items()} == words.USES
    described = PageCpu.model_json_schema()["properties"]["use"]["description"]
    assert [*words.USES] == re.findall(r"`([a-z-]+)`", described)


def test_the_page_and_the_commands_name_the_protection_of_cpus_in_the_same_words() -> None:
    assert table_of("details.js", "KEPT_BY") == words.KEPT_BY
    assert {word: render.kept_by(word) for word in words.KEPT_BY} == words.KEPT_BY
    assert render.kept_by("of a newer release") == "of a newer release"


def test_the_page_and_the_plugin_use_the_same_words_for_enforcement() -> None:
    assert {status: word for status, (_, word) in table_of("lists.js", "ENFORCED").items()} == words.ENFORCED
    assert lists.ENFORCED == words.ENFORCED


def test_the_page_and_status_use_the_same_words_for_problems() -> None:
    assert {level: word for level, (_, word) in table_of("lists.js", "LEVELS").items()} == words.LEVELS


def test_amounts_of_memory_have_the_same_units() -> None:
    assert tuple(table_of("values.js", "UNITS")) == quantity.UNITS == words.UNITS


@given(st.integers(0, (1 << 63) - 1))
def test_the_plugin_and_the_commands_format_an_amount_in_the_same_way(amount: int) -> None:
    assert quantity.format_bytes(amount) == render.format_bytes(amount)


@pytest.mark.parametrize("page_bytes", [4 << 10, 64 << 10, 2 << 20, 512 << 20, 1 << 30, 16 << 30])
def test_a_page_size_is_written_as_an_amount(page_bytes: int) -> None:
    """A page size in a message is the same whether it is formatted as a page size or as an amount."""
    assert render.format_bytes(page_bytes) == kubernetes_page_size(page_bytes)


def test_an_amount_never_looks_larger_than_it_is() -> None:
    sizes = (0, 1023, 1536, (1 << 30) - 1, 3 << 29, (1 << 63) - 1)
    assert [render.format_bytes(one) for one in sizes] == ["0", "1023", "1.5Ki", "1023.9Mi", "1.5Gi", "8191.9Pi"]


def test_explain_and_the_page_use_the_same_sentence_for_the_use_of_a_cpu() -> None:
    """The page shows the word, a colon and the meaning, as `explain` does for a CPU that no claim holds."""
    assert "`${cpu.use}: ${USES[cpu.use][1]}`" in (_BROWSER / "details.js").read_text()
    for use, (_, meaning) in table_of("values.js", "USES").items():
        assert render.cpu_use(use) == f"{use}: {meaning}"
