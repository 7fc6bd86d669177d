# SPDX-License-Identifier: Apache-2.0
"""Limits that the operator sets for tenants, and bounds on the cost of a hostile claim."""

from typing import Any

import pytest
from dra_frontend.allocation.claim import RefusedError
from dra_frontend.allocation.ledger import Ledger
from dra_frontend.devices.inventory import build_inventory
from numa_contract.cdi import ClaimFile
from numa_contract.config import Config, MemoryProtection

from tests.rigs.builders import NODE, cpus, memory, memory_opaque, opaque, report
from tests.rigs.cpu_time import cpu_seconds
from tests.rigs.decisions import INVENTORY, decided, holding, refused, view
from tests.strategies.machines import Core, assemble

CONFIG = Config(reserved_cpus=frozenset({0}))
HALF = CONFIG.model_copy(update={"max_claim_fraction": 0.5})
MIB = 1 << 20
BUDGET_SECONDS = 0.1


def test_a_claim_gets_at_most_the_configured_fraction_of_the_cpus() -> None:
    """Half of the node's seven CPUs is rounded down to three. The refusal gives the configuration key, its value and a
    remedy.
    """
    two = (cpus(2, "a"), cpus(2, "b", "cpudevnuma001"))
    assert decided(view("u", cpus(3)), config=HALF).cpus_of() == {1, 4, 5}
    text = refused(view("u", *two), config=HALF)
    assert (
        "4 CPUs requested, but one claim may have at most 3 of the 7 that this node offers (maxClaimFraction: 0.5)"
        in text
    )
    assert text.endswith("claim fewer")
    former = decided(view("u", *two))
    assert decided(view("u", *two), ledger=holding(former), config=HALF).cpus == former.cpus


def protecting(kind: str, size: str = "64Mi", uid: str = "u", node: int = 0) -> Any:
    """Returns a claim that asks for memory protection."""
    return view(uid, memory(size, node=node), config=(memory_opaque({"protect": kind}),))


def test_only_the_allowed_kinds_of_protection_are_accepted() -> None:
    """The default is `low`; an operator may allow other kinds or none."""
    assert decided(protecting("low"), "dra.memory").memory_parameters_of("memory").protect == "low"
    text = refused(protecting("min"), "dra.memory")
    assert "memoryConfig.protect: min is not allowed on this node (memoryProtection.allowed); use none or low" in text
    none = Config(memory_protection=MemoryProtection(allowed=()))
    assert text.replace(" or low", "").replace("min is", "low is") == refused(
        protecting("low"), "dra.memory", config=none
    )
    decided(protecting("none"), "dra.memory", config=none)


