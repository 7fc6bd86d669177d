# SPDX-License-Identifier: Apache-2.0
"""The pages document every setting, and nothing that does not exist."""

import argparse
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from dra_frontend.allocation.parameters import CpuConfig
from dra_frontend.devices.inventory import build_inventory
from dra_frontend.machine.discovery import discover
from dra_frontend.settings import add_run_arguments
from nri_backend.settings import build_parser
from numa_contract.config import Config, parse_config

from hack.chart_values import ChartValues
from tests.chart.helm import CHART
from tests.chart.test_values import DEFAULTS, given, keys
from tests.chart.test_yaml_reading import choices
from tests.rigs.trees import small_machine

ROOT = CHART.parents[1]
CONFIGURATION = (ROOT / "docs/configuration.md").read_text()
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), *ROOT.glob("*.md"), ROOT / "examples/README.md", CHART / "README.md"]


def rows() -> dict[str, str]:
    """Returns the key table as a mapping from each key to its default, as written on the page."""
    table = "|" + CONFIGURATION.split("## Keys")[1].split("\n\n|")[1].split("\n\n")[0]
    found = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, re.MULTILINE)
    assert len(found) == len(table.splitlines()) - 2
    return dict(found)


def test_every_key_is_documented() -> None:
    """Each setting is documented once."""
    known = {field.alias or name for name, field in Config.model_fields.items()}
    assert rows().keys() == known


@pytest.mark.parametrize("key", [field.alias or name for name, field in Config.model_fields.items()])
def test_documented_defaults_are_correct(key: str) -> None:
    """A configuration that contains the documented default equals an empty one."""
    told = rows()[key].strip("`")
    is_value = told in ("true", "false") or told[0] in "{0123456789"
    value = None if told == "none" else yaml.safe_load(told) if is_value else told
    assert parse_config({key: value}, "docs") == Config()
    assert told != "none" or Config().model_dump(by_alias=True)[key] in ("", (), None)


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3", "coretype"])
def test_the_page_names_every_attribute(group_by: str) -> None:
    """Authors of claims find every attribute for selectors, including attributes that exist only on some machines or in
    some modes.
    """
    page = (ROOT / "docs/devices.md").read_text()
    modes = ({"groupBy": group_by, "allocator": "external"}, {"cpuDeviceMode": "individual"})
    for mode in modes:
        config = parse_config({**mode, "exposePCIeRoots": True}, "docs")
        machine = replace(discover(small_machine()), pcie_roots={"pci0000:17": frozenset({0})})
        devices = build_inventory(machine, config, "n").devices
        names = {name for device in devices.values() for name in device.attributes}
        assert {name for name in names if f"`{name}`" not in page} == set()


def test_a_settings_table_lists_its_allowed_values() -> None:
    """A table whose first heading is a key or a parameter has exactly one row for each allowed value of that key or
    parameter.
    """
    fields = {field.alias or name: field for model in (CpuConfig, Config) for name, field in model.model_fields.items()}
    words = {key: choices(field.annotation) for key, field in fields.items()}
    tables = [
        (key.rpartition(".")[2], set(re.findall(r"^\| `(\w+)`", rows, re.MULTILINE)))
        for page in PAGES
        for key, rows in re.findall(
            r"^\| `([\w.]+)` \|[^\n]*\n\|---[^\n]*\n((?:\|[^\n]*\n)+)", page.read_text(), re.MULTILINE
        )
    ]
    checked = [(key, found) for key, found in tables if words.get(key)]
    assert {key for key, _ in checked} >= {"cpuExclusivity", "isolation", "poolCPUs"}
    for key, found in checked:
        assert found == words[key], key


def test_documented_flags_exist() -> None:
    """Every flag on a page belongs to one of the two commands."""
    frontend = argparse.ArgumentParser()
    add_run_arguments(frontend)
    known = set(frontend._option_string_actions) | set(build_parser()._option_string_actions)
    assert set(re.findall(r"`(--[a-z-]+)", CONFIGURATION)) - known == set()


def test_documented_values_exist() -> None:
    """The chart accepts the values in every command line on a page."""
    known = keys(ChartValues) | given(DEFAULTS) | {f"driverConfig.{key}" for key in rows()} | {"podLabels.app"}
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"--set[a-z-]* ([\w.]+)=", text)) | set(re.findall(r"`(driverConfig\.\w+)", text))
    assert len(named) > 8
    assert named - known == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_are_valid(page: Path) -> None:
    """A relative link points to an existing file, and its anchor to a heading in that file."""
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]*(?:#[^)]*)?)\)", prose):
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}, target


def test_every_documented_make_target_exists() -> None:
    """Commands on pages must not fail."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE)}
    assert named - targets == set()


def test_the_site_lists_every_page() -> None:
    """Readers of the site can find every page; decisions are listed in their directory's index."""
    listed = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "hack/site/mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_are_short_enough_for_reviews(page: Path) -> None:
    """A changed sentence should appear as a changed line; table rows and code cannot be wrapped."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for line in prose.splitlines() if len(line) > 120 and not line.startswith("|")] == []
