# SPDX-License-Identifier: Apache-2.0
"""Opaque parameters are parsed strictly and per request. Parameters from the claim override those from the class, and
parameters that cannot be enforced are refused.
"""

from typing import Any

import pytest
from dra_frontend.allocation.allocate import DriverClaim, parse_driver_claim
from dra_frontend.allocation.claim import ClaimView
from dra_frontend.devices.inventory import Inventory, build_inventory
from dra_frontend.machine.discovery import discover
from numa_contract.config import Config, MemoryProtection
from numa_contract.names import DRIVERS
from numa_contract.records import CpuParameters, MemoryMount, MemoryParameters

from tests.rigs.builders import NODE, cpus, memory, memory_opaque, opaque, result
from tests.rigs.decisions import decided, refused, view
from tests.rigs.trees import small_machine
from tests.strategies.machines import machine

NUMA = build_inventory(machine(), Config(), NODE)
WHOLE = build_inventory(machine(), Config(group_by="machine"), NODE)
SINGLE = build_inventory(machine(), Config(cpu_device_mode="individual"), NODE)
PAGES = build_inventory(discover(small_machine()), Config(), NODE)
HUGE = "hugepages-2m"
BOTH = Config(memory_protection=MemoryProtection(allowed=("low", "min")))
Entry = dict[str, Any]


def of_cpus(*config: Entry, request: str = "cpus", inventory: Inventory = NUMA) -> DriverClaim:
    """Returns a claim with two requests for CPUs."""
    device = inventory.pools[0].devices[0].name
    found = view("u", cpus(2, request, device), cpus(2, "other", device), config=config)
    return parse_driver_claim(found, "dra.cpu", inventory, BOTH)


def of_memory(*config: Entry, kinds: tuple[str, ...] = ("memory",), size: str = "64Mi") -> DriverClaim:
    """Returns a claim with the request `r`, which has one result from each driver."""
    found = view("u", *(memory(size, "r", 1, kind) for kind in kinds), config=config)
    return parse_driver_claim(found, "dra.memory", PAGES, BOTH)


def wish(*config: Entry, request: str = "cpus", inventory: Inventory = NUMA) -> CpuParameters:
    """Returns a request's resolved CPU parameters."""
    parsed = of_cpus(*config, request=request, inventory=inventory)
    assert parsed.refusal is None
    return parsed.blank.parameters[request.partition("/")[0]]


def memory_wish(*config: Entry, kinds: tuple[str, ...] = ("memory",), size: str = "64Mi") -> MemoryParameters:
    """Returns a request's resolved memory parameters."""
    parsed = of_memory(*config, kinds=kinds, size=size)
    assert parsed.refusal is None
    return parsed.blank.memory_parameters["r"]


def fault(parsed: DriverClaim) -> str:
    """Returns the error message if the claim is refused."""
    assert parsed.refusal is not None
    text = str(parsed.refusal)
    assert text.startswith(("request cpus: ", "request r: "))
    return text.partition(": ")[2]


def raw(parameters: Any, entry: Entry | None = None) -> Entry:
    """Returns a configuration entry with the given parameters, valid or not."""
    entry = entry or opaque({})
    entry["opaque"]["parameters"] = parameters
    return entry


def test_without_parameters_all_defaults_apply() -> None:
    """Parameters are optional. By default, memory is bound by cpuset.mems, and is not limited, protected or mounted."""
    assert wish() == wish(raw({})) == wish(opaque({})) == wish(opaque({"x": 1}, driver="gpu.example.com"))
    assert wish() == CpuParameters()
    default = MemoryParameters(binding="strict", limit="none", protect="none", high=None, mount=None)
    assert memory_wish() == memory_wish(memory_opaque({})) == default


def test_every_field_is_parsed() -> None:
    """The claims set every field in the parameter tables to a value other than its default."""
    first = {"fullPhysicalCores": True, "l3": "required", "isolcpus": "only", "coreType": "performance"}
    second = {"sharing": "pod", "quota": "keep", "irqs": "keep"}
    assert wish(opaque(first), opaque(second)) == CpuParameters(
        full_physical_cores=True, l3="required", isolcpus="only", core_type="performance", quota="keep", irqs="keep"
    )
    given = wish(opaque({"strategy": "spread", "numa": "distribute", "isolation": "isolated"}))
    assert given == CpuParameters(strategy="spread", numa="distribute", isolation="isolated")
    assert wish(opaque({"poolCPUs": "all"})) == CpuParameters(pool_cpus="all", isolation="mixed")
    assert wish(opaque({"poolCPUs": "all"}, from_class=True), opaque({"poolCPUs": "none"})) == CpuParameters()
    fields = {"binding": "interleave", "limit": "claim", "protect": "min", "high": 0.9}
    assert memory_wish(memory_opaque({**fields, "sharing": "pod"})) == MemoryParameters.model_validate(fields)
    mount = {"path": "/dev/hugepages", "mode": "1777"}
    assert memory_wish(memory_opaque({"mount": mount}), kinds=(HUGE,)).mount == MemoryMount(**mount)


