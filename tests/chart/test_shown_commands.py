# SPDX-License-Identifier: Apache-2.0
"""Every command line on a page is accepted by its program, and Helm renders the chart with the documented options."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest
from dra_frontend.state_endpoint.api import state_app
from dra_frontend.state_endpoint.backend_link import BackendLink
from dra_frontend.state_endpoint.ports import probe_endpoints
from dra_frontend.state_endpoint.source import StateSource
from kubectl_numa import cli as plugin
from nri_backend import settings as backend
from nri_backend.setup import command as setup
from numa_tools import cli as frontend

from tests.chart.helm import CHART, HELM, run

ROOT = CHART.parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *ROOT.glob("*.md"), ROOT / "examples/README.md"]
_SPAN: Final = re.compile(r"`((?:kubectl|helm|dra-frontend|nri-backend|docker) [^`]+)`")
_BLOCK: Final = re.compile(r"^```(sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# Placeholders on pages for which a program accepts only certain values.
_FILLED: Final = {"N": "2", "SECONDS": "9"}
_PARSERS: Final = {
    "dra-frontend": frontend.build_parser,
    "nri-backend": backend.build_parser,
    "nri-backend setup-runtime": setup.build_parser,
    "kubectl numa": plugin.build_parser,
}
# Helm options that do not affect rendering: those for an existing release, and timeouts.
_OF_RELEASES: Final = {"--reset-then-reuse-values", "--wait", "--create-namespace", "--install"}


def lines(text: str) -> Iterator[str]:
    """Returns the command lines on a page, each on one line, without the prompt."""
    for kind, block in _BLOCK.findall(text):
        open_line = ""
        for line in block.replace("\\\n", " ").splitlines():
            if open_line or kind == "sh" or line.startswith("$ "):
                open_line += " " + line.removeprefix("$ ")
                if open_line.count("'") % 2 == 0:
                    yield open_line
                    open_line = ""


def spans(text: str) -> Iterator[str]:
    """Returns the command lines in a page's sentences and tables."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for span in _SPAN.findall(prose):
        yield " ".join(span.replace("\\|", "|").split())


