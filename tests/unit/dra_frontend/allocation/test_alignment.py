# SPDX-License-Identifier: Apache-2.0
"""A matchAttribute constraint gives a claim CPUs that share an attribute value with the constraint's other devices,
even if the CPU device has several values for that attribute.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, get_args

import pytest
from dra_frontend.allocation.alignment import OtherDevices, needed_devices, read_attributes
from dra_frontend.allocation.allocate import allocate_claim, parse_driver_claim
from dra_frontend.allocation.claim import ClaimView, RefusedError, parse_claim
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.cpu_groups import ATTRIBUTES_OF_CPU
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.devices.slices import slice_documents
from dra_frontend.machine.model import Cpu, Machine, MemoryKind, MemoryTraits, NumaNode
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from numa_contract.config import Config
from numa_contract.cpuset import parse_cpu_list
from numa_contract.records import AllocationRecord

from tests.fakes.scheduler import UnschedulableError, allocate
from tests.rigs.builders import NODE, claim, cpu_record, cpus, files_of, memory, opaque, result
from tests.rigs.cpu_time import cpu_seconds
from tests.strategies.machines import SYNTHETIC, Core, assemble, even_cores, hybrid

NUMA: Final = "resource.kubernetes.io/numaNode"
ROOT: Final = "resource.kubernetes.io/pcieRoot"
SOCKET: Final = "dra.cpu/socketID"
NEAREST: Final = "dra.cpu/nearestNumaNode"
L3: Final = "dra.cpu/cacheL3ID"
CORE_TYPE: Final = "dra.cpu/coreType"
GPU: Final = "gpu.example.com"
HBM: Final = MemoryKind.HBM
NPS4 = assemble(even_cores(2, 4, 1, 4, 2))
"""Two sockets with four NUMA nodes each and eight CPUs per node. Node 3, for example, has CPUs 12-15 and 44-47."""
ROOTS = {f"pci0000:{node}{half}": NPS4.numa_nodes[node].cpus for node in range(8) for half in (0, 8)}


def with_far(machine: Machine, **nearest: Sequence[int]) -> Machine:
    """Returns the machine with HBM nodes added. An argument such as ``n8=[3]`` adds node 8, whose nearest CPUs are on
    node 3.
    """
    traits = {int(name[1:]): MemoryTraits(HBM, initiators=frozenset(near)) for name, near in nearest.items()}
    far = {number: NumaNode(number, frozenset(), 16 << 30, traits=one) for number, one in traits.items()}
    return replace(machine, numa_nodes={**machine.numa_nodes, **far})


def node(group_by: Any = "socket", machine: Machine = NPS4, **more: Any) -> Inventory:
    """Returns the machine's inventory of devices, with PCIe roots published."""
    settings = {"group_by": group_by, "withheld_cpus": 0, "expose_pcie_roots": True, **more}
    config = Config.model_validate(settings)
    return build_inventory(replace(machine, pcie_roots=ROOTS if machine is NPS4 else machine.pcie_roots), config, NODE)


def joined(results: list[dict[str, Any]], *constraints: dict[str, Any], uid: str = "u", config: Any = ()) -> ClaimView:
    """Returns an allocated claim with the given constraints."""
    document = claim(uid, *results, config=config)
    document["spec"] = {"devices": {"constraints": list(constraints)}}
    return parse_claim(document)


def match(*requests: str, attribute: str = NUMA) -> dict[str, Any]:
    """Returns a matchAttribute constraint on the given requests, or on all requests by default."""
    return {"matchAttribute": attribute, **({"requests": list(requests)} if requests else {})}


def gpu(name: str = "gpu-1", request: str = "gpu") -> dict[str, Any]:
    """Returns an allocation result for another driver's device."""
    return result(request, GPU, name)


def slice_of(driver: str = GPU, generation: int = 1, **devices: Mapping[str, Any]) -> dict[str, Any]:
    """Returns another driver's ResourceSlice. Underscores in device names become hyphens, and attributes are in the
    API's format.
    """
    listed = [{"name": name.replace("_", "-"), "attributes": dict(one)} for name, one in devices.items()]
    spec = {
        "driver": driver,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": generation, "resourceSliceCount": 1},
        "devices": listed,
    }
    return {"kind": "ResourceSlice", "metadata": {"name": driver, "uid": driver}, "spec": spec}