def test_the_claim_overrides_the_class_field_by_field() -> None:
    """A field that the claim omits comes from the class. A mount counts as a single field: if the claim has one,
    nothing from the class's mount is used.
    """
    both = [opaque({"strategy": "spread", "l3": "ignore"}, from_class=True), opaque({"l3": "required"})]
    assert wish(*both) == wish(*both[::-1]) == CpuParameters(strategy="spread", l3="required")
    both = [memory_opaque({"limit": "claim", "protect": "low"}, from_class=True), memory_opaque({"protect": "none"})]
    assert memory_wish(*both) == memory_wish(*both[::-1]) == MemoryParameters(limit="claim")
    both = [memory_opaque({"mount": {"path": "/a", "mode": "0700"}}, from_class=True)]
    both += [memory_opaque({"mount": {"path": "/b"}})]
    assert memory_wish(*both, kinds=(HUGE,)).mount == MemoryMount(path="/b", mode="0770")


def test_each_request_has_its_own_parameters() -> None:
    """Parameters for other requests are ignored. Parameters apply to a subrequest if they name it or its parent
    request.
    """
    config = (opaque({"strategy": "spread"}, "other"), opaque({"isolcpus": "never"}, "cpus"))
    assert wish(*config) == wish(*config, request="cpus/big") == CpuParameters(isolcpus="never")
    assert wish(opaque({"l3": "ignore"}, "cpus/big"), request="cpus/big") == CpuParameters(l3="ignore")


