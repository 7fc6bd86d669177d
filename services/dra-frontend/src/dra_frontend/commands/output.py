# SPDX-License-Identifier: Apache-2.0
"""How the commands print: aligned tables for people, JSON and YAML for programs. Pure."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import yaml


def structured(document: Any, form: str) -> str:
    """Returns a document as ``json`` or ``yaml``, in the order it has."""
    if form == "json":
        return json.dumps(document, indent=2)
    return yaml.safe_dump(document, sort_keys=False, default_flow_style=None, width=120).rstrip("\n")


def object_list(items: Iterable[Any], form: str) -> str:
    """Returns API objects as one List, which ``kubectl apply -f -`` takes."""
    return structured({"apiVersion": "v1", "kind": "List", "items": list(items)}, form)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Returns one line for each row, its cells below those of the row before."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
