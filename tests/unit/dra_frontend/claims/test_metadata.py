# SPDX-License-Identifier: Apache-2.0
"""What containers are told of their devices (KEP-5304), and the files that tell it."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView, read_claim
from dra_frontend.claims.metadata import with_metadata
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.kubelet.values import Failure, Prepared
from numa_contract.config import Config
from numa_contract.errors import MalformedError

from tests.rigs.decisions import decided
from tests.rigs.frontend import Claims, Frontend
from tests.strategies.claims import NODE, claim, cpus, memory, result
from tests.strategies.machines import machine

PLUGINS = "/var/lib/kubelet/plugins"


def offered(**config: Any) -> Inventory:
    """What a small machine offers; CPU 0 is reserved."""
    return build_inventory(machine(), Config(reserved_cpus=frozenset({0}), **config), NODE)


def view(*results: dict[str, Any], uid: str = "u", pod_claim: str = "", **more: Any) -> ClaimView:
    """An allocated claim; with ``pod_claim`` one that was made from a template."""
    return read_claim(document(*results, uid=uid, pod_claim=pod_claim, **more))


def document(*results: dict[str, Any], uid: str = "u", pod_claim: str = "", **more: Any) -> dict[str, Any]:
    """The same as the API server has it."""
    found = claim(uid, *results, **more)
    if pod_claim:
        found["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": pod_claim}
    return found


def told(found: ClaimView, driver: str = "dra.cpu", inventory: Inventory | None = None) -> dict[str, Any]:
    """The documents by request."""
    inventory = inventory or offered()
    record = with_metadata(decided(found, inventory, driver), found, inventory, PLUGINS)
    return {request: json.loads(file.content) for request, file in record.metadata.items()}


def test_a_device_is_told_as_it_is_published_and_how_much_of_it() -> None:
    """The form is the one that KubeVirt and others read: claim, requests, devices with their attributes by type."""
    document = told(view(cpus(2), uid="u7"))["cpus"]
    (device,) = document.pop("requests")[0]["devices"]
    assert document == {
        "apiVersion": "metadata.resource.k8s.io/v1beta1",
        "kind": "DeviceMetadata",
        "metadata": {"name": "claim-u7", "namespace": "ns", "uid": "u7", "generation": 1},
    }
    assert (device["driver"], device["pool"], device["name"]) == ("dra.cpu", NODE, "cpudevnuma000")
    attributes = device["attributes"]
    assert attributes["resource.kubernetes.io/numaNode"] == {"int": 0}
    assert attributes["dra.cpu/smtEnabled"] == {"bool": True}
    assert attributes["dra.cpu/allocatedNumCPUs"] == {"int": 2}


def test_memory_tells_its_bytes() -> None:
    """What a claim took of a memory device is told in bytes."""
    (device,) = told(view(memory("512Mi")), "dra.memory")["memory"]["requests"][0]["devices"]
    assert device["attributes"]["dra.memory/allocatedBytes"] == {"int": 512 << 20}
    assert device["attributes"]["dra.memory/pageSize"] == {"string": "4Ki"}


def test_a_single_cpu_is_told_without_an_amount() -> None:
    """Nothing is consumed of a device that is given whole; its CPU is an attribute."""
    inventory = offered(cpu_device_mode="individual")
    (device,) = told(view(result("one", "dra.cpu", "cpudev003")), inventory=inventory)["one"]["requests"][0]["devices"]
    assert device["attributes"]["dra.cpu/cpuID"] == {"int": 3}
    assert "dra.cpu/allocatedNumCPUs" not in device["attributes"]


def test_each_request_has_a_file_of_its_own() -> None:
    """By base name in paths, by full name inside; what is only watched, or another driver's, is not in it."""
    found = view(
        cpus(1, "a"), cpus(1, "b/big"), memory("1Mi", "m"), result("w", "dra.cpu", "cpudevnuma000", adminAccess=True)
    )
    documents = told(found)
    assert {name: [r["name"] for r in one["requests"]] for name, one in documents.items()} == {
        "a": ["a"],
        "b": ["b/big"],
    }
    assert told(found, "dra.memory").keys() == {"m"}


