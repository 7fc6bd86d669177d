# SPDX-License-Identifier: Apache-2.0
"""Checks that the kubelet leaves CPUs and memory to claims, and that its reservations match the driver's. This module
does no I/O.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from dra_frontend.devices import gates
from dra_frontend.devices.reserves import is_explicit, reserved_by_kubelet
from numa_contract.config import Config
from numa_contract.cpuset import format_cpu_list
from numa_contract.quantity import format_quantity
from numa_contract.reports import BackendStatus

from numa_tools.doctor.facts import Document, KubeletConfig
from numa_tools.doctor.model import Check, Finding, Unread, facts_or_none, note, problem, unknown

_OLDEST: Final = (1, 34)
_MAX_BEHIND: Final = 3
"""Maximum number of minor releases by which a kubelet may lag behind the API server (version skew policy)."""
_GATES: Final = ("DynamicResourceAllocation", gates.SHARING_GATE)
_OFF: Final = {"cpu": "cpuManagerPolicy: none", "memory": "memoryManagerPolicy: None"}
"""Settings that disable the kubelet's managers. The kubelet rejects any other spelling."""
_NAMES: Final = {"cpu": "CPU", "memory": "memory"}
_CONFIGURATION: Final = "the kubelet's configuration"
_SEEN: Final = {"cpu": "CPUs", "memory": "NUMA nodes"}
_NO_FIGURES: Final = Unread(
    "the Node's status lacks the capacity or the allocatable amount",
    "see kubelet.ready: the kubelet sets the Node's capacity and allocatable amounts",
)
_PINNED: Final = "Guaranteed pods may be assigned claimed CPUs or memory, but do not get them: claims take precedence"


def _version(text: object) -> tuple[int, int] | None:
    found = re.match(r"v(\d{1,3})\.(\d{1,4})", str(text), re.ASCII)
    return (int(found[1]), int(found[2])) if found else None


def _release(node: Document, server: str | Unread) -> Iterator[Finding]:
    version = str(((node.get("status") or {}).get("nodeInfo") or {}).get("kubeletVersion", ""))
    ours, theirs = _version(version), _version(facts_or_none(server))
    if ours and ours < _OLDEST:
        why = (
            "dynamic resource allocation has been stable since Kubernetes 1.34; older kubelets use a different protocol"
        )
        yield problem(f"The kubelet is {version}.", why, "upgrade the node to Kubernetes 1.34 or later")
    elif ours and theirs and not 0 <= theirs[1] - ours[1] <= _MAX_BEHIND:
        newer = ours > theirs
        which = "newer than" if newer else f"more than {_MAX_BEHIND} releases behind"
        why = "Kubernetes does not support this version skew; claim fields may be lost"
        remedy = f"upgrade the {'API server' if newer else 'node'}, which is older"
        yield problem(f"The kubelet ({version}) is {which} the API server ({server}).", why, remedy)


def _ready(node: Document) -> Iterator[Finding]:
    conditions = (node.get("status") or {}).get("conditions") or []
    states = {one.get("type"): one for one in conditions if isinstance(one, dict)}
    if states and states.get("Ready", {}).get("status") != "True":
        why = str(states.get("Ready", {}).get("message") or "the kubelet has not reported a reason")
        yield problem("The node is not ready.", why, "see the kubelet's log: journalctl -u kubelet on the node")


def _unknown_if_incomplete(
    judge: Callable[..., Iterator[Finding]], is_conclusive: Callable[..., bool] = lambda *_: False
) -> Callable[..., Iterator[Finding]]:
    """Returns a check whose result is unknown if it has no findings and a part of the configuration could not be read.

    If ``is_conclusive`` returns True, the check's result does not depend on the missing part, so the check passes if it
    has no findings.
    """

    def run(kubelet: KubeletConfig | Unread, *others: Any) -> Iterator[Finding]:
        seen = None if isinstance(kubelet, Unread) else kubelet
        findings = list(judge(seen, *others))
        yield from findings
        incomplete = kubelet if isinstance(kubelet, Unread) else kubelet.incomplete
        if not findings and incomplete is not None and not is_conclusive(seen, *others):
            yield unknown(incomplete)

    return run


def _set_remedy(setting: str, origin: str) -> str:
    """Returns the remedy that changes a setting at its origin. An origin is a path or begins with a flag."""
    value = setting.partition(": ")[2].strip('"')
    return f"set {origin} to {value}" if origin.startswith("--") else f"set {setting} in {origin}"


