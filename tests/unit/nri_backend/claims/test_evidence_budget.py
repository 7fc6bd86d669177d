# SPDX-License-Identifier: Apache-2.0
"""Limits on the CPU time and memory that the backend spends on a container's environment variables, which are written
by the pod's author. CPU time is measured because it does not depend on the machine's load.
"""

import tracemalloc
from collections.abc import Callable
from typing import Final

import pytest
from nri_backend._pb import nri_pb2 as pb
from nri_backend.claims.authorization import MAX_CLAIMS, Claims, Reason, Rejection, authorize, read_evidence
from nri_backend.claims.entitlement import Entitlement
from nri_backend.containers.container import tracked_as
from nri_backend.containers.state import MAX_REJECTED, NodeState
from nri_backend.frontend_link.reports import report
from nri_backend.nri.model import MAX_VARIABLE_BYTES, MAX_VARIABLES
from nri_backend.nri.plugin import read_container

from tests.fakes.waiting import PATIENCE
from tests.rigs.builders import cpu_record, files_of
from tests.rigs.containers import container, pod
from tests.rigs.cpu_time import cpu_seconds

MEGABYTE: Final = 1 << 20
ONE = cpu_record("c1", "cpus=2-3")
TWO = cpu_record("c2", "a=2-3", "b=6")
HOOK_SECONDS: Final = 0.05
SNAPSHOT_SECONDS: Final = 0.2
"""CPU time allowed for 100 containers: a fifth of the one second that 500 containers may take."""
ENVIRONMENTS: Final[dict[str, Callable[[], list[str]]]] = {
    "ranges": lambda: ["DRA_CPUSET_x=" + "0-65535," * (3 * MEGABYTE // 16)],
    "small ranges": lambda: ["DRA_CPUSET_c1=" + "0-8191," * (3 * MEGABYTE // 14)],
    "single CPUs": lambda: ["DRA_CPUSET_x=" + "0," * (3 * MEGABYTE // 4)],
    "ascending": lambda: ["DRA_CPUSET_c1=" + ",".join(map(str, range(0, 8192, 2)))],
    "a long name": lambda: ["DRA_CPUSET_" + "x" * (3 * MEGABYTE // 2) + "=0"],
    "unknown claims": lambda: [f"DRA_CPUSET_x{n}=0-8191" for n in range(30_000)],
    "many variables of one claim": lambda: [f"DRA_CPUSET_c2={n}" for n in range(30_000)],
    "maximum number of claims": lambda: [f"DRA_CPUSET_x{n}=0-8191" for n in range(MAX_CLAIMS)],
    "maximum number of variables": lambda: [f"DRA_CPUSET_x{n % MAX_CLAIMS}_{n}=0-8191" for n in range(MAX_VARIABLES)],
    "memory claims": lambda: [f"DRAMEMORY_m{n}_r_hugepages_2Mi=numanode:0" for n in range(30_000)],
    "unrelated variables": lambda: [f"SERVICE_{n}=tcp://10.0.0.1:80" for n in range(30_000)],
    "the driver's variable last": lambda: [
        *(f"S_{n}=tcp://10.0.0.1:80" for n in range(30_000)),
        "DRA_CPUSET_c1=0-8191,0-8191",
    ],
}


@pytest.fixture(params=ENVIRONMENTS)
def message(request: pytest.FixtureRequest) -> pb.Container:
    return pb.Container(id="c", name="main", env=ENVIRONMENTS[request.param]())


def test_any_environment_is_checked_within_a_hooks_cpu_time_limit(message: pb.Container) -> None:
    """The time covers everything from the parsed message to the report of the rejection.

    The rejection's message and the report are short.
    """
    claims = Claims(files_of(ONE, TWO))

    def work() -> tuple[Entitlement, Rejection | None, str]:
        tracked = tracked_as(pod(), read_container(message))
        held, _, rejection = authorize(tracked.identity.evidence, tracked.identity.user, claims)
        return held, rejection, report(tracked).model_dump_json()

    assert cpu_seconds(work) < HOOK_SECONDS
    held, rejection, report_json = work()
    assert held.cpus == frozenset()
    assert len(rejection.text if rejection else "") < 1000
    assert len(report_json) < 10_000


def test_a_snapshot_of_containers_with_large_environments_is_checked_in_time(message: pb.Container) -> None:
    """The runtime sends its containers in several messages, and all of them are authorized together."""
    sent = read_container(message)
    claims = Claims(files_of(ONE, TWO))

    def work() -> None:
        for _ in range(100):
            tracked = tracked_as(pod(), sent)
            authorize(tracked.identity.evidence, tracked.identity.user, claims)

    assert cpu_seconds(work) < SNAPSHOT_SECONDS * PATIENCE


def test_an_environment_beyond_the_limits_is_malformed() -> None:
    """One variable, one byte or one claim beyond the limit is enough."""
    at_most = tuple(f"DRA_CPUSET_x{n % MAX_CLAIMS}_{n}=0" for n in range(MAX_VARIABLES))
    assert read_evidence(at_most).fault == ""
    assert "more than 64 of this driver's claims" in read_evidence((*at_most[1:], "DRA_CPUSET_y=0")).fault
    several = pb.Container(env=[*at_most, *at_most])
    long = pb.Container(env=["DRA_CPUSET_x=" + "0" * MAX_VARIABLE_BYTES])
    for message in (several, long):
        tracked = tracked_as(pod(), read_container(message))
        _, _, rejection = authorize(tracked.identity.evidence, tracked.identity.user, Claims())
        assert rejection is not None
        assert rejection.reason == Reason.MALFORMED
        assert f"more than {MAX_VARIABLES} variables or 64 KiB" in rejection.text


def test_rejected_attempts_are_stored_without_their_environments() -> None:
    """The maximum number of stored attempts, each with the largest environment that the backend reads, takes less than
    6 MiB.
    """
    state = NodeState()
    value = "0" * (MAX_VARIABLE_BYTES // MAX_VARIABLES - 40)
    tracemalloc.start()
    for number in range(MAX_REJECTED):
        env = [f"DRA_CPUSET_x{number}-{n % MAX_CLAIMS}_{n}={value}" for n in range(MAX_VARIABLES)]
        tracked = state.authorized(tracked_as(pod(f"p{number}"), container(f"c{number}", *env, of=f"p{number}")))
        assert tracked.rejection is not None
        state.reject(tracked)
        del env, tracked
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(state.rejected) == MAX_REJECTED
    assert kept < 6 * MEGABYTE
