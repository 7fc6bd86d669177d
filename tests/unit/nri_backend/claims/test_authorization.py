# SPDX-License-Identifier: Apache-2.0
"""How the backend determines which claims a container may use: the container's environment is evidence, but the claim
records are authoritative.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import Claims, Reason, Rejection, authorize, claim_use, read_evidence
from nri_backend.claims.entitlement import Entitlement
from numa_contract.cdi import ClaimFile
from numa_contract.records import AllocationRecord, Owner

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record

ME = Owner(pod_uid="p1", container="main")
SIDE = Owner(pod_uid="p1", container="side")
ONE = cpu_record("c1", "cpus=2-3")
TWO = cpu_record("c2", "a=2-3", "b=6")
MEM = memory_record("m1", ("m", 0, 64 * MI, 2 * MI), ("n", 1, 4 * MI, 2 * MI), ("n", 1, 512 * MI, 4096))


def entitlement_for(
    env: tuple[str, ...], *records: AllocationRecord, user: Owner = ME, first: Owner | None = None
) -> Entitlement:
    """Returns the entitlement of a container that must not be rejected."""
    first_users = {(r.driver, r.claim.uid): first for r in records} if first else {}
    entitlement, _, rejection = authorize(read_evidence(env), user, Claims(files_of(*records), first_users))
    assert rejection is None
    return entitlement


def rejection_for(
    env: tuple[str, ...], *records: AllocationRecord, user: Owner = ME, first: Owner | None = None
) -> Rejection:
    """Returns the rejection of a container that must be rejected."""
    first_users = {(r.driver, r.claim.uid): first for r in records} if first else {}
    _, _, rejection = authorize(read_evidence(env), user, Claims(files_of(*records), first_users))
    assert rejection is not None
    return rejection


def test_a_container_without_claim_variables_holds_no_claim() -> None:
    """Other variables, and names with only part of the driver's prefix, are ignored."""
    assert entitlement_for(("PATH=/bin", "DRA_CPU=1", "BARE"), ONE) == Entitlement()


def test_the_entitlement_is_the_sum_over_the_recorded_claims() -> None:
    """CPUs, NUMA nodes and hugepages are added up across claims and requests."""
    entitlement = entitlement_for(env_of(ONE) + env_of(MEM), ONE, MEM)
    assert entitlement.cpus == {2, 3}
    assert entitlement.mems == {0, 1}
    assert dict(entitlement.hugepages) == {(2 * MI, "m1", "m"): 64 * MI, (2 * MI, "m1", "n"): 4 * MI}
    assert entitlement.env == {}


def test_a_container_is_entitled_only_to_the_requests_that_it_names() -> None:
    """A container may use just one of a claim's requests."""
    assert entitlement_for(env_of(TWO, "b"), TWO).cpus == {6}
    assert entitlement_for(env_of(MEM, "m"), MEM).mems == {0}


def test_the_union_variable_for_several_requests_is_added_and_accepted() -> None:
    """Launchers read DRA_CPUSET_<uid>.

    The backend adds the variable to the container, so the runtime includes it in all later messages. The backend
    accepts it in these messages, but does not count it as evidence of a claim.
    """
    entitlement = entitlement_for(env_of(TWO), TWO)
    assert entitlement.env == {"DRA_CPUSET_c2": "2-3,6"}
    again = entitlement_for((*env_of(TWO), "DRA_CPUSET_c2=2-3,6"), TWO)
    assert (again.cpus, again.env) == (entitlement.cpus, entitlement.env)


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (("DRA_CPUSET_=0",), Reason.MALFORMED),
        (("DRA_CPUSET_x y=0",), Reason.MALFORMED),
        (("DRAMEMORY_m1_what=0",), Reason.MALFORMED),
        (("DRA_CPUSET_other=0-3",), Reason.NO_RECORD),
        (("DRA_CPUSET_c1=0-7",), Reason.FORGED),
        (("DRA_CPUSET_c1=nonsense",), Reason.FORGED),
        (("DRA_CPUSET_c1_cpus=2-3",), Reason.FORGED),
        (("DRA_CPUSET_c1=2-3", "DRA_CPUSET_c1=0"), Reason.FORGED),
        (("DRA_CPUSET_c2=2-3,6",), Reason.FORGED),
        (("DRA_CPUSET_c2_a=2-3", "DRA_CPUSET_c2=2-3,6"), Reason.FORGED),
        (("DRA_CPUSET_c2_z=2-3",), Reason.FORGED),
        (("DRAMEMORY_m1_m_NUMANodes=0",), Reason.FORGED),
        ((*env_of(MEM, "m")[:1], "DRAMEMORY_m1_m_hugepages_2Mi=numanode:0,size:1Gi"), Reason.FORGED),
    ],
)
def test_variables_that_differ_from_the_record_are_rejected(env: tuple[str, ...], reason: Reason) -> None:
    """A pod can set any variable, but none of them widens the container's entitlement. The rejection names the
    variable.
    """
    rejection = rejection_for(env, ONE, TWO, MEM)
    assert rejection.reason == reason
    assert env[0].partition("=")[0] in rejection.text or env[-1].partition("=")[0] in rejection.text


def test_a_pod_is_rejected_until_the_record_lists_it() -> None:
    """The record's ``reservedFor`` is a snapshot.

    After a rejection, the claim is reported to the frontend, which reads it again.
    """
    rejection = rejection_for(env_of(ONE), ONE, user=Owner(pod_uid="p2", container="main"))
    assert rejection.reason == Reason.NOT_RESERVED
    assert [(use.uid, use.cpus) for use in rejection.unknown_claims] == [("c1", frozenset())]
    assert "ns/claim-c1 (c1) is recorded for pod ns/p1 and not for this pod" in rejection.text
    assert "If the pod names the claim in spec.resourceClaims" in rejection.text
    wider = cpu_record("c1", "cpus=2-3", pods=("p1", "p2"))
    assert entitlement_for(env_of(ONE), wider, user=Owner(pod_uid="p2", container="main")).cpus == {2, 3}


