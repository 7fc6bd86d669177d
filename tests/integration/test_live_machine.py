# SPDX-License-Identifier: Apache-2.0
"""The machine changes while the services are running: slices, health and the state endpoint are updated within 5 s."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from numa_contract.cpuset import format_cpu_list

from tests.fakes.scheduler import UnschedulableError
from tests.rigs.trees import captured, write_tree
from tests.stage.machine import HostDirectory
from tests.stage.pods import claim_pod, cpus, hugepages
from tests.stage.process import wait_for
from tests.stage.settings import StageSettings
from tests.stage.stage import Stage
from tests.stage.wires import ask_unix

T = TypeVar("T")
SECONDS = 5.0
"""Time within which a change must be visible."""
ERRORS_SECONDS = 15.0
"""Time within which a change in an error counter must be visible. The counters are read every ten seconds."""
PAGE = 2 << 20
NODE_1 = {*range(8, 16), *range(24, 32)}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> HostDirectory:
    """Creates a machine with two NUMA nodes, each with 16 CPUs in 8 cores and 2048 hugepages of 2 MiB."""
    host = HostDirectory(write_tree(captured("32intel64-2p8co2t+8ve"), tmp_path_factory.mktemp("live")))
    for node in (0, 1):
        host.set_pages(node, 2048, 2048)
    return host


@pytest.fixture(scope="module")
def shared(machine: HostDirectory) -> Iterator[Stage]:
    with Stage(StageSettings(host_root=machine.root, reserved_cpus="0,16")) as stage:
        stage.add_ready_instance()
        yield stage


def soon(what: str, condition: Callable[[], T]) -> T:
    """Waits until the condition is true; fails after the time within which a change must be visible."""
    return wait_for(what, condition, SECONDS)


def published(stage: Stage) -> dict[str, Any]:
    """Returns the devices in all slices by name."""
    return {device["name"]: device for one in stage.slices() for device in one["spec"].get("devices") or []}


def amount(stage: Stage, device: str) -> str:
    """Returns the published capacity of a device, or an empty value if the device does not exist."""
    found = published(stage).get(device)
    return next(iter(found["capacity"].values()))["value"] if found else ""


def taints(stage: Stage, device: str) -> list[tuple[str, str, str]]:
    """Returns the taints on a published device."""
    return [(t["key"], t["value"], t["effect"]) for t in published(stage)[device].get("taints", [])]


def health(stage: Stage, device: str) -> tuple[str, str]:
    """Returns the health last sent to the kubelet for a device: status and message."""
    return next((one["health"], one["message"]) for one in stage.kubelet("health") if one["device"] == device)


def test_a_claimed_cpu_that_goes_offline_stays_claimed(stage: Stage, machine: HostDirectory) -> None:
    """The claim keeps its CPUs in the ledger, its device is unhealthy, and the other thread of the core is not
    allocated to another claim.
    """
    with claim_pod(stage, "db", cpus(4, numa_node=1)) as pod:
        pod.prepare()
        held = stage.held(pod.claim_uid)
        assert held < NODE_1
        lost = max(held)
        machine.take_offline({lost})
        soon("an unhealthy device", lambda: health(stage, "cpudevnuma001")[0] == "UNHEALTHY")
        assert f"CPU {lost} is offline" in health(stage, "cpudevnuma001")[1]
        assert health(stage, "cpudevnuma000") == ("HEALTHY", "online")
        soon("a smaller capacity", lambda: amount(stage, "cpudevnuma001") == "15")
        (record,) = stage.state(f"/v1/claims/{pod.claim_uid}")
        assert record["cpus"][0]["cpus"] == format_cpu_list(held)
        assert {"cpu": lost, "use": "offline", "claimUid": pod.claim_uid, "claim": "default/db-claim"} in stage.state(
            "/v1/cpus"
        )
        pod.prepare()
        assert [one["cpus"] for one in stage.state(f"/v1/claims/{pod.claim_uid}")[0]["cpus"]] == [format_cpu_list(held)]
        machine.take_online({lost})
        soon("the device to become healthy again", lambda: health(stage, "cpudevnuma001") == ("HEALTHY", "online"))


def test_a_reserved_cpu_that_is_offline_at_startup_causes_a_warning(stage: Stage, machine: HostDirectory) -> None:
    """SMT is off, or a core has failed: the frontend starts with a warning and can still unprepare claims."""
    instance = stage.instances[0]
    with claim_pod(stage, "kept", cpus(2)) as pod:
        pod.prepare()
        machine.take_offline({16})
        instance.frontend.kill()
        instance.frontend.start()
        wait_for("the pod to become ready", lambda: not stage.unready(instance), 20.0)
        assert "warning: reservedCPUs: CPU 16 is offline" in ask_unix(instance.state_socket, "/readyz")
        pod.unprepare()
        machine.take_online({16})


def test_published_devices_are_kept_if_discovery_fails(stage: Stage, machine: HostDirectory) -> None:
    """The error is reported, and the last known devices stay published."""
    online = machine.root / "sys/devices/system/cpu/online"
    before, text = published(stage), online.read_text()
    machine.write(online, "nonsense")
    problem = soon("a problem", lambda: stage.state("/v1/machine")["problem"])
    assert "/sys/devices/system/cpu/online" in problem
    metrics = ask_unix(stage.instances[0].state_socket, "/metrics")
    assert "dra_numa_machine_readable 0.0" in metrics
    for driver in ("dra.cpu", "dra.memory"):
        assert f'dra_numa_slices_in_sync{{driver="{driver}"}} 1.0' in metrics
    assert published(stage) == before
    assert not stage.unready(stage.instances[0])
    machine.write(online, text.strip())
    soon("no problem", lambda: not stage.state("/v1/machine")["problem"])


def test_a_pool_that_shrinks_below_its_claims_is_tainted(stage: Stage, machine: HostDirectory) -> None:
    """A device with fewer pages than claims hold is tainted and unhealthy until the claims fit again. It stays
    published even if it has no pages left.
    """
    with claim_pod(stage, "db", hugepages(200 * PAGE, numa_node=1)) as pod:
        pod.prepare()
        machine.set_pages(1, 100, 100)
        taint = ("dra.memory/overclaimed", "true", "NoSchedule")
        soon("a taint", lambda: taints(stage, "hugepages-2m-numa001") == [taint])
        assert amount(stage, "hugepages-2m-numa001") == "200Mi"
        soon("the device to become unhealthy", lambda: health(stage, "hugepages-2m-numa001")[0] == "UNHEALTHY")
        assert "default/db-claim" in health(stage, "hugepages-2m-numa001")[1]
        machine.set_pages(1, 0, 0)
        soon("one page for show", lambda: amount(stage, "hugepages-2m-numa001") == "2Mi")
        assert taints(stage, "hugepages-2m-numa001") == [taint]
        gone = next(one for one in stage.state("/v1/memory") if one["device"] == "hugepages-2m-numa001")
        assert (gone["capacityBytes"], gone["claimedBytes"], gone["freeBytes"]) == (0, 200 * PAGE, 0)
        machine.set_pages(1, 2048, 2048)
        soon("no taint", lambda: taints(stage, "hugepages-2m-numa001") == [])
        assert amount(stage, "hugepages-2m-numa001") == "4Gi"


def test_memory_errors_keep_new_claims_away(stage: Stage, machine: HostDirectory) -> None:
    """An uncorrected error taints the memory of the controller's socket, with the reason, and new claims do not get
    that memory.
    """
    label = "CPU_SrcID#1_MC#0_Chan#0_DIMM#0"
    with claim_pod(stage, "before", hugepages(4 * PAGE, numa_node=1)) as pod:
        pod.prepare()
        machine.set_errors(1, "Skylake Socket#1 IMC#0", label, ue=1)
        taint = ("dra.memory/hardware-errors", "uncorrected", "NoSchedule")
        wait_for("a taint", lambda: taints(stage, "hugepages-2m-numa001") == [taint], ERRORS_SECONDS)
        assert (taints(stage, "memory-numa001"), taints(stage, "memory-numa000")) == ([taint], [])
        soon("the device to become unhealthy", lambda: health(stage, "memory-numa001")[0] == "UNHEALTHY")
        _, reason = health(stage, "memory-numa001")
        assert (label in reason, "1 uncorrected errors" in reason) == (True, True)
        shown = {one["name"]: one for one in stage.state("/v1/devices")}
        assert shown["memory-numa001"]["message"] == reason
        assert shown["memory-numa001"]["taints"] == ["dra.memory/hardware-errors"]
        (counter,) = stage.state("/v1/machine")["errors"]
        assert (counter["source"], counter["uncorrected"], counter["numaNodes"]) == ("mc1", 1, [1])
        with pytest.raises(UnschedulableError), claim_pod(stage, "after", hugepages(PAGE, numa_node=1)):
            pass
        pod.prepare()
        stage.instances[0].frontend.kill()
        stage.instances[0].frontend.start()
        wait_for("the pod to become ready", lambda: not stage.unready(stage.instances[0]), 20.0)
        assert taints(stage, "memory-numa001") == [taint]
        machine.set_errors(1, "Skylake Socket#1 IMC#0", label)
        wait_for("no taint", lambda: taints(stage, "memory-numa001") == [], ERRORS_SECONDS)


def test_pages_of_host_processes_are_not_part_of_the_capacity(stage: Stage, machine: HostDirectory) -> None:
    """Pages in use are attributed to host processes unless they belong to pods; the pods' pages stay in the
    capacity.
    """
    pods = stage.paths.cgroup_root / "kubepods.slice"
    machine.write(pods / "hugetlb.2MB.numa_stat", f"total={300 * PAGE} N0=0 N1={300 * PAGE}")
    machine.write(pods / "hugetlb.1GB.numa_stat", "total=0 N0=0 N1=0")
    machine.set_pages(1, 2048, 2048 - 300)
    soon("knowledge", lambda: not stage.state("/v1/machine")["warnings"])
    machine.set_pages(1, 2048, 2048 - 364)
    # Two samples, two seconds apart, must agree.
    wait_for(
        "the capacity to shrink by 64 pages",
        lambda: amount(stage, "hugepages-2m-numa001") == f"{(2048 - 64) * 2}Mi",
        10.0,
    )
    node = stage.state("/v1/machine")["numaNodes"][1]
    assert {"pageSize": "2Mi", "total": 2048, "free": 1684, "heldByHost": 64} in node["hugepages"]
    machine.set_pages(1, 2048, 2048 - 300)
    wait_for("all pages", lambda: amount(stage, "hugepages-2m-numa001") == "4Gi", 15.0)
