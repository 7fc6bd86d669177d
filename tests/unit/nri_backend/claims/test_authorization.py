# SPDX-License-Identifier: Apache-2.0
"""Which claims a container holds: the environment is evidence, the record is authority."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nri_backend.claims.authorization import Claims, Reason, Rejection, authorize, read_evidence, use
from nri_backend.claims.entitlement import Entitlement
from numa_contract.cdi import ClaimFile
from numa_contract.records import AllocationRecord, Owner

from tests.rigs.builders import MI, cpu_record, env_of, files_of, memory_record

ME = Owner(pod_uid="p1", container="main")
SIDE = Owner(pod_uid="p1", container="side")
ONE = cpu_record("c1", "cpus=2-3")
TWO = cpu_record("c2", "a=2-3", "b=6")
MEM = memory_record("m1", ("m", 0, 64 * MI, 2 * MI), ("n", 1, 4 * MI, 2 * MI), ("n", 1, 512 * MI, 4096))


def held(env: tuple[str, ...], *records: AllocationRecord, user: Owner = ME, first: Owner | None = None) -> Entitlement:
    """What is held, when nothing is refused."""
    first_users = {(r.driver, r.claim.uid): first for r in records} if first else {}
    entitlement, _, rejection = authorize(read_evidence(env), user, Claims(files_of(*records), first_users))
    assert rejection is None
    return entitlement


def refused(
    env: tuple[str, ...], *records: AllocationRecord, user: Owner = ME, first: Owner | None = None
) -> Rejection:
    """Why it is refused."""
    first_users = {(r.driver, r.claim.uid): first for r in records} if first else {}
    _, _, rejection = authorize(read_evidence(env), user, Claims(files_of(*records), first_users))
    assert rejection is not None
    return rejection


def test_a_plain_container_holds_nothing() -> None:
    """Variables of others are not looked at."""
    assert held(("PATH=/bin", "DRA_CPU=1", "BARE"), ONE) == Entitlement()


def test_a_claim_is_held_as_recorded() -> None:
    """CPUs, NUMA nodes and hugepages come from the records, added up over claims and requests."""
    entitlement = held(env_of(ONE) + env_of(MEM), ONE, MEM)
    assert entitlement.cpus == {2, 3}
    assert entitlement.mems == {0, 1}
    assert dict(entitlement.hugepages) == {(2 * MI, "m1", "m"): 64 * MI, (2 * MI, "m1", "n"): 4 * MI}
    assert entitlement.env == {}


def test_one_request_of_a_claim_gives_no_more_than_that() -> None:
    """A container may use one request of a claim."""
    assert held(env_of(TWO, "b"), TWO).cpus == {6}
    assert held(env_of(MEM, "m"), MEM).mems == {0}


def test_several_requests_get_their_union_and_it_is_recognised_later() -> None:
    """Launchers read DRA_CPUSET_<uid>; the runtime shows it back to us in every later message."""
    entitlement = held(env_of(TWO), TWO)
    assert entitlement.env == {"DRA_CPUSET_c2": "2-3,6"}
    again = held((*env_of(TWO), "DRA_CPUSET_c2=2-3,6"), TWO)
    assert (again.cpus, again.env) == (entitlement.cpus, entitlement.env)


@pytest.mark.fault("memory peer, nri")
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
def test_what_is_not_the_record_is_refused(env: tuple[str, ...], reason: Reason) -> None:
    """A pod can write any variable; it never widens what a container gets, and the text names the variable."""
    rejection = refused(env, ONE, TWO, MEM)
    assert rejection.reason == reason
    assert env[0].partition("=")[0] in rejection.text or env[-1].partition("=")[0] in rejection.text


@pytest.mark.fault("cpu peer 9.4.4")
def test_a_pod_that_the_record_does_not_know_is_refused_until_it_does() -> None:
    """reservedFor is a snapshot: the rejection names the claim to the frontend, which reads it again."""
    rejection = refused(env_of(ONE), ONE, user=Owner(pod_uid="p2", container="main"))
    assert rejection.reason == Reason.NOT_RESERVED
    assert [(use.uid, use.cpus) for use in rejection.unknown] == [("c1", frozenset())]
    assert "ns/claim-c1 (c1) is recorded for pod ns/p1 and not for this pod" in rejection.text
    assert "If the pod names the claim in spec.resourceClaims" in rejection.text
    wider = cpu_record("c1", "cpus=2-3", pods=("p1", "p2"))
    assert held(env_of(ONE), wider, user=Owner(pod_uid="p2", container="main")).cpus == {2, 3}


def test_an_unreadable_record_is_no_record() -> None:
    """The text says what is wrong with the record; the claim is reported for rebuilding."""
    files = {("dra.cpu", "c1"): ClaimFile("dra.cpu", "c1", None, frozenset({2, 3}), "no record (KeyError)")}
    _, _, rejection = authorize(read_evidence(env_of(ONE)), ME, Claims(files))
    assert rejection is not None
    assert rejection.reason == Reason.NO_RECORD
    assert "KeyError" in rejection.text
    assert [use.uid for use in rejection.unknown] == ["c1"]


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
def test_a_claim_has_one_owner(source: str, sharing: bool, owner: Owner, user: Owner, allowed: bool) -> None:
    """One container, or the containers of one pod; the right ends when the owner's pod leaves reservedFor."""
    recorded = owner if source == "record" else None
    record = cpu_record("c1", "cpus=2-3", pods=("p1", "p2"), pool=sharing, owner=recorded)
    first = owner if source == "memory" else None
    if allowed:
        assert held(env_of(record), record, user=user, first=first).cpus == {2, 3}
    else:
        rejection = refused(env_of(record), record, user=user, first=first)
        assert rejection.reason == Reason.SHARED
        assert f"container {owner.container} of pod ns/{owner.pod_uid}" in rejection.text, "the builder names pods so"
        assert [one.uid for one in rejection.about] == ["c1"]
        assert rejection.unknown == (), "reading the claim again would change nothing"


