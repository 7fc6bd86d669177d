# SPDX-License-Identifier: Apache-2.0
"""Claims that use shared-pool CPUs in addition to their own: which CPUs these are, and how containers find out about
them.
"""

import json

from dra_frontend.allocation.cpus import pool_cpus
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


def claimed(word: str, *requests: str) -> AllocationRecord:
    """Returns the record of a claim with two requests: ``cpus`` holds CPUs 1 and 5 on NUMA node 0, and ``other`` holds
    CPU 2 on node 1.
    """
    found = view("u", cpus(2), cpus(1, "other", "cpudevnuma001"), config=[opaque({"poolCPUs": word}, *requests)])
    return decided(found)


def test_the_pool_is_every_cpu_outside_the_claim() -> None:
    """Only the backend knows which of the CPUs outside the claim are in the pool at a given time. Reserved CPUs are
    included if all others are claimed.
    """
    found = claimed("all").pool_cpus
    assert found.keys() == {"cpus", "other"}
    for one in found.values():
        assert one.cpus == one.near == parse_cpu_list("0,3-4,6-7")


def test_near_pool_cpus_are_on_the_numa_nodes_of_each_request() -> None:
    """A request without the option gets only its own CPUs. If the claim holds a whole NUMA node, the entire pool counts
    as near.
    """
    found = claimed("numa", "cpus").pool_cpus
    assert found.keys() == {"cpus"}
    assert (found["cpus"].near, found["cpus"].cpus) == (parse_cpu_list("0,4"), parse_cpu_list("0,3-4,6-7"))
    whole = [CpuAllocation(request="cpus", device="d", cpus=NODE_0)]
    (only,) = pool_cpus(whole, {"cpus": CpuParameters(pool_cpus="numa")}, INVENTORY.machine).values()
    assert only.near == only.cpus == parse_cpu_list("2-3,6-7")


def test_a_rebuilt_record_includes_the_pool_cpus() -> None:
    """The record is rebuilt from the claim and from the CPUs that the claim's containers hold."""
    found = view("u", cpus(2), config=[opaque({"poolCPUs": "numa"})])
    record = decided(found, ledger=lost("u", {"": frozenset({4, 5})}))
    assert (record.rebuilt, record.cpus_of(), record.pool_cpus["cpus"].near) == (True, {4, 5}, {0, 1})


def test_containers_get_both_cpu_sets() -> None:
    """There is one environment variable and one attribute for each set. The driver does not trust these variables, so a
    pod gains nothing by setting one.
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
    assert told["cpus"]["dra.cpu/poolCPUs"] == {"string": "0,3-4,6-7"}
    assert "dra.cpu/poolCPUs" not in told["other"]


@given(st.sampled_from(sorted(SYNTHETIC)), st.data())
def test_pool_cpus_never_include_claimed_ones(name: str, data: st.DataObject) -> None:
    """On any machine and for any requests, the near set is a subset of the pool, and it is empty only if the pool
    is.
    """
    machine: Machine = SYNTHETIC[name]
    sets = data.draw(st.lists(st.frozensets(st.sampled_from(sorted(machine.online)), min_size=1), max_size=3))
    parts = [CpuAllocation(request=str(n), device="d", cpus=one) for n, one in enumerate(sets)]
    words = st.sampled_from(["none", "all", "numa"])
    wanted = {part.request: CpuParameters(pool_cpus=data.draw(words)) for part in parts}
    found = pool_cpus(parts, wanted, machine)
    assert found.keys() == {request for request, one in wanted.items() if one.pool_cpus != "none"}
    for one in found.values():
        assert not one.cpus & frozenset().union(*sets)
        assert one.near <= one.cpus
        assert bool(one.near) == bool(one.cpus)
