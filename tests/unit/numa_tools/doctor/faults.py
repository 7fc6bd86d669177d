# SPDX-License-Identifier: Apache-2.0
"""Changes to a healthy node that make each check fail. Each key is the check's ID, optionally followed by a slash and
the fault.
"""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from numa_contract.cpuset import parse_cpu_list
from numa_contract.names import CPU_DRIVER, cdi_file_name
from numa_contract.records import AllocationRecord, CpuAllocation
from numa_tools.doctor.facts import Space
from numa_tools.doctor.model import facts_or_none

from tests.fakes.apiserver_store import CLAIMS, CLASSES, NODES
from tests.rigs.builders import MI, memory_record, report
from tests.rigs.faulty_node import FaultyNode
from tests.rigs.trees import offline, small_machine, write_tree

_CONTAINERD_1_7: Final = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
_CPU: Final = "/sys/devices/system/cpu"


def _set(name: str, **fields: Any) -> Callable[[FaultyNode], None]:
    """Changes keys in one of the node's documents."""
    return lambda node: getattr(node, name).update(fields)


def _host(path: str, text: str) -> Callable[[FaultyNode], None]:
    return lambda node: node.host(path, text)


def _cgroup(path: str, text: str) -> Callable[[FaultyNode], None]:
    return lambda node: node.cgroup(path, text)


def _without(path: str) -> Callable[[FaultyNode], None]:
    return lambda node: (node.base / path).unlink()


def _container(**fields: Any) -> Callable[[FaultyNode], None]:
    """Changes the container that uses the claim."""
    return lambda node: node.containers[0].update(fields)


def _forbidden(*rights: tuple[str, str]) -> Callable[[FaultyNode], None]:
    return lambda node: node.server.options.forbidden.update(rights)


def _gate_off(*names: str) -> Callable[[FaultyNode], None]:
    return lambda node: node.server.options.gates.update(dict.fromkeys(names, False))


def _node_info(**fields: Any) -> Callable[[FaultyNode], None]:
    return lambda node: node.node["nodeInfo"].update(fields)


def _read(source: Any) -> Any:
    """Returns the content that a source has on a healthy node."""
    assert facts_or_none(source) is not None
    return source


def _facts(**fields: Any) -> Callable[[FaultyNode], None]:
    """Changes facts that a test cannot change in any other way: the process's limits, its disk and its clock."""

    def change(node: FaultyNode) -> None:
        node.edit = lambda facts: replace(facts, **{name: make(facts) for name, make in fields.items()})

    return change


def _full(name: str) -> Callable[[FaultyNode], None]:
    return _facts(**{name: lambda facts: replace(_read(getattr(facts, name)), space=Space("/run", 4096, 7))})


def _all(*changes: Callable[[FaultyNode], object]) -> Callable[[FaultyNode], None]:
    def change(node: FaultyNode) -> None:
        for one in changes:
            one(node)

    return change


def _hand_over_cut(node: FaultyNode) -> None:
    (node.run / "state.sock").unlink()
    (node.run / "state.sock").symlink_to("gone/state.sock")


def _left_behind(node: FaultyNode) -> None:
    node.listen(node.run / "former/state.sock")
    node.sockets.pop().close()


def _dead_registration(node: FaultyNode) -> None:
    node.sockets.pop().close()


def _another(cpus: str) -> Callable[[FaultyNode], None]:
    """Adds a claim with the given CPUs."""
    return lambda node: node.records.append(node.claimed("other", cpus))


def _moved(cpus: str) -> Callable[[FaultyNode], None]:
    """Gives the claim and its container other CPUs."""

    def change(node: FaultyNode) -> None:
        allocation = CpuAllocation(request="r", device="d", cpus=parse_cpu_list(cpus))
        node.records[0] = node.records[0].model_copy(update={"cpus": (allocation,)})
        node.containers[0]["cpus"] = cpus

    return change


def _reserved_offline(node: FaultyNode) -> None:
    shutil.rmtree(node.root / _CPU[1:])
    write_tree(offline(small_machine(), {1}), node.root)
    node.settings_of["reservedCPUs"] = "0-1"


def _much_memory(node: FaultyNode) -> None:
    record: AllocationRecord = memory_record("m", ("r", 0, 600 * MI, 2 * MI))
    memory = tuple(one.model_copy(update={"device": "hugepages-2m-numa000"}) for one in record.memory)
    node.records.append(record.model_copy(update={"memory": memory}))


def _released(node: FaultyNode) -> None:
    node.server.store.delete(CLAIMS, "ns", "work")


def _recreated_node(node: FaultyNode) -> None:
    node.change_slices(lambda document: document["metadata"]["ownerReferences"][0].update(uid="former"))


def _half_a_pool(node: FaultyNode) -> None:
    node.change_slices(lambda document: document["spec"]["pool"].update(resourceSliceCount=2))


def _foreign_device(node: FaultyNode) -> None:
    node.change_slices(lambda document: document["spec"]["devices"][0].update(name="other"))


def _stray_drop_in(node: FaultyNode) -> None:
    node.host("/etc/containerd/config.toml", "version = 3\n")