def test_all_claims_together_protect_at_most_a_fraction_of_a_numa_node() -> None:
    """Memory that other claims protect counts toward the fraction, even while these claims are being released.
    Protected memory on other NUMA nodes does not count.
    """
    node = INVENTORY.machine.numa_nodes[0].memory_bytes
    first = decided(protecting("low", str(node // 4)), "dra.memory")
    text = refused(protecting("low", str(node // 2), "v"), "dra.memory", holding(first))
    have = f"{node // 4} of at most {node // 2} bytes"
    assert f"{node // 2} bytes on NUMA node 0 requested, but other claims already protect {have}" in text
    assert "(memoryProtection.maxFraction: 0.5); claim less memory, or omit protect" in text
    leaving = Ledger({}, holding(first).files)
    assert refused(protecting("low", str(node // 2), "v"), "dra.memory", leaving) == text
    decided(protecting("low", "64Mi", "v", 1), "dra.memory", holding(first))
    decided(protecting("none", str(node // 2), "v"), "dra.memory", holding(first))
    assert decided(protecting("low", str(node // 4)), "dra.memory", holding(first)) == first


def test_hugepages_of_a_lost_record_are_held() -> None:
    """The container may still be using the pages, so no other claim gets them until the claim whose record was lost has
    been looked up on the API server.
    """
    running = report(
        unknownClaims=[{"uid": "x", "driver": "dra.memory"}],
        limits={
            "hugetlb.2MB.max": str(400 * MIB),
            "hugetlb.2MB.rsvd.max": "max",
            "hugetlb.x.max": "1",
            "memory.max": "9",
        },
        mems="0",
    )
    wanted = view("u", memory("400Mi", kind="hugepages-2m"))
    asked = refused(wanted, "dra.memory", Ledger({}, containers=(running,)))
    assert "no hugepages are allocated while the record of claim x is being rebuilt" in asked
    answered = Ledger({}, containers=(running,), lookup_results={("dra.memory", "x"): {}})
    assert "117440512 of 536870912 unclaimed" in refused(wanted, "dra.memory", answered)
    decided(view("u", memory("400Mi", kind="hugepages-2m", node=1)), "dra.memory", answered)
    held = {"hugepages-2m-numa000": 200 * MIB}
    counted = Ledger({}, containers=(running,), lookup_results={("dra.memory", "x"): held})
    assert f"{312 * MIB} of 536870912 unclaimed" in refused(wanted, "dra.memory", counted), (
        "the limits do not count in addition to the claim"
    )
    absent = Ledger({}, absent=frozenset({("dra.memory", "y")}))
    assert "the record of claim y is being rebuilt" in refused(wanted, "dra.memory", absent)
    decided(view("y", memory("400Mi", kind="hugepages-2m")), "dra.memory", absent)
    decided(view("u", memory("400Mi")), "dra.memory", absent)  # Only hugepages are allocated exclusively.


def test_a_running_container_holds_resources_without_a_record() -> None:
    """The backend still has a record of the claim, but this frontend instance has neither the claim's file nor a
    release entry.
    """
    uses: dict[str, Any] = {"claims": [{"uid": "gone", "driver": "dra.cpu"}], "cpus": "4-5"}
    assert Ledger({}, containers=(report(**uses),)).held_cpus() == {4, 5}
    assert Ledger({}, containers=(report(**uses, refused="no"),)).held_cpus() == frozenset()
    assert Ledger({}, containers=(report(state="stopped", **uses),)).held_cpus() == frozenset()
    record = decided(view("gone", cpus(2)))
    for ledger in (holding(record, containers=(report(**uses),)), Ledger({}, holding(record).files)):
        assert ledger.held_cpus() == {1, 5}


def test_too_many_or_too_long_parameters_are_refused_with_a_short_error() -> None:
    """A claim with more than 32 entries per driver, the API server's maximum, is refused. A CPU list is parsed only
    if it applies to a request, and the error for an invalid list quotes only its beginning.
    """
    with pytest.raises(RefusedError, match="33 entries for this driver"):
        view("u", cpus(1), config=[opaque({})] * 33)
    others = [opaque({}, driver="gpu.example.com")] * 31
    decided(view("u", cpus(1), config=[*others, *[opaque({})] * 32]))
    text = refused(view("u", cpus(1), config=[opaque({"cpuset": "x" * 9000})]))
    assert "cpuConfig.cpuset: 'xxx" in text
    assert len(text) < 400


def test_many_requests_on_a_large_machine_are_refused_within_the_time_budget() -> None:
    """There are 32 requests for one L3 each, but only 31 free L3 groups. The refusal arrives within the time budget,
    whatever the order of the requests.
    """
    large = assemble([Core(n // 128, n // 64, n // 4, 2) for n in range(512)])
    inventory = build_inventory(large, Config(group_by="machine", reserved_cpus=frozenset({0})), NODE)
    l3s = sorted({cpu.l3 for cpu in large.cpus.values() if cpu.l3 is not None})
    loose = sorted(cpu.id for cpu in large.cpus.values() if cpu.l3 in l3s[31:])
    held = {("dra.cpu", "x"): ClaimFile("dra.cpu", "x", None, frozenset(loose) - frozenset(loose[::8]))}
    wanted = view("u", *(cpus(6, f"r{n}", "cpudevmachine") for n in range(32)), config=[opaque({"l3": "required"})])
    said: list[str] = []
    seconds = cpu_seconds(lambda: said.append(refused(wanted, inventory=inventory, ledger=Ledger(held))))
    assert all("no single L3 group has that many" in text for text in said)
    assert seconds < BUDGET_SECONDS
