# SPDX-License-Identifier: Apache-2.0
"""The CPUs that a container may use, as explain, doctor and the claim status compute them."""

from typing import Any

from dra_frontend.allocation.entitlement import claimed_cpus, entitled_cpus, shares_pool
from dra_frontend.allocation.ledger import Ledger
from numa_contract.records import PoolCpus
from numa_contract.reports import ContainerReport

from tests.rigs.builders import cpu_record, files_of, memory_record, report

TWO = cpu_record("u1", "a=0-1", "b=2-3")
OTHER = cpu_record("u2", "r=6")
BESIDE = TWO.model_copy(update={"pool_cpus": {"a": PoolCpus(cpus=frozenset({4, 5, 6, 7}), near=frozenset({4}))}})


def user(*requests: str, driver: str = "dra.cpu", uid: str = "u1") -> ContainerReport:
    """Returns a container that names some of a claim's requests."""
    use: dict[str, Any] = {"uid": uid, "driver": driver, "requests": requests}
    return report("c", claims=[use])


def test_a_container_is_entitled_to_the_requests_that_it_names() -> None:
    """A backend from an older release reports no request names. In that case, the container is entitled to the CPUs
    from all of the claim's requests.
    """
    ledger = Ledger(files_of(TWO, OTHER))
    assert entitled_cpus(user("a"), ledger) == claimed_cpus(user("a"), ledger) == {0, 1}
    assert entitled_cpus(user("a", "b"), ledger) == entitled_cpus(user(), ledger) == {0, 1, 2, 3}


def test_a_container_can_be_entitled_to_the_pool() -> None:
    """A container that names the request with the pool option also gets the unclaimed pool CPUs."""
    ledger = Ledger(files_of(BESIDE, OTHER))
    assert entitled_cpus(user("a"), ledger) == {0, 1, 4, 5, 7}
    assert (claimed_cpus(user("a"), ledger), shares_pool(user("a"), ledger)) == ({0, 1}, True)
    assert (entitled_cpus(user("b"), ledger), shares_pool(user("b"), ledger)) == ({2, 3}, False)


def test_a_container_without_a_cpu_request_has_no_cpus_of_its_own() -> None:
    """A container without a CPU request uses the shared pool, even if other containers use CPUs from the same claim."""
    ledger = Ledger(files_of(TWO, memory_record("u1", ("m", 0, 1 << 20, 4096))))
    assert entitled_cpus(user("m", driver="dra.memory"), ledger) == frozenset()
    assert entitled_cpus(user("r", uid="unknown"), ledger) == frozenset()
