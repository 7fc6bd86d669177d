# SPDX-License-Identifier: Apache-2.0
"""Reports from backends and the frontend that merges them, without sockets and with random sequences of events.

After any loss, delay or restart, the frontend's containers are those of one backend's complete state, in that backend's
order, or the frontend shows that they are incomplete.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

from dra_frontend.claims.backend import BackendView, read_state
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from nri_backend.claims.authorization import Reason, Rejection
from nri_backend.containers.container import Tracked, tracked_as
from nri_backend.containers.lifecycle import Phase
from nri_backend.containers.state import NodeState
from nri_backend.frontend_link.exchange import Exchange
from nri_backend.frontend_link.reports import Reports
from numa_contract.reports import LEASE_SECONDS, RENEW_SECONDS, BackendStatus, ContainerReport, StateAnswer

from tests.rigs.containers import container, pod

_IDS: Final = "abcdef"
_ROUNDS: Final = 2
"""Number of reports after which a frontend that receives all of them has the current state."""
_number = st.sampled_from([0, 0, 0, 0, 1])
"""Strategy that draws the index of a backend. Most reports come from backend 0; a report from backend 1 replaces the
frontend's containers.
"""
_id = st.sampled_from(_IDS)


Fate = Literal["arrives", "has no answer", "is lost", "is late"]
Change = tuple[Callable[[NodeState, str], object], str]


def _tracked(id_: str, phase: Phase) -> Tracked:
    return replace(tracked_as(pod(f"p-{id_}"), container(id_, of=f"p-{id_}")), phase=phase)


def _reject(state: NodeState, id_: str) -> None:
    state.reject(replace(_tracked(id_, Phase.ABSENT), rejection=Rejection(Reason.KERNEL, "text")))


_CHANGES: Final[tuple[Callable[[NodeState, str], object], ...]] = (
    lambda state, id_: state.put(_tracked(id_, Phase.CREATED)),
    lambda state, id_: state.put(_tracked(id_, Phase.RUNNING)),
    lambda state, id_: state.put(_tracked(id_, Phase.STOPPED)),
    lambda state, id_: state.drop(id_),
    lambda state, id_: state.forget_rejected(f"p-{id_}"),
    _reject,
)
_changes = st.tuples(st.sampled_from(_CHANGES), _id)
_fates: st.SearchStrategy[Fate] = st.sampled_from([*["arrives"] * 9, "has no answer", "is lost", "is late"])


@dataclass(slots=True)
class Process:
    """One run of a backend."""

    instance: str
    state: NodeState = field(default_factory=NodeState)
    reports: Reports = field(init=False)
    exchange: Exchange | None = None
    """State of the report exchange on the backend's connection, or None while the backend is not connected."""

    def __post_init__(self) -> None:
        self.reports = Reports(self.state)

    def lease(self) -> BackendStatus:
        return BackendStatus(instance=self.instance, synchronized=True)

    def status(self) -> BackendStatus:
        return self.lease().model_copy(update={"counters": {"audits": 1}, "metrics": ()})


