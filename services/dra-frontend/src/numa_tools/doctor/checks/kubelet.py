# SPDX-License-Identifier: Apache-2.0
"""Whether the kubelet leaves CPUs and memory to claims, and keeps the same for the system. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dra_frontend.devices import gates
from dra_frontend.devices.reserves import is_explicit, reserved_by_kubelet
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.reports import BackendStatus

from numa_tools.doctor.facts import Document, KubeletConfig
from numa_tools.doctor.model import Check, Finding, note, problem, unknown

_OLDEST: Final = (1, 34)
_MOST_BEHIND: Final = 3
"""Minor releases that a kubelet may be older than the API server (version skew policy)."""
_GATES: Final = ("DynamicResourceAllocation", gates.SHARING)
_COUNTED: Final = gates.COUNTING
_OFF: Final = {"cpu": "cpuManagerPolicy: none", "memory": "memoryManagerPolicy: None"}
"""The settings that switch off the kubelet's managers. It does not start with another spelling of these words."""
_NAMES: Final = {"cpu": "CPU", "memory": "memory"}
_CONFIGURATION: Final = "the kubelet's configuration"
_REMEDY: Final = "{}, remove its state file, restart it"
_PINNED: Final = "Guaranteed pods may be given what claims have, and then neither is alone"


def _version(text: object) -> tuple[int, int] | None:
    found = re.match(r"v(\d{1,3})\.(\d{1,4})", str(text), re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def _kubelet_version(node: Document) -> str:
    return str(((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion", ""))


def _release(node: Document) -> Iterator[Finding]:
    said = _kubelet_version(node)
    if (version := _version(said)) and version < _OLDEST:
        why = "dynamic resource allocation is stable since Kubernetes 1.34; older kubelets speak another protocol"
        yield problem(f"The kubelet is {said}.", why, "update the node to Kubernetes 1.34 or later")


def _skew(node: Document, server: str) -> Iterator[Finding]:
    said = _kubelet_version(node)
    ours, theirs = _version(said), _version(server)
    if ours and theirs and not 0 <= theirs[1] - ours[1] <= _MOST_BEHIND:
        which = "newer than" if ours > theirs else f"more than {_MOST_BEHIND} releases behind"
        why = "Kubernetes does not support that; fields of claims may be lost on the way"
        yield problem(f"The kubelet ({said}) is {which} the API server ({server}).", why, "update the older one")


def _ready(node: Document) -> Iterator[Finding]:
    conditions = (node.get("status") or {}).get("conditions") or []
    states = {one.get("type"): one for one in conditions if isinstance(one, dict)}
    if states and states.get("Ready", {}).get("status") != "True":
        why = str(states.get("Ready", {}).get("message") or "the kubelet has not said so")
        yield problem("The node is not ready.", why, "see the kubelet's log")


def _if_seen(
    judge: Callable[..., Iterator[Finding]], settled: Callable[..., bool] = lambda *_: False
) -> Callable[..., Iterator[Finding]]:
    """Returns a check that finds nothing only if the whole configuration was seen, or ``settled`` without it."""

    def run(kubelet: KubeletConfig, *others: Any) -> Iterator[Finding]:
        findings = list(judge(kubelet, *others))
        yield from findings
        if not findings and kubelet.unseen is not None and not settled(kubelet, *others):
            yield unknown(kubelet.unseen)

    return run


def _set(setting: str, origin: str) -> str:
    """Returns the remedy for a setting where it stands: in a file, or as a flag, whose origin begins with the flag."""
    return f"set {origin} to {setting.partition(': ')[2]}" if origin.startswith("--") else f"set {setting} in {origin}"


def _manager_check(manager: str, static: str) -> Callable[..., Iterator[Finding]]:
    """Returns the check of a manager whose policy is in a state file while it runs, and else in the configuration."""

    def judge(kubelet: KubeletConfig) -> Iterator[Finding]:
        running = {"cpu": kubelet.cpu_manager, "memory": kubelet.memory_manager}[manager]
        setting, _, _ = _OFF[manager].partition(":")
        remedy = _REMEDY.format(_set(_OFF[manager], kubelet.origins.get(setting, _CONFIGURATION)))
        if running == static:
            yield problem(f"The kubelet's {_NAMES[manager]} manager is {static}.", _PINNED, remedy)
        elif kubelet.configured.get(manager) == static:
            what = f"The kubelet's {_NAMES[manager]} manager is configured as {static}, but runs as {running}."
            yield problem(what, "with another policy in its state file the kubelet does not start again", remedy)

    return _if_seen(judge, lambda kubelet: manager in kubelet.running)


def _seen_pinning(backend: BackendStatus) -> Iterator[Finding]:
    for manager in filter(_OFF.__contains__, backend.kubelet_pins):
        what = f"The kubelet's static {manager} manager or another NRI plugin was seen to pin containers."
        remedy = f"{_REMEDY.format(_set(_OFF[manager], _CONFIGURATION))}; if it is set so, remove the other NRI plugin"
        yield problem(what, _PINNED, remedy)


def _topology_manager(kubelet: KubeletConfig) -> Iterator[Finding]:
    if kubelet.topology_manager in ("restricted", "single-numa-node"):
        origin = kubelet.origins.get("topologyManagerPolicy", _CONFIGURATION)
        yield note(
            f"The kubelet's topology manager is {kubelet.topology_manager}.",
            "it knows nothing of claims: it may refuse a pod on the node that the scheduler has chosen for its claims",
            f"{_set('topologyManagerPolicy: none', origin)}; "
            "claims use matchAttribute: resource.kubernetes.io/numaNode instead",
        )


def _gates(kubelet: KubeletConfig) -> Iterator[Finding]:
    for gate in _GATES:
        if kubelet.gates.get(gate) is False:
            why = "the kubelet prepares no claims" if gate == _GATES[0] else "it drops what claims have of a device"
            yield problem(f"The kubelet's feature gate {gate} is off.", why, f"take {gate}: false out of featureGates")
    if kubelet.gates.get("AllBeta") is False and _GATES[1] not in kubelet.gates:
        why = f"{_GATES[1]} is a beta gate since Kubernetes 1.36: it is off, and the kubelet drops what claims have"
        yield problem("The kubelet's feature gate AllBeta is off.", why, f"add {_GATES[1]}: true to featureGates")


def _counted_gate(kubelet: KubeletConfig, config: Config) -> Iterator[Finding]:
    if kubelet.unseen is not None and _COUNTED not in kubelet.gates:
        return
    on = kubelet.gates.get(_COUNTED, kubelet.gates.get("AllAlpha", False))
    if config.publish_node_allocatable_resource_mapping and not on:
        why = "claims count against the node in the scheduler, and the kubelet counts requests alone"
        yield note(f"The kubelet's feature gate {_COUNTED} is not on.", why, f"add {_COUNTED}: true to featureGates")


def _reserved_cpus(kubelet: KubeletConfig, config: Config) -> Iterator[Finding]:
    if kubelet.reserved_cpus is not None and kubelet.reserved_cpus != config.reserved_cpus:
        theirs, ours = (format_cpu_list(one) or "none" for one in (kubelet.reserved_cpus, config.reserved_cpus))
        yield problem(
            f"The kubelet reserves CPUs {theirs} (reservedSystemCPUs), the driver {ours} (reservedCPUs).",
            "claims may get CPUs that the system was promised, or nobody gets those that only one side keeps",
            "make both lists the same",
        )


def _counts_reserves(node: Document, config: Config) -> Iterator[Finding]:
    held = reserved_by_kubelet(node, "cpu")
    if held is not None and held < len(config.reserved_cpus):
        yield problem(
            f"The driver reserves {len(config.reserved_cpus)} CPUs, the kubelet {float(held):g}.",
            "the scheduler sends pods for CPUs that no claim and no pod can have",
            "set reservedSystemCPUs, kubeReserved or systemReserved of the kubelet to as much",
        )


def _counts_memory(node: Document, config: Config) -> Iterator[Finding]:
    held, ours = reserved_by_kubelet(node, "memory"), sum(one.limits.get("memory", 0) for one in config.reserved_memory)
    if is_explicit(config) and held is not None and ours < held:
        yield note(
            f"The kubelet reserves {int(held) >> 20} MiB of memory, the driver {ours >> 20} MiB (reservedMemory).",
            "claims of plain memory may get what the system and the eviction threshold need",
            "set reservedMemory to at least that in all, or take memory out of it: then the driver keeps as much",
        )


def _reserved_memory(kubelet: KubeletConfig, config: Config) -> Iterator[Finding]:
    theirs = {one.get("numaNode") for one in kubelet.reserved_memory}
    ours = {one.numa_node for one in config.reserved_memory}
    if theirs and theirs != ours:
        yield problem(
            f"The kubelet reserves memory of NUMA nodes {_numbers(theirs)}, the driver of {_numbers(ours)}.",
            "claims may get memory that the system was promised",
            "take the kubelet's reservedMemory over into reservedMemory of the driver",
        )


def _numbers(nodes: set[Any]) -> str:
    return ", ".join(sorted(map(str, nodes))) or "none"


def _sockets(sockets: Mapping[str, str]) -> Iterator[Finding]:
    for driver, fault in sockets.items():
        if fault:
            why = "the kubelet finds a driver by a socket in its registry; without one no claim is prepared"
            yield problem(f"{driver} is not registered with the kubelet: {fault}.", why, "see driver.ready and its log")


CHECKS: Final = (
    Check("kubelet.release", "The kubelet is of Kubernetes 1.34 or later.", ("node",), _release),
    Check("kubelet.version-skew", "It is not newer than the API server, nor much older.", ("node", "server"), _skew),
    Check("kubelet.ready", "The node is ready.", ("node",), _ready),
    Check("kubelet.registration", "Both drivers have a live socket in the kubelet's registry.", ("sockets",), _sockets),
    Check("kubelet.cpu-manager", "The CPU manager's policy is none.", ("kubelet",), _manager_check("cpu", "static")),
    Check(
        "kubelet.memory-manager",
        "The memory manager's policy is None.",
        ("kubelet",),
        _manager_check("memory", "Static"),
    ),
    Check(
        "kubelet.pinning",
        "Neither the kubelet nor another NRI plugin was seen to pin containers.",
        ("backend",),
        _seen_pinning,
    ),
    Check(
        "kubelet.topology-manager", "The topology manager refuses no pod.", ("kubelet",), _if_seen(_topology_manager)
    ),
    Check("kubelet.gates", f"The gates {' and '.join(_GATES)} are not off.", ("kubelet",), _if_seen(_gates)),
    Check(
        "kubelet.counted-gate",
        f"{_COUNTED} is on where publishNodeAllocatableResourceMapping is.",
        ("kubelet", "config"),
        _if_seen(_counted_gate, lambda _, config: not config.publish_node_allocatable_resource_mapping),
    ),
    Check(
        "kubelet.reserved-cpus", "reservedSystemCPUs are reservedCPUs.", ("kubelet", "config"), _if_seen(_reserved_cpus)
    ),
    Check("kubelet.counts-reserved-cpus", "It reserves as many CPUs as we.", ("node", "config"), _counts_reserves),
    Check(
        "kubelet.counts-reserved-memory",
        "reservedMemory is as much as it reserves.",
        ("node", "config"),
        _counts_memory,
    ),
    Check(
        "kubelet.reserved-memory",
        "Both reserve memory of the same nodes.",
        ("kubelet", "config"),
        _if_seen(_reserved_memory),
    ),
)
