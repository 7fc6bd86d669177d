# SPDX-License-Identifier: Apache-2.0
"""In docs/symptoms.md, operators on call find a section with a remedy for every message that the driver shows."""

import ast
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import pytest
import yaml
from dra_frontend.claims import memory_kills, pod_events
from numa_contract.state.status import StatusCode

from tests.chart.helm import CHART
from tests.rigs.symptoms import INDEX, SECTIONS, TEXT, quoted, rows, slug

ROOT = CHART.parents[1]
PARTS = ("What you see", "Urgency", "Running pods", "Commands")
FOREIGN = {
    'required plugin "dra-driver-numa" not present',
    "unresolvable CDI devices",
    "cannot be imported into the current release",
    "Additional property ... is not allowed",
    "Invalid type. Expected: ...",
    "Invalid type. Expected: [number,null], given: string",
}
"""Messages from the container runtime and from Helm."""
POD_REASONS = {pod_events.BEST_EFFORT, pod_events.KEPT_BY_POOL, memory_kills.REASON}


@lru_cache(1)
def texts() -> str:
    """Returns every message in the programs' sources and the chart's templates, without inserted values."""
    found = [path.read_text() for path in (CHART / "templates").glob("*") if path.is_file()]
    for path in [*ROOT.glob("services/*/src/**/*.py"), *ROOT.glob("shared/src/**/*.py")]:
        found += _strings(path)
    return "\n".join(found)


def _strings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_has_the_same_parts(title: str) -> None:
    """The parts are symptoms, urgency, effect on running pods, commands, cause and remedy, in this order."""
    found = re.findall(r"^\*\*([A-Z][a-z ]+):\*\*", SECTIONS[title], re.MULTILINE)
    assert tuple(found[: len(PARTS)]) == PARTS
    assert found[len(PARTS) :] in (["Cause", "Remedy"], ["Cause and remedy"])
    urgency = SECTIONS[title].split("**Urgency:** ")[1]
    assert re.match(r"Now\b|Working hours\b|No action\b", urgency)


def test_the_index_leads_to_every_section() -> None:
    """Every link in the index also leads to an existing section."""
    linked = set(re.findall(r"\]\(#([^)]+)\)", INDEX))
    assert linked == {slug(title) for title in SECTIONS}


def messages() -> list[str]:
    """Returns the messages that the page's tables quote from a program."""
    listed = [span for cells in rows(TEXT, "message") for span in quoted(cells[0])]
    listed += [span for cells in rows(TEXT, "code or text") for span in quoted(cells[0]) if " " in span]
    listed += [span for cells in rows(TEXT, "problem with the pod") for span in quoted(cells[1])]
    return list(dict.fromkeys(listed))


@pytest.mark.parametrize("message", messages())
def test_quoted_messages_exist_in_the_programs(message: str) -> None:
    """Users can search the page for a message that they see. A quoted message has gaps (``...``), and each part between
    two gaps is in a source file.
    """
    if message not in FOREIGN:
        parts = [part.strip(" .,:()") for part in message.split("...")]
        assert [part for part in parts if part not in texts()] == []


def test_the_index_contains_every_alert_reason_and_code() -> None:
    """Users can search the page for every name that the driver reports."""
    named = set(quoted(INDEX))
    alerts = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"][0]["rules"]
    assert {rule["alert"] for rule in alerts} - named == set()
    assert {*POD_REASONS, *map(str, StatusCode)} - {str(StatusCode.BACKEND_PROBLEM)} - named == set()
    reasons = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs/events.md").read_text(), re.MULTILINE)
    assert {*reasons} - named == set()


def test_the_index_shows_the_severity_of_every_alert() -> None:
    """The index shows which alerts are critical."""
    alerts = yaml.safe_load((CHART / "files/rules.yaml").read_text())["groups"][0]["rules"]
    told = {name: cells[1] for cells in rows(INDEX, "alert") for name in quoted(cells[0])}
    assert told == {rule["alert"]: rule["labels"]["severity"] for rule in alerts}
