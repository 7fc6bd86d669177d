# SPDX-License-Identifier: Apache-2.0
"""Input and output of the commands: strictly validated files, and aligned tables, JSON and YAML. This module does no
I/O.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import yaml
from numa_contract.config import ConfigError, faults_of
from numa_contract.errors import printable
from numa_node.config_file import PortableDumper
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel


class Input(BaseModel):
    """Base model for input files: frozen, with camelCase keys and without type conversion. Rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, alias_generator=to_camel)


_Model = TypeVar("_Model", bound=Input)


def validated(model: type[_Model], document: Any, source: str) -> _Model:
    """Validates the contents of an input file. Raises ConfigError with every fault and its location."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        raise ConfigError(source, faults_of(error)) from error


def structured(document: Any, form: str) -> str:
    """Formats a document as ``json`` or ``yaml``, preserving the order of its keys."""
    if form == "json":
        return json.dumps(document, indent=2)
    text = yaml.dump(document, Dumper=PortableDumper, sort_keys=False, default_flow_style=None, width=120)
    return text.rstrip("\n")


def object_list(items: Iterable[Any], form: str) -> str:
    """Formats API objects as one List, which ``kubectl apply -f -`` accepts."""
    return structured({"apiVersion": "v1", "kind": "List", "items": list(items)}, form)


def table(rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as lines with aligned columns."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in cells)
