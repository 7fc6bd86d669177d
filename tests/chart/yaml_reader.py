# SPDX-License-Identifier: Apache-2.0
"""Reads YAML with Helm. kubectl reads it in the same way: both use sigs.k8s.io/yaml, which converts it to JSON."""

import json
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.chart.helm import run

_CHART = "apiVersion: v2\nname: reader\nversion: 0.1.0\n"
_TEMPLATE = "kind: Read\nvalue: {{ .Values.value | toJson }}\n"
_BEFORE = "value: "


@lru_cache(64)
def helm_json(text: str) -> str:
    """Returns the JSON of one YAML document. Raises HelmError if Helm cannot read it."""
    with tempfile.TemporaryDirectory() as directory:
        chart = Path(directory)
        (chart / "templates").mkdir()
        (chart / "Chart.yaml").write_text(_CHART)
        (chart / "templates/read.yaml").write_text(_TEMPLATE)
        lines = "".join(f"  {line}\n" for line in text.splitlines())
        (chart / "read.yaml").write_text(f"value:\n{lines}")
        printed = run("template", "reader", str(chart), "--values", str(chart / "read.yaml"))
    (found,) = [line for line in printed.splitlines() if line.startswith(_BEFORE)]
    return found.removeprefix(_BEFORE)


def helm_value(text: str) -> Any:
    """Returns the value of one YAML document. Raises HelmError."""
    return json.loads(helm_json(text))