def commands(line: str) -> Iterator[list[str]]:
    """Splits a line into its individual commands. In a synopsis, the optional parts are included without their
    brackets.
    """
    line = re.sub(r"(^|\s)#.*", "", line)
    if "[" in line and "'" not in line:
        line = re.sub(r"\|[\w|]+", "", line.replace(" | ", " ").translate({ord("["): None, ord("]"): None}))
    lexer = shlex.shlex(line.replace("...", ""), posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word[0] in "|&;<>":
            if words:
                yield words
            words = []
        else:
            words.append(word)


def shown() -> list[tuple[str, list[str]]]:
    """Returns every command with the name of its page. For a program that a command runs in a container, returns the
    program's own arguments.
    """
    found = []
    for page in PAGES:
        for line in lines(page.read_text()):
            for words in commands(line):
                inner = words[words.index("--") + 1 :] if "--" in words else words
                found += [(page.name, inner if inner[0] in ("dra-frontend", "nri-backend") else words)]
    return found


SHOWN = shown()


def of(program: str) -> list[tuple[str, list[str]]]:
    """Returns the arguments of each documented call to a program, with the name of the page."""
    names = program.split()
    return [(page, words[len(names) :]) for page, words in SHOWN if words[: len(names)] == names]


@pytest.mark.parametrize("program", _PARSERS)
def test_the_programs_accept_the_documented_arguments(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With an obsolete flag or subject, a command copied from a page would fail."""
    commands_apart = {"nri-backend": ("setup-runtime", "version")}.get(program, ())
    uses = [(page, words) for page, words in of(program) if not words or words[0] not in commands_apart]
    assert uses
    for page, words in uses:
        try:
            _PARSERS[program]().parse_args([_FILLED.get(word, word) for word in words if word != "FLAGS"])
        except (SystemExit, backend.UsageError) as end:
            pytest.fail(f"{page}: {program} {shlex.join(words)}: {end} {capsys.readouterr().err}")


def in_sentences(program: str) -> list[list[str]]:
    """Returns the arguments of a program's command lines in sentences. A name without arguments is not a command
    line.
    """
    found = {span for page in PAGES for span in spans(page.read_text()) if span.startswith(f"{program} ")}
    words = [next(commands(span.partition(" [")[0])) for span in sorted(found) if "..." not in span.split()]
    return [one for each in words if len(one := each[len(program.split()) :]) > 1]


@pytest.mark.parametrize("program", ["dra-frontend", "kubectl numa"])
def test_commands_in_sentences_are_accepted(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Readers type these commands just as they type those in code blocks."""
    for words in in_sentences(program):
        try:
            _PARSERS[program]().parse_args([_FILLED.get(word, word) for word in words])
        except SystemExit as end:
            pytest.fail(f"{program} {shlex.join(words)}: {end} {capsys.readouterr().err}")


def test_names_of_commands_in_sentences_exist() -> None:
    """Each ``dra-frontend NAME`` and ``kubectl numa NAME`` on a page is a command of the program."""
    text = "\n".join(span for page in PAGES for span in spans(page.read_text()))
    named = {program: set(re.findall(rf"^{program} ([a-z-]+)", text, re.MULTILINE)) for program in _PARSERS}
    assert named["dra-frontend"] - {*frontend.COMMANDS} == set()
    assert named["kubectl numa"] - {*plugin.COMMANDS} == set()


def test_helm_accepts_the_commands_that_render_nothing() -> None:
    """One of these commands is ``helm list``. With ``--help``, Helm parses the line without contacting a cluster."""
    shown_by_helm = {tuple(words) for _, words in of("helm") if words[0] not in ("install", "upgrade", "template")}
    spans_of_helm = {
        tuple(shlex.split(span)[1:]) for page in PAGES for span in spans(page.read_text()) if "helm " in span
    }
    for words in shown_by_helm | {one for one in spans_of_helm if one and "..." not in one}:
        done = subprocess.run([HELM, *words, "--help"], capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, ""), words
        assert f"helm {words[0]}" in done.stdout, words


def test_targets_in_documented_image_builds_exist_in_the_dockerfile() -> None:
    stages = set(re.findall(r"^FROM .* AS ([\w-]+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.IGNORECASE))
    named = {words[words.index("--target") + 1] for _, words in SHOWN if "--target" in words}
    assert named
    assert named - stages == set()


def test_helm_renders_the_documented_installations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the commands exist, and the chart accepts the values."""
    monkeypatch.chdir(ROOT)
    uses = [words for _, words in of("helm") if words[0] in ("install", "upgrade", "template")]
    assert len(uses) > 3
    for words in uses:
        kept = [word.replace("REGISTRY", "registry.example") for word in words[1:] if word not in _OF_RELEASES]
        if "FILE" not in " ".join(kept):
            assert "kind: DaemonSet" in run("template", *kept), words


def test_files_in_documented_commands_exist() -> None:
    """Commands that are copied from a page find the file in this tree."""
    named = {word.rstrip(")") for _, words in SHOWN for word in words if re.match(r"(examples|charts|hack)/", word)}
    assert named
    assert [name for name in named if not Path(ROOT, name).exists()] == []


def test_documented_addresses_are_served() -> None:
    """Each path of the state socket or of the probes has a route."""
    state = SimpleNamespace(watch=None, store=None, backend=None, node="node-a", instance="i")
    app = state_app(cast("StateSource", state), BackendLink(cast("StateSource", state)))
    routes = {route.path for route in app.routes if hasattr(route, "path")} | set(
        probe_endpoints(cast("StateSource", state))
    )
    text = "\n".join(page.read_text() for page in PAGES)
    asked = set(re.findall(r"(?:http://node|localhost:80\d\d)(/[\w/.]*)", text))
    assert asked
    assert asked - routes == set()
    schemas = app.openapi()["components"]["schemas"].values()
    fields = {name for schema in schemas for name in schema.get("properties", {})}
    filters = re.findall(r"http://node/v1\S* *(?:\\\n *)?\| jq (?:-r )?'([^']+)'", text)
    assert filters
    assert {name for one in filters for name in re.findall(r"\.(\w+)", one)} - fields == set()
