# SPDX-License-Identifier: Apache-2.0
"""Device metadata files for containers (KEP-5304)."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from dra_frontend.allocation.claim import ClaimView, parse_claim
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.devices.inventory import Inventory, build_inventory
from numa_contract.config import Config
from numa_contract.records import AllocationRecord

from tests.rigs.builders import NODE, claim, cpus, memory, result
from tests.rigs.decisions import decided
from tests.rigs.frontend import Claims, Frontend
from tests.strategies.machines import machine

PLUGINS = "/var/lib/kubelet/plugins"
FILES = MetadataFiles(PLUGINS, enabled=True)


def offered(**config: Any) -> Inventory:
    """Returns the devices of a small machine with CPU 0 reserved."""
    return build_inventory(machine(), Config(reserved_cpus=frozenset({0}), **config), NODE)


def document(*results: dict[str, Any], uid: str = "u", pod_claim: str = "", **more: Any) -> dict[str, Any]:
    """Returns an allocated claim. With ``pod_claim``, the claim was created from a template."""
    found = claim(uid, *results, **more)
    if pod_claim:
        found["metadata"]["annotations"] = {"resource.kubernetes.io/pod-claim-name": pod_claim}
    return found


def described(found: ClaimView, driver: str = "dra.cpu", inventory: Inventory | None = None) -> AllocationRecord:
    """Returns the claim's record, including its metadata."""
    inventory = inventory or offered()
    return FILES.describe(decided(found, driver, inventory=inventory), found, inventory)


def told(*results: dict[str, Any], driver: str = "dra.cpu", inventory: Inventory | None = None) -> dict[str, Any]:
    """Returns each request's metadata document."""
    record = described(parse_claim(document(*results)), driver, inventory)
    return {request: json.loads(file.content) for request, file in record.metadata.items()}


def test_metadata_contains_device_attributes_and_allocated_capacity() -> None:
    """KubeVirt and other programs read this format. A document contains the claim, its requests, and the requests'
    devices with typed attributes.
    """
    document = told(cpus(2))["cpus"]
    (device,) = document.pop("requests")[0]["devices"]
    assert document == {
        "apiVersion": "metadata.resource.k8s.io/v1beta1",
        "kind": "DeviceMetadata",
        "metadata": {"name": "claim-u", "namespace": "ns", "uid": "u", "generation": 1},
    }
    assert (device["driver"], device["pool"], device["name"]) == ("dra.cpu", NODE, "cpudevnuma000")
    attributes = device["attributes"]
    assert attributes["resource.kubernetes.io/numaNode"] == {"int": 0}
    assert attributes["dra.cpu/smtEnabled"] == {"bool": True}
    assert attributes["dra.cpu/allocatedNumCPUs"] == {"int": 2}
    (device,) = told(memory("512Mi"), driver="dra.memory")["memory"]["requests"][0]["devices"]
    assert device["attributes"]["dra.memory/allocatedBytes"] == {"int": 512 << 20}
    assert device["attributes"]["dra.memory/pageSize"] == {"string": "4Ki"}
    # A device that is allocated as a whole has no consumed capacity. Its CPU number is an attribute.
    single = told(result("one", "dra.cpu", "cpudev003"), inventory=offered(cpu_device_mode="individual"))
    (device,) = single["one"]["requests"][0]["devices"]
    assert device["attributes"]["dra.cpu/cpuID"] == {"int": 3}
    assert "dra.cpu/allocatedNumCPUs" not in device["attributes"]


def test_each_request_has_its_own_file() -> None:
    """The path contains the request's base name, and the document contains the request's full name. Results with
    adminAccess and other drivers' results are left out.
    """
    watched = result("w", "dra.cpu", "cpudevnuma000", adminAccess=True)
    found = (cpus(1, "a"), cpus(1, "b/big"), memory("1Mi", "m"), watched)
    named = {name: [request["name"] for request in one["requests"]] for name, one in told(*found).items()}
    assert named == {"a": ["a"], "b": ["b/big"]}
    assert told(*found, driver="dra.memory").keys() == {"m"}