def test_one_bad_claim_refuses_the_container_whole() -> None:
    """A container is never half believed, and every claim in question is reported."""
    rejection = refused((*env_of(ONE), "DRA_CPUSET_x=5", "DRAMEMORY_y_NUMANodes=0"), ONE)
    assert rejection.reason == Reason.NO_RECORD
    assert {use.uid for use in rejection.unknown} == {"x", "y"}


def test_evidence_names_each_request_once() -> None:
    """A claim is reported once, with its requests; the union beside them is not a request, and no CPU is believed."""
    evidence = read_evidence((*env_of(TWO), "DRA_CPUSET_c2=2-3,6", *env_of(MEM, "n")))
    named = [use(key, variables) for key, variables in evidence.claims.items()]
    assert [(one.uid, one.requests) for one in named] == [("c2", ("a", "b")), ("m1", ("n",))]
    assert not any(one.cpus for one in named)


NAMES = st.sampled_from(
    ["DRA_CPUSET_c1", "DRA_CPUSET_c2", "DRA_CPUSET_c2_a", "DRA_CPUSET_c2_b", "DRA_CPUSET_zz", "HOME"]
)
VALUES = st.sampled_from(["2-3", "6", "2-3,6", "0-7", "", "x", "3,2"])


@given(st.lists(st.builds("{}={}".format, NAMES, VALUES), max_size=5))
@pytest.mark.fault("protocol trap 7.9")
def test_no_environment_widens_what_the_records_give(env: list[str]) -> None:
    """Whatever a pod writes, it holds CPUs of its claims or nothing, and there is always an answer."""
    entries = tuple(entry for entry in env if not entry.startswith("HOME"))
    held, _, rejection = authorize(read_evidence(entries), ME, Claims(files_of(ONE, TWO)))
    assert held.cpus == frozenset().union(*(one.record.cpus_of(one.requests) for one in held.claims))
    assert held.cpus <= {2, 3, 6}
    assert rejection is None or rejection.text


def test_a_sharing_of_tomorrow_is_the_stricter_one() -> None:
    """A word that a newer frontend wrote lets nobody in beside the owner."""
    record = cpu_record("c1", "cpus=2-3", pool=True, owner=SIDE)
    assert held(env_of(record), record).cpus == {2, 3}
    strict = record.model_copy(update={"sharing": "of tomorrow"})
    assert refused(env_of(strict), strict).reason == Reason.SHARED
