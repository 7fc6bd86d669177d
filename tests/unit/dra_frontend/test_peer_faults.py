# SPDX-License-Identifier: Apache-2.0
"""What the CPU peer gets wrong and the frontend must not, by the numbers of section 9 of its page of facts.

The backend's are in the file of this name there, what needs processes and sockets in ``tests/integration/``.
"""

import argparse
import ast
import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dra_frontend
import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.commands import cli
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.model import CpuDevice
from dra_frontend.devices.pcie import PCIE_ROOT
from dra_frontend.devices.slices import slice_documents
from dra_frontend.kubelet.health import HealthBoard
from dra_frontend.kubelet.values import Failure, Prepared
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.model import Machine
from dra_frontend.placement.allocator import NoCpusError, allocate
from dra_frontend.placement.place import Layout
from dra_frontend.settings import add_run_arguments, load_settings
from numa_contract.cdi import CDI_VERSION, ClaimFile, cdi_document
from numa_contract.config import Config, ConfigError, parse_config
from numa_contract.records import AllocationRecord, CpuParameters
from numa_node.file_lock import FileLock

from tests.rigs import frontend
from tests.rigs.decisions import decided, refused, view
from tests.rigs.trees import small_machine, write_tree
from tests.strategies.claims import NODE, claim, cpus, opaque, result
from tests.strategies.machines import Core, assemble, even_cores, hybrid, isolating, machine, uneven

NONE: frozenset[int] = frozenset()


def given(found: Machine, free: set[int], count: int, **wish: Any) -> frozenset[int]:
    """Returns what the allocator gives of some free CPUs."""
    return allocate(frozenset(free), NONE, count, Layout.of(found), CpuParameters(**wish))


def offered(found: Machine, **config: Any) -> Inventory:
    """Returns what a machine offers."""
    return build_inventory(found, Config(**config), NODE)


def devices(inventory: Inventory) -> dict[str, CpuDevice]:
    """Returns the CPU devices by name."""
    return {device.name: device for device in inventory.pools[0].devices if isinstance(device, CpuDevice)}


def record(
    inventory: Inventory, *results: dict[str, Any], ledger: Ledger | None = None, **more: Any
) -> AllocationRecord:
    """Returns the record of the claim ``u``."""
    return decided(view("u", *results, **more), inventory, ledger=ledger)


def refusal(inventory: Inventory, *results: dict[str, Any], **more: Any) -> str:
    """Returns why the claim ``u`` is refused."""
    return refused(view("u", *results, **more), inventory)


@pytest.mark.fault("cpu peer 9.1.1")
def test_core_ids_repeat_on_every_socket() -> None:
    """Claims stay on their node, take whole cores, and are not refused while the node has room."""
    inventory = offered(machine(2, 1, 1, 4, 2), reserved_cpus=frozenset({0}))
    node = inventory.machine.numa_nodes[0].cpus
    assert {cpu.core_id for cpu in inventory.machine.cpus.values()} == {0, 1, 2, 3}
    assert record(inventory, cpus(4)).cpus_of() == {1, 9, 2, 10}
    assert record(inventory, cpus(2)).cpus_of() == {1, 9}
    assert record(inventory, cpus(7)).cpus_of() == node - {0}


@pytest.mark.fault("cpu peer 9.1.2")
def test_sizes_are_not_averages() -> None:
    """Uneven sockets are not taken whole by mistake, and P-cores are whole cores on a hybrid part."""
    found = assemble(uneven(8, 2, per_l3=8))
    assert given(found, set(found.online) - {0}, 4) == {8, 9, 18, 19}
    assert given(found, set(found.online) - {0}, 6) == {1, 2, 3, 11, 12, 13}
    mixed = assemble(hybrid(2, 1, 0), adjacent=True)
    assert given(mixed, set(mixed.online), 2) == {0, 1}
    assert given(mixed, set(mixed.online), 4, full_physical_cores=True, core_type="performance") == {0, 1, 2, 3}


