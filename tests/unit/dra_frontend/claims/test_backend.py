# SPDX-License-Identifier: Apache-2.0
"""The frontend's view of its backend: whether claims are enforced on this node, and which containers run."""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from dra_frontend.claims.backend import BackendView, read_state
from numa_contract.config import Config, parse_config
from numa_contract.reports import LEASE_SECONDS, BackendStatus, Observation
from numa_contract.state.status import PREVENTS_PREPARE, StatusCode

from tests.rigs.cpu_time import cpu_seconds


@dataclass
class Clock:
    """A clock that the test sets."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def status(generation: int = 1, **changes: Any) -> BackendStatus:
    """Returns a lease as an enforcing backend sends it."""
    values = {"instance": "i", "generation": generation, "active": True, "synchronized": True}
    return BackendStatus.model_validate(values | changes)


def container(id_: str = "c", **changes: Any) -> dict[str, Any]:
    """Returns a container as the backend reports it."""
    return {"id": id_, "name": "n", "podUid": "p", "podNamespace": "ns", "podName": "pod", **changes}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def view(clock: Clock) -> BackendView:
    """Returns the view of an enforcing backend that has reported one container."""
    view = BackendView(clock)
    view.renew(status(), [container()])
    assert view.live
    return view


def test_a_lease_lasts_ten_seconds(clock: Clock, view: BackendView) -> None:
    """On a busy node, the backend may renew its lease late. The lease expires after ten seconds without a report."""
    clock.now += LEASE_SECONDS - 0.1
    view.renew(status())
    clock.now += LEASE_SECONDS - 0.1
    assert (view.live, LEASE_SECONDS) == (True, 10)
    clock.now += 0.2
    assert not view.live
    assert "not reported for 10 s" in view.problem


def test_a_lease_without_containers_refers_to_the_known_ones(view: BackendView) -> None:
    """If the generation has not changed, neither have the containers. If the generation differs or the lease comes from
    a different backend instance, no claim is prepared until the backend has reported its containers. The view retains
    the previous containers in the meantime, so their CPUs stay allocated.
    """
    view.renew(status(1))
    assert (view.live, view.generation) == (True, 1)
    view.renew(status(2))
    assert (view.live, view.generation, list(view.containers)) == (False, 1, ["c"])
    assert "every container" in view.problem
    view.renew(status(2), [])
    assert (view.live, view.generation, view.containers) == (True, 2, {})
    view.renew(status(2), [container()])
    view.renew(status(1, instance="j"))
    assert (view.live, view.generation, list(view.containers)) == (False, 0, ["c"])
    view.renew(status(1, instance="j"), [container("d")])
    assert (view.live, list(view.containers)) == (True, ["d"])


def test_only_changed_containers_are_processed(view: BackendView) -> None:
    """Owners and rejections are derived only from containers that were added or changed."""
    before = view.containers["c"]
    view.renew(status(2), [container(), container("d"), container("e", state="running")])
    assert view.containers["c"] is before
    second = view.containers["d"]
    view.renew(status(3), [container(), container("d"), container("e", state="stopped")])
    assert view.containers["d"] is second
    assert not view.containers["e"].alive


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"synchronized": False}, "not connected"),
        ({"generation": 7}, "every container"),
        ({"enforced": False}, "is not reporting"),
    ],
)
def test_a_missing_backend_is_explained(clock: Clock, view: BackendView, changes: dict[str, Any], text: str) -> None:
    """The reported problem includes a hint for the operator. Before the first lease, the hint is to look for the cause
    in the backend container's log.
    """
    view.renew(status().model_copy(update=changes))
    assert text in view.problem
    unheard = BackendView(clock)
    assert (unheard.live, unheard.age) == (False, None)
    assert "see the log of its container" in unheard.problem


@pytest.mark.parametrize(
    ("changes", "silence", "code"),
    [
        ({}, 0.0, None),
        ({}, LEASE_SECONDS + 1, StatusCode.BACKEND_SILENT),
        ({"synchronized": False}, 0.0, StatusCode.BACKEND_NOT_CONNECTED),
        ({"generation": 7}, 0.0, StatusCode.BACKEND_INCOMPLETE),
        ({"enforced": False}, 0.0, StatusCode.NO_BACKEND_ENFORCES),
    ],
)
def test_each_reason_to_refuse_all_claims_has_a_code(
    clock: Clock, view: BackendView, changes: dict[str, Any], silence: float, code: StatusCode | None
) -> None:
    """Programs compare codes, and only problems with these codes prevent claims from being prepared."""
    view.renew(status().model_copy(update=changes))
    clock.now += silence
    assert (view.fault and view.fault.code) == code
    assert view.live == (code not in PREVENTS_PREPARE)


def test_a_missing_first_report_and_an_unreadable_one_have_codes(clock: Clock, view: BackendView) -> None:
    """Before the first report, it is unknown which containers are running. If a report is unreadable, the state of its
    container is unknown.
    """
    unheard = BackendView(clock).fault
    assert unheard is not None
    view.renew(status(generation=2), [{"id": "odd", "claims": 1}])
    assert view.fault is not None
    codes = {unheard.code, view.fault.code}
    assert codes == {StatusCode.BACKEND_NOT_REPORTED, StatusCode.BACKEND_REPORT_UNREADABLE}
    assert codes <= PREVENTS_PREPARE


def test_a_standby_prepares_claims_while_another_instance_enforces_them(view: BackendView) -> None:
    """During an upgrade, the new pod is not active yet. If it became unready because its own backend is not enforcing
    anything yet, the rollout would stop.
    """
    view.renew(status(active=False))
    assert (view.live, view.leads) == (True, False)
    view.renew(status(active=False, enforced=False))
    assert "no nri-backend enforces claims on this node" in view.problem
    assert (view.live, view.own_fault) == (False, None)


def test_a_report_from_a_newer_backend_is_accepted() -> None:
    """Unknown fields and values from a newer release are accepted in the lease, metrics and reports."""
    document = {**json.loads(status().model_dump_json()), "invention": {"of": 1}}
    document["metrics"] = [{"name": "x", "kind": "summary", "samples": [{"value": 1, "quantile": 0.5}]}]
    document["containers"] = [container(state="sleeping", invention=[1])]
    view = BackendView(Clock())
    lease, reports = read_state(json.dumps(document).encode())
    view.renew(lease, reports)
    assert view.live
    assert view.containers["c"].state == "unknown"


def test_an_unreadable_report_does_not_affect_others(view: BackendView, caplog: pytest.LogCaptureFixture) -> None:
    """The other reports are still used. If an unreadable report hides which CPUs its container uses, no claim is
    prepared, and the reported problem says so.
    """
    bad: list[Any] = [container("b", claims="x"), 7, None, [], {}, container(unknownClaims=[{"uid": 1}])]
    for generation in (2, 3):
        view.renew(status(generation), [*bad, container("d")])
        assert list(view.containers) == ["c", "d"]
        assert not view.live
        assert "cannot" in view.problem or "container report" in view.problem
    assert len(caplog.records) == 1
    view.renew(status(4), [container("d")])
    assert view.live


def test_a_partially_readable_report_is_used(view: BackendView) -> None:
    """Only the container's claims need to be readable: a newer backend may change the format of everything else."""
    view.renew(status(2), [container("d", limits=7, mems={}, podName=[], claims=[{"uid": "u", "driver": "dra.cpu"}])])
    assert view.live
    assert view.containers["d"].claims[0].uid == "u"
    assert view.containers["d"].limits == {}


