# SPDX-License-Identifier: Apache-2.0
"""``status.devices`` of claims, written by the real client with the chart's permissions, against several Kubernetes
releases.
"""

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.api_server.client import KubeClient, connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import ForbiddenError, InvalidError, NotFoundError

from tests.chart.helm import only, render
from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import CLAIMS, Document
from tests.fakes.apiserver_values import Options

NODE = "node-a"
SHARE = "6f1b0c5e-0000-4000-8000-000000000001"
RELEASES = ("1.34", "1.36", "1.37")
CONDITION = {"type": "Ready", "status": "True", "reason": "Prepared", "lastTransitionTime": "2026-01-01T00:00:00Z"}


def result(driver: str, device: str, **more: str) -> Document:
    return {"request": "r", "driver": driver, "pool": NODE, "device": device, **more}


CPU = {"driver": "dra.cpu", "pool": NODE, "device": "cpudevnuma000", "shareID": SHARE, "data": {"cpus": "1-2"}}
GPU = {"driver": "gpu.example", "pool": NODE, "device": "gpu-0", "data": {"model": "x"}}


@asynccontextmanager
async def cluster(tmp_path: Path, version: str, **options: Any) -> AsyncGenerator[tuple[ApiServer, KubeClient], None]:
    """Yields a server with a claim for devices of two drivers, and the driver's client with the permissions that the
    chart grants.
    """
    options = {"rules": only(render(), "ClusterRole")["rules"], "node": NODE, **options}
    async with ApiServer(Options(version=version, **options)) as server:
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
        results = [result("dra.cpu", "cpudevnuma000", shareID=SHARE), result("gpu.example", "gpu-0")]
        allocation = {"devices": {"results": results}, "nodeSelector": {"nodeSelectorTerms": [term]}}
        claim = {"metadata": {"name": "c"}, "spec": {}, "status": {"allocation": allocation, "devices": [GPU]}}
        server.store.create(CLAIMS, "ns", claim)
        async with connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as client:
            yield server, client


def present(server: ApiServer) -> Document:
    return server.store.get(CLAIMS, "ns", "c")


async def apply(server: ApiServer, client: KubeClient, *devices: Document, uid: str = "") -> list[Document]:
    claim = await client.apply_claim_devices("ns", "c", uid or present(server)["metadata"]["uid"], list(devices))
    devices_of: list[Document] = claim["status"].get("devices", [])
    return devices_of


@pytest.mark.parametrize("version", RELEASES)
async def test_the_charts_permissions_are_enough_in_every_release(tmp_path: Path, version: str) -> None:
    """The driver's own entries are added, changed and removed; other drivers' entries stay the same."""
    async with cluster(tmp_path, version) as (server, client):
        assert await apply(server, client, CPU) == [GPU, {**CPU, "conditions": []}]
        before = present(server)["metadata"]["resourceVersion"]
        assert await apply(server, client, CPU) == [GPU, {**CPU, "conditions": []}]
        assert present(server)["metadata"]["resourceVersion"] == before
        changed = {**CPU, "data": {"cpus": "1"}, "conditions": [CONDITION]}
        assert await apply(server, client, changed) == [GPU, changed]
        assert await apply(server, client) == [GPU]


async def test_entries_are_dropped_when_the_claim_is_deallocated(tmp_path: Path) -> None:
    """The server drops the entries on its own, and clients on the node may no longer write them."""
    async with cluster(tmp_path, "1.36") as (server, client):
        await apply(server, client, CPU)
        server.store.update(CLAIMS, "ns", "c", {**present(server), "status": {}}, "status")
        assert "devices" not in present(server)["status"]
        with pytest.raises(ForbiddenError):
            await apply(server, client, CPU)
        server.options.version = "1.34"
        with pytest.raises(InvalidError, match="allocated device"):
            await apply(server, client, CPU)


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize(
    ("rights", "node"), [("associated-node:patch", NODE), ("", NODE), ("associated-node:patch", "node-b")]
)
async def test_since_1_36_a_driver_needs_more_permissions(tmp_path: Path, version: str, rights: str, node: str) -> None:
    """The driver needs a separate verb, and a token bound to the claim's node; the error names the permission that is
    missing.
    """
    rules = [one for one in only(render(), "ClusterRole")["rules"] if rights or "resourceNames" not in one]
    async with cluster(tmp_path, version, rules=rules, node=node) as (server, client):
        if version == "1.34" or (rights and node == NODE):
            assert len(await apply(server, client, CPU)) == 2
        else:
            with pytest.raises(ForbiddenError, match=r"associated-node:patch resource .*resourceclaims/driver"):
                await apply(server, client, CPU)


async def test_entries_of_other_drivers_cannot_be_written(tmp_path: Path) -> None:
    """The permissions are granted per driver."""
    async with cluster(tmp_path, "1.36") as (server, client):
        with pytest.raises(ForbiddenError):
            await apply(server, client, {**GPU, "data": {"model": "y"}})


async def test_entries_cannot_be_written_without_the_status_permission(tmp_path: Path) -> None:
    """A role that is narrower than the chart's may lack the permission."""
    async with cluster(tmp_path, "1.34", rules=[]) as (server, client):
        with pytest.raises(ForbiddenError, match=re.escape('resources: ["resourceclaims/status"]')):
            await apply(server, client, CPU)


async def test_a_server_without_the_gate_drops_the_entries(tmp_path: Path) -> None:
    """The response contains no error."""
    async with cluster(tmp_path, "1.34") as (server, client):
        server.store.update(CLAIMS, "ns", "c", _without_devices(present(server)), "status")
        server.options.gates["DRAResourceClaimDeviceStatus"] = False
        assert await apply(server, client, CPU) == []


def _without_devices(claim: Document) -> Document:
    return {**claim, "status": {key: value for key, value in claim["status"].items() if key != "devices"}}


async def test_the_status_of_another_claim_with_the_same_name_is_not_written(tmp_path: Path) -> None:
    """The status of a deleted claim is not written to its successor, and a deleted claim is not created again."""
    async with cluster(tmp_path, "1.36") as (server, client):
        with pytest.raises(InvalidError, match="immutable"):
            await apply(server, client, CPU, uid=SHARE)
        server.store.delete(CLAIMS, "ns", "c")
        with pytest.raises(NotFoundError):
            await apply(server, client, CPU, uid=SHARE)


@pytest.mark.parametrize(
    "entry",
    [
        {**CPU, "conditions": [{**CONDITION, "reason": ""}]},
        {**CPU, "conditions": [{**CONDITION, "lastTransitionTime": None}]},
        {**CPU, "conditions": [{**CONDITION, "type": f"T{n}"} for n in range(9)]},
        {**CPU, "data": {"cpus": "1," * 6000}},
        {key: value for key, value in CPU.items() if key != "shareID"},
    ],
)
async def test_the_server_rejects_invalid_entries(tmp_path: Path, entry: Document) -> None:
    """Checks that the fake implements the API's validation rules."""
    async with cluster(tmp_path, "1.36") as (server, client):
        with pytest.raises(InvalidError):
            await apply(server, client, entry)