@pytest.mark.fault("cpu peer 9.1.3")
def test_fragments_do_not_defeat_l3_alignment() -> None:
    """Where the lowest cores of an L3 are broken, the whole ones behind them are found."""
    found = assemble(even_cores(1, 1, 2, 4, 2))
    free = set(found.online) - {0, 4, 5, 12}
    assert given(found, free, 4, full_physical_cores=True, l3="required") == {6, 14, 7, 15}
    assert given(found, free, 7, l3="required") == {8, 1, 9, 2, 10, 3, 11}


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3", "coretype"])
@pytest.mark.fault("cpu peer 9.1.4")
def test_the_shared_pool_cannot_be_claimed_empty(group_by: str) -> None:
    """Without reserved CPUs one is withheld, so that no empty cpuset is ever wanted."""
    inventory = offered(machine(), group_by=group_by)
    claims = [cpus(len(d.cpus), f"r{i}", name) for i, (name, d) in enumerate(devices(inventory).items())]
    assert inventory.machine.online - record(inventory, *claims).cpus_of() == inventory.withheld_cpus != NONE


@pytest.mark.fault("cpu peer 9.1.5")
def test_cpus_without_cache_or_node_links_are_offered() -> None:
    """No cache directories: one L3-less group; no NUMA directories: one node. No CPU gets lost."""
    cpu, node = "/sys/devices/system/cpu", "/sys/devices/system/node"
    gone = {f"{cpu}/cpu{n}/cache": None for n in range(8)} | {f"{node}/node{n}": None for n in range(2)}
    found = discover(
        small_machine().changed({**gone, f"{node}/online": None, "/proc/meminfo": "MemTotal: 4194304 kB\n"})
    )
    assert {d.cpus for d in devices(offered(found)).values()} == {frozenset(range(1, 8))}
    assert devices(offered(found, group_by="l3")).keys() == {"cpudevnuma000"}


@pytest.mark.fault("cpu peer 9.1.6")
def test_the_socket_of_a_node_is_not_arbitrary() -> None:
    """Where a node spans sockets, each start says the socket of the lowest CPU."""
    found = assemble([Core(package=1), Core(package=0), Core(package=0)])
    shuffled = replace(found, cpus=dict(reversed(found.cpus.items())))
    for listed in (found, shuffled):
        assert devices(offered(listed))["cpudevnuma000"].attributes["dra.cpu/socketID"] == 1


@pytest.mark.fault("cpu peer 9.1.7")
def test_a_container_gets_the_request_it_names() -> None:
    """Each request is a CDI device of its own with its own environment."""
    made = record(offered(machine()), cpus(1, "a"), cpus(2, "b"))
    environment = {device["name"]: device["containerEdits"]["env"] for device in cdi_document(made)["devices"]}
    assert environment == {"claim-u-a": ["DRA_CPUSET_u_a=1"], "claim-u-b": ["DRA_CPUSET_u_b=0,4"]}


class Frontend(frontend.Frontend):
    """A frontend of a node whose CPU 0 is reserved."""

    def __init__(self, path: Path, *documents: dict[str, Any], enforced: bool = True) -> None:
        super().__init__(path, offered(machine(), reserved_cpus=frozenset({0})), *documents, enforced=enforced)


@pytest.mark.fault("cpu peer 9.2.1")
async def test_a_restart_keeps_claims_without_containers(tmp_path: Path) -> None:
    """The files are the memory: what is prepared and not yet running is nobody else's after a restart."""
    one, two = claim("u1", cpus(2)), claim("u2", cpus(2))
    assert isinstance(await Frontend(tmp_path, one).prepare("u1"), Prepared)
    answer = await Frontend(tmp_path, one, two).prepare("u2")
    assert isinstance(answer, Failure)
    assert "1 free" in answer.text


@pytest.mark.fault("cpu peer 9.2.2")
async def test_nothing_is_prepared_before_the_backend_knows_the_containers(tmp_path: Path) -> None:
    """Without a synchronised backend the answer is an error that the kubelet retries."""
    frontend = Frontend(tmp_path, claim("u", cpus(2)), enforced=False)
    answer = await frontend.prepare("u")
    assert isinstance(answer, Failure)
    assert "without enforcement" in answer.text
    assert not frontend.store.ledger.records