def test_a_mostly_unchanged_report_is_processed_quickly() -> None:
    """A report with 500 containers, only one of which has changed, takes less than 25 ms of CPU time, far below the 100
    ms between two reports.
    """
    view = BackendView(Clock())
    containers = [container(f"{n:064}", cgroup="kubepods.slice/" * 10, cpus="1-255") for n in range(500)]

    def body(generation: int) -> bytes:
        document = {**json.loads(status(generation).model_dump_json()), "containers": containers}
        return json.dumps(document).encode()

    view.renew(*read_state(body(1)))
    before, bodies = dict(view.containers), []
    for generation, state in enumerate(("stopped", "running", "stopped"), 2):
        containers[7] = {**containers[7], "state": state}
        bodies.append(body(generation))
    assert cpu_seconds(lambda: view.renew(*read_state(bodies.pop(0)))) < 0.025
    assert [key for key, report in view.containers.items() if before[key] is not report] == [f"{7:064}"]


def view_of(clock: Clock | None = None, config: Config | None = None, **fields: Any) -> BackendView:
    """Returns the view of a live backend whose lease has the given fields."""
    made = BackendView(clock or Clock(), config or Config())
    made.renew(status(**fields), [])
    return made


def test_a_node_without_partitions_has_one_warning() -> None:
    """The backend's reason applies to the node as a whole, not to individual claims. There is no warning if the
    configuration itself selects the shared pool.
    """
    view = view_of(exclusivity="pool", exclusivity_reason="nri-backend lacks the capability SYS_ADMIN")
    (warning,) = view.warnings
    assert "nri-backend lacks the capability SYS_ADMIN" in warning.text
    assert view_of(exclusivity="pool").warnings == ()
    assert view_of(exclusivity="partition").warnings == ()


