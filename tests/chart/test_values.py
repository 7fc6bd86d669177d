# SPDX-License-Identifier: Apache-2.0
"""The chart's schema, its default values and the services' own model of the configuration agree."""

import itertools
import json
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml
from numa_contract.config import Config, parse_config
from pydantic import BaseModel

from hack.chart_schema import README, SCHEMA, values_schema, with_table
from hack.chart_values import ChartValues
from tests.chart.helm import CHART, Document, render

DEFAULTS: Document = yaml.safe_load((CHART / "values.yaml").read_text())


def test_the_schema_is_generated() -> None:
    """values.schema.json is not edited by hand; "make chart-schema" writes it."""
    assert json.loads(SCHEMA.read_text()) == values_schema()


def test_the_table_of_values_in_the_readme_is_generated() -> None:
    """Each value has a row with its default and a description."""
    page = README.read_text()
    assert with_table(page) == page
    rows = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and line.count("|") == 4}
    leaves = {path for path in given(DEFAULTS) if not any(other.startswith(f"{path}.") for other in given(DEFAULTS))}
    assert {path for path in leaves if not any(path.startswith(row) for row in rows)} == set()


def objects(schema: Any) -> list[Document]:
    """Returns the schemas of all objects whose properties are listed."""
    if isinstance(schema, list):
        return list(itertools.chain.from_iterable(map(objects, schema)))
    if not isinstance(schema, dict):
        return []
    own = [schema] if "properties" in schema and schema.get("type") == "object" else []
    return own + list(itertools.chain.from_iterable(map(objects, schema.values())))


def test_unknown_keys_are_rejected_at_every_level() -> None:
    """A misspelt key is an error. Only ``global``, which Helm shares among charts, may contain additional keys."""
    schema = values_schema()
    assert schema["properties"].pop("global")
    found = objects(schema)
    assert len(found) > 25
    assert all(one["additionalProperties"] is False for one in found)


def keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Returns the paths of all values that a model defines, except those in the services' configuration."""
    found = set()
    for name, field in model.model_fields.items():
        path = prefix + (field.alias or name)
        found.add(path)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel) and path != "driverConfig":
            found |= keys(field.annotation, f"{path}.")
    return found


def given(values: Document, prefix: str = "") -> set[str]:
    """Returns the paths of all values in a values file."""
    found = set()
    for name, value in values.items():
        found.add(prefix + name)
        if isinstance(value, dict):
            found |= given(value, f"{prefix}{name}.")
    return found


def test_values_yaml_lists_every_value() -> None:
    """values.yaml contains each value with its default."""
    ChartValues.model_validate(DEFAULTS)
    optional = {"global", "frontend.resources.claims", "backend.resources.claims", "hugepagesOnDemand.resources.claims"}
    assert keys(ChartValues) - given(DEFAULTS) == optional


def some_value(annotation: Any, default: Any) -> Any:
    """Returns a value other than the default, if there is one."""
    if get_origin(annotation) is Literal:
        return next((choice for choice in get_args(annotation) if choice != default), default)
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, BaseModel):
        first, field = next(iter(type(default).model_fields.items()))
        return {field.alias or first: some_value(field.annotation, field.default)}
    if "OnDemandPages" in str(annotation):
        return [{"numaNode": 0, "size": "1Gi", "pages": 2}]
    others: dict[Any, Any] = {"": "/some/where", frozenset(): "0-1", (): [{"numaNode": 0, "limits": {"memory": "1Gi"}}]}
    others |= {None: 2, 1.0: 0.5, ("low",): ["min"]}
    return others.get(default, f"{default}/other")


@pytest.mark.parametrize("name", Config.model_fields)
def test_every_setting_is_passed_through_the_chart(name: str) -> None:
    """Every setting of the services can be set through the chart, which passes it on unchanged."""
    field = Config.model_fields[name]
    value = some_value(field.annotation, field.default)
    documents = render({"driverConfig": {field.alias or name: value}})
    config = next(d["data"]["config.yaml"] for d in documents if d["kind"] == "ConfigMap")
    assert parse_config(yaml.safe_load(config), "config.yaml") == parse_config({field.alias or name: value}, "told")


def test_host_paths_default_to_those_of_the_services() -> None:
    """The chart's default host paths are the same as the services' defaults."""
    helpers = (CHART / "templates/_helpers.tpl").read_text()
    for key in ("kubelet_root_dir", "cdi_dir", "run_dir", "nri_socket", "cgroup_root"):
        field = Config.model_fields[key]
        assert f'default "{field.default}" .Values.driverConfig.{field.alias}' in helpers