@pytest.mark.fault("cpu peer 9.2.3")
async def test_nothing_is_chosen_on_a_state_that_changes_meanwhile(tmp_path: Path) -> None:
    """A choice waits for whoever is changing the claims, and is made on what that one leaves behind."""
    frontend, writer = Frontend(tmp_path, claim("v", cpus(1))), Frontend(tmp_path)
    lock = FileLock(tmp_path / "claims.lock")
    await lock.acquire()
    preparing = asyncio.create_task(frontend.prepare("v"))
    await asyncio.sleep(0.1)
    writer.files.write(record(offered(machine(), reserved_cpus=frozenset({0})), cpus(2)))
    lock.close()
    assert isinstance(await preparing, Prepared)
    assert {uid: file.cpus for (_, uid), file in frontend.store.ledger.files.items()} == {"u": {1, 5}, "v": {4}}


@pytest.mark.fault("cpu peer 9.2.6")
async def test_records_are_read_at_the_start(tmp_path: Path) -> None:
    """A file that nobody remembers is found, with everything that was decided."""
    first = Frontend(tmp_path, claim("u", cpus(2), config=[opaque({"strategy": "spread"})]))
    await first.prepare("u")
    second = Frontend(tmp_path)
    await second.store.transact(lambda transaction: None)
    assert second.store.ledger.records == first.store.ledger.records
    assert second.store.ledger.records[0].parameters_of("cpus").strategy == "spread"


@pytest.mark.fault("cpu peer 9.2.7")
def test_single_cpus_keep_their_names() -> None:
    """The name is the CPU's number, whatever is reserved or offline."""
    one = devices(offered(machine(), cpu_device_mode="individual", reserved_cpus=frozenset({0})))
    other = devices(offered(machine(offline=frozenset({1})), cpu_device_mode="individual"))
    assert all(device.cpus == {int(name.removeprefix("cpudev"))} for name, device in {**one, **other}.items())


@pytest.mark.fault("cpu peer 9.2.8")
def test_a_changed_allocation_is_noticed() -> None:
    """Prepared again with other results, the claim gets what they say."""
    inventory = offered(machine())
    first = record(inventory, cpus(2))
    ledger = Ledger({("dra.cpu", "u"): ClaimFile("dra.cpu", "u", first, first.cpus_of())})
    assert record(inventory, cpus(2), ledger=ledger).cpus == first.cpus
    assert len(record(inventory, cpus(3), ledger=ledger).cpus_of()) == 3


@pytest.mark.fault("cpu peer 9.2.9")
def test_nothing_to_publish_withdraws_what_was_published() -> None:
    """A pool without devices is a slice without devices, not silence."""
    (pool, *_) = offered(machine(), reserved_cpus=frozenset(range(8))).pools
    assert [document["spec"]["devices"] for document in slice_documents(pool, NODE)] == [[]]


def quickest(action: Callable[[], object]) -> float:
    """Returns the seconds of the quickest of some runs: the others were disturbed."""
    times = []
    for _ in range(15):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


@pytest.mark.fault("cpu peer 9.3.3")
def test_the_allocator_is_not_quadratic() -> None:
    """Eight times the CPUs take less than twenty times as long; quadratic would be sixty-four."""

    def half_of(found: Machine) -> Callable[[], object]:
        layout, count = Layout.of(found), len(found.online) // 2 + 1
        return lambda: allocate(found.online, frozenset({0}), count, layout, CpuParameters())

    small, large = (quickest(half_of(assemble(even_cores(2, 2, size, 4, 2)))) for size in (2, 16))
    assert large < 20 * small


@pytest.mark.fault("cpu peer 9.3.4")
def test_devices_are_found_without_a_search() -> None:
    """By an index made once: the list of devices is not looked at again."""
    inventory = offered(machine(2, 4, 4, 8, 2), cpu_device_mode="individual")
    object.__setattr__(inventory, "pools", None)
    found = inventory.device("dra.cpu", NODE, "cpudev500")
    assert isinstance(found, CpuDevice)
    assert inventory.device("dra.cpu", NODE, "cpudev999") is None


@pytest.mark.fault("cpu peer 9.3.5")
def test_health_is_told_not_collected() -> None:
    """Without a change there is no new report, however often somebody would have asked."""
    board = HealthBoard()
    first = board.report()
    board.show(())
    assert board.report() is first


