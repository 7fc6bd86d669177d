# SPDX-License-Identifier: Apache-2.0
"""The sample for language reviews includes every kind of text."""

from hack.sample import SIZES, draw, texts

_MODULE = '''# SPDX-License-Identifier: Apache-2.0
"""A module."""

# A comment of two
# lines.
LIMIT = 1
"""The limit."""


def run():
    """Runs."""
    raise ValueError("the message of an error has several words")
'''


def test_each_part_contains_its_comments_docstrings_and_messages() -> None:
    """The lines of a block comment form one text. Instructions to tools, short strings and generated files are left
    out.
    """
    page = "# Page\n\nA passage has more words than a heading, and no block of code belongs to it.\n\n```sh\nls\n```\n"
    names = ("services/dra-frontend/src/a.py", "shared/src/b.py", "tests/c.py", "shared/src/numa/_pb/d.py")
    found = texts({**dict.fromkeys(names, _MODULE), "docs/page.md": page})
    documented = ["A module.", "The limit.", "Runs.", "A comment of two lines."]
    for part in ("frontend", "backend", "tests"):
        assert sorted(one.content for one in found[part]) == sorted(documented)
    assert [one.content for one in found["messages"]] == ['"the message of an error has several words"'] * 2
    assert [one.content for one in found["pages"]] == [page.split("\n\n")[1]]


def test_the_same_seed_draws_the_same_sample() -> None:
    module = "".join(f"# comment number {number}\n\n" for number in range(100))
    found = texts({"tests/a.py": module})
    first, again, other = (list(draw(seed, found)) for seed in ("1", "1", "2"))
    assert first == again != other
    assert len([line for line in first if "comment number" in line]) == SIZES["tests"]
