# SPDX-License-Identifier: Apache-2.0
"""docs/concepts.md explains each term that the driver's output contains or that other pages use with a special meaning.

The third line of each page states its audience.
"""

import re

import pytest
from numa_contract.pagesize import kubernetes_page_size, parse_page_size, short_page_size
from numa_contract.state.words import USES

from tests.chart.helm import CHART

DOCS = CHART.parents[1] / "docs"
PAGE = (DOCS / "concepts.md").read_text()
WORDS = (
    *("audit", "claim", "device", "exclusive", "held", "hook", "isolated", "journal", "lease", "partition"),
    *("pod-shared", "quarantine", "record", "reserved", "shared pool", "standby", "tick", "withheld"),
)


@pytest.mark.parametrize("word", WORDS)
def test_a_term_has_an_anchor_and_a_definition(word: str) -> None:
    """Other pages link to ``concepts.md#term``."""
    glossary = PAGE.split("## Glossary")[1].split("## See also")[0]
    texts = dict(re.findall(r"^### (.+)\n\n((?:(?!^#).*\n)+)", glossary, re.MULTILINE))
    assert sorted(texts) == sorted(WORDS)
    assert len(texts[word].split()) > 20


def test_uses_of_cpus_are_explained() -> None:
    """Each CPU use on a node's page and in ``/v1/cpus`` is explained, except those that Linux defines."""
    assert {use for use in USES if f"`{use}`" not in PAGE and f"### {use}" not in PAGE} == {"offline"}
    assert "`claimed`" in PAGE


def test_documented_page_size_spellings_match_the_code() -> None:
    """The driver can parse every spelling in the table. The first two are the ones that it writes itself."""
    table = PAGE.split("## How sizes are written")[1].split("\n\n")[2]
    spellings = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    size = 2 << 20
    assert [parse_page_size(one) for one in spellings] == [size] * 4
    assert spellings[:2] == [kubernetes_page_size(size), short_page_size(size)]


@pytest.mark.parametrize("page", sorted({page.stem for page in DOCS.glob("*.md")} - {"state-api"}))
def test_a_page_names_its_readers(page: str) -> None:
    """The third line of a page states who "you" refers to on that page: operators, application developers, or both.
    state-api.md is generated and has no such line.
    """
    assert (DOCS / f"{page}.md").read_text().splitlines()[2].startswith("*For ")