@pytest.mark.parametrize(
    ("config", "beginning", "ending"),
    [
        (Config(), "CPU claims on this node are enforced by the shared pool", "host daemons may run on claimed CPUs"),
        (Config(host_slices=True), "CPU claims on this node are enforced by the shared pool", "boot Linux 6.7"),
        (
            Config(cpu_exclusivity="partition"),
            "CPU claims for a single container are refused on this node: boot Linux 6.7",
            "(cpuExclusivity: partition)",
        ),
    ],
)
def test_the_warning_about_partitions_depends_on_the_configuration(config: Config, beginning: str, ending: str) -> None:
    """If the node cannot create partitions, the configuration decides whether claims are enforced by means of the
    shared pool or refused. If hostSlices is enabled, host daemons are also kept off the claimed CPUs.
    """
    view = view_of(config=config, exclusivity="pool", exclusivity_reason="boot Linux 6.7")
    (found,) = view.conditions
    assert (found.text.startswith(beginning), found.text.endswith(ending)) == (True, True), found.text


def test_static_managers_cause_a_warning_while_the_lease_is_live() -> None:
    """The warning names the kubelet's static CPU and memory managers, but omits any manager that this release does not
    know. As another possible cause, it mentions another NRI plugin.
    """
    clock = Clock()
    live = view_of(clock, kubelet_pins=("memory", "cpu", "x" * 10_000))
    assert [one.code for one in live.conditions] == ["KubeletManagerStatic"]
    (warning,) = live.warnings
    assert warning.text.startswith("Guaranteed pods may be assigned claimed CPUs ")
    assert "the kubelet's static cpu and memory manager or another NRI plugin assigns" in warning.text
    assert "set cpuManagerPolicy: none and memoryManagerPolicy: None" in warning.text
    clock.now += LEASE_SECONDS + 1
    assert live.warnings == ()


def test_observe_mode_and_an_empty_reserve_are_configuration_warnings() -> None:
    """The warnings about observe mode and about an empty reserve appear even before the backend's first report. Once
    that report has arrived, the warning about observe mode also gives the number of files that would change.
    """
    silent = BackendView(Clock(), Config(enforcement="observe"))
    assert [one.code for one in silent.configuration_notices] == ["ObserveMode", "NoReservedCPUs"]
    assert "have not been reported yet" in silent.configuration_notices[0].text
    seen = view_of(config=Config(enforcement="observe"), observation=Observation(total=7))
    assert "7 files would change" in seen.configuration_notices[0].text
    assert BackendView(Clock(), Config(reserved_cpus=frozenset({0}))).configuration_notices == ()


def test_a_deprecated_name_in_the_configuration_causes_a_warning() -> None:
    """The warning gives the deprecated name and its replacement."""
    (warning,) = BackendView(Clock(), parse_config({"reservedCPUs": "0", "irqs": "leave"}, "f")).configuration_notices
    assert (warning.code, warning.text) == ("SettingRenamed", "irqs: leave is the former name of keep")


def test_an_observation_that_a_report_omits_is_retained(view: BackendView) -> None:
    """The backend counts the files that it would change in observe mode. It sends this observation only together with
    metrics. When the backend restarts, the previous observation is dropped.
    """
    found = Observation(total=3, complete=True)
    view.renew(BackendStatus(instance="b", generation=1, observation=found, counters={}, metrics=()), [])
    view.renew(BackendStatus(instance="b", generation=1))
    assert view.status is not None
    assert view.status.observation == found
    view.renew(BackendStatus(instance="other", generation=1))
    assert view.status.observation is None