def test_an_unreadable_record_is_treated_as_missing() -> None:
    """The message gives the cause, and the claim is reported to the frontend so that the frontend rebuilds
    the record.
    """
    files = {("dra.cpu", "c1"): ClaimFile("dra.cpu", "c1", None, frozenset({2, 3}), "no record (KeyError)")}
    _, _, rejection = authorize(read_evidence(env_of(ONE)), ME, Claims(files))
    assert rejection is not None
    assert rejection.reason == Reason.NO_RECORD
    assert "KeyError" in rejection.text
    assert [use.uid for use in rejection.unknown_claims] == ["c1"]


def test_an_unusable_record_affects_only_its_own_claim() -> None:
    """No share of the claim can be computed from an unusable record. The node's and the container's other claims remain
    usable.
    """
    broken = cpu_record("c9", "cpus=7").model_copy(update={"cpus": (None,)})
    files = files_of(ONE) | {("dra.cpu", "c9"): ClaimFile("dra.cpu", "c9", broken, frozenset({7}))}
    evidence = read_evidence((*env_of(ONE), "DRA_CPUSET_c9=7"))
    entitlement, _, rejection = authorize(evidence, ME, Claims(files))
    assert entitlement.cpus == {2, 3}
    assert rejection is not None
    assert rejection.reason == Reason.NO_RECORD
    assert "its record cannot be used (AttributeError" in rejection.text
    assert [use.uid for use in rejection.unknown_claims] == ["c9"]


OTHER_POD = Owner(pod_uid="p2", container="main")


@pytest.mark.parametrize("source", ["record", "memory"])
@pytest.mark.parametrize(
    ("sharing", "owner", "user", "allowed"),
    [
        (False, ME, ME, True),
        (False, ME, SIDE, False),
        (True, ME, SIDE, True),
        (True, ME, OTHER_POD, False),
        (False, OTHER_POD, ME, False),
        (False, Owner(pod_uid="p9", container="main"), ME, True),
    ],
)
def test_only_its_owner_can_use_a_claim(source: str, sharing: bool, owner: Owner, user: Owner, allowed: bool) -> None:
    """The owner is a single container, or all containers in one pod if the claim is shared.

    Ownership ends when the owner's pod is removed from ``reservedFor``.
    """
    recorded = owner if source == "record" else None
    record = cpu_record("c1", "cpus=2-3", pods=("p1", "p2"), pool=sharing, owner=recorded)
    first = owner if source == "memory" else None
    if allowed:
        assert entitlement_for(env_of(record), record, user=user, first=first).cpus == {2, 3}
    else:
        rejection = rejection_for(env_of(record), record, user=user, first=first)
        assert rejection.reason == Reason.SHARED
        assert f"container {owner.container} of pod ns/{owner.pod_uid}" in rejection.text, "pods are named by their UID"
        assert [one.uid for one in rejection.claims] == ["c1"]
        assert rejection.unknown_claims == (), "reading the claim again would not change the result"


def test_one_invalid_claim_rejects_the_container() -> None:
    """If a container names several claims without a record, all of them are reported, so that the frontend can restore
    their records.
    """
    rejection = rejection_for((*env_of(ONE), "DRA_CPUSET_x=5", "DRAMEMORY_y_NUMANodes=0"), ONE)
    assert rejection.reason == Reason.NO_RECORD
    assert {use.uid for use in rejection.unknown_claims} == {"x", "y"}


def test_evidence_contains_each_request_once() -> None:
    """A claim is reported once, together with its requests.

    The union variable is not a request, and the CPUs in the environment are not reported.
    """
    evidence = read_evidence((*env_of(TWO), "DRA_CPUSET_c2=2-3,6", *env_of(MEM, "n")))
    named = [claim_use(key, variables) for key, variables in evidence.claims.items()]
    assert [(one.uid, one.requests) for one in named] == [("c2", ("a", "b")), ("m1", ("n",))]
    assert not any(one.cpus for one in named)


NAMES = st.sampled_from(
    ["DRA_CPUSET_c1", "DRA_CPUSET_c2", "DRA_CPUSET_c2_a", "DRA_CPUSET_c2_b", "DRA_CPUSET_zz", "HOME"]
)
VALUES = st.sampled_from(["2-3", "6", "2-3,6", "0-7", "", "x", "3,2"])


@given(st.lists(st.builds("{}={}".format, NAMES, VALUES), max_size=5))
def test_no_environment_widens_the_entitlement(env: list[str]) -> None:
    """Whatever its variables, a container is entitled only to its claims' CPUs, and every rejection has a message."""
    entries = tuple(entry for entry in env if not entry.startswith("HOME"))
    entitlement, _, rejection = authorize(read_evidence(entries), ME, Claims(files_of(ONE, TWO)))
    assert entitlement.cpus == frozenset().union(*(one.record.cpus_of(one.requests) for one in entitlement.claims))
    assert entitlement.cpus <= {2, 3, 6}
    assert rejection is None or rejection.text


def test_an_unknown_sharing_value_means_no_sharing() -> None:
    """A newer frontend may write a value that this release does not know."""
    record = cpu_record("c1", "cpus=2-3", pool=True, owner=SIDE)
    assert entitlement_for(env_of(record), record).cpus == {2, 3}
    strict = record.model_copy(update={"sharing": "unknown"})
    assert rejection_for(env_of(strict), strict).reason == Reason.SHARED