def test_a_claim_of_a_template_goes_by_its_name_in_the_pod() -> None:
    """The pod's author does not know the generated name: annotation and path tell the one that is in the manifest."""
    found = view(cpus(1), pod_claim="pinned")
    record = with_metadata(decided(found, offered()), found, offered(), PLUGINS)
    file = record.metadata["cpus"]
    root = "/var/run/kubernetes.io/dra-device-attributes"
    assert file.mount_path == f"{root}/resourceclaimtemplates/pinned/cpus/dra.cpu-metadata.json"
    assert file.host_path == f"{PLUGINS}/dra.cpu/dra-device-metadata/ns_claim-u/cpus/metadata.json"
    assert json.loads(file.content)["podClaimName"] == "pinned"


def test_what_was_told_stays_told() -> None:
    """Prepared again after attributes have changed, the record and so the CDI file stay the same."""
    found = view(cpus(2))
    first = with_metadata(decided(found, offered()), found, offered(), PLUGINS)
    assert with_metadata(first, found, offered(group_by="socket"), PLUGINS) == first
    moved = with_metadata(first, found, offered(), "/kubelet/plugins")
    assert moved.metadata["cpus"].host_path.startswith("/kubelet/plugins/dra.cpu/")


def test_a_name_that_is_a_path_is_refused() -> None:
    """Nobody's name leads out of the plugin's directory."""
    found = view(cpus(2), pod_claim="../../etc")
    with pytest.raises(MalformedError, match="may not become part of a path"):
        with_metadata(decided(found, offered()), found, offered(), PLUGINS)


class Node(Frontend):
    """A frontend with metadata files, as a new process over the same disk each time it is made."""

    def __init__(self, path: Path, *, enabled: bool = True, api: Claims | None = None) -> None:
        super().__init__(path, offered(), metadata=enabled, api=api)
        self.plugins = path / "plugins" / "dra.cpu" / "dra-device-metadata"

    async def has(self, found: dict[str, Any]) -> None:
        """A claim is prepared."""
        self.api.add(found)
        answer = await self.prepare(found["metadata"]["uid"])
        assert isinstance(answer, Prepared), answer

    def metadata(self, claim_name: str = "claim-u") -> Path:
        """A claim's metadata file."""
        return self.plugins / f"ns_{claim_name}" / "cpus" / "metadata.json"

    def mounts(self, uid: str = "u") -> list[dict[str, Any]]:
        """The mounts of the claim's only CDI device."""
        written = json.loads(self.file(uid).read_text())
        found: list[dict[str, Any]] = written["devices"][0]["containerEdits"].get("mounts", [])
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """A node whose disk is well."""
    return Node(tmp_path)


async def test_the_file_is_there_when_the_cdi_file_names_it(node: Node) -> None:
    """Readable by all, nothing half written beside it, at the path that is mounted."""
    await node.has(document(cpus(2)))
    (mount,) = node.mounts()
    assert mount["hostPath"] == str(node.metadata())
    assert json.loads(node.metadata().read_text())["metadata"]["uid"] == "u"
    assert stat.S_IMODE(node.metadata().stat().st_mode) == 0o644
    assert [path.name for path in node.metadata().parent.iterdir()] == ["metadata.json"]


async def test_switched_off_there_is_nothing(tmp_path: Path) -> None:
    """With deviceMetadata off, neither file nor mount; what was told before stays as long as its claim."""
    node = Node(tmp_path, enabled=False)
    await node.has(document(cpus(2)))
    assert not node.mounts()
    assert not node.plugins.exists()


async def test_unprepare_takes_the_file(node: Node) -> None:
    """Directory and all; another claim's stays."""
    await node.has(document(cpus(1)))
    await node.has(document(cpus(1), uid="v"))
    await node.unprepare("u")
    assert [path.name for path in node.plugins.iterdir()] == ["ns_claim-v"]


async def test_a_namesakes_file_is_not_taken(node: Node) -> None:
    """Deleted by force and made anew, a claim has the directory of its forerunner, whose unprepare comes late."""
    await node.has(document(cpus(1), name="same"))
    await node.has(document(cpus(2), uid="v", name="same"))
    await node.unprepare("u")
    assert json.loads(node.metadata("same").read_text())["metadata"]["uid"] == "v"


