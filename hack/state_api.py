# SPDX-License-Identifier: Apache-2.0
"""Generates ``docs/state-api.md``, the reference page of the state endpoint, from its OpenAPI document.

``python -m hack.state_api`` writes it. With ``--check``, it fails if the file is out of date.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

from dra_frontend.state_endpoint.api import state_app
from dra_frontend.state_endpoint.backend_link import BackendLink
from dra_frontend.state_endpoint.source import StateSource

from hack.pages import wrapped, write_or_check

PAGE: Final = Path(__file__).parents[1] / "docs/state-api.md"
_HEAD: Final = """\
# Reference of the state endpoint

`make state-api` generates this page from `/openapi.json`, which the frontend serves on its state socket.
[The state endpoint](state-endpoint.md) explains how to connect to it.

Compatibility: releases add fields and words without a new format version. A reader must ignore fields that it does not
know, use the default for a field that is missing, and treat an unknown word as an unknown value. `/v1/version` shows
the versions of the formats; a field is removed or changes its meaning only with a new one. CPUs and NUMA nodes in the
kernel's list format are strings such as `0-3,8`; the empty string is no CPU. A field of type "... or null" that has no
value is left out in `/v1/devices`, `/v1/cpus`, `/v1/memory` and `/v1/node`.
"""


def openapi() -> dict[str, Any]:
    """Returns the OpenAPI document, which is the same on every node."""
    state = SimpleNamespace(watch=None, store=None, backend=None, node="", instance="")
    return state_app(cast("StateSource", state), BackendLink(cast("StateSource", state))).openapi()


def page(document: dict[str, Any]) -> str:
    """Returns the reference page."""
    parts = [_HEAD, "## Requests", *_requests(document["paths"]), "## Documents"]
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", wrapped(schema["description"]), *_fields(schema)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _requests(paths: dict[str, Any]) -> Iterator[str]:
    for path, operations in paths.items():
        for method, operation in operations.items():
            yield f"### {method.upper()} {path}"
            yield wrapped(operation["description"])
            rows = [
                f"| `{one['name']}` | {one['in']} | {one['description']} |" for one in operation.get("parameters", ())
            ]
            if rows:
                yield "\n".join(["| parameter | in | meaning |", "|---|---|---|", *rows])
            if "requestBody" in operation:
                yield f"Body: {_type_of(_json(operation['requestBody']))}."
            yield "\n".join(["| status | answer |", "|---|---|", *_responses(operation["responses"])])


def _responses(responses: dict[str, Any]) -> Iterator[str]:
    for status, response in sorted(responses.items()):
        if "application/json" not in response.get("content", {}):
            yield f"| {status} | text |"
        elif status == "200":
            yield f"| 200 | {_type_of(_json(response))} |"
        else:
            yield f"| {status} | {_type_of(_json(response))}: {response['description']} |"


def _json(part: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = part["content"]["application/json"]["schema"]
    return schema


def _fields(schema: dict[str, Any]) -> Iterator[str]:
    if properties := schema.get("properties"):
        rows = [f"| `{name}` | {_type_of(one)} | {_in_row(one['description'])} |" for name, one in properties.items()]
        yield "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])
        for name, one in properties.items():
            if words := one.get("x-codes"):
                rows = [f"| `{word}` | {_in_row(text)} |" for word, text in words.items()]
                yield "\n".join([f"| `{name}` | meaning |", "|---|---|", *rows])


def _in_row(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")


def _type_of(schema: dict[str, Any]) -> str:
    """Describes a schema's type in words, with links to the documents."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if choices := schema.get("anyOf"):
        return " or ".join(map(_type_of, choices))
    kind = str(schema.get("type"))
    if kind == "array":
        return f"list of {_type_of(schema['items'])}"
    if kind == "object":
        return f"map of {_type_of(schema['additionalProperties'])}"
    return kind


def main(arguments: list[str]) -> int:
    """Writes or compares the page and returns the exit status."""
    source = "the models of the state endpoint"
    return write_or_check({PAGE: page(openapi())}, arguments, source=source, target="state-api")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