def test_a_claim_from_a_template_is_named_as_in_the_pod() -> None:
    """The pod's author does not know the generated name, so the path contains the name from the manifest, which is in
    an annotation on the claim.
    """
    file = described(parse_claim(document(cpus(1), pod_claim="pinned"))).metadata["cpus"]
    root = "/var/run/kubernetes.io/dra-device-attributes"
    assert file.mount_path == f"{root}/resourceclaimtemplates/pinned/cpus/dra.cpu-metadata.json"
    assert file.host_path == f"{PLUGINS}/dra.cpu/dra-device-metadata/ns_claim-u/cpus/metadata.json"
    assert json.loads(file.content)["podClaimName"] == "pinned"


def test_preparing_a_claim_again_does_not_change_its_metadata() -> None:
    """Even if attributes have changed when the claim is prepared again, the record, and therefore the CDI file, stays
    the same.
    """
    found = parse_claim(document(cpus(2)))
    first = described(found)
    assert FILES.describe(first, found, offered(group_by="socket")) == first
    moved = MetadataFiles("/kubelet/plugins", enabled=True).describe(first, found, offered())
    assert moved.metadata["cpus"].host_path.startswith("/kubelet/plugins/dra.cpu/")


class Node(Frontend):
    """A frontend with metadata files. Each object represents a new process on the same disk."""

    def __init__(self, path: Path, *, enabled: bool = True, api: Claims | None = None) -> None:
        super().__init__(path, offered(), metadata=enabled, api=api)
        self.plugins = path / "plugins" / "dra.cpu" / "dra-device-metadata"

    async def has(self, found: dict[str, Any]) -> None:
        """Prepares a claim."""
        self.api.add(found)
        answer = await self.prepare(found["metadata"]["uid"])
        assert answer.error is None, answer

    def metadata(self, claim_name: str = "claim-u") -> Path:
        """Returns a claim's metadata file."""
        return self.plugins / f"ns_{claim_name}" / "cpus" / "metadata.json"

    def mounts(self, uid: str = "u") -> list[dict[str, Any]]:
        """Returns the mounts in the claim's only CDI device."""
        written = json.loads(self.file(uid).read_text())
        found: list[dict[str, Any]] = written["devices"][0]["containerEdits"].get("mounts", [])
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    """Returns a node with a working disk."""
    return Node(tmp_path)


async def test_the_metadata_file_exists_before_the_cdi_file_refers_to_it(node: Node) -> None:
    """The file is world-readable, complete, and at the mounted path. Unprepare removes the file and its directory."""
    await node.has(document(cpus(1)))
    await node.has(document(cpus(1), uid="v"))
    (mount,) = node.mounts()
    assert mount["hostPath"] == str(node.metadata())
    assert json.loads(node.metadata().read_text())["metadata"]["uid"] == "u"
    assert stat.S_IMODE(node.metadata().stat().st_mode) == 0o644
    assert [path.name for path in node.metadata().parent.iterdir()] == ["metadata.json"]
    await node.unprepare("u")
    assert [path.name for path in node.plugins.iterdir()] == ["ns_claim-v"]


async def test_no_metadata_is_written_if_it_is_disabled(tmp_path: Path) -> None:
    """With deviceMetadata off, there is neither a file nor a mount. Existing files remain for as long as their claims
    exist.
    """
    node = Node(tmp_path, enabled=False)
    await node.has(document(cpus(2)))
    assert not node.mounts()
    assert not node.plugins.exists()


async def test_the_file_of_another_claim_with_the_same_name_is_kept(node: Node) -> None:
    """A claim that was force-deleted and recreated shares the directory with its predecessor, and the kubelet
    unprepares the predecessor late.
    """
    await node.has(document(cpus(1), name="same"))
    await node.has(document(cpus(2), uid="v", name="same"))
    await node.unprepare("u")
    assert json.loads(node.metadata("same").read_text())["metadata"]["uid"] == "v"