@pytest.mark.fault("cpu peer 9.3.7")
def test_no_library_code_ends_the_process() -> None:
    """Only the program's entry exits; everything else raises or returns."""
    for source in Path(dra_frontend.__file__).parent.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
        exits = {
            f"{f.value.id}.{f.attr}" for f in calls if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)
        }
        exits |= {f.id for f in calls if isinstance(f, ast.Name)}
        forbidden = {"os._exit", "os.abort", "sys.exit", "exit", "quit"}
        assert source.name == "__main__.py" or not exits & forbidden, source.name


@pytest.mark.fault("cpu peer 9.4.1")
def test_reserved_cpus_must_exist() -> None:
    """A reserve of nothing offers nothing, and an unknown group is refused at the start in every mode."""
    inventory = offered(machine(), reserved_cpus=frozenset({0, 8, 9}))
    assert "CPU 8-9 does not exist" in inventory.refused["dra.cpu"]
    assert not inventory.pools[0].devices
    with pytest.raises(ConfigError, match="groupBy"):
        parse_config({"cpuDeviceMode": "individual", "groupBy": "shelf"}, "f")


@pytest.mark.fault("cpu peer 9.4.2")
def test_the_scheduler_settles_fractions_and_missing_amounts() -> None:
    """Every shared device has a policy: one CPU by default and at least, in whole CPUs, up to all."""
    for group_by in ("numanode", "socket", "machine", "l3", "coretype"):
        for document in slice_documents(offered(machine(), group_by=group_by).pools[0], NODE):
            for device in document["spec"]["devices"]:
                capacity = device["capacity"]["dra.cpu/cpu"]
                assert capacity["requestPolicy"] == {
                    "default": "1",
                    "validRange": {"min": "1", "max": capacity["value"], "step": "1"},
                }


@pytest.mark.parametrize("group_by", ["numanode", "socket", "machine", "l3", "coretype"])
@pytest.mark.fault("cpu peer 9.4.3")
def test_parameters_are_read_in_every_mode_and_strictly(group_by: str) -> None:
    """A field that is not known is refused, wherever it is; administrative access takes nothing; share ids are kept."""
    inventory = offered(machine(), group_by=group_by)
    device = next(iter(devices(inventory)))
    assert "unknown field" in refusal(inventory, cpus(1, device=device), config=[opaque({"cpusets": "1"})])
    watching = result("w", "dra.cpu", device, adminAccess=True)
    made = record(inventory, cpus(1, device=device), watching)
    assert [(r.request, r.share_id) for r in made.results] == [("cpus", "share-cpus")]


@pytest.mark.fault("cpu peer 9.4.5")
async def test_prepare_errors_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By claim and reason, also without the kubelet's log."""
    await Frontend(tmp_path, claim("u", cpus(9))).prepare("u")
    (logged,) = [record.__dict__ for record in caplog.records]
    assert (logged["msg"], logged["claim"]) == ("prepare failed", "claim ns/claim-u (u)")
    assert "9 CPUs wanted" in logged["error"]


@pytest.mark.fault("cpu peer 9.4.8")
def test_the_node_name_comes_from_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """The downward API beats the one override for all nodes, and both the host name."""
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    monkeypatch.setenv("NODE_NAME", "Node-7.example")
    assert load_settings(parser.parse_args(["--hostname-override", "other"])).node_name == "node-7.example"
    monkeypatch.delenv("NODE_NAME")
    assert load_settings(parser.parse_args(["--hostname-override", "other"])).node_name == "other"


@pytest.mark.fault("cpu peer 9.4.9")
def test_the_lowest_cdi_version_that_suffices() -> None:
    """Annotations need 0.6.0, nothing needs more; older libraries refuse a file of a newer version."""
    assert CDI_VERSION == "0.6.0"
    assert set(json.loads(json.dumps(cdi_document(record(offered(machine()), cpus(1)))))) == {
        "cdiVersion",
        "kind",
        "annotations",
        "devices",
    }