class Links(RuleBasedStateMachine):
    """A frontend and two backends of its pod, such as the processes before and after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.runs = 100.0, 0
        self.merges = True
        """False while the frontend is from a release that does not read changes."""
        self.backends = [self._run(), self._run()]
        self.late: list[bytes] = []
        """Requests on connections that the backend has abandoned."""
        self.complete: dict[tuple[str, int], list[ContainerReport]] = {}
        """All containers by instance and generation."""
        self.view = BackendView(lambda: self.now)

    def _run(self, *, told: bool = True) -> Process:
        self.runs += 1
        process = Process(f"backend-{self.runs}")
        if told:
            process.state.replace_containers([_tracked(id_, Phase.RUNNING) for id_ in _IDS])
        return process

    @rule(number=_number, changes=st.lists(_changes, max_size=3), fate=_fates)
    def work(self, number: int, changes: list[Change], fate: Fate) -> None:
        """Changes containers, and sends a report if one is due."""
        backend = self.backends[number]
        for change, id_ in changes:
            change(backend.state, id_)
        if fate == "arrives":
            self._exchange(backend)
            return
        # The backend abandons the connection.
        body, backend.exchange = self._next_body(backend), None
        if body is not None and fate == "has no answer":
            self._receive(body)
        if body is not None and fate == "is late":
            self.late.append(body)

    @rule(number=_number, ids=st.lists(_id, unique=True))
    def synchronize(self, number: int, ids: list[str]) -> None:
        """Has the runtime list its containers after a restart."""
        self.backends[number].state.replace_containers([_tracked(id_, Phase.RUNNING) for id_ in ids])

    @rule(seconds=st.sampled_from([0.1, 2.0, 7.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.late)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Delivers a delayed request. It changes nothing if a later request has already been delivered."""
        body = self.late.pop(data.draw(st.integers(0, len(self.late) - 1)))
        last, age = self.view.status, self.view.age
        before = (last, self.view.containers, self.view.generation, age)
        self._receive(body)
        made_at = (last and last.reported_at) or 0.0
        if age is not None and age <= LEASE_SECONDS and json.loads(body)["reportedAt"] < made_at:
            assert before == (self.view.status, self.view.containers, self.view.generation, self.view.age)

    @rule(merges=st.booleans(), keeps_connections=st.booleans())
    def restart_frontend(self, merges: bool, keeps_connections: bool) -> None:
        """Replaces the frontend with one from this or the previous release. If the connections stay open, as they do
        behind a proxy, a frontend from the previous release may receive changes, which it ignores.
        """
        self.view, self.merges = BackendView(lambda: self.now), merges
        if not keeps_connections:
            self.late.clear()
            for backend in self.backends:
                backend.exchange = None

    @rule(number=_number, told=st.booleans())
    def restart_backend(self, number: int, told: bool) -> None:
        """Restarts a backend. ``told`` is True if the runtime lists its containers before the first report."""
        self.backends[number] = self._run(told=told)

    @rule(number=_number)
    def settle(self, number: int) -> None:
        """Delivers some reports of one backend without losses, after which the frontend has that backend's current
        state.
        """
        backend = self.backends[number]
        self.now += RENEW_SECONDS + 1
        for _ in range(_ROUNDS):
            if not self._exchange(backend):
                break
        assert self.view.status is not None
        assert self.view.status.instance == backend.instance
        if backend.state.containers_listed:
            assert self.view.complete
            expected = {one.id for one in (*backend.state, *backend.state.rejected.values())}
            assert self.view.containers.keys() == expected

    def _exchange(self, backend: Process) -> bool:
        """Sends a report if one is due. Returns True if a report was due."""
        body = self._next_body(backend)
        if body is None:
            return False
        assert backend.exchange is not None
        backend.exchange.handle_answer(StateAnswer.model_validate_json(self._receive(body)))
        return True

    def _next_body(self, backend: Process) -> bytes | None:
        self.now += 0.001
        if backend.exchange is None:
            backend.exchange = Exchange(backend.reports)
        due = backend.exchange.is_due(backend.lease(), self.now)
        found = json.loads(backend.reports.containers())
        key = backend.instance, backend.reports.generation
        self.complete[key] = [ContainerReport.model_validate(one) for one in found]
        return backend.exchange.next_body(backend.lease(), backend.status, self.now) if due else None

    def _receive(self, body: bytes) -> bytes:
        if not self.merges:
            document: dict[str, Any] = json.loads(body)
            document.pop("changes", None)
            body = json.dumps(document).encode()
        self.view.renew(*read_state(body))
        answer: dict[str, Any] = {"instance": "frontend", "generation": self.view.generation}
        return json.dumps(answer | ({"readsChanges": True} if self.merges else {})).encode()

    # The rules.

    @invariant()
    def is_one_complete_state(self) -> None:
        """Checks that the frontend has the same containers as after a report of all containers."""
        view = self.view
        if view.status is None or not view.complete:
            return
        assert [*view.containers.values()] == self.complete[view.status.instance, view.status.generation]
        assert [*view.containers] == [one.id for one in view.containers.values()]
        assert view.unreadable == ""


Links.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestLinks: Callable[..., object] = Links.TestCase
