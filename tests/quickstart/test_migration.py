# SPDX-License-Identifier: Apache-2.0
"""Migration from dra-driver-cpu and dra-driver-memory and back, with the command blocks from docs/migration.md.

``peers/`` contains objects with the two drivers' names and selectors; the drivers themselves are not run. The fake
scheduler allocates claims from the slices and classes in the cluster.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fakes.scheduler import UnschedulableError, allocate, schedule
from tests.quickstart.conftest import Shell
from tests.rigs import command_blocks as documented
from tests.stage.pods import cpus, hugepages, memory
from tests.stage.process import wait_for

pytestmark = pytest.mark.timeout(300)
PEERS = Path(__file__).parent / "peers"
BLOCKS = [block.script({"REGISTRY": "registry.example"}) for block in documented.blocks("migration")]
REMOVE_CPU, REMOVE_MEMORY, DELETE_CLASSES, INSTALL, UPGRADE, BACK = BLOCKS
CPU_INSTALL = f"helm install dra-driver-cpu {PEERS}/dra-driver-cpu --namespace kube-system"
MEMORY_INSTALL = f"kubectl apply -f {PEERS}/dra-driver-memory.yaml"
Document = dict[str, Any]


@pytest.fixture(autouse=True)
def clean_cluster(shell: Shell) -> Iterator[None]:
    """Removes every driver, class, slice, claim and namespace for the next test."""
    yield
    for release in ("dra-driver-numa --namespace dra-driver-numa", "dra-driver-cpu --namespace kube-system"):
        shell.typed(f"helm uninstall --ignore-not-found {release}")
    shell.typed(f"{MEMORY_INSTALL} && kubectl delete -f {PEERS}/dra-driver-memory.yaml")
    shell.typed("kubectl delete resourceclaims,resourceslices --all")
    shell.typed("kubectl delete namespace dra-driver-numa --ignore-not-found")


def publish(shell: Shell) -> None:
    """Publishes the two drivers' slices."""
    shell.typed(f"kubectl apply -f {PEERS}/slices.yaml")


def withdraw(shell: Shell) -> None:
    """Deletes the two drivers' slices, as the kubelet does when a driver is gone."""
    shell.typed(f"kubectl delete -f {PEERS}/slices.yaml")


def claim(shell: Shell, name: str, request: Document) -> None:
    """Creates a claim that is not allocated yet."""
    document = {"metadata": {"name": name}, "spec": {"devices": {"requests": [request]}}}
    shell.stage.api("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims", "POST", document)


def device(shell: Shell, name: str) -> str:
    """Allocates a claim once its device is published, and returns the device's name."""

    def attempt() -> dict[str, Any] | None:
        try:
            return dict(schedule(shell.stage.server, "default", name))
        except UnschedulableError:
            return None

    allocated = wait_for(f"a device to be published for the claim {name}", attempt)
    assert allocated is not None
    [result] = allocated["status"]["allocation"]["devices"]["results"]
    return str(result["device"])


def owners(shell: Shell) -> dict[str, str | None]:
    """Returns the Helm release of each DeviceClass."""
    items = json.loads(shell.typed("kubectl get deviceclasses -o json"))["items"]
    release = "meta.helm.sh/release-name"
    return {one["metadata"]["name"]: one["metadata"].get("annotations", {}).get(release) for one in items}


def test_migration_from_dra_driver_cpu_and_back(shell: Shell) -> None:
    """A claim that was pending during the migration is allocated afterwards, in both directions."""
    shell.typed(CPU_INSTALL)
    publish(shell)
    claim(shell, "before", cpus(2))
    shell.typed(REMOVE_CPU)
    withdraw(shell)
    with pytest.raises(UnschedulableError):
        schedule(shell.stage.server, "default", "before")
    shell.typed(DELETE_CLASSES)
    shell.typed(INSTALL)
    assert set(owners(shell).values()) == {"dra-driver-numa"}
    assert device(shell, "before") == "cpudevnuma000"

    claim(shell, "after", cpus(2))
    shell.typed(BACK)
    shell.until("kubectl get resourceslices -o name", lambda printed: printed == "")
    assert owners(shell) == {}
    shell.typed(CPU_INSTALL)
    publish(shell)
    assert owners(shell) == {"dra.cpu": "dra-driver-cpu"}
    assert device(shell, "after") == "cpudevnuma000"


def test_migration_from_dra_driver_memory_and_back(shell: Shell) -> None:
    """If only the old driver's DaemonSet is deleted, its classes remain, and the chart refuses to install next to them.
    The chart also refuses with --take-ownership, because Helm 3.17 would otherwise report success and leave the
    selectors unchanged.
    """
    shell.typed(MEMORY_INSTALL)
    claim(shell, "before", memory("64Mi"))
    shell.typed(REMOVE_MEMORY)
    [helm] = [line for line in INSTALL.replace("\\\n", " ").splitlines() if line.startswith("helm")]
    for flag in ("", " --take-ownership"):
        refused = shell.run(helm + flag)
        assert refused.returncode != 0
        assert "DeviceClass dra.memory exists and does not belong to this release" in refused.stderr
        assert "kubectl delete deviceclass dra.memory" in refused.stderr

    shell.typed(DELETE_CLASSES)
    shell.typed(INSTALL)
    assert set(owners(shell).values()) == {"dra-driver-numa"}
    assert device(shell, "before") == "memory-numa000"

    claim(shell, "after", hugepages("4Mi"))
    shell.typed(BACK)
    shell.until("kubectl get resourceslices -o name", lambda printed: printed == "")
    shell.typed(MEMORY_INSTALL)
    publish(shell)
    assert set(owners(shell)) == {"dra.memory", "dra.hugepages-2m", "dra.hugepages-1g"}
    assert device(shell, "after") == "hugepages-2m-b7d4sn"


def test_an_upgrade_restores_classes_that_the_old_release_deleted(shell: Shell) -> None:
    """Helm deletes a release's objects by name, even if another release has created them again. While both releases
    exist, this driver's classes select the old drivers' devices; the old drivers' classes do not select this driver's
    memory.
    """
    shell.typed(CPU_INSTALL)
    shell.typed(DELETE_CLASSES)
    shell.typed(INSTALL)
    shell.typed(REMOVE_CPU)
    assert "dra.cpu" not in owners(shell)
    shell.typed(UPGRADE)
    assert owners(shell)["dra.cpu"] == "dra-driver-numa"
    classes = {
        one["metadata"]["name"]: one for one in shell.stage.api("/apis/resource.k8s.io/v1/deviceclasses")["items"]
    }
    theirs = list(yaml.safe_load_all((PEERS / "dra-driver-memory.yaml").read_text()))
    their_classes = {one["metadata"]["name"]: one for one in theirs if one["kind"] == "DeviceClass"}
    their_slices = list(yaml.safe_load_all((PEERS / "slices.yaml").read_text()))
    for request in (memory("64Mi"), hugepages("4Mi")):
        wanted = {"metadata": {"name": "wanted"}, "spec": {"devices": {"requests": [request]}}}
        assert allocate(wanted, their_slices, classes)["status"]["allocation"]
        with pytest.raises(UnschedulableError):
            allocate(wanted, shell.stage.slices(), their_classes)