@pytest.mark.parametrize("why", ["disk", "name"])
async def test_a_failed_metadata_write_does_not_fail_prepare(node: Node, why: str) -> None:
    """The claim is prepared without metadata, a metric counts the failure, and the next Prepare call tries again."""
    if why == "disk":
        node.plugins.parent.mkdir(parents=True)
        node.plugins.write_text("in the way")
    await node.has(document(cpus(2), pod_claim="" if why == "disk" else "../../etc"))
    assert not node.mounts()
    assert node.metadata_failures == ["dra.cpu"]
    node.plugins.unlink(missing_ok=True)
    await node.has(document(cpus(2)))
    assert node.mounts()[0]["hostPath"] == str(node.metadata())


async def test_a_failed_prepare_leaves_no_file(node: Node) -> None:
    """If the CDI file cannot be written, the claim is not prepared, and its metadata file is removed."""
    node.file("u").mkdir(parents=True)
    node.api.add(document(cpus(2)))
    assert (await node.prepare("u")).error is not None
    assert list(node.plugins.iterdir()) == []


async def test_lost_files_are_restored_together(node: Node) -> None:
    """The metadata file and the CDI file are restored within a second with their previous content, and the CDI file
    never refers to a metadata file that does not exist.
    """
    await node.has(document(cpus(2)))
    cdi = node.file("u")
    before = node.metadata().read_text(), cdi.read_text()
    for lost in ([node.metadata()], [node.metadata(), cdi]):
        for path in lost:
            path.unlink()
        node.metadata().parent.rmdir()
        await node.reconciler.scan()
        assert (node.metadata().read_text(), cdi.read_text()) == before
    # If a mount's source is missing, the container cannot start at all.
    node.metadata().unlink()
    node.metadata().parent.rmdir()
    node.metadata().parent.write_text("in the way")
    await node.reconciler.scan()
    assert not node.mounts()
    assert node.store.ledger.held_cpus()


@pytest.mark.parametrize(("peer", "left"), [(False, ["ns_claim-u"]), (True, ["ns_claim-u", "ns_gone"])])
async def test_metadata_without_a_claim_is_removed_at_startup(node: Node, peer: bool, left: list[str]) -> None:
    """A crash during Prepare or Unprepare can leave such metadata behind. If a claim file has no record, it is unknown
    which metadata directory belongs to its claim, so no directory is removed.
    """
    await node.has(document(cpus(2)))
    (node.plugins / "ns_gone" / "cpus").mkdir(parents=True)
    if peer:
        device = {"name": "claim-v", "containerEdits": {"env": ["DRA_CPUSET_v=4-5"]}}
        of_peer = {"cdiVersion": "0.8.0", "kind": "dra.k8s.io/cpu", "devices": [device]}
        node.file("v").write_text(json.dumps(of_peer))
    await Node(node.root).store.start()
    assert sorted(path.name for path in node.plugins.iterdir()) == left


async def test_an_unreadable_metadata_directory_does_not_affect_claims(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """If there is a file where the directory should be, the claim loses only its metadata."""
    node.plugins.parent.mkdir(parents=True, exist_ok=True)
    node.plugins.write_text("")
    await node.store.start()
    assert "cannot list metadata files" in caplog.text


async def test_a_rebuilt_claim_mounts_the_same_file(node: Node) -> None:
    """The record and the files were lost while the driver was down. Restarted containers find the same file at the same
    path.
    """
    await node.has(document(cpus(2), pod_claim="pinned"))
    before = node.mounts(), node.metadata().read_text()
    held = node.cpus("u")
    node.file("u").unlink()
    (node.root / "claims.journal").unlink()
    again = Node(node.root, api=node.api)
    await again.store.start()
    assert not again.plugins.exists() or not list(again.plugins.iterdir())
    again.report(unknownClaims=[{"uid": "u", "driver": "dra.cpu", "cpus": sorted(held)}])
    await again.recovery.run_round()
    assert again.store.ledger.records[0].rebuilt
    assert (again.mounts(), again.metadata().read_text()) == before
