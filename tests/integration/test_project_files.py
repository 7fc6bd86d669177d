# SPDX-License-Identifier: Apache-2.0
"""Files that hosting services and tools of contributors read: templates of issues, hooks for commits."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yaml"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_a_form_for_issues_has_what_github_requires(form: Path) -> None:
    """GitHub hides a form without name, description and body, or with two fields of one id."""
    document: dict[str, Any] = yaml.safe_load(form.read_text())
    assert document["name"]
    assert document["description"]
    fields = [field for field in document["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_links_of_a_form_lead_to_files(form: Path) -> None:
    """They are relative to the page for a new issue."""
    for path in re.findall(r"\]\(\.\./blob/main/([^)#]+)", form.read_text()):
        assert (ROOT / path).is_file(), path


def test_hooks_for_commits_run_the_gates_of_the_makefile() -> None:
    """They are local, and each runs a command of "make check" or a target of the Makefile."""
    makefile = (ROOT / "Makefile").read_text()
    assert [one["repo"] for one in HOOKS] == ["local"]
    for hook in HOOKS[0]["hooks"]:
        assert hook["language"] == "system"
        program, _, rest = hook["entry"].partition(" ")
        if program == "make":
            assert re.search(rf"^{rest}:", makefile, re.MULTILINE), hook["entry"]
        else:
            command = hook["entry"].replace(".venv/bin/", "$(BIN)/").removesuffix(" --message")
            assert command in makefile, hook["entry"]
