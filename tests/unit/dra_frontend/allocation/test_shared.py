# SPDX-License-Identifier: Apache-2.0
"""Claims that use shared-pool CPUs in addition to their own: which CPUs these are, and how the containers learn about
them.
"""

import json

from dra_frontend.allocation.cpus import shared_cpus
from dra_frontend.claims.metadata import MetadataFiles
from dra_frontend.machine.model import Machine
from hypothesis import given
from hypothesis import strategies as st
from numa_contract.cdi import dump_claim_file
from numa_contract.cpuset import parse_cpu_list
from numa_contract.names import parse_env_key
from numa_contract.records import AllocationRecord, CpuAllocation, CpuParameters

from tests.rigs.builders import cpus, opaque
from tests.rigs.decisions import INVENTORY, decided, lost, view
from tests.strategies.machines import SYNTHETIC

NODE_0 = parse_cpu_list("0-1,4-5")


def claimed(shared: str, *requests: str) -> AllocationRecord:
    """Returns a claim with the requests `cpus` and `other`, whose CPUs are 1 and 5 of NUMA node 0 and 2 of node 1."""
    found = view("u", cpus(2), cpus(1, "other", "cpudevnuma001"), config=[opaque({"shared": shared}, *requests)])
    return decided(found)


def test_the_pool_is_every_cpu_but_the_claims() -> None:
    """The backend knows which of these CPUs are in the pool at a given time. Reserved CPUs are included if all others
    are claimed.
    """
    shared = claimed("pool").shared_cpus
    assert shared.keys() == {"cpus", "other"}
    for one in shared.values():
        assert one.cpus == one.near == parse_cpu_list("0,3-4,6-7")


def test_numa_is_what_is_near_each_request() -> None:
    """A request without the option gets only its own CPUs. If the claim has a whole NUMA node, the entire pool counts
    as near.
    """
    shared = claimed("numa", "cpus").shared_cpus
    assert shared.keys() == {"cpus"}
    assert (shared["cpus"].near, shared["cpus"].cpus) == (parse_cpu_list("0,4"), parse_cpu_list("0,3-4,6-7"))
    whole = [CpuAllocation(request="cpus", device="d", cpus=NODE_0)]
    (only,) = shared_cpus(whole, {"cpus": CpuParameters(shared="numa")}, INVENTORY.machine).values()
    assert only.near == only.cpus == parse_cpu_list("2-3,6-7")


def test_a_lost_record_comes_back_with_it() -> None:
    """The record is rebuilt from the claim and from the CPUs that its containers hold."""
    found = view("u", cpus(2), config=[opaque({"shared": "numa"})])
    record = decided(found, ledger=lost("u", {"": frozenset({4, 5})}))
    assert (record.rebuilt, record.cpus_of(), record.shared_cpus["cpus"].near) == (True, {4, 5}, {0, 1})


def test_containers_are_told_both_sets() -> None:
    """There is a variable and an attribute for each set. The variable is not evidence, so a pod gains nothing by
    setting it.
    """
    record = claimed("numa", "cpus")
    devices = json.loads(dump_claim_file(record))["devices"]
    env = {device["name"]: dict(e.split("=") for e in device["containerEdits"]["env"]) for device in devices}
    assert env == {
        "claim-u-cpus": {"DRA_CPUSET_u_cpus": "1,5", "DRA_SHARED_CPUSET_u_cpus": "0,3-4,6-7"},
        "claim-u-other": {"DRA_CPUSET_u_other": "2"},
    }
    assert parse_env_key("DRA_SHARED_CPUSET_u_cpus") is None
    files = MetadataFiles("/var/lib/kubelet/plugins", enabled=True)
    found = view("u", cpus(2), cpus(1, "other", "cpudevnuma001"))
    told = {
        request: json.loads(file.content)["requests"][0]["devices"][0]["attributes"]
        for request, file in files.describe(record, found, INVENTORY).metadata.items()
    }
    assert told["cpus"]["dra.cpu/exclusiveCPUs"] == {"string": "1,5"}
    assert told["cpus"]["dra.cpu/sharedCPUs"] == {"string": "0,3-4,6-7"}
    assert "dra.cpu/sharedCPUs" not in told["other"]


@given(st.sampled_from(sorted(SYNTHETIC)), st.data())
def test_no_claimed_cpu_is_ever_among_them(name: str, data: st.DataObject) -> None:
    """On any machine and with any requests, the near set is a subset of the pool and is empty only if the pool is."""
    machine: Machine = SYNTHETIC[name]
    sets = data.draw(st.lists(st.frozensets(st.sampled_from(sorted(machine.online)), min_size=1), max_size=3))
    parts = [CpuAllocation(request=str(n), device="d", cpus=one) for n, one in enumerate(sets)]
    words = st.sampled_from(["none", "pool", "numa"])
    wanted = {part.request: CpuParameters(shared=data.draw(words)) for part in parts}
    found = shared_cpus(parts, wanted, machine)
    assert found.keys() == {request for request, one in wanted.items() if one.shared != "none"}
    for one in found.values():
        assert not one.cpus & frozenset().union(*sets)
        assert one.near <= one.cpus
        assert bool(one.near) == bool(one.cpus)
