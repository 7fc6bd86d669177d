# SPDX-License-Identifier: Apache-2.0
"""The state endpoint's OpenAPI document describes every JSON document completely."""

import asyncio
import re
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from dra_frontend.state_endpoint.api import state_app
from dra_frontend.state_endpoint.backend_link import BackendLink
from dra_frontend.state_endpoint.source import StateSource

_STATE: Final = cast("StateSource", SimpleNamespace(watch=None, store=None, backend=None, node="node-a", instance="i"))
DOCUMENT: Final = state_app(_STATE, BackendLink(_STATE)).openapi()
SCHEMAS: Final[dict[str, Any]] = DOCUMENT["components"]["schemas"]
_UNIT: Final = re.compile(
    r"\b(bytes|seconds|nanoseconds|MB/s|CPUs|pages|number|numbers|ID|IDs|version|generation|unit|fraction)\b",
    re.IGNORECASE,
)


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields every field of every schema, with the field's own schema."""
    for name, schema in SCHEMAS.items():
        for field, shown in schema.get("properties", {}).items():
            yield f"{name}.{field}", shown


def kinds(schema: dict[str, Any]) -> set[str]:
    """Returns the JSON types that a field may have."""
    return {schema.get("type", "")} | {kind for one in schema.get("anyOf", ()) for kind in kinds(one)}


def contents(part: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema for the JSON in a response or a request body."""
    found: dict[str, Any] = part["content"]["application/json"]["schema"]
    return found


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_schema_has_a_description(name: str) -> None:
    """The reference page shows the description."""
    assert SCHEMAS[name]["description"].endswith("."), SCHEMAS[name]


def test_every_field_has_a_description_in_full_sentences() -> None:
    """The description comes from the docstring below the attribute, and is in Markdown."""
    texts = {name: shown.get("description", "") for name, shown in fields()}
    assert {name for name, text in texts.items() if not text.endswith((".", ".)"))} == set()
    assert {name for name, text in texts.items() if "``" in text} == set()


def test_every_number_has_a_unit() -> None:
    """The description states whether a number is a count, an identifier, or an amount in bytes or seconds."""
    numbers = {name: shown["description"] for name, shown in fields() if kinds(shown) & {"integer", "number"}}
    assert len(numbers) > 40
    assert {name for name, text in numbers.items() if not _UNIT.search(text)} == set()


def test_every_json_document_is_declared() -> None:
    """Each response, as well as the backend's report, has the schema of a contract model."""
    json_paths = {path: operations for path, operations in DOCUMENT["paths"].items() if path.startswith("/v1/")}
    assert len(json_paths) == 13
    for path, operations in json_paths.items():
        for method, operation in operations.items():
            found = contents(operation["responses"]["200"])
            assert found.keys() - {"title"}, (path, method)
            assert operation["description"].endswith("."), (path, method)
    body = contents(DOCUMENT["paths"]["/v1/backend"]["put"]["requestBody"])
    assert body == {"$ref": "#/components/schemas/BackendReport"}
    assert {"containers", "metrics", "requestTimeout"} <= SCHEMAS["BackendReport"]["properties"].keys()


def test_every_error_has_the_same_format() -> None:
    """The document contains no response in FastAPI's own error format."""
    errors = [
        response
        for operations in DOCUMENT["paths"].values()
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if status != "200"
    ]
    assert len(errors) >= 7
    assert {str(contents(one)) for one in errors} == {"{'$ref': '#/components/schemas/ErrorDocument'}"}


def test_no_field_is_an_enumeration() -> None:
    """Without enumerations, a client generated from this document also accepts values that a newer release adds."""
    assert [name for name, shown in fields() if "enum" in shown] == []


async def test_requests_for_the_document_share_one_thread() -> None:
    """If each request ran in a separate thread, a flood of requests would leave idle threads behind, each with its own
    stack and heap.
    """
    app = state_app(_STATE, BackendLink(_STATE))
    answers: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        answers.append(message)

    async def request() -> None:
        head = {"type": "http", "http_version": "1.1", "method": "GET", "path": "/openapi.json", "root_path": ""}
        await app({**head, "query_string": b"", "headers": []}, receive, send)

    before = threading.active_count()
    await asyncio.gather(*(request() for _ in range(20)))
    assert [one["status"] for one in answers if one["type"] == "http.response.start"] == [200] * 20
    # A thread that has just finished may not count as idle yet when the next request arrives.
    assert threading.active_count() <= before + 3