def _manager_check(manager: str, static: str) -> Callable[..., Iterator[Finding]]:
    """Returns a check that a kubelet manager's policy is not static. The check examines the manager's state file, the
    kubelet's configuration, and whether new containers are pinned to CPUs or NUMA nodes.
    """
    setting, name = _OFF[manager].partition(":")[0], _NAMES[manager]

    def judge(kubelet: KubeletConfig | None, config: Config, backend: BackendStatus | Unread) -> Iterator[Finding]:
        running = {"cpu": kubelet.cpu_manager, "memory": kubelet.memory_manager}[manager] if kubelet else ""
        origin = kubelet.origins.get(setting, _CONFIGURATION) if kubelet else _CONFIGURATION
        state = f"{config.kubelet_root_dir}/{manager}_manager_state"
        remedy = f"{_set_remedy(_OFF[manager], origin)}, remove {state}, and restart the kubelet"
        pins = not isinstance(backend, Unread) and manager in backend.kubelet_pins
        seen = [f"containers were created with {_SEEN[manager]} that no claim assigns to them"] if pins else []
        if running == static:
            yield problem(f"The kubelet's {name} manager uses the {static} policy.", _PINNED, remedy, seen)
        elif kubelet and kubelet.configured.get(manager) == static:
            what = f"The kubelet's {name} manager policy is configured as {static}, but the policy in use is {running}."
            yield problem(
                what, "the kubelet does not restart while its state file contains a different policy", remedy, seen
            )
        elif kubelet and pins and (manager in kubelet.running or kubelet.incomplete is None):
            what = f"Containers are pinned, although the kubelet's {name} manager policy is {running}."
            other = "remove the other NRI plugin that pins them, or delete pods created while the policy was static"
            yield problem(what, _PINNED, other, seen)
        elif pins:
            what = f"The kubelet's static {name} manager or another NRI plugin pins containers."
            yield problem(what, _PINNED, f"{remedy}; if this is already set, remove the other NRI plugin", seen)

    return _unknown_if_incomplete(judge, lambda kubelet, *_: kubelet is not None and manager in kubelet.running)


def _topology_manager(kubelet: KubeletConfig | None) -> Iterator[Finding]:
    if kubelet and kubelet.topology_manager in ("restricted", "single-numa-node"):
        origin = kubelet.origins.get("topologyManagerPolicy", _CONFIGURATION)
        yield note(
            f"The kubelet's topology manager policy is {kubelet.topology_manager}.",
            "it does not consider claims, and may reject a pod on the node that the scheduler chose for its claims",
            f"{_set_remedy('topologyManagerPolicy: none', origin)}; "
            "to align claims, use matchAttribute: resource.kubernetes.io/numaNode instead",
        )


def _gates(kubelet: KubeletConfig | None, config: Config) -> Iterator[Finding]:
    if kubelet is None:
        return
    for gate in _GATES:
        if kubelet.gates.get(gate) is False:
            why = (
                "the kubelet does not prepare claims"
                if gate == _GATES[0]
                else "the kubelet drops the consumed capacity of shared devices from claims"
            )
            origin = kubelet.origins.get(f"featureGates.{gate}", _CONFIGURATION)
            remedy = f"remove {gate}: false from featureGates in {origin}"
            yield problem(f"The kubelet's feature gate {gate} is off.", why, remedy)
    if kubelet.gates.get("AllBeta") is False and _GATES[1] not in kubelet.gates:
        why = (
            f"{_GATES[1]} has been beta since Kubernetes 1.36, so AllBeta: false turns it off, and the kubelet drops "
            "consumed capacities"
        )
        yield problem("The kubelet's feature gate AllBeta is off.", why, f"add {_GATES[1]}: true to featureGates")
    counting = gates.COUNTING_GATE
    is_known = kubelet.incomplete is None or counting in kubelet.gates
    is_on = kubelet.gates.get(counting, kubelet.gates.get("AllAlpha", False))
    if config.publish_node_allocatable_resource_mapping and is_known and not is_on:
        why = "the scheduler counts claims against the node, but the kubelet counts only pods' resource requests"
        remedy = f"add {counting}: true to featureGates, or set publishNodeAllocatableResourceMapping: false"
        yield note(f"The kubelet's feature gate {counting} is not on.", why, remedy)


def _reserved_cpus(kubelet: KubeletConfig | None, config: Config, node: Document | Unread) -> Iterator[Finding]:
    ours, theirs = config.reserved_cpus, kubelet.reserved_cpus if kubelet else None
    counted = None if isinstance(node, Unread) else reserved_by_kubelet(node, "cpu")
    text = format_cpu_list(ours)
    if theirs is not None and theirs != ours:
        listed = format_cpu_list(theirs)
        origin = kubelet.origins.get("reservedSystemCPUs", _CONFIGURATION) if kubelet else _CONFIGURATION
        change = "; or " + _set_remedy(f'reservedSystemCPUs: "{text}"', origin) if ours else ""
        yield problem(
            f"The kubelet reserves CPUs {listed} (reservedSystemCPUs), the driver {text or 'none'} (reservedCPUs).",
            "claims may get CPUs that the kubelet reserves for the system, and CPUs that only one side reserves may be "
            "unused",
            f'set reservedCPUs: "{listed}" in driverConfig{change}',
        )
    elif counted is not None and counted < len(ours):
        yield problem(
            f"The driver reserves {len(ours)} CPUs, the kubelet {float(counted):g}.",
            "the scheduler counts on CPUs that neither claims nor pods can use",
            f'set reservedSystemCPUs: "{text}" in {_CONFIGURATION}, or the same number of CPUs in kubeReserved and '
            "systemReserved",
        )
    elif ours and theirs is None and counted is None and kubelet and kubelet.incomplete is None:
        yield unknown(node if isinstance(node, Unread) else _NO_FIGURES)
    elif not ours:
        yield note(
            "No CPU is reserved for the system.",
            "the kubelet, the container runtime and daemons can use only the CPUs that no claim holds; withheldCPUs is "
            "the minimum number of these CPUs (default: 1)",
            "set reservedCPUs in driverConfig and the kubelet's reservedSystemCPUs to the same list "
            "(docs/node-tuning.md)",
        )


