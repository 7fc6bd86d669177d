# SPDX-License-Identifier: Apache-2.0
"""PCIe roots near CPUs, from sysfs to the published devices."""

import pytest
from dra_frontend.devices.inventory import PCIE_ROOT, Inventory, build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from numa_contract.config import Config

from tests.fakes.apiserver_rules import GATES_OF_1_36, admit
from tests.fakes.apiserver_store import ApiError, Resource
from tests.fakes.scheduler import allocate
from tests.rigs.trees import captured, small_machine
from tests.strategies.modes import MODES

SLICES = Resource("resource.k8s.io", "resourceslices", "ResourceSlice")


def root(name: str, cpus: str) -> dict[str, str | bytes | None]:
    """Returns the files for one root bridge."""
    return {f"/sys/devices/pci{name}/pci_bus/{name}/cpulistaffinity": cpus}


def offered(files: dict[str, str | bytes | None], **config: object) -> Inventory:
    """Returns the devices of a machine with CPUs 0-3 and 4-7 and the given roots."""
    given = Config.model_validate({"reservedCPUs": "0", "exposePCIeRoots": True, **config})
    return build_inventory(discover(small_machine().changed(files)), given, "n")


def lists(inventory: Inventory) -> dict[str, object]:
    """Returns each CPU device's attribute, or None for a device without it."""
    return {device.name: device.attributes.get(PCIE_ROOT) for device in inventory.pools[0].devices}


TWO = {**root("0000:00", "0-3\n"), **root("0000:80", "4-7\n")}


def test_a_device_lists_the_roots_near_its_cpus() -> None:
    """Each root is listed once, and the list is sorted. A device on both sockets lists all roots, and a single CPU's
    device lists the roots of the CPU's socket.
    """
    roots = discover(captured("32intel64-2p8co2t+8ve")).pcie_roots
    assert roots == dict.fromkeys(["pci0000:17", "pci0000:3a", "pci0000:5d"], frozenset({*range(8), *range(16, 24)}))
    assert lists(offered(TWO)) == {"cpudevnuma000": ("pci0000:00",), "cpudevnuma001": ("pci0000:80",)}
    assert lists(offered(TWO, groupBy="machine")) == {"cpudevmachine": ("pci0000:00", "pci0000:80")}
    single = lists(offered(TWO, cpuDeviceMode="individual"))
    assert single["cpudev003"] == ("pci0000:00",)
    assert single["cpudev004"] == ("pci0000:80",)


def test_distant_roots_are_not_listed() -> None:
    """A device without nearby roots has no list, because the server rejects an empty one. Reserved and offline CPUs
    contribute no root, and neither does a removed bridge. Lists are published only with ``exposePCIeRoots``, since the
    feature gate for lists is alpha.
    """
    gone = {"/sys/devices/pci0000:40/uevent": ""}
    files = {**root("0000:00", "0\n"), **root("0000:80", "4-7,64-127\n"), **gone}
    assert lists(offered(files)) == {"cpudevnuma000": None, "cpudevnuma001": ("pci0000:80",)}
    assert set(lists(offered(TWO, exposePCIeRoots=False)).values()) == {None}


def test_only_root_bridges_count() -> None:
    """Root bridges are recognized by name. An invalid CPU list is reported with its path, like invalid content in any
    other file that discovery reads.
    """
    others = {f"/sys/devices/{name}/pci_bus/x/cpulistaffinity": "0-7\n" for name in ("pci", "pci0000", "pcih0000:00")}
    assert discover(small_machine().changed({**others, **root("0000:0A", "0-7\n")})).pcie_roots == {}
    with pytest.raises(HostTreeError, match="pci_bus/0000:00/cpulistaffinity: is not a CPU list"):
        offered(root("0000:00", "zero\n"))


@pytest.mark.parametrize("mode", MODES)
def test_lists_satisfy_the_servers_rules(mode: dict[str, str]) -> None:
    """If the feature gate is on, the lists are valid in every mode. A list with too many roots is truncated, with a
    warning.
    """
    files = {key: text for n in range(64) for key, text in root(f"0000:{n:02x}", "0-7\n").items()}
    inventory = offered(files, **mode)
    for document in slice_documents(inventory.pools[0], "n"):
        named = {**document, "metadata": {"name": "s"}}
        admit({**GATES_OF_1_36, "DRAListTypeAttributes": True}, SLICES, named, None)
        with pytest.raises(ApiError, match="exactly one value"):
            admit(GATES_OF_1_36, SLICES, named, None)
    (told,) = (text for text in inventory.warnings if "nearby PCIe roots" in text)
    assert told.partition(": ")[0] == ", ".join(device.name for device in inventory.pools[0].devices)
    assert "PCIe" not in "".join(offered(TWO, **mode).warnings)


@pytest.mark.parametrize("near", [{"string": "pci0000:80"}, {"strings": ["pci0000:40", "pci0000:80"]}])
def test_cpus_are_found_near_another_drivers_device(near: dict[str, object]) -> None:
    """A claim for a GPU and CPUs that match by PCIe root gets CPUs on the GPU's socket."""
    gpu = {"name": "gpu0", "attributes": {PCIE_ROOT: near}}
    pool = {"name": "gpus", "generation": 1, "resourceSliceCount": 1}
    spec = {"driver": "gpu.example", "nodeName": "n", "pool": pool, "devices": [gpu]}
    slices = [{"metadata": {"name": "gpu"}, "spec": spec}]
    for index, document in enumerate(slice_documents(offered(TWO).pools[0], "n")):
        slices.append({**document, "metadata": {"name": f"cpu{index}"}})
    classes = {
        name: {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{name}"'}}]}}
        for name in ("gpu.example", "dra.cpu")
    }
    amount = {"requests": {"dra.cpu/cpu": "2"}}
    requests = [
        {"name": "gpu", "exactly": {"deviceClassName": "gpu.example"}},
        {"name": "cpus", "exactly": {"deviceClassName": "dra.cpu", "capacity": amount}},
    ]
    devices = {"requests": requests, "constraints": [{"matchAttribute": PCIE_ROOT}]}
    claim = allocate({"metadata": {"name": "c"}, "spec": {"devices": devices}}, slices, classes)
    results = claim["status"]["allocation"]["devices"]["results"]
    assert [result["device"] for result in results] == ["gpu0", "cpudevnuma001"]