SAID = {"apiVersion": "v1alpha1"}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"cpuConfig": {}}, "apiVersion: is missing; it must be 'v1alpha1'"),
        ({"apiVersion": "v1", "cpuConfig": {}}, "apiVersion: 'v1': input should be 'v1alpha1'"),
        ({**SAID, "cpuConfg": {}}, "cpuConfg: unknown field; known fields are apiVersion, cpuConfig"),
        ({**SAID, "memoryConfig": {}}, "memoryConfig: is for the driver dra.memory; dra.cpu accepts cpuConfig"),
        ({**SAID, "cpuConfig": {"FullPhysicalCores": True}}, "known fields are sharing, cpuset, strategy"),
        ({**SAID, "cpuConfig": {"full_physical_cores": True}}, "unknown field"),
        ({**SAID, "cpuConfig": {"strategy": "best"}}, "cpuConfig.strategy: 'best': input should be"),
        (
            {**SAID, "cpuConfig": {"fullPhysicalCores": "yes"}},
            "cpuConfig.fullPhysicalCores: got the text 'yes'; input should be a valid boolean, true or false without q",
        ),
        ({**SAID, "cpuConfig": {"fullPhysicalCores": 1}}, "got the integer 1; input should be a valid boolean"),
        (
            {**SAID, "cpuConfig": {"quota": True}},
            "cpuConfig.quota: got the boolean true (YAML reads on, yes and y as true); input should be 'lift'",
        ),
        ({**SAID, "cpuConfig": {"quota": "no"}}, "cpuConfig.quota: 'no': input should be 'lift' or 'keep'"),
        ({**SAID, "cpuConfig": {"irqs": False}}, "got the boolean false (YAML reads off, no and n as false); input"),
        ({**SAID, "cpuConfig": {"l3": 3}}, "cpuConfig.l3: got the integer 3; input should be 'preferred'"),
        ({**SAID, "cpuConfig": {"l3": 1 << 5000}}, "cpuConfig.l3: got a very large integer; input should be"),
        ({**SAID, "cpuConfig": {"l3": ["required"]}}, "cpuConfig.l3: got a list; input should be"),
        (
            {**SAID, "cpuConfig": {"cpuset": True}},
            "got the boolean true (YAML reads on, yes and y as true); input shou",
        ),
        (
            {**SAID, "cpuConfig": {"cpuset": 0.5}},
            "got the number 0.5; input should be a valid string; write a CPU list",
        ),
        ({**SAID, "cpuConfig": {"cpuset": 1 << 5000}}, "cpuConfig.cpuset: got a very large integer; input should be"),
        ({**SAID, "cpuConfig": []}, "cpuConfig: must be a map of fields"),
        ({**SAID, "cpuConfig": None}, "cpuConfig: must be a map of fields"),
        (SAID, "cpuConfig: is missing"),
    ],
)
def test_unknown_cpu_parameters_are_refused(parameters: Any, text: str) -> None:
    """Unknown or invalid fields are never ignored. The message names the field and the source, since only an
    administrator can correct a class.
    """
    shown = fault(of_cpus(raw(parameters)))
    assert shown.startswith("parameters of the claim: ")
    assert text in shown
    of_class = fault(of_cpus(raw(parameters, opaque({}, from_class=True))))
    assert of_class == shown.replace("the claim", "the DeviceClass")


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"bindings": "strict"},
            "memoryConfig.bindings: unknown field; known fields are sharing, binding, limit, protect,",
        ),
        ({"binding": "bind"}, "memoryConfig.binding: 'bind': input should be 'strict', 'preferred' or 'interleave'"),
        ({"limit": "64Mi"}, "memoryConfig.limit: '64Mi': input should be 'none' or 'claim'"),
        ({"sharing": "all"}, "memoryConfig.sharing: 'all': input should be 'container' or 'pod'"),
        ({"high": 0}, "memoryConfig.high: got the integer 0; input should be greater than 0"),
        ({"high": 1.01}, "memoryConfig.high: got the number 1.01; input should be less than or equal to 1"),
        ({"high": "0.9"}, "memoryConfig.high: got the text '0.9'; input should be a valid number without quotes"),
        ({"mount": "/a"}, "memoryConfig.mount: must be a map of fields"),
        ({"mount": {}}, "memoryConfig.mount.path: is missing"),
        ({"mount": {"path": "/a", "size": "1Gi"}}, "mount.size: unknown field; known fields are path, mode"),
        ({"mount": {"path": "a"}}, "memoryConfig.mount.path: 'a': must be an absolute path"),
        ({"mount": {"path": "/a/../b"}}, "must be an absolute path without '.' or '..'"),
        ({"mount": {"path": "/"}}, "is managed by the container runtime"),
        ({"mount": {"path": "/proc/x"}}, "is managed by the container runtime"),
        ({"mount": {"path": "//dev/"}}, "is managed by the container runtime"),
        ({"mount": {"path": "/a\nb"}}, "printable"),
        ({"mount": {"path": "/" + "a" * 4095}}, "at most 4095 bytes"),
        (
            {"mount": {"path": "/a", "mode": 0o770}},
            'the integer 504; input should be a valid string; write octal permissions in quotes, such as "0770" (YAML',
        ),
        ({"mount": {"path": None}}, "memoryConfig.mount.path: got null; input should be a valid string; write it in q"),
        ({"mount": {"path": "/a", "mode": "0888"}}, 'must be octal permissions, such as "0770"'),
        ({"mount": {"path": "/a", "mode": "4755"}}, "must be octal permissions"),
    ],
)
def test_unknown_memory_parameters_are_refused(fields: Entry, text: str) -> None:
    """The message names the source and the field, and gives the field's value and the expected values."""
    shown = fault(of_memory(memory_opaque(fields), kinds=(HUGE,)))
    assert shown.startswith("parameters of the claim: memoryConfig.")
    assert text in shown


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (
            [opaque({"strategy": "spread"}, from_class=True), opaque({"fullPhysicalCores": True})],
            "of the DeviceClass: cpuConfig.strategy: spread conflicts with fullPhysicalCores: true (in the claim)",
        ),
        (
            [opaque({"numa": "distribute", "l3": "required"})],
            "cpuConfig.numa: distribute conflicts with l3: required (in the claim)",
        ),
        (
            [opaque({"poolCPUs": "numa"}, from_class=True), opaque({"isolation": "isolated"})],
            "cpuConfig.isolation: isolated conflicts with poolCPUs: numa (in the DeviceClass): an isolated container",
        ),
    ],
)
def test_contradictory_parameters_are_refused(config: list[Entry], text: str) -> None:
    """Two contradictory parameters are an error; neither of them takes precedence."""
    assert text in fault(of_cpus(*config))


