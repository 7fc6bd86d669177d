# SPDX-License-Identifier: Apache-2.0
"""A client that openapi-python-client generates from ``/openapi.json`` reads every document of a running driver."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.fakes.waiting import PATIENCE
from tests.stage.pods import StagePod, claim_pod, cpus, hugepages, memory, opaque
from tests.stage.stage import Instance, OpenStage
from tests.stage.wires import ask_unix

_PACKAGE = "generated_state_client"
_CHANGING = {"age"}
"""Fields that differ between two reads of the same state."""


class Driver(NamedTuple):
    """A running driver and the client generated from its OpenAPI document."""

    instance: Instance
    openapi: dict[str, Any]
    client: Any

    def call(self, operation: str, *arguments: Any) -> Any:
        """Calls the client's function for an operation and returns the function's result."""
        function = importlib.import_module(f"{_PACKAGE}.api.default.{operation}")
        return function.sync(*arguments, client=self.client)

    def model(self, name: str) -> Any:
        """Returns one of the client's models."""
        return getattr(importlib.import_module(f"{_PACKAGE}.models"), name)


def generate(openapi: dict[str, Any], root: Path) -> None:
    """Generates the client; fails if the generator cannot read a part of the document."""
    (root / "openapi.json").write_text(json.dumps(openapi))
    (root / "config.yaml").write_text("post_hooks: []\n")
    arguments = ("--path", root / "openapi.json", "--output-path", root / _PACKAGE, "--config", root / "config.yaml")
    command = [sys.executable, "-m", "openapi_python_client", "generate", "--meta", "none", "--fail-on-warning"]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def driver(open_shared_stage: OpenStage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driver]:
    """Yields a driver on a node with three running containers: two have claims for CPUs, memory or hugepages, and one
    has no claim.
    """
    stage = open_shared_stage(partitions=True)
    instance = stage.add_ready_instance()
    parameters = [
        opaque("dra.cpu", "cpuConfig", {"poolCPUs": "numa"}),
        opaque("dra.memory", "memoryConfig", {"high": 0.9}),
    ]
    db = claim_pod(stage, "db", cpus(2), memory(64 << 20), config=parameters)
    with db, claim_pod(stage, "pages", hugepages(4 << 20)) as pages, StagePod(stage, "web") as web:
        for pod in (db, pages):
            pod.prepare()
        for pod in (db, pages, web):
            pod.run()
        root = tmp_path_factory.mktemp("client")
        openapi = ask_unix(instance.state_socket, "/openapi.json")
        generate(openapi, root)
        sys.path.insert(0, str(root))
        try:
            transport = httpx.HTTPTransport(uds=str(instance.state_socket))
            made = importlib.import_module(_PACKAGE).Client(
                "http://node", raise_on_unexpected_status=True, httpx_args={"transport": transport}
            )
            with made.with_timeout(httpx.Timeout(60 * PATIENCE)) as client:
                yield Driver(instance, openapi, client)
        finally:
            sys.path.remove(str(root))
            for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
                del sys.modules[name]


def plain(value: Any) -> Any:
    """Returns one of the client's values as JSON, without the fields that change on their own."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    found = value.to_dict() if hasattr(value, "to_dict") else value
    return {key: one for key, one in found.items() if key not in _CHANGING} if isinstance(found, dict) else found


def test_every_document_is_read(driver: Driver) -> None:
    """The client's value contains every field of the document, each as described by the schema."""
    read = {}
    for path, operations in driver.openapi["paths"].items():
        operation = operations.get("get", {})
        if path.startswith("/v1/") and "{" not in path:
            document = ask_unix(driver.instance.state_socket, path)
            found = driver.call(operation["operationId"])
            assert plain(found) == plain(document), path
            assert document or path == "/v1/quarantine", path
            read[path] = found
    assert len(read) == 12
    assert {type(one).__name__ for one in read["/v1/claims"]} == {"AllocationRecord"}
    assert sorted(one.driver for one in read["/v1/claims"]) == ["dra.cpu", "dra.memory", "dra.memory"]
    assert read["/v1/backend"].status.synchronized
    assert read["/v1/version"].node == read["/v1/node"].node


def test_the_records_of_one_claim_are_read(driver: Driver) -> None:
    """The UID selects the claim; a request for an unknown claim returns an error with a reason."""
    records = driver.call("claims")
    uid = next(one.claim.uid for one in records if one.driver == "dra.cpu")
    assert plain(driver.call("claim", uid)) == [plain(one) for one in records if one.claim.uid == uid]
    refused = driver.call("claim", "nothing")
    assert type(refused).__name__ == "ErrorDocument"
    assert "GET /v1/claims" in refused.detail


def test_the_backends_report_matches_its_schema(driver: Driver) -> None:
    """The body of ``PUT /v1/backend`` consists of the lease and the containers."""
    status = ask_unix(driver.instance.state_socket, "/v1/backend")["status"]
    body = {**status, "metrics": [], "containers": ask_unix(driver.instance.state_socket, "/v1/containers")}
    report = driver.model("BackendReport").from_dict(body)
    assert (report.to_dict(), report.additional_properties) == (body, {})
    assert {type(one).__name__ for one in report.containers} == {"ContainerReport"}


def test_fields_of_a_newer_release_are_kept(driver: Driver) -> None:
    """A client of this release reads a document with unknown fields and enumeration values."""
    document = ask_unix(driver.instance.state_socket, "/v1/containers")[0] | {"state": "thawing", "nice": 5}
    report = driver.model("ContainerReport").from_dict(document)
    assert (report.state, report.to_dict()) == ("thawing", document)