@pytest.mark.fault("cpu peer 9.4.10")
def test_tools_show_what_they_are_told_to_look_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No process is searched for, and a configuration that cannot be read is an error, not the defaults."""
    root = write_tree(small_machine().changed({"/proc/7/comm": "dra-frontend\n"}), tmp_path / "host")
    command = ["--node", NODE, "slices", "--host-root", str(root), "-o", "json", "--config"]
    (tmp_path / "config.yaml").write_text("cpuDeviceMode: individual\n")
    assert cli.main([*command, str(tmp_path / "config.yaml")]) == 0
    assert '"cpudev001"' in capsys.readouterr().out
    assert cli.main([*command, str(tmp_path / "other.yaml")]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "other.yaml" in shown.err


@pytest.mark.fault("cpu peer 9.4.11")
def test_more_than_two_threads_per_core() -> None:
    """SMT 4 and 8: whole cores are all threads, spreading takes one of each."""
    for threads in (4, 8):
        found = assemble(even_cores(1, 1, 1, 4, threads), adjacent=True)
        assert given(found, set(found.online), threads, full_physical_cores=True) == set(range(threads))
        assert given(found, set(found.online), 4, strategy="spread") == {n * threads for n in range(4)}


@pytest.mark.parametrize("name", ["0000:00", "10000:e0", "7fffffff:00"])
@pytest.mark.fault("cpu peer 9.4.11")
def test_pcie_roots_of_every_machine_and_domain(name: str) -> None:
    """Not only amd64, and domains of more than four digits (Intel VMD): no architecture is asked for."""
    files = {f"/sys/devices/pci{name}/pci_bus/{name}/cpulistaffinity": "0-3\n"}
    found = discover(small_machine().changed({**files, "/proc/cpuinfo": "CPU implementer\t: 0x41\n"}))
    listed = {n: d.attributes.get(PCIE_ROOT) for n, d in devices(offered(found, expose_pcie_roots=True)).items()}
    assert listed == {"cpudevnuma000": (f"pci{name}",), "cpudevnuma001": None}


@pytest.mark.fault("cpu peer 9.4.11")
def test_a_pcie_root_leads_to_cpus_near_it() -> None:
    """Groups are no larger than what the root is near to, and a claim's CPUs are of its device: none is elsewhere."""
    files = {f"/sys/devices/pci0000:{n}/pci_bus/0000:{n}/cpulistaffinity": c for n, c in (("00", "0-3"), ("80", "4-7"))}
    found = discover(small_machine().changed(files))
    inventory = offered(found, expose_pcie_roots=True, reserved_cpus=frozenset({0}))
    for device in devices(inventory).values():
        roots = device.attributes[PCIE_ROOT]
        assert isinstance(roots, tuple)
        assert record(inventory, cpus(2, device=device.name)).cpus_of() <= found.pcie_roots[roots[0]]


@pytest.mark.fault("cpu peer 9.4.12")
def test_strategies_that_it_lacks() -> None:
    """Whole cores, distribution over NUMA nodes, spreading, isolated CPUs, and L3 and core-type devices are there."""
    found = isolating(machine(1, 2, 1, 4, 2), {6, 7, 14, 15})
    with pytest.raises(NoCpusError, match="the next amount that is one: 4"):
        given(found, set(found.online), 3, full_physical_cores=True)
    assert given(found, set(found.online), 4, numa="distribute") == {0, 8, 4, 12}
    assert given(found, set(found.online), 4, strategy="spread") == {0, 1, 2, 3}
    assert given(found, set(found.online), 4, isolated="only") == {6, 7, 14, 15}
    assert devices(offered(found, group_by="l3")).keys() == {"cpudevl3000", "cpudevl3004"}
    mixed = assemble(hybrid(2, 1, 0))
    assert devices(offered(mixed, group_by="coretype")).keys() == {"cpudevpcore", "cpudevecore"}


@pytest.mark.fault("cpu peer 9.4.13")
async def test_an_upgrade_finds_what_the_old_release_decided(tmp_path: Path) -> None:
    """Two instances over one directory: the second answers for the first one's claim as the first did."""
    document = claim("u", cpus(2))
    old, new = Frontend(tmp_path, document), Frontend(tmp_path, document)
    assert await old.prepare("u") == await new.prepare("u")
    assert new.store.ledger.records == old.store.ledger.records
