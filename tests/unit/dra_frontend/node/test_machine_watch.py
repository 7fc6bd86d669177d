# SPDX-License-Identifier: Apache-2.0
"""Periodic reading of the machine: which files are read, which parts of the result are replaced, and how errors are
handled.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.model import MemoryDevice
from dra_frontend.machine.discovery import discover
from dra_frontend.machine.file_tree import HostTreeError
from dra_frontend.machine.model import DoubtTopic
from dra_frontend.node.error_watch import ErrorWatch
from dra_frontend.node.host_tree import HostTree
from dra_frontend.node.machine_watch import DOUBT_SECONDS, MachineWatch
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, HardwareErrors, parse_config

from tests.fakes.waiting import patience
from tests.rigs.trees import MemoryTree, edac, small_machine, write_tree

PAGE = 2 << 20
PAGES = "node/node0/hugepages/hugepages-2048kB"


class Host:
    """A fake host tree that counts the reads and whose content can be replaced."""

    def __init__(self, tree: MemoryTree) -> None:
        self.tree = tree
        self.reads = 0
        self.unlisted = ""
        """A directory that cannot be listed."""

    def change(self, files: Mapping[str, str | None]) -> None:
        """Writes or removes files under /sys/devices/system."""
        self.tree = self.tree.changed({f"/sys/devices/system/{path}": text for path, text in files.items()})

    def read(self, path: str) -> str | None:
        """Counts the read and returns the file's content."""
        self.reads += 1
        return self.tree.read(path)

    def names(self, path: str) -> list[str] | None:
        """Returns the directory's entries."""
        if path == self.unlisted:
            raise HostTreeError(path, "cannot be listed: Too many open files")
        return self.tree.names(path)

    def live_page_bytes(self) -> int | None:
        """Returns None, because this is not the running machine."""
        return None


class Rig:
    """A watch on a small machine."""

    def __init__(self, config: Config | None = None, ledger: Ledger | None = None, pods: str = "total=0") -> None:
        self.host = Host(small_machine())
        files = {f"/kubepods/hugetlb.{size}.numa_stat": pods.encode() for size in ("2MB", "1GB")}
        self.config = config or Config()
        trees = self.host, MemoryTree(files)
        self.reserve: int | None = None
        self.watch = MachineWatch(*trees, self.config, "n", lambda: ledger or Ledger({}), reserve=lambda: self.reserve)

    async def after(self, files: Mapping[str, str | None]) -> None:
        """Changes files under /sys/devices/system and then reads the machine once more."""
        self.host.change(files)
        await self.watch.read()

    def capacity(self, device: str) -> int:
        """Returns a memory device's capacity in bytes, or 0 if the device does not exist."""
        found = [one for pool in self.watch.inventory.pools for one in pool.devices if one.name == device]
        return sum(one.amount for one in found if isinstance(one, MemoryDevice))


# Two CPU lists, and for each of the two nodes: meminfo, three files for one page size, and only the total for an empty
# pool.
ONE_READ = 2 + 2 * (1 + 2 * 3) - 2


async def test_an_unchanged_machine_costs_one_fingerprint_per_read() -> None:
    """After startup, the machine is not discovered again: reading a few dozen files is enough to confirm
    the inventory.
    """
    rig = Rig()
    for _ in range(2):
        inventory, rig.host.reads = rig.watch.inventory, 0
        await rig.watch.read()
        assert rig.host.reads == ONE_READ
    assert rig.watch.inventory is inventory


async def test_pods_are_read_again_only_while_pages_are_in_use() -> None:
    """The pods' page counts are read a second time to find the pages that a pod has freed since the first time. This is
    not needed if all pages are free.
    """
    host = Host(small_machine())
    pods = Host(MemoryTree({f"/kubepods/hugetlb.{size}.numa_stat": b"total=0" for size in ("2MB", "1GB")}))
    watch = MachineWatch(host, pods, Config(), "n", lambda: Ledger({}))
    for free, reads in (("200", 4), ("256", 2), ("255", 4)):
        host.change({f"node/node{node}/hugepages/hugepages-2048kB/free_hugepages": free for node in (0, 1)})
        pods.reads = 0
        await watch.read()
        assert pods.reads == reads
    assert not watch.notices


async def test_a_change_is_detected_by_the_next_read() -> None:
    """Added pages are offered and subtracted from plain memory. A change in the number of free pages does not require
    rediscovery.
    """
    rig = Rig(pods="")
    await rig.watch.read()
    plain, inventory = rig.capacity("memory-numa000"), rig.watch.inventory
    await rig.after({f"{PAGES}/free_hugepages": "199"})
    assert rig.watch.inventory is inventory
    assert [pool.free for pool in rig.watch.machine.numa_nodes[0].hugepages] == [199, 0]
    await rig.after({f"{PAGES}/nr_hugepages": "512", f"{PAGES}/free_hugepages": "455"})
    assert rig.capacity("hugepages-2m-numa000") == 512 * PAGE
    assert rig.capacity("memory-numa000") == plain - 256 * PAGE