def test_a_claim_may_name_its_cpus() -> None:
    """Only the claim itself may name CPUs. It may do so once per request and for devices with any grouping, but not
    together with other parameters that select CPUs.
    """
    named = opaque({"cpuset": "2-3"}, "cpus")
    for inventory in (WHOLE, NUMA):
        assert wish(named, opaque({"quota": "keep", "isolation": "isolated"}), inventory=inventory) == CpuParameters(
            cpuset=frozenset({2, 3}), quota="keep", isolation="isolated"
        )
    assert "the scheduler selects them" in fault(of_cpus(named, inventory=SINGLE))
    for config, text in [
        ([opaque({"cpuset": "2"}, from_class=True)], "may only be set in the claim"),
        ([opaque({"cpuset": "3-1"})], "cpuConfig.cpuset: '3-1': the range 3-1 runs"),
        ([opaque({"cpuset": ""})], "contains no CPU"),
        ([named, opaque({"cpuset": "2-3"})], "is set twice"),
        ([named, opaque({"strategy": "packed"}, from_class=True)], "cannot be combined with cpuset"),
        ([named, opaque({"fullPhysicalCores": False})], "cannot be combined with cpuset"),
    ]:
        assert text in fault(of_cpus(*config, inventory=WHOLE))


def test_common_spellings_of_parameters_are_accepted() -> None:
    """YAML tools such as kubectl convert `off` and `no` to false, and a single CPU to a number."""
    assert [wish(opaque({"quota": word})).quota for word in (False, "off", "lift", "keep", None)] == [
        *["lift"] * 3,
        "keep",
        "lift",
    ]
    assert wish(opaque({"cpuset": 3}), inventory=WHOLE).cpuset == frozenset({3})
    assert "cpuset: '-3': '-3' is neither a number nor a range" in fault(of_cpus(opaque({"cpuset": -3})))


def test_deprecated_names_mean_the_same_as_their_replacements() -> None:
    """If the class uses one name and the claim uses the other, the claim still overrides the field."""
    for word in ("ignore", "only", "never"):
        assert wish(opaque({"isolated": word})) == wish(opaque({"isolcpus": word})) == CpuParameters(isolcpus=word)
    for former, present in (("none", "none"), ("pool", "all"), ("numa", "numa")):
        assert wish(opaque({"shared": former})) == wish(opaque({"poolCPUs": present}))
    assert wish(opaque({"shared": "numa"}, from_class=True), opaque({"poolCPUs": "none"})) == CpuParameters()
    assert wish(opaque({"isolcpus": "only"}, from_class=True), opaque({"isolated": "never"})).isolcpus == "never"
    assert wish(opaque({"isolcpus": "only", "isolated": None})).isolcpus == "only"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"isolated": "only", "isolcpus": "only"}, "isolated is the former name of isolcpus, and both are given; remo"),
        ({"shared": "pool", "poolCPUs": "numa"}, "shared is the former name of poolCPUs, and both are given; remove"),
        ({"isolated": "always"}, "cpuConfig.isolated: 'always': input should be 'ignore', 'only' or 'never'"),
        ({"shared": "x"}, "cpuConfig.shared: 'x': input should be 'none', 'all' or 'numa'"),
        ({"poolCPUs": "pool"}, "cpuConfig.poolCPUs: 'pool': input should be 'none', 'all' or 'numa'"),
        ({"pool_cpus": "all"}, "cpuConfig.pool_cpus: unknown field; known fields are sharing, cpuset"),
    ],
)
def test_the_error_for_a_deprecated_field_contains_the_deprecated_name(fields: dict[str, Any], text: str) -> None:
    """An entry with both the deprecated and the current name is refused, whatever the values."""
    assert text in fault(of_cpus(opaque(fields)))


def test_single_cpus_are_chosen_by_the_scheduler() -> None:
    """In individual mode, only parameters that do not select CPUs are allowed."""
    free = opaque({"sharing": "pod", "quota": "keep", "irqs": "keep"})
    assert wish(free, inventory=SINGLE) == CpuParameters(quota="keep", irqs="keep")
    assert "the scheduler selects them" in fault(of_cpus(opaque({"strategy": "spread"}), inventory=SINGLE))