async def test_a_disk_that_refuses_costs_the_mount_only(node: Node) -> None:
    """The claim is prepared without metadata, and that is counted; the next Prepare tries again."""
    node.plugins.parent.mkdir(parents=True)
    node.plugins.write_text("in the way")
    await node.has(document(cpus(2)))
    assert not node.mounts()
    assert node.metadata_failures == ["dra.cpu"]
    node.plugins.unlink()
    await node.has(document(cpus(2)))
    assert node.mounts()[0]["hostPath"] == str(node.metadata())


async def test_a_name_that_is_no_path_part_costs_the_mount_only(node: Node) -> None:
    """The claim itself never fails for its metadata."""
    await node.has(document(cpus(2), pod_claim="../x"))
    assert not node.mounts()
    assert node.metadata_failures == ["dra.cpu"]


async def test_a_failed_prepare_leaves_no_file(node: Node) -> None:
    """Where the CDI file cannot be written there is no claim, and so nothing to tell."""
    node.file("u").mkdir(parents=True)
    node.api.add(document(cpus(2)))
    assert isinstance(await node.prepare("u"), Failure)
    assert list(node.plugins.iterdir()) == []


async def test_a_lost_file_comes_back_with_the_same_content(node: Node) -> None:
    """Upkeep sees within a second that it is gone; the CDI file does not change."""
    await node.has(document(cpus(2)))
    cdi = node.file("u")
    before = node.metadata().read_text(), cdi.read_text()
    node.metadata().unlink()
    node.metadata().parent.rmdir()
    await node.reconciler.scan()
    assert (node.metadata().read_text(), cdi.read_text()) == before


async def test_what_cannot_come_back_is_not_mounted(node: Node) -> None:
    """A container with a mount that has no source would not start at all."""
    await node.has(document(cpus(2)))
    node.metadata().unlink()
    node.metadata().parent.rmdir()
    node.metadata().parent.write_text("in the way")
    await node.reconciler.scan()
    assert not node.mounts()
    assert node.store.ledger.held_cpus()


async def test_both_files_lost_come_back_together(node: Node) -> None:
    """A CDI file that is written again from memory never names a file that is not there."""
    await node.has(document(cpus(2)))
    cdi = node.file("u")
    before = cdi.read_bytes()
    cdi.unlink()
    node.metadata().unlink()
    await node.store.transact(lambda _: None)
    assert cdi.read_bytes() == before
    assert node.metadata().exists()


async def test_a_start_sweeps_what_belongs_to_no_claim(node: Node) -> None:
    """Left by a death between two steps; the files of claims stay."""
    await node.has(document(cpus(2)))
    (node.plugins / "ns_gone" / "cpus").mkdir(parents=True)
    await Node(node.root).store.start()
    assert [path.name for path in node.plugins.iterdir()] == ["ns_claim-u"]


async def test_metadata_that_cannot_be_listed_stops_nothing(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody's file where the directory should be costs the metadata, never the driver."""
    node.plugins.parent.mkdir(parents=True, exist_ok=True)
    node.plugins.write_text("")
    await node.store.start()
    assert "metadata files cannot be listed" in caplog.text


async def test_nothing_is_swept_while_a_claim_has_no_name(node: Node) -> None:
    """A file without a record, such as the CPU peer's, does not tell which directory is its claim's."""
    await node.has(document(cpus(2)))
    other = node.file("v")
    device = {"name": "claim-v", "containerEdits": {"env": ["DRA_CPUSET_v=4-5"]}}
    other.write_text(json.dumps({"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}))
    (node.plugins / "ns_peer").mkdir()
    await Node(node.root).store.start()
    assert sorted(path.name for path in node.plugins.iterdir()) == ["ns_claim-u", "ns_peer"]


async def test_a_rebuilt_claim_mounts_what_it_mounted(node: Node) -> None:
    """Record and files lost while the driver was down: containers that restart find the same file in the same place."""
    await node.has(document(cpus(2), pod_claim="pinned"))
    before = node.mounts(), node.metadata().read_text()
    held = node.cpus("u")
    node.file("u").unlink()
    again = Node(node.root, api=node.api)
    await again.store.start()
    assert not again.plugins.exists() or not list(again.plugins.iterdir())
    again.report(unknownClaims=[{"uid": "u", "driver": "dra.cpu", "cpus": sorted(held)}])
    await again.recovery.round()
    assert again.store.ledger.records[0].rebuilt
    assert (again.mounts(), again.metadata().read_text()) == before