def others(view: ClaimView, inventory: Inventory, *slices: dict[str, Any]) -> OtherDevices:
    """Returns the other drivers' devices that the claim's constraints involve, as read from the slices."""
    return OtherDevices(read_attributes(slices, needed_devices(view, inventory)))


def prepared(
    view: ClaimView, inventory: Inventory, *slices: dict[str, Any], ledger: Ledger | None = None
) -> AllocationRecord:
    """Allocates the claim's CPUs and returns the claim's record, or raises RefusedError."""
    known = others(view, inventory, *slices)
    return allocate_claim(
        parse_driver_claim(view, "dra.cpu", inventory, Config(), others=known), inventory, ledger or Ledger({})
    )


def refusal(view: ClaimView, inventory: Inventory, *slices: dict[str, Any], ledger: Ledger | None = None) -> str:
    """Returns the error message if the claim's CPUs cannot be allocated."""
    with pytest.raises(RefusedError) as caught:
        prepared(view, inventory, *slices, ledger=ledger)
    return str(caught.value)


def joined_values(record: AllocationRecord) -> list[dict[str, tuple[Any, ...]]]:
    """Returns, for each of the record's CPU results, the attribute values that constraints require of it, keyed by
    attribute.
    """
    return [{one.attribute: one.values for one in part.joined} for part in record.cpus]


@pytest.mark.parametrize(
    ("group_by", "device"), [("socket", "cpudevsocket000"), ("machine", "cpudevmachine"), ("coretype", "cpudevmachine")]
)
def test_cpus_are_on_the_numa_node_of_the_claims_memory(group_by: str, device: str) -> None:
    found = prepared(joined([cpus(8, device=device), memory("1Gi", node=3)], match()), node(group_by))
    assert found.cpus_of() == NPS4.numa_nodes[3].cpus
    assert joined_values(found) == [{NUMA: (3,)}]


@pytest.mark.parametrize("group_by", ["socket", "machine"])
def test_cpus_are_next_to_the_claims_hbm(group_by: str) -> None:
    """The HBM forms a separate NUMA node, and the CPUs nearest to it are on node 6."""
    device = "cpudevmachine" if group_by == "machine" else "cpudevsocket001"
    view = joined([cpus(8, device=device), memory("1Gi", node=8)], match(attribute=NEAREST))
    found = prepared(view, node(group_by, with_far(NPS4, n8=[6], n9=[5])))
    assert found.cpus_of() == NPS4.numa_nodes[6].cpus
    assert joined_values(found) == [{NEAREST: (6,)}]


def test_cpus_for_memory_near_several_nodes_are_all_on_one_of_them() -> None:
    """Only one of the nodes near the memory has enough free CPUs. If the claim's memory is on a node with CPUs of its
    own, the same constraint selects that node's CPUs.
    """
    machine = with_far(NPS4, n8=[2, 5])
    view = joined([cpus(8, device="cpudevmachine"), memory("1Gi", node=8)], match(attribute=NEAREST))
    found = prepared(view, node("machine", machine), ledger=Ledger(files_of(cpu_record("other", "r=8"))))
    assert found.cpus_of() == NPS4.numa_nodes[5].cpus
    view = joined([cpus(8, device="cpudevmachine"), memory("1Gi", node=3)], match(attribute=NEAREST))
    assert prepared(view, node("machine", machine)).cpus_of() == NPS4.numa_nodes[3].cpus


def test_a_refusal_for_lack_of_free_cpus_next_to_hbm_contains_the_counts() -> None:
    view = joined([cpus(4, device="cpudevmachine"), memory("1Gi", node=8)], match(attribute=NEAREST))
    taken = Ledger(files_of(cpu_record("other", "r=12-15,44")))
    text = refusal(view, node("machine", with_far(NPS4, n8=[3])), ledger=taken)
    assert f"matchAttribute {NEAREST} requires 4 CPUs for request cpus near memory-numa008: 3 has 3 of 8 free" in text