@pytest.mark.parametrize("fields", [{"limit": "claim"}, {"protect": "low"}, {"protect": "min"}, {"high": 0.5}])
def test_memory_limits_and_protection_are_refused_for_hugepages(fields: Entry) -> None:
    """The refusal names the source and the page size, and gives a remedy. The value "none" is accepted."""
    shown = fault(of_memory(memory_opaque(fields, from_class=True), kinds=(HUGE,)))
    (name,) = fields
    assert shown.startswith(f"parameters of the DeviceClass: memoryConfig.{name}: ")
    assert "for 2Mi hugepages" in shown
    assert "under config[].requests, list only requests to which the field applies" in shown
    assert fault(of_memory(memory_opaque(fields), kinds=("memory", HUGE)))
    assert memory_wish(memory_opaque({"limit": "none", "protect": "none"}), kinds=(HUGE,)) == MemoryParameters()


def test_a_mount_is_for_hugepages_of_one_size() -> None:
    """A hugetlbfs file system has a single page size, and plain memory cannot be mounted."""
    mount = memory_opaque({"mount": {"path": "/a"}})
    assert "applies to hugepages, but the request is for plain memory" in fault(of_memory(mount))
    assert "applies to hugepages" in fault(of_memory(mount, kinds=("memory", HUGE)))
    assert "has 2Mi and 1Gi pages" in fault(of_memory(mount, kinds=(HUGE, "hugepages-1g"), size="1Gi"))
    assert memory_wish(mount, kinds=(HUGE, HUGE)).mount == MemoryMount(path="/a")
    # Each directory has exactly one accepted spelling, so two requests cannot shadow each other unnoticed.
    many = memory_opaque({"mount": {"path": "//mnt//huge/"}})
    assert memory_wish(many, kinds=(HUGE,)).mount == MemoryMount(path="/mnt/huge")


def test_memory_high_is_at_least_one_page() -> None:
    """If a fraction for memory.high were rounded down to zero, the container would be blocked before its first
    instruction.
    """
    assert "is less than one page" in fault(of_memory(memory_opaque({"high": 0.5}), size="4Ki"))
    assert memory_wish(memory_opaque({"high": 0.5}), size="8Ki").high == 0.5
    assert memory_wish(memory_opaque({"high": 1}), size="4Ki").high == 1.0


def shares(name: str, how: str, **more: Any) -> Entry:
    """Returns parameters that set how a request may be shared."""
    return (memory_opaque if name == "m" else opaque)({"sharing": how}, name, **more)


def sharing(*config: Entry) -> ClaimView:
    """Returns a claim with two requests for CPUs, one for memory, and one with adminAccess."""
    watching = result("w", "dra.cpu", "cpudevnuma001", adminAccess=True)
    return view("u", cpus(1, "a"), cpus(1, "b"), memory("64Mi", "m"), watching, config=config)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ((), "container"),
        ((shares("a", "pod"),), "pod"),
        ((shares("m", "pod"),), "pod"),
        ((shares("m", "container"),), "container"),
        ((shares("a", "pod"), shares("b", "pod"), shares("m", "pod")), "pod"),
        ((shares("a", "container", from_class=True), shares("a", "pod"), shares("m", "pod")), "pod"),
        ((shares("a", "pod"), shares("w", "container"), opaque({"sharing": 1}, driver="gpu.example.com")), "pod"),
    ],
)
def test_requests_without_sharing_use_the_value_of_the_others(config: tuple[Entry, ...], expected: str) -> None:
    """Both drivers record the same value. Other drivers' requests and requests with adminAccess do not matter."""
    assert [decided(sharing(*config), driver, inventory=NUMA).sharing for driver in DRIVERS] == [expected, expected]


_DIFFER = "parameters: sharing: applies to the whole claim, but its requests differ (%s); set the same value for all"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            [shares("a", "pod"), shares("b", "container", from_class=True)],
            _DIFFER % "a of dra.cpu: pod in the claim, b of dra.cpu: container in the DeviceClass",
        ),
        (
            [shares("a", "pod"), shares("m", "container")],
            _DIFFER % "a of dra.cpu: pod in the claim, m of dra.memory: container in the claim",
        ),
        ([memory_opaque({"limit": "all"})], "request m: parameters of the claim: memoryConfig.limit: 'all'"),
    ],
)
def test_both_drivers_refuse_a_claim_with_the_same_message(config: list[Entry], expected: str) -> None:
    """One container uses the whole claim, so either both drivers prepare the claim or both refuse it."""
    text, same = (refused(sharing(*config), driver, inventory=NUMA) for driver in DRIVERS)
    assert text == same
    assert text.startswith(f"claim ns/claim-u: {expected}")
