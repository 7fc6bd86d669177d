# SPDX-License-Identifier: Apache-2.0
"""Everything that a running driver has shown: the fields of its documents, samples of its metrics, and the reasons in
its Events.

Fields have paths such as ``/v1/containers[].claims[].cpus``. In a path, ``*`` replaces a key that is data and not the
name of a field.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, get_args

from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic_core import PydanticUndefined, to_jsonable_python

from tests.stage.stage import Stage
from tests.stage.wires import AnsweredError, ask_unix

_MAX_VALUES = 64
"""Maximum number of distinct values that are recorded for a field."""
_DATA = re.compile(r"\.(attributes|distances|limits|counters|parameters|memoryParameters|metadata|poolCpus|consumed)$")
"""Matches the paths of objects whose keys are data."""
_EMPTY: tuple[Any, ...] = (None, "", 0, False, [], {})
Labels = Mapping[str, str]


def fields_of(model: type[BaseModel], path: str) -> Iterator[tuple[str, Any]]:
    """Yields the path of every field of a document and the field's default as JSON, or None if the field has no
    default.
    """
    for name, field in model.model_fields.items():
        inner, default = f"{path}.{field.alias or name}", field.get_default(call_default_factory=True)
        yield inner, None if default is PydanticUndefined else to_jsonable_python(default, serialize_unknown=True)
        for part in _parts(field.annotation):
            repeated = "[]" if "tuple" in str(field.annotation) else ".*" if "dict" in str(field.annotation) else ""
            yield from fields_of(part, inner + repeated)


def _parts(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _parts(inner)


class Witness:
    """Records everything that was observed, across several stages."""

    def __init__(self, documents: Iterable[str]) -> None:
        self._documents = tuple(documents)
        self.values: dict[str, list[Any]] = defaultdict(list)
        """Different values of each field, as JSON."""
        self.samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        """Different samples of each time series name."""
        self.families: set[str] = set()
        """Names of the metrics in the registry, including the ones without a sample."""
        self.reasons: set[str] = set()
        self.conditions: set[str] = set()
        """Reasons of device conditions, in the API server's claims and on the page."""
        self.vanished = False
        """Whether a frontend that had metrics no longer has any."""

    def observe(self, stage: Stage) -> None:
        """Reads everything that the instances of a stage currently show."""
        for instance in stage.instances:
            with suppress(OSError, AnsweredError):
                for name in self._documents:
                    self._walk(name, ask_unix(instance.state_socket, name))
                self._scrape(ask_unix(instance.state_socket, "/metrics"))
        claims = stage.api("/apis/resource.k8s.io/v1/resourceclaims")["items"]
        devices = [device for claim in claims for device in claim.get("status", {}).get("devices") or []]
        self.conditions |= {one["reason"] for device in devices for one in device["conditions"]}
        self.conditions |= set(self.values["/v1/node.claims[].enforced.reason"])
        self.reasons |= {event["reason"] for event in stage.events()}

    def record_vanished_metrics(self, stage: Stage) -> bool:
        """Records whether the first instance's metrics have disappeared."""
        try:
            ask_unix(stage.instances[0].state_socket, "/metrics")
        except OSError:
            self.vanished = bool(self.samples)
        return self.vanished

    def _walk(self, path: str, value: Any) -> None:
        known = self.values[path]
        shown = value if not isinstance(value, list | dict) else bool(value)
        if shown not in known and len(known) < _MAX_VALUES:
            known.append(shown)
        if isinstance(value, dict):
            for key, inner in value.items():
                self._walk(f"{path}.{'*' if _DATA.search(path) else key}", inner)
        elif isinstance(value, list):
            for inner in value:
                self._walk(f"{path}[]", inner)

    def _scrape(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            self.families.add(family.name)
            for sample in family.samples:
                known, found = self.samples[sample.name], (dict(sample.labels), sample.value)
                if len(known) < 4096 and found not in known:
                    known.append(found)

    def differs(self, path: str, default: Any) -> bool:
        """Returns True if the field was seen with a value that is neither empty nor its default, or if the field's
        default is not empty and an empty value was seen.
        """
        empty = default in _EMPTY
        return any((value not in _EMPTY) if empty else value != default for value in self.values.get(path, ()))

    def counted(self, name: str) -> bool:
        """Returns True if a metric was seen with a value other than 0."""
        return any(value for ending in ("", "_total", "_sum", "_count") for _, value in self.samples[f"{name}{ending}"])

    def describe(self, path: str) -> str:
        """Returns the observed values of a field for a failure message."""
        return json.dumps(self.values.get(path, "never seen"), default=str)[:500]