def test_hbm_and_cpus_cannot_be_joined_by_numa_node() -> None:
    """The HBM's NUMA node has no CPUs, so neither the scheduler nor Prepare can match HBM and CPUs by NUMA node."""
    view = joined([cpus(4, device="cpudevmachine"), memory("1Gi", node=8)], match())
    text = refusal(view, node("machine", with_far(NPS4, n8=[3])))
    assert "no value in common: cpudevmachine has 0, 1, 2, 3, 4, 5, 6, 7; memory-numa008 has 8" in text


def test_cpus_from_an_l3_that_spans_numa_nodes_are_on_the_memorys_node() -> None:
    machine = assemble([Core(node=core // 4, l3=0) for core in range(8)])
    found = prepared(joined([cpus(3, device="cpudevl3000"), memory("1Gi", node=1)], match()), node("l3", machine))
    assert found.cpus_of() <= machine.numa_nodes[1].cpus


def test_cpus_from_a_numa_node_that_spans_sockets_are_on_the_joined_socket() -> None:
    """The device publishes only the socket of its lowest-numbered CPU."""
    machine = assemble([Core(package=core // 4, node=0, l3=core // 4) for core in range(8)])
    view = joined([cpus(4), gpu()], match(attribute=SOCKET))
    found = prepared(view, node("numanode", machine), slice_of(gpu_1={SOCKET: {"int": 1}}))
    assert {machine.cpus[cpu].package for cpu in found.cpus_of()} == {1}


@pytest.mark.parametrize("attributes", [{NUMA: {"int": 5}}, {NUMA: {"ints": [5]}}])
def test_cpus_are_on_the_numa_node_of_another_drivers_device(attributes: dict[str, Any]) -> None:
    view = joined([cpus(8, device="cpudevmachine"), gpu()], match())
    assert prepared(view, node("machine"), slice_of(gpu_1=attributes)).cpus_of() == NPS4.numa_nodes[5].cpus


def test_cpus_are_on_one_of_the_nodes_that_another_drivers_device_lists() -> None:
    """All CPUs are on the same listed node, and that node has enough free CPUs."""
    view = joined([cpus(8, device="cpudevmachine"), gpu()], match())
    ledger = Ledger(files_of(cpu_record("other", "r=8")))
    found = prepared(view, node("machine"), slice_of(gpu_1={NUMA: {"ints": [2, 6]}}), ledger=ledger)
    assert found.cpus_of() == NPS4.numa_nodes[6].cpus


def test_cpus_are_near_the_pcie_root_of_another_drivers_device() -> None:
    view = joined([cpus(4, device="cpudevsocket001"), gpu()], match(attribute=ROOT))
    found = prepared(view, node(), slice_of(gpu_1={ROOT: {"string": "pci0000:78"}}))
    assert found.cpus_of() <= NPS4.numa_nodes[7].cpus


def test_an_unqualified_attribute_of_another_driver_belongs_to_that_drivers_domain() -> None:
    view = joined(
        [cpus(4, device="cpudevsocket000"), result("nic", "dra.net", "eth0")], match(attribute="dra.net/numaNode")
    )
    found = prepared(view, node(), slice_of("dra.net", eth0={"numaNode": {"int": 2}}))
    assert found.cpus_of() <= NPS4.numa_nodes[2].cpus


def test_all_constraints_of_a_claim_are_satisfied() -> None:
    """The claim has two CPU/memory pairs, and a GPU that is joined to one of them."""
    results = [
        cpus(8, "a", "cpudevmachine"),
        memory("1Gi", "am", node=1),
        cpus(4, "b/big", "cpudevmachine"),
        memory("1Gi", "bm", node=6),
        gpu(),
    ]
    constraints = [match("a", "am"), match("b", "bm"), match("b/big", "gpu", attribute=ROOT)]
    found = prepared(joined(results, *constraints), node("machine"), slice_of(gpu_1={ROOT: {"string": "pci0000:60"}}))
    chosen = {part.request: part.cpus for part in found.cpus}
    assert chosen["a"] == NPS4.numa_nodes[1].cpus
    assert chosen["b"] <= NPS4.numa_nodes[6].cpus
    assert joined_values(found) == [{NUMA: (1,)}, {NUMA: (6,), ROOT: ("pci0000:60",)}]


def test_two_cpu_requests_joined_to_each_other_are_on_one_node_with_room_for_both() -> None:
    view = joined([cpus(3, "a", "cpudevsocket000"), cpus(4, "b", "cpudevsocket000")], match())
    ledger = Ledger(files_of(cpu_record("other", "r=0,1,4,5,8,9")))
    found = prepared(view, node(), ledger=ledger)
    assert {NPS4.cpus[cpu].numa_node for cpu in found.cpus_of()} == {3}


def test_requests_outside_the_constraint_leave_room_for_those_inside() -> None:
    view = joined(
        [cpus(24, "free", "cpudevsocket000"), cpus(8, "near", "cpudevsocket000"), memory("1Gi")],
        match("near", "memory"),
    )
    chosen = {part.request: part.cpus for part in prepared(view, node()).cpus}
    assert chosen["near"] == NPS4.numa_nodes[0].cpus


def test_a_constraint_with_one_member_changes_nothing() -> None:
    """A constraint with only one member always holds, so the CPUs may still span several nodes."""
    view = joined([cpus(16, device="cpudevsocket000"), memory("1Gi", node=3)], match("cpus"))
    assert len(prepared(view, node()).cpus_of()) == 16


def test_other_parameters_apply_within_the_joined_node() -> None:
    config = [opaque({"fullPhysicalCores": True}, "cpus")]
    view = joined([cpus(4, device="cpudevsocket000"), memory("1Gi", node=2)], match(), config=config)
    ledger = Ledger(files_of(cpu_record("other", "r=8,9,10")))
    text = refusal(view, node(), ledger=ledger)
    assert "device cpudevsocket000 with resource.kubernetes.io/numaNode 2 (matchAttribute): 4 CPUs requested" in text


def test_a_refusal_for_lack_of_free_cpus_on_the_joined_node_contains_the_counts() -> None:
    view = joined([cpus(4, device="cpudevsocket000"), memory("1Gi", node=3)], match())
    text = refusal(view, node(), ledger=Ledger(files_of(cpu_record("other", "r=12-15,44"))))
    assert (
        f"matchAttribute {NUMA} requires 4 CPUs for request cpus near memory-numa003: 3 has 3 of 8 free; "
        "the scheduler only knows the total capacity of a device"
    ) in text


def test_mutually_exclusive_constraints_are_refused_permanently() -> None:
    results = [cpus(4, device="cpudevsocket000"), memory("1Gi", "a", node=1), memory("1Gi", "b", node=3)]
    text = refusal(joined(results, match("cpus", "a"), match("cpus", "b")), node())
    assert "no CPUs on this node would meet these requirements even if all were free" in text


def test_more_cpus_than_the_joined_node_has_are_refused_permanently() -> None:
    text = refusal(joined([cpus(9, device="cpudevsocket000"), memory("1Gi", node=1)], match()), node())
    assert "1 has 8 of 8 free; no CPUs on this node would meet these requirements even if all were free" in text


@pytest.mark.parametrize(
    ("named", "text"),
    [("12-15", ""), ("12-14,16", "do not belong to device cpudevsocket000 with"), ("8-11", "do not belong to")],
)
def test_cpus_that_the_claim_names_must_be_on_the_joined_node(named: str, text: str) -> None:
    config = [opaque({"cpuset": named}, "cpus")]
    view = joined([cpus(4, device="cpudevsocket000"), memory("1Gi", node=3)], match(), config=config)
    if text:
        assert text in refusal(view, node())
    else:
        assert prepared(view, node()).cpus_of() == parse_cpu_list(named)


def test_a_device_that_is_in_no_slice_is_refused() -> None:
    view = joined([cpus(4, device="cpudevmachine"), gpu()], match())
    text = refusal(view, node("machine"), slice_of(gpu_2={NUMA: {"int": 1}}))
    assert f"matchAttribute {NUMA}: the values of device {NODE}/gpu-1 are unknown: no ResourceSlice contains it" in text
    assert "does not have this attribute" in refusal(view, node("machine"), slice_of(gpu_1={}))


def test_only_the_newest_generation_of_a_pool_is_used() -> None:
    view = joined([cpus(8, device="cpudevmachine"), gpu()], match())
    slices = [slice_of(generation=number, gpu_1={NUMA: {"int": number}}) for number in (4, 5, 3)]
    assert prepared(view, node("machine"), *slices).cpus_of() == NPS4.numa_nodes[5].cpus


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"spec": 3},
        {"spec": {"driver": GPU, "pool": {"name": NODE}, "devices": 7}},
        {"spec": {"driver": GPU, "pool": {"name": NODE, "generation": "9"}, "devices": [{}]}},
        {"spec": {"driver": GPU, "pool": {"name": NODE}, "devices": [3, {"name": 4}, {"name": "gpu-1"}]}},
        {"spec": {"driver": GPU, "pool": {"name": NODE}, "devices": [{"name": "gpu-1", "attributes": {NUMA: 1}}]}},
        {
            "spec": {
                "driver": GPU,
                "pool": {"name": NODE},
                "devices": [{"name": "gpu-1", "attributes": {NUMA: {"x": {}}}}],
            }
        },
    ],
)
def test_unreadable_slices_cause_a_refusal(broken: dict[str, Any]) -> None:
    text = refusal(joined([cpus(4, device="cpudevmachine"), gpu()], match()), node("machine"), broken)
    assert "unknown" in text or "does not have this attribute" in text


def test_without_a_common_value_the_refusal_names_the_devices() -> None:
    """The GPU's driver has published different attributes since the scheduler allocated the claim."""
    view = joined([cpus(4, device="cpudevsocket000"), gpu()], match())
    text = refusal(view, node(), slice_of(gpu_1={NUMA: {"int": 5}}))
    assert "no value in common: cpudevsocket000 has 0, 1, 2, 3; gpu-1 has 5" in text
    assert "no value in common" in refusal(view, node(), slice_of(gpu_1={NUMA: {"string": "1"}}))


def test_a_claim_with_the_maximum_number_of_constraints_is_refused_quickly() -> None:
    """Every request is joined to the next one, and no value satisfies all of them. Other claims wait for the lock while
    this claim is being processed.
    """
    machine = SYNTHETIC["epyc-512"]
    roots = {f"pci{n}": frozenset(cpu for cpu in machine.online if (cpu * 7 + n) % 40 < 20) for n in range(48)}
    inventory = node("machine", replace(machine, pcie_roots=roots))
    results = [cpus(12, f"c{number}", "cpudevmachine") for number in range(32)]
    constraints = [match(f"c{number}", f"c{number + 1}", attribute=ROOT) for number in range(31)]
    view = joined(results, *constraints, match(attribute=NUMA))
    assert cpu_seconds(lambda: refusal(view, inventory)) < 2
    assert len(refusal(view, inventory)) < 2048


@pytest.mark.parametrize("attribute", [NUMA, ROOT])
def test_slices_are_not_read_for_devices_with_a_single_attribute_value(attribute: str) -> None:
    """If groupBy gives each device a single value of the attribute, the scheduler has already checked the
    constraint.
    """
    inventory = node("numanode")
    view = joined([cpus(4, device="cpudevnuma003"), gpu()], match(attribute=attribute))
    assert not needed_devices(view, inventory)
    assert prepared(view, inventory).cpus[0].joined == ()


def test_a_prepared_claim_keeps_its_cpus_after_the_slices_are_gone() -> None:
    view = joined([cpus(4, device="cpudevmachine"), gpu()], match())
    record = prepared(view, node("machine"), slice_of(gpu_1={NUMA: {"int": 5}}))
    assert prepared(view, node("machine"), ledger=Ledger(files_of(record))).cpus == record.cpus


@pytest.mark.parametrize(
    "spec", [[], {"devices": 3}, {"devices": {"constraints": {}}}, {"devices": {"constraints": [3]}}]
)
def test_a_malformed_spec_is_refused(spec: Any) -> None:
    document = claim("u", cpus(1))
    document["spec"] = spec
    with pytest.raises(RefusedError):
        parse_claim(document)


def test_constraints_of_other_kinds_are_left_to_the_scheduler() -> None:
    view = joined([cpus(1)], {"distinctAttribute": NUMA}, {"somethingNew": {}})
    assert view.matches == ()


def test_results_of_other_drivers_are_not_read_without_constraints() -> None:
    assert parse_claim(claim("u", cpus(1), {"driver": GPU})).others == ()


MACHINES: Final = {
    "nps4": NPS4,
    "snc2": assemble(even_cores(2, 2, 1, 3, 2)),
    "nodes-across-sockets": assemble([Core(package=core // 6, node=core % 3, l3=core // 4) for core in range(12)]),
    "l3-across-nodes": assemble([Core(package=0, node=core // 3, l3=core // 6, threads=2) for core in range(12)]),
    "hybrid": assemble([replace(core, node=number % 2) for number, core in enumerate(hybrid())]),
    "hbm": with_far(assemble(even_cores(2, 2, 1, 3, 2)), n4=[3], n5=[1], n6=[0, 2]),
}
OF_CPU: Final[Mapping[str, Callable[[Cpu], int | str]]] = {
    NUMA: lambda cpu: cpu.numa_node,
    NEAREST: lambda cpu: cpu.numa_node,
    "dra.cpu/numaNodeID": lambda cpu: cpu.numa_node,
    "dra.net/numaNode": lambda cpu: cpu.numa_node,
    SOCKET: lambda cpu: cpu.package,
    L3: lambda cpu: cpu.l3_id,
    CORE_TYPE: lambda cpu: cpu.core_type.value,
    "dra.cpu/coreID": lambda cpu: cpu.core_id,
    "dra.cpu/cpuID": lambda cpu: cpu.id,
}
MODES: Final = (*get_args(Config.model_fields["group_by"].annotation), "individual")
"""Every groupBy value, and the mode with one device per CPU."""


def test_the_expected_values_cover_every_attribute_of_a_cpu() -> None:
    assert OF_CPU.keys() == ATTRIBUTES_OF_CPU.keys()


def offered_by(mode: str, machine: Machine) -> Inventory:
    """Returns the machine's inventory in the given mode."""
    return node(machine=machine, cpu_device_mode=mode) if mode == "individual" else node(mode, machine)


def values_of(machine: Machine, chosen: frozenset[int], attribute: str) -> set[Any]:
    """Returns the attribute values that all of the given CPUs have in common."""
    if attribute == ROOT:
        return {name for name, near in machine.pcie_roots.items() if chosen <= near}
    values = {OF_CPU[attribute](machine.cpus[cpu]) for cpu in chosen}
    return values if len(values) == 1 else set()


@st.composite
def foreign_attributes(draw: st.DrawFn, machine: Machine) -> dict[str, Any]:
    """Draws the attributes of another driver's device, each with a single value or a list."""
    nodes, roots = st.sampled_from(sorted(machine.numa_nodes)), st.sampled_from(sorted(machine.pcie_roots))
    lists = draw(st.booleans())
    numa = {"ints": draw(st.lists(nodes, min_size=1, unique=True))} if lists else {"int": draw(nodes)}
    root = {"strings": draw(st.lists(roots, min_size=1, unique=True))} if lists else {"string": draw(roots)}

    def some(attribute: str) -> Any:
        return draw(st.sampled_from(sorted({OF_CPU[attribute](cpu) for cpu in machine.cpus.values()}, key=str)))

    single = {name: {"int": some(name)} for name in ("dra.cpu/numaNodeID", "dra.net/numaNode", SOCKET, L3)}
    return {NUMA: numa, NEAREST: numa, ROOT: root, CORE_TYPE: {"string": some(CORE_TYPE)}, **single}


@st.composite
def joined_claims(draw: st.DrawFn, mode: str, machine: Machine) -> dict[str, Any]:
    """Draws a claim for CPUs, memory and other drivers' devices, with one or two constraints.

    A request may ask for two devices. With one device per CPU, a request for CPUs specifies no amount, because each
    device is a single CPU.
    """

    def amount() -> dict[str, str]:
        return {} if mode == "individual" else {"dra.cpu/cpu": str(draw(st.integers(1, 4)))}

    kinds = ["dra.memory", *(["far"] * 2 if any(not one.cpus for one in machine.numa_nodes.values()) else [])]
    wishes = {
        **{f"c{n}": ("dra.cpu", amount()) for n in range(draw(st.integers(1, 3)))},
        **{f"m{n}": (draw(st.sampled_from(kinds)), {"size": "1Gi"}) for n in range(draw(st.integers(0, 2)))},
        **{f"g{n}": (GPU, {}) for n in range(draw(st.integers(0, 2)))},
    }
    attributes = st.sampled_from([NUMA, NUMA, NUMA, NEAREST, NEAREST, ROOT, ROOT, *OF_CPU])
    some = st.lists(st.sampled_from(sorted(wishes)), unique=True, max_size=3)
    constraints = [match(*draw(some), attribute=draw(attributes)) for _ in range(draw(st.integers(1, 2)))]
    count = st.sampled_from([1, 1, 1, 2])
    requests = []
    for name, (of, amounts) in draw(st.permutations(sorted(wishes.items()))):
        wish = {"deviceClassName": of, "count": draw(count), "capacity": {"requests": dict(amounts)}}
        requests.append({"name": name, "exactly": wish})
    return {
        "metadata": {"name": "claim-u", "namespace": "ns", "uid": "u"},
        "spec": {"devices": {"requests": requests, "constraints": constraints}},
    }


def scheduled_on(inventory: Inventory, foreign: dict[str, Any], claim: dict[str, Any]) -> dict[str, Any]:
    """Returns the claim as the scheduler would allocate it. Discards the example if the scheduler cannot allocate
    it.
    """
    own = [one for pool in inventory.pools for one in slice_documents(pool, NODE)]
    classes = {
        of: {"spec": {"selectors": [{"cel": {"expression": f'device.driver == "{of}"'}}]}}
        for of in ("dra.cpu", "dra.memory", GPU)
    }
    far = 'device.driver == "dra.memory" && device.attributes["dra.memory"].tier == "far"'
    classes["far"] = {"spec": {"selectors": [{"cel": {"expression": far}}]}}
    try:
        return allocate(claim, [*own, foreign], classes, pods=[{"name": "p", "uid": "p"}], node=NODE)
    except UnschedulableError:
        assume(False)
        raise


def values_by_result(
    machine: Machine,
    foreign: dict[str, Any],
    scheduled: dict[str, Any],
    given_cpus: list[frozenset[int]],
    constraint: dict[str, Any],
) -> list[set[Any]]:
    """Returns the values that each of the claim's results has for the constraint's attribute.

    ``given_cpus`` contains the CPUs allocated to each of the CPU driver's results, in order.
    """
    attribute, names = constraint["matchAttribute"], constraint.get("requests")
    published = {one["name"]: one["attributes"] for one in foreign["spec"]["devices"]}
    found: list[set[Any]] = []
    given = iter(given_cpus)
    for one in scheduled["status"]["allocation"]["devices"]["results"]:
        cpus_of_result = next(given) if one["driver"] == "dra.cpu" else frozenset[int]()
        if names and one["request"] not in names:
            continue
        if one["driver"] == "dra.cpu":
            found.append(values_of(machine, cpus_of_result, attribute))
        elif one["driver"] == "dra.memory":
            number = int(one["device"][-3:])
            near = set(machine.numa_nodes[number].traits.initiators)
            found.append(near if near and attribute == NEAREST else {number})
        else:
            (value,) = published[one["device"]][attribute].values()
            found.append(set(value) if isinstance(value, list) else {value})
    return found


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_joined_devices_share_a_value_or_the_claim_is_refused(mode: str, data: st.DataObject) -> None:
    # The test scheduler is too slow for one device per CPU on the largest machine.
    names = sorted(name for name in MACHINES if (name, mode) != ("nps4", "individual"))
    machine = MACHINES[data.draw(st.sampled_from(names))]
    near = {f"pci{number}": one.cpus for number, one in machine.numa_nodes.items()}
    near |= {"pci-some": frozenset(sorted(machine.online)[::3])}
    machine = replace(machine, pcie_roots=near)
    inventory = offered_by(mode, machine)
    claim = data.draw(joined_claims(mode, machine))
    constraints = claim["spec"]["devices"]["constraints"]
    foreign = slice_of(GPU, 1, **{f"gpu_{n}": data.draw(foreign_attributes(machine)) for n in range(4)})
    scheduled = scheduled_on(inventory, foreign, claim)
    held = data.draw(st.frozensets(st.sampled_from(sorted(machine.online)), max_size=4))
    ledger = Ledger(files_of(*([cpu_record("other", "r=" + ",".join(map(str, sorted(held))))] if held else [])))
    view = parse_claim(scheduled)
    try:
        record = prepared(view, inventory, foreign, ledger=ledger)
    except RefusedError as error:
        record, refused = None, str(error)
    event("prepared" if record else "refused")
    if record is None:
        assert not _possible(view, inventory, foreign, held, constraints), refused
        return
    assert not record.cpus_of() & held
    given_cpus = [part.cpus for part in record.cpus]
    assert sum(map(len, given_cpus)) == len(record.cpus_of())
    for constraint in constraints:
        values = values_by_result(machine, foreign, scheduled, given_cpus, constraint)
        assert len(values) < 2 or set.intersection(*values), (constraint, given_cpus, scheduled)


def _possible(
    view: ClaimView,
    inventory: Inventory,
    foreign: dict[str, Any],
    held: frozenset[int],
    constraints: list[dict[str, Any]],
) -> bool:
    """Returns True if counting CPUs shows that the claim's only constraint can be met. Returns False for a claim with
    several constraints, because counting cannot decide whether they can all be met.
    """
    if len(constraints) > 1:
        return False
    attribute, names = constraints[0]["matchAttribute"], constraints[0].get("requests")
    machine = inventory.machine
    candidates: Any = (
        machine.pcie_roots if attribute == ROOT else {OF_CPU[attribute](cpu) for cpu in machine.cpus.values()}
    )
    published = {one["name"]: one["attributes"] for one in foreign["spec"]["devices"]}

    def near(value: Any) -> frozenset[int]:
        if attribute == ROOT:
            return machine.pcie_roots[value]
        return frozenset(cpu.id for cpu in machine.cpus.values() if OF_CPU[attribute](cpu) == value)

    def fits(value: Any) -> bool:
        wanted: dict[str, int] = {}
        for one in view.results["dra.cpu"]:
            if not names or one.request in names:
                wanted[one.device] = wanted.get(one.device, 0) + int(one.consumed.get("dra.cpu/cpu", 1))
        devices = {device.name: device for device in inventory.devices.values()}
        memory_here = all(
            (listed := devices[one.device].attributes[attribute]) == value
            or (isinstance(listed, tuple) and value in listed)
            for one in view.results["dra.memory"]
            if not names or one.request in names
        )
        other_here = True
        for other in view.others:
            if not names or other.request in names:
                (found,) = published[other.device][attribute].values()
                other_here &= value in found if isinstance(found, list) else value == found
        room = all(len((devices[name].cpus & near(value)) - held) >= count for name, count in wanted.items())  # type: ignore[union-attr]
        return room and memory_here and other_here

    totals: dict[str, int] = {}
    for one in view.results["dra.cpu"]:
        totals[one.device] = totals.get(one.device, 0) + int(one.consumed.get("dra.cpu/cpu", 1))
    devices = {device.name: device for device in inventory.devices.values()}
    enough = all(len(devices[name].cpus - held) >= count for name, count in totals.items())  # type: ignore[union-attr]
    return enough and any(fits(value) for value in candidates)