def _reserved_memory(kubelet: KubeletConfig | None, config: Config, node: Document | Unread) -> Iterator[Finding]:
    theirs = {one.get("numaNode") for one in kubelet.reserved_memory} if kubelet else set()
    ours = {one.numa_node for one in config.reserved_memory}
    held = None if isinstance(node, Unread) else reserved_by_kubelet(node, "memory")
    total = sum(one.limits.get("memory", 0) for one in config.reserved_memory)
    if theirs and theirs != ours:
        yield problem(
            f"The kubelet reserves memory on NUMA nodes {_numbers(theirs)}, the driver on {_numbers(ours)}.",
            "claims may get memory that the kubelet reserves for the system",
            "copy the kubelet's reservedMemory to reservedMemory in driverConfig",
        )
    elif is_explicit(config) and held is None and kubelet and kubelet.incomplete is None:
        yield unknown(node if isinstance(node, Unread) else _NO_FIGURES)
    elif is_explicit(config) and held is not None and total < held:
        amounts = [format_quantity(int(one), binary=True) for one in (held, total)]
        yield note(
            f"The kubelet reserves {amounts[0]} of memory, the driver {amounts[1]} (reservedMemory).",
            "claims for plain memory may get memory that the system and the eviction threshold need",
            f"raise reservedMemory to {amounts[0]} across all NUMA nodes, or remove its entries for memory: the driver "
            "will then reserve as much as the kubelet",
        )


def _numbers(nodes: set[Any]) -> str:
    return ", ".join(sorted(map(str, nodes))) or "none"


def _sockets(sockets: Mapping[str, str]) -> Iterator[Finding]:
    missing = {driver: fault for driver, fault in sockets.items() if fault}
    if missing:
        yield problem(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not registered with the kubelet.",
            "the kubelet finds drivers through the sockets in its plugin registry; without them, no claim is prepared",
            "set kubeletRootDir in driverConfig to the kubelet's --root-dir; see driver.pod, and the kubelet's log: "
            "journalctl -u kubelet on the node",
            missing.values(),
        )


_KUBELET: Final = ("kubelet", "config", "node")
CHECKS: Final = (
    Check(
        "kubelet.release",
        "The kubelet runs Kubernetes 1.34 or later, and is neither newer nor much older than the API server.",
        ("node",),
        _release,
        optional_reads=("server",),
    ),
    Check("kubelet.ready", "The node is ready.", ("node",), _ready),
    Check("kubelet.registration", "Both drivers have a live socket in the kubelet's registry.", ("sockets",), _sockets),
    *(
        Check(
            f"kubelet.{manager}-manager",
            f"The {_NAMES[manager]} manager's policy is {off}, and only the driver pins containers.",
            ("kubelet", "config", "backend"),
            _manager_check(manager, static),
            accepts_unread=True,
        )
        for manager, off, static in (("cpu", "none", "static"), ("memory", "None", "Static"))
    ),
    Check(
        "kubelet.topology-manager",
        "The topology manager does not reject any pods.",
        ("kubelet",),
        _unknown_if_incomplete(_topology_manager),
    ),
    Check(
        "kubelet.gates",
        f"The feature gates {' and '.join(_GATES)} are not off, and {gates.COUNTING_GATE} is on if claims count "
        "against the node.",
        ("kubelet", "config"),
        _unknown_if_incomplete(_gates),
    ),
    Check(
        "kubelet.reserved-cpus",
        "The kubelet and the driver reserve the same CPUs, and at least one CPU is reserved.",
        _KUBELET,
        _unknown_if_incomplete(_reserved_cpus),
        accepts_unread=True,
    ),
    Check(
        "kubelet.reserved-memory",
        "The kubelet and the driver reserve memory on the same NUMA nodes, and the driver reserves at least as much as "
        "the kubelet.",
        _KUBELET,
        _unknown_if_incomplete(_reserved_memory),
        accepts_unread=True,
    ),
)
