# SPDX-License-Identifier: Apache-2.0
"""Writes the chart's ``values.schema.json`` from the configuration model and the model of the chart's own values.

``python -m hack.chart_schema`` writes it; with ``--check`` it compares instead, and fails where the file differs.
"""

import json
import sys
from pathlib import Path
from typing import Any

from hack.chart_values import ChartValues

SCHEMA = Path(__file__).parents[1] / "charts/dra-driver-numa/values.schema.json"
_DROPPED = ("$defs", "$ref", "title", "default")
# "--set ...=0" is a number; the chart makes a text of it, and checks it in words.
# Values of dra-driver-cpu's chart. The schema lets them pass, so that the chart can refuse them with their new place.
_PEER_VALUES = ("args", "healthzPath", "healthzPort", "image", "kubeletRootDir", "resources", "sysfsOverlay")
_OTHERWISE = {"reservedCPUs": {"type": ["string", "integer"]}}


def _inlined(node: Any, definitions: dict[str, Any]) -> Any:
    """Returns the schema without references, titles and defaults; what is not listed may not be in an object."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if reference := node.get("$ref"):
        node = {**definitions[reference.removeprefix("#/$defs/")], **node}
    result = {
        key: {name: _OTHERWISE.get(name) or _inlined(inner, definitions) for name, inner in value.items()}
        if key == "properties"  # a property may have a keyword's name
        else _inlined(value, definitions)
        for key, value in node.items()
        if key not in _DROPPED
    }
    if "patternProperties" in result:
        result["additionalProperties"] = False
    return result


def values_schema() -> dict[str, Any]:
    """Returns the schema of all values in JSON Schema draft 7, which every Helm 3 and 4 reads."""
    document = ChartValues.model_json_schema(by_alias=True)
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", **_inlined(document, document.get("$defs", {}))}
    schema["properties"] |= {name: {} for name in _PEER_VALUES}
    return schema


def main(arguments: list[str]) -> int:
    """Writes or compares; returns the exit code."""
    text = json.dumps(values_schema(), indent=2) + "\n"
    if "--check" not in arguments:
        SCHEMA.write_text(text)
        return 0
    if not SCHEMA.exists() or SCHEMA.read_text() != text:
        print(f"{SCHEMA.name} is not what the models say: run make chart-schema", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
