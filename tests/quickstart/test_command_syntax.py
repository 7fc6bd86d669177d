# SPDX-License-Identifier: Apache-2.0
"""A real kubectl accepts each kubectl command line on a page, in blocks and in sentences.

Most of them are run against a cluster of fakes by the other tests in this directory. The others require features that
no fake has: logs, the node's metrics, and a debugging container. With ``--help`` kubectl parses the whole line without
contacting a cluster.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Iterator

import pytest

from tests.chart.test_shown_commands import PAGES, lines, spans

_PLUGINS = ("numa", "krew")
"""Commands of kubectl plugins. The tests for this project's plugin are in tests/plugin."""
_START = re.compile(r"(?:^|[|;&(`]|\bdo|\bthen)\s*kubectl\s")
_ENDS = ("|", ";", "&", ">", "<", ")", "&&", "||", "done")


def uses(line: str) -> Iterator[list[str]]:
    """Returns the arguments of each kubectl call in a shell line."""
    for match in _START.finditer(line):
        lexer = shlex.shlex(line[match.end() :], posix=True, punctuation_chars="|&;<>)")
        lexer.whitespace_split = True
        words = []
        for word in lexer:
            if word[0] in "|&;<>)" or word in _ENDS:
                break
            words.append(word)
        yield words


def documented() -> list[tuple[str, ...]]:
    """Returns every kubectl command line on the pages once. If a command line in a sentence ends with an option whose
    value is missing, such as ``-n``, a value is added.
    """
    texts = [page.read_text() for page in PAGES]
    shown = [re.sub(r"\s#\s.*", "", line) for text in texts for line in lines(text)] + [
        f"{span} X" if re.search(r" -\w$", span) else span for text in texts for span in spans(text)
    ]
    found = {tuple(words) for line in shown for words in uses(line) if words and "..." not in words}
    return sorted(words for words in found if not {*words[:3]} & {*_PLUGINS})


@pytest.mark.parametrize("words", documented(), ids=" ".join)
def test_kubectl_accepts_documented_commands(words: tuple[str, ...]) -> None:
    """An unknown command or option is an error, with or without a cluster."""
    place = words.index("--") if "--" in words else len(words)
    command = [os.environ["KUBECTL"], *words[:place], "--help", *words[place:]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage:" in done.stdout
