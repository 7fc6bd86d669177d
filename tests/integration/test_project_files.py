# SPDX-License-Identifier: Apache-2.0
"""Files for hosting services and for contributors' tools: issue templates and commit hooks."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yaml"))
HOOKS = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_an_issue_form_has_the_required_fields(form: Path) -> None:
    """GitHub hides a form without name, description and body, or with a duplicate field id."""
    document: dict[str, Any] = yaml.safe_load(form.read_text())
    assert document["name"]
    assert document["description"]
    fields = [field for field in document["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 0
    assert all(field["attributes"]["label"] for field in fields)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.stem)
def test_links_of_a_form_are_valid(form: Path) -> None:
    """The links are relative to the page for a new issue."""
    for path in re.findall(r"\]\(\.\./blob/main/([^)#]+)", form.read_text()):
        assert (ROOT / path).is_file(), path


def test_commit_hooks_run_commands_of_the_makefile() -> None:
    """The hooks are local, and each runs a command of "make check" or a target of the Makefile."""
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