async def test_the_kubelets_reserve_changes_the_capacity_once() -> None:
    """The capacity changes when the reserve becomes known and again when the reserve changes. Neither requires
    rediscovery of the machine.
    """
    rig = Rig()
    await rig.watch.read()
    assert rig.watch.inventory.reserve.source == "default"
    free = rig.capacity("memory-numa000") + rig.watch.inventory.reserve.by_node[0]
    for reserve in (1 << 30, 2 << 30):
        rig.reserve = reserve
        await rig.watch.read()
        assert (rig.watch.inventory.reserve.source, rig.capacity("memory-numa000")) == ("kubelet", free - reserve // 2)
        inventory, rig.host.reads = rig.watch.inventory, 0
        await rig.watch.read()
        assert (rig.watch.inventory is inventory, rig.host.reads) == (True, ONE_READ)


async def test_error_counters_are_read_every_ten_seconds() -> None:
    """The counters are also read before the first offer. Until the faults change, the collection of faults remains the
    same object, because the offer compares it by identity.
    """
    now = [0.0]
    host = Host(small_machine().changed(edac(0, "F19h", ue=1)))
    errors = ErrorWatch(host, HardwareErrors(), lambda: now[0])
    machine = discover(host)
    errors.read(machine)
    (fault,) = faults = errors.faults
    assert (fault.source, fault.kind, fault.numa_nodes) == ("mc0", "uncorrected", {0})
    assert not errors.is_due
    now[0] = 10.0
    assert errors.is_due
    errors.read(machine)
    assert errors.faults is faults
    watch = MachineWatch(host, MemoryTree({}), Config(), "n", lambda: Ledger({}))
    assert [one.kind for one in watch.errors.faults] == ["uncorrected"]


async def test_a_counter_that_cannot_be_read_keeps_its_fault() -> None:
    """The counter's last value is used, and a warning names the file."""
    rig = Rig()
    rig.host.tree = rig.host.tree.changed(edac(0, "F19h", ue=1))
    errors = rig.watch.errors = ErrorWatch(rig.host, HardwareErrors(), lambda: 0.0)
    errors.read(rig.watch.machine)
    rig.host.change({"edac/mc/mc0/ue_count": "?"})
    errors.read(rig.watch.machine)
    assert [one.kind for one in errors.faults] == ["uncorrected"]
    await rig.watch.read()
    assert any(warning.startswith("/sys/devices/system/edac/mc/mc0/ue_count: ") for warning in rig.watch.warnings)


def test_a_counter_directory_that_cannot_be_listed_keeps_its_faults() -> None:
    """Otherwise the taint would disappear and come back. Counters of other kinds are still read."""
    host = Host(small_machine().changed(edac(0, "F19h", ue=1)))
    errors = ErrorWatch(host, HardwareErrors(), lambda: 0.0)
    errors.read(discover(host))
    faults, host.unlisted = errors.faults, "/sys/devices/system/edac/mc"
    errors.read(discover(host))
    assert errors.faults is faults
    assert len(errors.faults) == len(errors.problems) == 1
    host.unlisted = "/sys/devices/system/edac/cpu"
    host.change({"edac/mc/mc0/ue_count": "0"})
    errors.read(discover(host))
    assert errors.faults == ()


async def test_the_last_inventory_is_kept_after_an_error() -> None:
    """The error is reported and counted until the next successful read."""
    rig = Rig()
    await rig.watch.read()
    inventory = rig.watch.inventory
    await rig.after({"cpu/online": "what?"})
    assert rig.watch.inventory is inventory
    assert rig.watch.problem.startswith("/sys/devices/system/cpu/online: ")
    assert rig.watch.failures == 1
    await rig.after({"cpu/online": "0-7"})
    assert (rig.watch.problem, rig.watch.failures) == ("", 1)


async def test_a_failed_discovery_is_retried() -> None:
    """The fingerprint can be read, but discovery fails. The change is still processed later."""
    rig = Rig()
    await rig.watch.read()
    siblings = "cpu/cpu0/topology/core_cpus"
    await rig.after({"cpu/online": "0-5", "cpu/cpu6/topology": None, "cpu/cpu7/topology": None, siblings: "damage"})
    assert "core_cpus" in rig.watch.problem
    await rig.after({siblings: "03"})
    assert rig.watch.inventory.machine.online == set(range(6))


async def test_reserves_that_no_longer_fit_are_warnings() -> None:
    """Reserved CPUs that went offline and a node that was removed are reported, and everything else keeps working."""
    reserved = [{"numaNode": 1, "limits": {"memory": "1Gi"}}]
    rig = Rig(parse_config({"reservedCPUs": "0,7", "reservedMemory": reserved}, "test"))
    rig.host.change({"cpu/online": "0-3", "node/node1": None, "node/online": "0"})
    await rig.after({f"cpu/cpu{cpu}/topology": None for cpu in range(4, 8)})
    assert rig.watch.problem == ""
    assert rig.watch.warnings == (
        "reservedCPUs: CPU 7 is offline; online CPUs: 0-3",
        "reservedMemory: NUMA node 1 does not exist; existing NUMA nodes: 0",
    )


async def test_there_is_no_inventory_until_the_machine_can_be_read() -> None:
    """Having no inventory is not the same as having an empty one. Every change after startup is noticed."""
    rig = Rig()
    rig.host.change({"cpu/online": "?"})
    watch = MachineWatch(rig.host, MemoryTree({}), Config(), "n", lambda: Ledger({}))
    await watch.read()
    assert (watch.inventory.pools, watch.failures) == ((), 2)
    assert watch.problem.startswith("/sys/devices/system/cpu/online: ")
    rig.host.change({"cpu/online": "0-3,5-7", "cpu/cpu4/topology": None})
    for one in (watch, rig.watch):
        await one.read()
        assert (one.problem, one.inventory.machine.offline) == ("", {4})
        assert one.inventory.pools


@pytest.mark.parametrize("when", ["at the start", "later"])
async def test_an_unexpected_exception_while_reading_is_reported(caplog: pytest.LogCaptureFixture, when: str) -> None:
    """It must be possible to release claims whatever the machine's state, so the exception does not end the process.
    Its traceback is logged once.
    """

    class OddTree(MemoryTree):
        """A tree that raises an unexpected exception."""

        broken = when == "at the start"

        def read(self, path: str) -> str | None:
            """Raises the exception until the tree is repaired."""
            if self.broken:
                raise KeyError("odd")
            return super().read(path)

    host = OddTree(small_machine().files)
    watch = MachineWatch(host, MemoryTree({}), Config(), "n", lambda: Ledger({}))
    host.broken = True
    for _ in range(3):
        await watch.read()
    assert watch.problem == "internal error (KeyError('odd')); see the log of dra-frontend"
    assert bool(watch.inventory.pools) == (when == "later")
    assert len([record for record in caplog.records if record.exc_info]) == 1
    host.broken = False
    await watch.read()
    assert (watch.problem, bool(watch.inventory.pools)) == ("", True)


async def test_the_watch_survives_an_unknown_exception(caplog: pytest.LogCaptureFixture) -> None:
    """An internal error, or an unexpected one from a dependency, is logged and reported, and the watch tries to read
    the machine again.
    """
    rig, seen = Rig(), asyncio.Event()

    def changed() -> None:
        if not rig.watch.failures:
            raise KeyError("fault")
        seen.set()

    async with asyncio.timeout(5 * patience()), asyncio.TaskGroup() as tasks:
        run = tasks.create_task(rig.watch.run(changed, partial(asyncio.sleep, 0)))
        await seen.wait()
        run.cancel()
    assert any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("group_by", ["l3", "numanode"])
async def test_an_inconsistent_reading_withdraws_no_device(group_by: Literal["l3", "numanode"]) -> None:
    """A mask that is read during a CPU hotplug may be inconsistent. Devices that depend on the mask stay as they are
    until it is consistent again, and the other devices are updated as usual. An inconsistency that persists causes only
    one more discovery, not one per second.
    """
    rig = Rig(Config(group_by=group_by))
    await rig.watch.read()
    inventory = rig.watch.inventory
    rig.host.change({"cpu/online": "0-6", "cpu/cpu7/topology": None, "cpu/cpu0/cache/index3/shared_cpu_map": "0e"})
    for _ in range(2):
        await rig.watch.read()
    if group_by == "l3":
        assert rig.watch.inventory is inventory
        assert "shared_cpu_map" in rig.watch.problem
        rig.host.change({"cpu/cpu0/cache/index3/shared_cpu_map": "0f"})
    else:
        assert rig.watch.inventory.machine.doubts.keys() == {DoubtTopic.L3}
        assert any("having no L3 cache" in warning for warning in rig.watch.warnings)
        rig.host.reads = 0
    await rig.watch.read()
    assert (rig.watch.problem, 7 in rig.watch.inventory.machine.online) == ("", False)
    assert group_by == "l3" or rig.host.reads == ONE_READ


async def test_a_file_that_could_not_be_read_for_a_while_is_read_again(tmp_path: Path) -> None:
    """The fingerprint does not change when the file becomes readable again. Therefore, as long as there is a doubt
    about the machine, it is discovered again every few minutes, but not on each read.
    """
    file = write_tree(small_machine(), tmp_path / "host") / "sys/devices/system/cpu/cpu0/cache/index3/level"
    file.rename(file.with_name("kept"))
    file.mkdir()
    now = [0.0]
    trees = HostTree(tmp_path / "host"), MemoryTree({})
    watch = MachineWatch(*trees, Config(), "n", lambda: Ledger({}), clock=lambda: now[0])
    await watch.read()
    assert watch.inventory.machine.doubts.keys() == {DoubtTopic.L3}
    for _ in range(2):
        inventory = watch.inventory
        now[0] += DOUBT_SECONDS - 1
        await watch.read()
        assert watch.inventory is inventory
        now[0] += 1
        await watch.read()
        assert watch.inventory.machine.doubts.keys() == {DoubtTopic.L3}
    file.rmdir()
    file.with_name("kept").rename(file)
    now[0] += DOUBT_SECONDS
    await watch.read()
    assert not watch.inventory.machine.doubts


async def test_the_withheld_cpu_is_never_a_claimed_one() -> None:
    """If the CPU that is withheld from claims goes offline, an unclaimed CPU takes its place."""
    held = Ledger({("dra.cpu", "u"): ClaimFile("dra.cpu", "u", None, frozenset({5, 6}))})
    rig = Rig(ledger=held)
    assert rig.watch.inventory.withheld_cpus == {4}
    await rig.after({"cpu/online": "0-3,5-7", "cpu/cpu4/topology": None})
    assert rig.watch.inventory.withheld_cpus == {7}


async def test_the_hosts_pages_are_not_part_of_the_capacity() -> None:
    """56 of the 256 pages are in use, but not by a pod. If a reserve is configured, it covers these pages, so they are
    not subtracted twice.
    """
    rig = Rig()
    await rig.watch.read()
    assert rig.capacity("hugepages-2m-numa000") == 200 * PAGE
    assert rig.watch.host_pages[0, PAGE] == 56
    for reserve, left in (("64Mi", 200), ("128Mi", 192)):
        keys = {"reservedMemory": [{"numaNode": 0, "limits": {"hugepages-2Mi": reserve}}]}
        rig = Rig(parse_config(keys, "test"))
        await rig.watch.read()
        assert rig.capacity("hugepages-2m-numa000") == left * PAGE


@pytest.mark.parametrize(
    ("pods", "pages", "warning"),
    [
        (f"total={112 * PAGE} N0={56 * PAGE} N1={56 * PAGE}", 256, ""),
        # Without the cgroup tree nothing is subtracted, and a warning says so.
        ("", 256, "/sys/fs/cgroup has no kubepods cgroup"),
    ],
)
async def test_pages_that_pods_use_are_part_of_the_capacity(pods: str, pages: int, warning: str) -> None:
    """The pages that pods use are the ones that were allocated to claims."""
    rig = Rig(pods=pods)
    await rig.watch.read()
    assert rig.capacity("hugepages-2m-numa000") == pages * PAGE
    assert bool(rig.watch.warnings) == bool(warning)
    assert warning in "".join(rig.watch.warnings)


class Restless(MemoryTree):
    """A cgroup tree in which a pod allocates or frees all pages between two reads."""

    def __init__(self, pages: list[int]) -> None:
        super().__init__({"/kubepods/cgroup.procs": b""})
        self._pages = pages

    def read(self, path: str) -> str | None:
        """Returns a cgroup file's content. The file for 2 MiB pages contains the pod's next page count on each read."""
        return f"total={(held := self._pages.pop(0) * PAGE)} N0={held}" if "2MB" in path else "total=0"


@pytest.mark.parametrize("pages", [[0, 56], [56, 0]])
async def test_pages_that_a_pod_allocates_between_two_reads_are_not_the_hosts(pages: list[int]) -> None:
    """The pods' page counts are read both before and after the machine. Pages that pods hold at either time do not
    count as the host's.
    """
    rig = Rig()
    watch = MachineWatch(rig.host, Restless([*pages]), Config(), "n", lambda: Ledger({}))
    await watch.read()
    assert watch.host_pages[0, PAGE] == 0


async def test_a_reserve_takes_effect_once_pages_of_its_size_exist() -> None:
    """A reservedMemory entry for such a page size is valid, and takes effect as soon as a page exists."""
    keys = {"reservedMemory": [{"numaNode": 0, "limits": {"hugepages-1Gi": "1Gi"}}]}
    rig = Rig(parse_config(keys, "test"))
    assert rig.capacity("hugepages-1g-numa000") == 0
    large = PAGES.replace("2048", "1048576")
    rig.host.change({f"{large}/nr_hugepages": "3", f"{large}/free_hugepages": "3"})
    await rig.after({"node/node0/meminfo": "Node 0 MemTotal: 8388608 kB\n"})
    assert rig.capacity("hugepages-1g-numa000") == 2 << 30
