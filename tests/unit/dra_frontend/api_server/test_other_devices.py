# SPDX-License-Identifier: Apache-2.0
"""Prepare reads other drivers' devices if they determine which CPUs a claim gets."""

from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.alignment import Key
from dra_frontend.api_server.client import connect
from dra_frontend.api_server.credentials import kubeconfig
from dra_frontend.api_server.errors import ForbiddenError, KubeError, UnavailableError
from dra_frontend.api_server.other_devices import OtherDeviceReader
from dra_frontend.api_server.responses import MAX_BYTES
from dra_frontend.devices.inventory import build_inventory
from numa_contract.config import Config

from tests.fakes.apiserver import ApiServer
from tests.fakes.apiserver_store import SLICES
from tests.rigs.builders import NODE, claim, cpus, result
from tests.rigs.frontend import Claims, Frontend
from tests.strategies.machines import machine

NUMA = "resource.kubernetes.io/numaNode"
GPU: Key = ("gpu.example.com", "pool", "gpu-1")
MACHINE = machine()


def slice_of(name: str, numa: int, node: str = NODE, pool: str = "pool", driver: str = GPU[0]) -> dict[str, Any]:
    """Returns a ResourceSlice with one device. Without a node name, the device can be reached from several nodes."""
    devices = [{"name": GPU[2], "attributes": {NUMA: {"int": numa}}}]
    spec: dict[str, Any] = {"driver": driver, "devices": devices}
    spec["pool"] = {"name": pool, "generation": 1, "resourceSliceCount": 1}
    spec |= {"nodeName": node} if node else {"allNodes": True}
    return {"metadata": {"name": name}, "spec": spec}


def joined(uid: str = "u") -> dict[str, Any]:
    """Returns a claim for two CPUs near another driver's device."""
    document = claim(uid, cpus(2, device="cpudevmachine"), result("gpu", GPU[0], GPU[2], GPU[1]))
    document["spec"] = {"devices": {"constraints": [{"matchAttribute": NUMA}]}}
    return document


@pytest.fixture
def node(tmp_path: Path) -> Frontend:
    """Returns a node that publishes all of its CPUs as one device."""
    config = Config(group_by="machine", reserved_cpus=frozenset({0}))
    return Frontend(tmp_path, build_inventory(MACHINE, config, NODE), joined(), config=config)


async def test_prepare_chooses_cpus_near_another_drivers_device(node: Frontend) -> None:
    node.api.slices = [slice_of("s", 1)]
    assert (await node.prepare("u")).error is None
    assert node.cpus("u") <= MACHINE.numa_nodes[1].cpus


async def test_prepare_finds_devices_that_belong_to_no_single_node(node: Frontend) -> None:
    node.api.slices = [slice_of("s", 1, node="")]
    assert (await node.prepare("u")).error is None
    assert node.cpus("u") <= MACHINE.numa_nodes[1].cpus


async def test_prepare_refuses_a_claim_while_no_slice_contains_the_device(node: Frontend) -> None:
    answer = await node.prepare("u")
    assert "the values of device pool/gpu-1 are unknown: no ResourceSlice contains it" in str(answer)
    assert not node.file("u").exists()
    node.api.slices = [slice_of("s", 1)]
    assert (await node.prepare("u")).error is None


async def test_a_prepared_claim_is_prepared_again_without_the_slices(node: Frontend) -> None:
    node.api.slices = [slice_of("s", 1)]
    await node.prepare("u")
    before, node.api.slices = node.cpus("u"), []
    assert (await node.prepare("u")).error is None
    assert node.cpus("u") == before


class Failing(Claims):
    """A fake API server on which the first attempts to list slices fail."""

    def __init__(self, *errors: KubeError) -> None:
        super().__init__()
        self.errors = list(errors)

    async def list_slices_of(self, driver: str, node_name: str) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        async for one in super().list_slices_of(driver, node_name):
            yield one


async def test_a_transient_error_is_retried() -> None:
    api = Failing(UnavailableError("list resourceslices", "overloaded"))
    api.slices = [slice_of("s", 1)]
    found = await OtherDeviceReader(api, NODE).read(frozenset({GPU}))
    assert found.values(GPU, NUMA) == {(int, 1)}


@pytest.mark.parametrize(
    "errors", [[UnavailableError("list resourceslices", "overloaded")] * 99, [ForbiddenError("list", "overloaded")]]
)
async def test_a_lasting_error_is_reported_as_the_problem(errors: list[KubeError]) -> None:
    found = await OtherDeviceReader(Failing(*errors), NODE, seconds=0.5).read(frozenset({GPU}))
    assert "overloaded" in found.problem
    assert not found.attributes


async def test_too_many_slices_are_a_problem() -> None:
    api = Claims()
    api.slices = [slice_of(f"s{number}", 1, node="", pool=f"p{number}") for number in range(2001)]
    found = await OtherDeviceReader(api, NODE, seconds=5).read(frozenset({GPU}))
    assert "gpu.example.com has more than 2000 slices that are not specific to one node" in found.problem


async def test_only_the_other_drivers_slices_are_listed(tmp_path: Path) -> None:
    """The node's own slices are listed first. Slices that do not belong to a single node are listed only if the device
    is not in the node's own slices.
    """
    async with ApiServer() as server:
        slices = [slice_of("a", 1), slice_of("b", 0, node="node-b"), slice_of("c", 0, node="", pool="fabric")]
        for one in [*slices, slice_of("d", 0, driver="other.example.com")]:
            server.store.create(SLICES, "", one)
        async with connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as client:
            for _ in range(2):
                found = await OtherDeviceReader(client, NODE).read(frozenset({GPU}))
                assert dict(found.attributes) == {GPU: {NUMA: {(int, 1)}}}
            far = (GPU[0], "fabric", GPU[2])
            found = await OtherDeviceReader(client, NODE).read(frozenset({GPU, far}))
            assert found.values(far, NUMA) == {(int, 0)}
            assert not (
                await OtherDeviceReader(client, NODE).read(frozenset({("a,spec.nodeName=b", "p", "d")}))
            ).attributes
        # The node's own slices are listed three times, and those that do not belong to a single node are listed once.
        assert [one.verb for one in server.served] == ["list"] * 4


async def test_a_slice_that_is_too_long_hides_no_others(tmp_path: Path) -> None:
    async with ApiServer() as server:
        long = slice_of("a", 0, pool="long")
        long["metadata"]["annotations"] = {"a": "x" * MAX_BYTES}
        for one in [long, slice_of("b", 1)]:
            server.store.create(SLICES, "", one)
        async with connect(kubeconfig(str(server.write_kubeconfig(tmp_path / "kubeconfig")))) as client:
            found = await OtherDeviceReader(client, NODE).read(frozenset({GPU}))
    assert found.values(GPU, NUMA) == {(int, 1)}