def _nobody_tolerated(node: FaultyNode) -> None:
    del node.nri["default_validator"]["tolerate_missing_plugins_annotation"]


UNKNOWN_CLAIM: Final = {"claims": [], "unknownClaims": [{"uid": "nobody", "driver": "dra.cpu", "cpus": "2-3"}]}
FAULTS: Final[dict[str, Callable[[FaultyNode], object]]] = {
    "driver.endpoint": lambda node: setattr(node, "serving", False),
    "driver.pod": lambda node: (node.kubelet_root / "plugins").write_text("in the way"),
    "driver.status/unready": lambda node: node.problems.append("dra.cpu: not registered with the kubelet"),
    "driver.status/no-backend": _set("status", active=False, enforced=False),
    "driver.status/backend": _set("status", problems=["no cgroup has the CPUs 4-5"], problemCodes=["CPUsLost"]),
    "driver.exclusivity": _set(
        "status",
        exclusivity="pool",
        exclusivityReason="nri-backend lacks the capability SYS_ADMIN",
        exclusivityCode="SysAdminMissing",
    ),
    "driver.versions": _set("status", software="0.0.1"),
    "driver.hand-over": _hand_over_cut,
    "driver.left-behind": _left_behind,
    "driver.run-directory": lambda node: node.run.chmod(0o755),
    "driver.journal": lambda node: (node.run / "claims.journal").write_text("spoilt"),
    "driver.status/warnings": lambda node: node.warned.append("slices are published without taints"),
    "config.machine": _host(f"{_CPU}/online", "nonsense\n"),
    "config.fits/never": _set("settings_of", reservedCPUs="0,64"),
    "config.fits/offline": _reserved_offline,
    "config.fits/nothing-left": _set("settings_of", reservedCPUs="0-7"),
    "kubelet.reserved-cpus/none": _all(
        _set("settings_of", reservedCPUs=""), lambda node: node.kubelet_of.pop("reservedSystemCPUs")
    ),
    "kernel.cgroup-v2/version": _without("cgroup/cgroup.controllers"),
    "kernel.cgroup-v2/controllers": _cgroup("cgroup.controllers", "cpu memory\n"),
    "kernel.delegated": _cgroup("kubepods.slice/cgroup.subtree_control", "cpu memory hugetlb\n"),
    "kernel.kubepods": lambda node: (node.base / "cgroup/kubepods.slice").rename(node.base / "cgroup/pods"),
    "kernel.hugetlb-accounting": lambda node: node.host(
        "/proc/self/mountinfo",
        f"30 23 0:26 / {node.base}/cgroup rw - cgroup2 cgroup2 rw,memory_hugetlb_accounting\n",
    ),
    "kernel.release/too-old": _host("/proc/sys/kernel/osrelease", "5.4.0-100-generic\n"),
    "kernel.release/partitions": _without("cgroup/kubepods.slice/cpuset.cpus.exclusive"),
    "kernel.reserved-cpus/isolcpus": _host(f"{_CPU}/isolated", "0-1\n"),
    "kernel.isolcpus-offered": _host(f"{_CPU}/isolated", "6-7\n"),
    "kernel.reserved-cpus/nohz_full": _host(f"{_CPU}/nohz_full", "0-3\n"),
    "kernel.rcu-nocbs": _all(
        _host(f"{_CPU}/isolated", "5-7\n"), _host("/proc/cmdline", "ro rcu_nocbs=6-N isolcpus=5-7\n")
    ),
    "kernel.clocksource": _host("/sys/devices/system/clocksource/clocksource0/current_clocksource", "hpet\n"),
    "runtime.nri": _set("status", synchronized=False),
    "runtime.settings/connections": _set("nri", disable_connections=True),
    "runtime.settings/nri": _set("nri", disable=True),
    "runtime.nri-socket": _set("nri", socket_path="/run/other.sock"),
    "runtime.settings/cdi": _set("cri", enable_cdi=False),
    "runtime.settings/directories": _set("cri", cdi_spec_dirs=["/etc/cdi"]),
    "runtime.settings/hugetlb": _all(
        _host("/etc/containerd/config.toml", _CONTAINERD_1_7),
        _node_info(containerRuntimeVersion="containerd://1.7.20"),
    ),
    "runtime.required-plugin/not-required": lambda node: node.nri.clear(),
    "runtime.required-plugin/not-tolerated": lambda node: node.nri["default_validator"].pop(
        "tolerate_missing_plugins_annotation"
    ),
    "runtime.drop-in": _stray_drop_in,
    "runtime.timeouts/request": _set("status", requestTimeout=0.5),
    "runtime.timeouts/registration": _set("status", registrationTimeout=1.0),
    "runtime.release": _node_info(containerRuntimeVersion="containerd://1.7.2"),
    "kubelet.release/too-old": _node_info(kubeletVersion="v1.33.4"),
    "kubelet.release/too-new": _node_info(kubeletVersion="v1.37.0"),
    "kubelet.ready": lambda node: node.node["conditions"][0].update(status="False", message="PLEG is not healthy"),
    "kubelet.registration": _dead_registration,
    "kubelet.cpu-manager/static": _set("kubelet_of", cpuManagerPolicy="static"),
    "kubelet.memory-manager/static": _set("kubelet_of", memoryManagerPolicy="Static"),
    "kubelet.memory-manager/seen": _set("status", kubeletPins=["memory"]),
    "kubelet.cpu-manager/seen": _set("status", kubeletPins=["cpu"]),
    "kubelet.topology-manager": _set("kubelet_of", topologyManagerPolicy="single-numa-node"),
    "kubelet.gates/off": _set("kubelet_of", featureGates={"DRAConsumableCapacity": False}),
    "kubelet.gates/counting": _set("settings_of", publishNodeAllocatableResourceMapping=True),
    "kubelet.reserved-cpus/lists": _set("kubelet_of", reservedSystemCPUs="0-1"),
    "kubelet.reserved-cpus/amount": lambda node: node.node["allocatable"].update(cpu="8"),
    "kubelet.reserved-memory/amount": _all(
        _set("settings_of", reservedMemory=[{"numaNode": 0, "limits": {"memory": "512Mi"}}]),
        lambda node: node.node["allocatable"].update(memory="5Gi"),
    ),
    "kubelet.reserved-memory/nodes": _set("kubelet_of", reservedMemory=[{"numaNode": 1, "limits": {"memory": "1Gi"}}]),
    "api.reachable": lambda node: node.server.fail_next(99, 500),
    "api.served": lambda node: node.server.options.not_served.add("resource.k8s.io"),
    "api.node": lambda node: node.server.store.delete(NODES, "", "node-a"),
    "api.release": lambda node: setattr(node.server.options, "version", "1.33"),
    "api.gates/sharing": _gate_off("DRAConsumableCapacity"),
    "api.gates/taints": _gate_off("DRADeviceTaints"),
    "api.gates/counting": _set("settings_of", publishNodeAllocatableResourceMapping=True),
    "api.gates/lists": _all(
        _set("settings_of", exposePCIeRoots=True),
        _host("/sys/devices/pci0000:00/pci_bus/0000:00/cpulistaffinity", "0-3\n"),
    ),
    "api.clock": _facts(trial=lambda facts: replace(_read(facts.trial), server_ahead=-90.0)),
    "api.classes": lambda node: node.server.store.delete(CLASSES, "", "dra.hugepages-2m"),
    "api.rights/resourceslices": _forbidden(("update", "resourceslices")),
    "api.rights/resourceclaims": _forbidden(("list", "resourceclaims")),
    "api.rights/resourceclaims-status": _forbidden(("patch", "resourceclaims/status")),
    "api.rights/resourceclaims-driver": _forbidden(("associated-node:patch", "resourceclaims/driver")),
    "api.rights/nodes": _forbidden(("get", "nodes")),
    "api.rights/deviceclasses": _forbidden(("list", "deviceclasses")),
    "api.rights/events": _forbidden(("create", "events")),
    "api.slices/devices": _foreign_device,
    "api.slices/pools": _half_a_pool,
    "api.owner": _recreated_node,
    "claims.readable": lambda node: (node.cdi / "dra.k8s.io-cpu_claim-u.json").write_text("{"),
    "claims.apart/quarantine": lambda node: node.quarantined.update(
        {cdi_file_name(CPU_DRIVER, node.records[0].claim.uid): "holds CPUs of claim b, which is in use"}
    ),
    "claims.directory": _facts(claims=lambda facts: replace(_read(facts.claims), detached=True)),
    "claims.apart/now": _another("3-4"),
    "claims.reserves": _moved("0-1"),
    "claims.online": _moved("7-8"),
    "claims.memory": _much_memory,
    "claims.in-use": lambda node: node.containers.clear(),
    "claims.recorded": _container(**UNKNOWN_CLAIM),
    "claims.refused": lambda node: node.containers.append(
        report("r", "unknown", refused="no CPU is free").model_dump()
    ),
    "claims.kept-by-kernel": _container(exclusivity="pool", fallbackReason="cpuset.cpus.exclusive of x has CPU 2"),
    "claims.best-effort": _container(cgroup="kubepods.slice/kubepods-besteffort.slice/x"),
    "claims.memory-kills": _container(memoryKills=2),
    "claims.pinned": _container(cpus="2-5"),
    "claims.known": _released,
    "host.daemons": _cgroup("system.slice/cpuset.cpus.effective", "0-7\n"),
    "host.interrupts/devices": _host("/proc/irq/24/effective_affinity_list", "3\n"),
    "host.interrupts/workers": _host("/sys/devices/virtual/workqueue/cpumask", "ff\n"),
    "host.hugepages": _cgroup("kubepods.slice/hugetlb.2MB.numa_stat", "total=0 N0=0 N1=0\n"),
    "kernel.release/hugepages": _without("cgroup/kubepods.slice/hugetlb.2MB.numa_stat"),
    "host.space/run": _full("run_directory"),
    "host.space/cdi": _full("claims"),
    "host.own-files": _facts(open_files=lambda facts: (1024, 1024)),
    "host.node-files": _host("/proc/sys/fs/file-nr", "980000\t0\t1000000\n"),
}
